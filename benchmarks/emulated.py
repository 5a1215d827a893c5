"""How fast the emulated card is: `python -m benchmarks.emulated [workers]` prints a table, one worker by default.

Times are the best of several repeats of whole launches, called from Python through the native layer.
"""

import sys
import time

import numpy as np
from numba import cuda
from numba.types import uint32

from kernels import q8_gemm, q8_gemv
from kernels.emulated import native
from kernels.open import open_cards


REPEATS = 10                                         # of a product within a list: the processor's vector units wake slowly


@cuda.jit
def nothing(x):
    x[uint32(0)] = uint32(1)


def programs(card, record):
    """The launches that `record` makes, one native Program for each; nothing is executed."""
    with card.record() as recording:
        record()
    program = native.Program([launch.native for launch in recording.stream.recorded])
    program.keep = recording                         # and with it the arrays that the launches use
    return program


def best_seconds(program, workers, seconds=0.5):
    """The shortest time of one execution, over at least `seconds`; of one worker the processor time, so that other
    programs on the machine do not count."""
    clock = time.thread_time if workers == 1 else time.perf_counter
    native.execute(program, workers)
    times, end = [], time.perf_counter() + seconds
    while time.perf_counter() < end:
        start = clock()
        native.execute(program, workers)
        times.append(clock() - start)
    return min(times)


def product(card, multiply, n, k, rows):
    """(program, multiply-accumulates) of a Q8_0 matrix product of random operands."""
    random = np.random.default_rng(0)
    w, x = q8_gemv.random_q8(random, n, k), q8_gemv.random_activations(random, rows, k)
    operands = q8_gemv.upload_q8(card, w, x)
    y = card.zeros((rows, n), np.float32)
    return programs(card, lambda: multiply(card, y, n, *operands, rows)), n * k * rows


def main(workers=1):
    card = open_cards("emulated")[0]
    print(f"{card.describe()}; {workers} worker{'s' * (workers > 1)}")
    x = card.zeros(1, np.uint32)
    one = programs(card, lambda: card.launch(nothing, 1, 32, x))
    many = programs(card, lambda: [card.launch(nothing, 1, 32, x) for _ in range(1000)])
    print(f"{'one launch from Python':40} {best_seconds(one, workers) * 1e6:8.2f} us")
    print(f"{'a launch within a list of 1,000':40} {best_seconds(many, workers) * 1e3:8.2f} us")
    for name, multiply, shapes in (
            ("q8_gemv", q8_gemv.gemv_q8_q8, [(1024, 1024, 1), (128, 4096, 1), (4096, 4096, 1), (1024, 1024, 8)]),
            ("q8_gemm", q8_gemm.gemm_q8_q8, [(512, 512, 128), (1024, 1024, 64), (1024, 1024, 512)])):
        for n, k, rows in shapes:
            program, operations = product(card, multiply, n, k, rows)
            seconds = best_seconds(native.Program(program.launches * REPEATS), workers) / REPEATS
            case = f"{name} n={n} k={k} {'columns' if name == 'q8_gemv' else 'rows'}={rows}"
            print(f"{case:40} {seconds * 1e6:8.1f} us {operations / seconds / 1e9:7.1f} GMAC/s")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
