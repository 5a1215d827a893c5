"""The emulated card: PTX kernels on the CPU, one warp as 32 SIMD lanes.

    ptx.py        PTX text -> dataclasses
    flow.py       control flow: blocks, order, where lanes wait for each other
    lanes.py      which registers are one scalar for the warp, or a scalar plus a constant per lane
    emit.py       LLVM IR text: values of 1, some or 32 lanes
    nans.py       which results must have the card's NaN
    floats.py, integers.py, bits.py, conversions.py, dots.py, special.py
                  instructions that compute registers from registers, each on top of the one before
    memory.py     loads, stores, atomics, shuffles
    printing.py   print
    translate.py  a kernel -> LLVM IR
    native.py     LLVM IR -> machine code, cached; launches on CPU threads

Warps of a block take turns where they poll memory, so locks and flags work within a block, and locks also
between the lanes of a warp if one that has taken it opens it before the warp synchronizes. Blocks run to
their end one after the other, as many at a time as there are workers: one that waits for a later one is given
up after 10 seconds with an error, and so is whatever else polls memory in vain. Atomics, volatile loads and
loads in a loop with a fence, a nanosleep or a syncwarp poll; a loop that waits without any of them runs for
ever, as it does on a card. Refused: synchronization of the grid, recursion, barriers that reduce over a part
of a block.
"""
