"""The course's residual MLP on MNIST."""

import os
import sys

import numpy as np

sys.path.append("../python")
import needle as ndl
import needle.nn as nn

np.random.seed(0)


def ResidualBlock(dim, hidden_dim, norm=nn.BatchNorm1d, drop_prob=0.1):
    inner = nn.Sequential(
        nn.Linear(dim, hidden_dim), norm(hidden_dim), nn.ReLU(), nn.Dropout(drop_prob), nn.Linear(hidden_dim, dim), norm(dim)
    )
    return nn.Sequential(nn.Residual(inner), nn.ReLU())


def MLPResNet(dim, hidden_dim=100, num_blocks=3, num_classes=10, norm=nn.BatchNorm1d, drop_prob=0.1):
    first, activation = nn.Linear(dim, hidden_dim), nn.ReLU()
    blocks = [ResidualBlock(hidden_dim, hidden_dim // 2, norm, drop_prob) for _ in range(num_blocks)]
    return nn.Sequential(first, activation, *blocks, nn.Linear(hidden_dim, num_classes))


def epoch(dataloader, model, opt=None):
    """One pass, training if ``opt`` is given: (error rate, mean loss)."""
    np.random.seed(4)
    model.train() if opt else model.eval()
    loss_fn, wrong, losses, count = nn.SoftmaxLoss(), 0, [], 0
    for X, y in dataloader:
        X = ndl.ops.reshape(X, (X.shape[0], -1))
        out = model(X)
        loss = loss_fn(out, y)
        if opt:
            opt.reset_grad()
            loss.backward()
            opt.step()
        wrong += int((out.numpy().argmax(axis=1) != y.numpy()).sum())
        losses.append(float(loss.numpy().reshape(-1)[0]))
        count += X.shape[0]
    return wrong / count, float(np.mean(losses))


def train_mnist(batch_size=100, epochs=10, optimizer=ndl.optim.Adam, lr=0.001, weight_decay=0.001, hidden_dim=100, data_dir="data"):
    """(training error, training loss, test error, test loss) of the last epoch."""
    np.random.seed(4)

    def loader(name, shuffle):
        paths = [os.path.join(data_dir, f"{name}-{kind}.gz") for kind in ("images-idx3-ubyte", "labels-idx1-ubyte")]
        return ndl.data.DataLoader(ndl.data.MNISTDataset(*paths), batch_size, shuffle=shuffle)

    train, test = loader("train", True), loader("t10k", False)
    model = MLPResNet(784, hidden_dim)
    opt = optimizer(model.parameters(), lr=lr, weight_decay=weight_decay)
    for _ in range(epochs):
        train_error, train_loss = epoch(train, model, opt)
    return train_error, train_loss, *epoch(test, model)
