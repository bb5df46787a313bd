"""How much of what a machine can multiply a run uses: model FLOPs utilization."""

from __future__ import annotations

import re
import time

from needle import init
from needle.amp import PRECISIONS

# Dense products in TFLOP/s: 16 bits with float32 sums, and float32 without TF32. source: NVIDIA's data sheets.
PUBLISHED = {
    "H100 PCIe": (756, 51), "H100 NVL": (835, 60), "H100": (989, 67), "H200 NVL": (835, 60), "H200": (989, 67), "A100": (312, 19.5),
    "L40S": (362, 91.6), "L4": (121, 30.3), "A10": (125, 31.2), "T4": (65, 8.1), "RTX 4090": (165, 82.6), "RTX 3090": (71, 35.6),
}  # fmt: skip
LESS = r"\b(MIG|Laptop|Mobile|Max Q)\b"  # a part of such a GPU, or a smaller one of the same name
EDGE, TIMES = 1024, 5


def peak_flops(device, precision: str) -> tuple[float, str]:
    """Multiplications and additions per second that ``device`` can do, and where that is known from; (0, "") where it is not.

    Call it before the run takes memory: on a CPU it is measured, which takes a moment and 8 MiB, 4 in 16 bits.
    """
    if device.name == "cuda":
        return published(device.mod.device_properties()["name"], precision)
    if not device.is_host:
        return 0.0, ""
    a = init.ones(EDGE, EDGE, device=device, dtype=PRECISIONS[precision] or "float32", requires_grad=False).realize_cached_data()
    seconds = []
    for _ in range(TIMES + 1):
        start = time.perf_counter()
        a @ a
        seconds.append(time.perf_counter() - start)
    flops = 2 * EDGE**3 / min(seconds[1:])
    return flops, f"{flops / 1e9:,.0f} GFLOP/s, the best of {TIMES} {precision} products of {EDGE} x {EDGE} as the run began"


def published(name: str, precision: str) -> tuple[float, str]:
    """The same for the GPU of that name."""
    plain = " ".join(re.split(r"[\s-]+", name))
    for known, (half, single) in PUBLISHED.items():
        if re.search(rf"\b{known}\b", plain) and not re.search(LESS, plain):
            tera = single if precision == "fp32" else half
            return tera * 1e12, f"{tera:g} TFLOP/s, published for dense {precision} products of {known}"
    return 0.0, ""
