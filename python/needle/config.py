"""The one table of environment variables that needle and its compiled modules read."""

from __future__ import annotations

import os
from typing import NamedTuple


class Variable(NamedTuple):
    name: str
    default: str
    accepted: str
    meaning: str


VARIABLES = {
    v.name: v
    for v in (
        Variable("NEEDLE_BACKEND", "nd", "nd, np", "the course's switch: needle's NDArray, or numpy's dtypes and shapes"),
        Variable("NEEDLE_NUM_THREADS", "", "1 to 4096", "size of the CPU thread pool; default: usable cores"),
        Variable("NEEDLE_BFLOAT16", "", "float32, pairs, tiles", "how a CPU multiplies bfloat16; default: the fastest it has"),
        Variable("NEEDLE_CUBLASLT", "", "a file, 0", "NVIDIA's library of matrix products; 0: none; default: the one installed"),
        Variable("NEEDLE_CACHE", "", "a folder", "where tokenizers and token files are kept; default: ~/.cache/needle"),
        Variable("NEEDLE_SIM_ORDER", "forward", "forward, reverse, random:SEED", "thread order of cuda_sim"),
        Variable("NEEDLE_SIM_CP_ASYNC", "late", "late, early", "when cuda_sim performs an asynchronous copy"),
        Variable("NEEDLE_SIM_SM", "90", "75, 80, 90, ...", "compute capability that cuda_sim reports"),
        Variable("NEEDLE_SIM_MEMORY", "", "1 to 999999", "MiB that cuda_sim has; default: the host's"),
        Variable("NEEDLE_SIM_STREAMS", "eager", "eager, lazy", "when cuda_sim runs the work of a stream"),
        Variable("NEEDLE_SIM_MULTIPROCESSORS", "4", "0, 1, 2, ...", "multiprocessors that cuda_sim reports; 0: grids of one block"),
    )
}


def get(name: str) -> str:
    """The value of the environment variable ``name``, or its default. KeyError if it is not in the table."""
    return os.environ.get(name) or VARIABLES[name].default
