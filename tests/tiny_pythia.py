"""A Pythia that is small enough for every test."""

import numpy as np

import needle as ndl
from needle.models import PythiaConfig

TINY = PythiaConfig(layers=2, width=32, heads=2, feed_forward=64, vocab_size=300)


def tokens(device, batch=2, T=32):
    return ndl.Tensor(np.zeros((batch, T)), device=device, dtype="int32", requires_grad=False)
