"""What the compiler made of the inner loops of products: sums that it keeps in memory make them half as fast, and no result tells."""

import re
import shutil
import subprocess

import pytest

import needle as ndl

LEAST = 12  # multiply-adds of a whole tile's loop


def inner_loops(listing):
    """The instructions of each loop that has no other inside, of the functions of inner_loops_cpu.h that multiply by vectors."""
    for function in re.findall(r"<[^>\n]*VectorLoop[^>\n]*micro[^>\n]*>:\n((?:.+\n)+)", listing):
        code = re.findall(r"^ *([0-9a-f]+):\t(.*)", function, re.M)
        places = {address: i for i, (address, _) in enumerate(code)}
        jumps = [
            (places.get(match[1], len(code)), i)
            for i, (_, text) in enumerate(code)
            if (match := re.match(r"j\w+ +([0-9a-f]+)", text))
        ]
        loops = [jump for jump in jumps if jump[0] <= jump[1]]
        for first, last in loops:
            if not any(loop != (first, last) and first <= loop[0] and loop[1] <= last for loop in loops):
                yield [text for _, text in code[first : last + 1]]


def test_products_keep_their_sums_in_registers():
    if shutil.which("objdump") is None:
        pytest.skip("objdump is not installed")
    command = ["objdump", "-d", "--no-show-raw-insn", ndl.cpu().require().__file__]
    listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    if "vfmadd" not in listing or "_GLOBAL__N_" not in listing:
        pytest.skip("a module without multiply-adds by vectors (another processor, no optimization) or without names")
    loops = list(inner_loops(listing))
    for product in ("vfmadd", "vdpbf16ps"):  # of numbers, of pairs of bfloat16
        tiles = [loop for loop in loops if sum(text.startswith(product) for text in loop) >= LEAST]
        assert tiles or product not in listing, product
        for loop in tiles:
            stored = [text for text in loop if re.match(r"v\w+ .*%[yz]mm\d+,.*\(%r[sb]p\)|v\w+ .*\(%r[sb]p\),%[yz]mm", text)]
            moved = [text for text in loop if re.match(r"vmov\w+ +%[yz]mm\d+,%[yz]mm\d+$", text)]
            assert not stored and len(moved) < LEAST // 3, "\n".join(loop)
