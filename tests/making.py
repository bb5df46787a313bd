"""Arrays, leaves and gradients as tests make them."""

import numpy as np

import needle as ndl
from needle.backend_ndarray.ndarray import NDArray


def array(values, device, dtype="float32"):
    return NDArray(values, device=device, dtype=dtype)


def leaf(values, device, dtype="float32", **kwargs):
    return ndl.Tensor(np.asarray(values), device=device, dtype=dtype, **kwargs)


def gradients(f, device, *values, create_graph=False):
    leaves = [leaf(v, device) for v in values]
    f(*leaves).backward(create_graph=create_graph)
    return [x.grad.numpy() for x in leaves]
