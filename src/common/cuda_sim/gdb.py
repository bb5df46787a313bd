"""For gdb inside an emulated kernel: source this file.

cuda       the command: block and thread of the frame that is looked at
$thread()  linear index of the thread in its block, and
$block()   of the block in its grid, for conditions: break file.cu:7 if $block() == 1 && $thread() == 33
"""

import gdb

# In quotes: without them gdb looks for a nested type, and does not find it in a module whose symbols it has not all read.
RECORD = "&'needle::sim::thread_table'[((char*)$sp - 'needle::sim::stack_region') >> 'needle::sim::kStackShift']"


def record():
    """The running CUDA thread's record, found by its stack as the emulator does it."""
    return gdb.parse_and_eval(RECORD)


def triple(value):
    return tuple(int(value[axis]) for axis in "xyz")


class Thread(gdb.Function):
    def __init__(self):
        super().__init__("thread")

    def invoke(self):
        return int(record()["rank"])


class Block(gdb.Function):
    def __init__(self):
        super().__init__("block")

    def invoke(self):
        place = record()["block"]
        x, y, z = triple(place["block_idx"])
        width, height, _ = triple(place["grid_dim"])
        return x + width * (y + height * z)


class Cuda(gdb.Command):
    """Says which CUDA thread the selected frame belongs to."""

    def __init__(self):
        super().__init__("cuda", gdb.COMMAND_STATUS)

    def invoke(self, argument, from_tty):
        thread = record()
        block, index = triple(thread["block"]["block_idx"]), triple(thread["thread_idx"])
        print(f"block {block}, thread {index}")


Thread()
Block()
Cuda()
