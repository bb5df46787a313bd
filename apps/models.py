"""The course's models: ResNet9 and a language model."""

import sys

import numpy as np

sys.path.append("./python")
import needle as ndl
from needle import nn

np.random.seed(0)


class ConvBN(nn.Module):
    """Convolution, batch norm, ReLU."""

    def __init__(self, a, b, k, s, device=None, dtype="float32"):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv(a, b, k, s, device=device, dtype=dtype), nn.BatchNorm2d(b, device=device, dtype=dtype), nn.ReLU()
        )

    def forward(self, x):
        return self.layers(x)


class ResNet9(ndl.nn.Module):
    """Images (N, 3, 32, 32) -> (N, 10)."""

    def __init__(self, device=None, dtype="float32"):
        super().__init__()
        kwargs = {"device": device, "dtype": dtype}

        def pair(c):
            return nn.Residual(nn.Sequential(ConvBN(c, c, 3, 1, **kwargs), ConvBN(c, c, 3, 1, **kwargs)))

        self.layers = nn.Sequential(
            ConvBN(3, 16, 7, 4, **kwargs),
            ConvBN(16, 32, 3, 2, **kwargs),
            pair(32),
            ConvBN(32, 64, 3, 2, **kwargs),
            ConvBN(64, 128, 3, 2, **kwargs),
            pair(128),
            nn.Flatten(),
            nn.Linear(128, 128, **kwargs),
            nn.ReLU(),
            nn.Linear(128, 10, **kwargs),
        )

    def forward(self, x):
        return self.layers(x)


class LanguageModel(nn.Module):
    """Embedding, a sequence model, a linear layer: ids (positions, batch) -> scores (positions * batch, output_size)."""

    def __init__(
        self, embedding_size, output_size, hidden_size, num_layers=1, seq_model="rnn", seq_len=40, device=None,
        dtype="float32",
    ):  # fmt: skip
        super().__init__()
        kwargs = {"device": device, "dtype": dtype}
        self.output_size = output_size
        self.embedding = nn.Embedding(output_size, embedding_size, **kwargs)
        width = hidden_size
        if seq_model == "rnn":
            self.seq_model = nn.RNN(embedding_size, hidden_size, num_layers, **kwargs)
        elif seq_model == "lstm":
            self.seq_model = nn.LSTM(embedding_size, hidden_size, num_layers, **kwargs)
        elif seq_model == "transformer":
            self.seq_model = nn.Transformer(embedding_size, hidden_size, num_layers, sequence_len=seq_len, **kwargs)
            width = embedding_size
        else:
            raise ValueError(f"[LanguageModel] unknown seq_model: {seq_model} (accepted: rnn, lstm, transformer)")
        self.linear = nn.Linear(width, output_size, **kwargs)

    def forward(self, x, h=None):
        out, h = self.seq_model(self.embedding(x), h)
        return self.linear(ndl.ops.reshape(out, (x.shape[0] * x.shape[1], out.shape[2]))), h
