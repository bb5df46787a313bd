"""Where every byte is, will be, and was: accounts, traces, plans, explanations of failures, and graphs that were kept by
mistake.
"""

from .accounting import MemoryStats, empty_cache, peak, process, reset_peak, set_limit, stats
from .explain import advise
from .leaks import Leak, LeakCheck, LeakWarning, leaks
from .picture import picture
from .planning import Plan, fitting_table, largest, peak_bytes, plan, smallest
from .room import available, capacity
from .trace import Holder, trace
from .units import GPUS, parse_bytes, readable

__all__ = [
    "GPUS", "Holder", "Leak", "LeakCheck", "LeakWarning", "MemoryStats", "Plan", "advise", "available", "capacity", "empty_cache",
    "fitting_table", "largest", "leaks", "parse_bytes", "peak", "peak_bytes", "picture", "plan", "process", "readable",
    "reset_peak", "set_limit", "smallest", "stats", "trace",
]  # fmt: skip
