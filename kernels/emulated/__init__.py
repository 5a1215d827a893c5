"""The emulated card: PTX kernels on the CPU. One warp is one LLVM function, its 32 lanes are SIMD lanes.

From PTX to machine code, in this order:

    ptx.py        PTX text -> dataclasses; calls become copies of what they call
    flow.py       control flow: blocks, their order, where lanes wait for each other
    lanes.py      which registers are one scalar for the warp, or a scalar plus a constant per lane
    emit.py       writes LLVM IR for values of 1, some or 32 lanes
    nans.py       which results must have the card's NaN
    translate.py  a kernel -> LLVM IR, with the instructions of the table below
    native.py     LLVM IR -> machine code, kept on disk; launches on CPU threads
    runtime.ll    LLVM IR of these threads: they take blocks, and run a block's warps between barriers

Around it: card.py (the Card), serving.py (programs that another card asks for), cards.py (figures of real cards),
watching.py with counting.py and checking.py (translations that report each access), estimate.py (what a launch would
cost on a real card).

Which file translates which PTX instruction. Each file's class extends the class of the file before it, and the
method for `add` is `op_add`. Instructions of integers and of floats that share a name are found in integers.py,
which takes what floats need from floats.py. tests/emulated/test_opcode_table.py compares the table with the code.

    file            opcodes
    floats.py       fma rcp sqrt rsqrt ex2 lg2 sin cos tanh copysign testp
    integers.py     mov cvta add sub mul mad div rem sad neg abs min max addc subc madc
    bits.py         and or xor not cnot shl shr shf popc clz brev bfind bfe bfi prmt lop3
    conversions.py  setp set selp slct cvt
    dots.py         dp4a dp2a
    tensor.py       mma ldmatrix
    special.py      (reads of special registers: %tid, %ctaid, %laneid, %clock, %globaltimer ...)
    memory.py       ld st atom red shfl vote match activemask membar fence nanosleep prefetch bar.warp cp
    printing.py     vprintf
    translate.py    bra ret exit trap bar barrier barrier_result (bar.red becomes bar and barrier_result)
    ptx.py          call brx (replaced by the function's body, and by comparisons with bra)

Warps of a block alternate where they poll memory, so locks and flags work within a block, and locks also between
the lanes of a warp if the lane that has taken the lock opens it before the warp synchronizes. Each block runs to
its end before its CPU thread takes another one; as many run at a time as there are workers. A block that waits for
a later block is given up after 10 seconds with an error, and so is every other warp that polls memory in vain. A
loop polls if it contains an atomic, a volatile load, or a load beside a fence, a nanosleep or a syncwarp. A loop
that waits without any of them runs for ever, as it does on a card. Refused: synchronization of the grid,
recursion, barriers that reduce over a part of a block.
"""
