"""A kernel for tests that need some kernel, whatever it computes."""

from numba import cuda, uint32


@cuda.jit
def double(x, n):
    i = uint32(cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x)
    if i < n:
        x[i] = x[i] + x[i]
