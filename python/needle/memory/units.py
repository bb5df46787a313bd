"""Bytes as people write them."""

from __future__ import annotations

import re

from ..errors import ShapeError

_UNITS = {"": 1, "b": 1, "bytes": 1}
for _power, _letter in enumerate("kmgt", 1):
    _UNITS |= {f"{_letter}b": 1000**_power, **dict.fromkeys((_letter, f"{_letter}i", f"{_letter}ib"), 1024**_power)}

# What `nvidia-smi` shows as the memory of a card, in MiB. source: NVIDIA's data sheets and the driver's own figure.
_GPUS_MIB = {
    "T4": 15360, "L4": 23034, "V100-16": 16384, "V100-32": 32768, "RTX3090": 24576, "RTX4090": 24564, "A10": 23028, "L40S": 46068,
    "A100-40": 40960, "A100-80": 81920, "H100": 81559, "H200": 143771, "B200": 183359,
}  # fmt: skip
GPUS = {name: mib << 20 for name, mib in _GPUS_MIB.items()}


def parse_bytes(text: int | str, name: str = "memory") -> int:
    """A number of bytes: an int, ``"16GiB"``, ``"500 MB"``, or the name of a GPU. name: what it is for.

    ``"16G"`` and ``"16Gi"`` are 16 GiB, as Docker, Slurm and systemd take the one and Kubernetes the other; ``"16GB"`` is 16 * 10^9
    bytes.
    raises: ShapeError for anything else.
    """
    if isinstance(text, int) and not isinstance(text, bool):
        found = text
    else:
        by_name = {name.lower(): size for name, size in GPUS.items()}
        plain = str(text).strip().lower()
        # needle's own texts have commas between thousands; where neither "bytes" nor a point follows, one might be a decimal comma.
        number = re.sub(r"^\d{1,3}(,\d{3})+(?= bytes$|\.)", lambda found: found[0].replace(",", ""), plain)
        match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?i?b?|bytes)", number)
        if plain in by_name:
            found = by_name[plain]
        elif match and match[2] in _UNITS and (_UNITS[match[2]] > 1 or float(match[1]).is_integer()):
            found = int(min(float(match[1]) * _UNITS[match[2]], 2.0**63))
        else:
            raise ShapeError(
                f"[{name}] not an amount of memory: {text!r} (accepted: 16GiB, or 16G for the same, 500MB, 1000000 bytes, or "
                f"{', '.join(GPUS)})"
            )
    if not 0 < found < 1 << 63:
        raise ShapeError(f"[{name}] not an amount of memory: {text!r} (accepted: above 0, below 2^63 bytes)")
    return found


def readable(nbytes: float) -> str:
    """1234567 -> "1.18 MiB"."""
    sign, size = ("-" if nbytes < 0 else ""), abs(nbytes)
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if round(size, 2) < 1024 or unit == "GiB":  # never "1,024.00 KiB"
            return f"{sign}{size:.0f} bytes" if unit == "bytes" else f"{sign}{size:,.2f} {unit}"
        size /= 1024
    raise AssertionError


def table(rows: list[list[str]], indent: str = "") -> str:
    """Rows in columns, the first left-aligned and the others right-aligned."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [row[0].ljust(widths[0])] + [cell.rjust(width) for cell, width in zip(row[1:], widths[1:])]
        lines.append((indent + "  ".join(cells)).rstrip())
    return "\n".join(lines)
