"""The emulated card: PTX kernels on the CPU, one warp as 32 SIMD lanes.

    ptx.py        PTX text -> dataclasses
    flow.py       control flow: blocks, order, where lanes wait for each other
    lanes.py      which registers are one scalar for the warp, or a scalar plus a constant per lane
    emit.py       LLVM IR text: values of 1 or 32 lanes
    nans.py       which results must have the card's NaN
    floats.py, integers.py, bits.py, conversions.py, dots.py, special.py
                  instructions that compute registers from registers, each on top of the one before
    memory.py     loads, stores, atomics, shuffles
    printing.py   print
    translate.py  a kernel -> LLVM IR
    native.py     LLVM IR -> machine code, cached; launches on CPU threads
"""
