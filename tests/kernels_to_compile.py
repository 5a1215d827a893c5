"""Kernels that the tests of compilation compile, in their own process and in others."""

from numba import cuda, float32, uint32
from numba.types import float16

from kernels import intrinsics, rope
from kernels.compile import supported_ccs

OLDEST = next(cc for cc in supported_ccs() if cc >= (7, 0))
FACTOR = 3.0
TABLE = (1.0, 2.0)


@cuda.jit
def multiply_add(x, y, n, s):
    i = uint32(cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x)
    if i < n:
        y[i] = x[i] * s + y[i]


SIGNATURE = ("float32[1]", "float32[1]", "uint32", "float32")


@cuda.jit
def half_sum(x, y, out):
    i = uint32(cuda.threadIdx.x)
    h = float16(x[i]) * y[i] + y[i]
    out[i] = float32(cuda.fp16.hfma(h, y[i], h))


HALF_SIGNATURE = ("float32[1]", "float16[1]", "float32[1]")


@cuda.jit(device=True)
def polynomial(x, turns):
    total = float32(0)
    for _ in range(turns):                              # a loop of unknown length is not inlined away
        total = total * x + float32(FACTOR)
    return total


@cuda.jit
def calls_device_function(x, n):
    x[uint32(0)] = polynomial(x[uint32(0)], n) + float32(TABLE[1]) + intrinsics.exp(x[uint32(1)])


@cuda.jit
def sets_variables_again(x, n):
    """In branches and in loops; two exchange their values."""
    low, high, found = uint32(0), uint32(n), float32(0)
    while low < high:
        middle = uint32(low + high) // uint32(2)
        if x[middle] < found:
            low = uint32(middle + uint32(1))
        elif x[middle] > float32(FACTOR):
            high = uint32(middle)
            found = x[high]
        else:
            low, high = high, low
            found += polynomial(found, low)
    for i in range(uint32(4)):
        found = found * x[i] + found
    x[low] = found


SEVERAL = ((half_sum, HALF_SIGNATURE), (calls_device_function, ("float32[1]", "uint32")),
           (sets_variables_again, ("float32[1]", "uint32")),
           (rope.query_kernel(*rope.QWEN35), ("float16[1]", "float32[1]", "float32[1]", "int32[1]", "float32[1]",
                                              *["uint32"] * 5, "float32")))
