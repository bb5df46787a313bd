"""What the compiler made of the inner loops of products: sums that it keeps in memory make them half as fast, and no result tells."""

import re
import shutil
import subprocess

import pytest

import needle as ndl

LEAST = 12  # multiply-adds of a whole tile's loop


def inner_loops(listing):
    """The instructions of each loop that has no other inside, of the functions of gemm_cpu.cc that multiply tiles."""
    for function in re.findall(r"<[^>\n]*Own[^>\n]*micro[^>\n]*>:\n((?:.+\n)+)", listing):
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
    tiles = [loop for loop in inner_loops(listing) if sum(bool(re.match("vfmadd|vdpbf16ps", text)) for text in loop) >= LEAST]
    if not tiles:
        pytest.skip("no multiply-adds by vectors here: another processor, no optimization, or no names")
    for loop in tiles:
        stored = [text for text in loop if re.match(r"v\w+ .*%[yz]mm\d+,.*\(%r[sb]p\)|v\w+ .*\(%r[sb]p\),%[yz]mm", text)]
        moved = [text for text in loop if re.match(r"vmov\w+ +%[yz]mm\d+,%[yz]mm\d+$", text)]
        assert not stored and len(moved) < LEAST // 3, "\n".join(loop)
