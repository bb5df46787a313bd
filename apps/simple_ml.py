"""The course's training loops."""

import sys

import numpy as np

sys.path += ["./python", "."]  # "." is the root, where a notebook looks for modules and a script does not
import needle as ndl
import needle.nn as nn
from apps.models import *  # noqa: F403
from needle.data.datasets.mnist_dataset import parse_mnist
from needle.errors import ShapeError

device = ndl.cpu()


def softmax_loss(Z, y_one_hot):
    """Mean softmax loss of scores Z (N, C) against one-hot rows. raises: ShapeError for what is not (N, C), such as classes."""
    if y_one_hot.shape != Z.shape:
        raise ShapeError(f"[softmax_loss] y_one_hot is {y_one_hot.shape} (accepted: {Z.shape}, the shape of Z)")
    losses = ndl.logsumexp(Z, axes=(1,)) - ndl.summation(Z * y_one_hot, axes=(1,))
    return ndl.summation(losses) / Z.shape[0]


def nn_epoch(X, y, W1, W2, lr=0.1, batch=100):
    """One pass of SGD, in order, over a two-layer ReLU network without biases; returns the new (W1, W2)."""
    if len(y) != len(X) or batch < 1:
        raise ShapeError(f"[nn_epoch] {len(X)} rows, {len(y)} classes, batch {batch} (accepted: as many, and at least 1)")
    classes = W2.shape[1]
    for start in range(0, X.shape[0], batch):
        inputs = ndl.Tensor(X[start : start + batch], requires_grad=False)
        one_hot = ndl.Tensor(np.eye(classes)[y[start : start + batch]], requires_grad=False)
        loss = softmax_loss(ndl.relu(inputs @ W1) @ W2, one_hot)
        loss.backward()
        W1 = ndl.Tensor(W1.numpy() - lr * W1.grad.numpy())
        W2 = ndl.Tensor(W2.numpy() - lr * W2.grad.numpy())
    return W1, W2


def _device_of(model):
    return model.parameters()[0].device


def epoch_general_cifar10(dataloader, model, loss_fn=nn.SoftmaxLoss(), opt=None):  # noqa: B008
    """One pass over a loader, training if ``opt`` is given: (accuracy, mean loss)."""
    np.random.seed(4)
    model.train() if opt else model.eval()
    where, correct, total, count = _device_of(model), 0, 0.0, 0
    for X, y in dataloader:
        X, y = X.to(where), y.to(where)
        n = X.shape[0]
        with ndl.enable_grad() if opt else ndl.no_grad():
            out = model(X)
            loss = loss_fn(out, y)
        if opt:
            opt.reset_grad()
            loss.backward()
            opt.step()
        correct += int((out.numpy().argmax(axis=1) == y.numpy()).sum())
        total += loss.item() * n
        count += n
    return correct / count, total / count


def train_cifar10(model, dataloader, n_epochs=1, optimizer=ndl.optim.Adam, lr=0.001, weight_decay=0.001, loss_fn=nn.SoftmaxLoss):
    """(accuracy, mean loss) of the last of ``n_epochs``, None of none."""
    np.random.seed(4)
    opt, result = optimizer(model.parameters(), lr=lr, weight_decay=weight_decay), None
    for _ in range(n_epochs):
        result = epoch_general_cifar10(dataloader, model, loss_fn(), opt)
    return result


def evaluate_cifar10(model, dataloader, loss_fn=nn.SoftmaxLoss):
    np.random.seed(4)
    return epoch_general_cifar10(dataloader, model, loss_fn())


def epoch_general_ptb(
    data,
    model,
    seq_len=40,
    loss_fn=nn.SoftmaxLoss(),  # noqa: B008
    opt=None,
    clip=None,
    device=None,
    dtype="float32",
):
    """One pass over batchified text, training if ``opt`` is given: (accuracy, mean loss). The state is carried, detached."""
    np.random.seed(4)
    model.train() if opt else model.eval()
    correct, total, count, h = 0, 0.0, 0, None
    for i in range(0, len(data) - 1, seq_len):
        X, y = ndl.data.get_batch(data, i, seq_len, device=device, dtype=dtype)
        with ndl.enable_grad() if opt else ndl.no_grad():
            out, h = model(X, h)
            loss = loss_fn(out, y)
        h = tuple(s.detach() for s in h) if isinstance(h, tuple) else h.detach()
        if opt:
            opt.reset_grad()
            loss.backward()
            if clip:
                opt.clip_grad_norm(clip)
            opt.step()
        n = y.shape[0]
        correct += int((out.numpy().argmax(axis=1) == y.numpy()).sum())
        total += loss.item() * n
        count += n
    return correct / count, total / count


def train_ptb(
    model, data, seq_len=40, n_epochs=1, optimizer=ndl.optim.SGD, lr=4.0, weight_decay=0.0, loss_fn=nn.SoftmaxLoss,
    clip=None, device=None, dtype="float32",
):  # fmt: skip
    """(accuracy, mean loss) of the last of ``n_epochs``, None of none."""
    np.random.seed(4)
    opt, result = optimizer(model.parameters(), lr=lr, weight_decay=weight_decay), None
    for _ in range(n_epochs):
        result = epoch_general_ptb(data, model, seq_len, loss_fn(), opt, clip, device, dtype)
    return result


def evaluate_ptb(model, data, seq_len=40, loss_fn=nn.SoftmaxLoss, device=None, dtype="float32"):
    np.random.seed(4)
    return epoch_general_ptb(data, model, seq_len, loss_fn(), device=device, dtype=dtype)


def loss_err(h, y):
    """(softmax loss, share of wrong rows) of scores h (N, C) against classes y."""
    y_one_hot = np.zeros((y.shape[0], h.shape[-1]))
    y_one_hot[np.arange(y.size), y] = 1
    return softmax_loss(h, ndl.Tensor(y_one_hot)).numpy(), np.mean(h.numpy().argmax(axis=1) != y)
