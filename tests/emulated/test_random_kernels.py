"""Random kernels on every card, bit for bit, and the NumPy arithmetic that they are compared with."""

import re
from fractions import Fraction

import numpy as np
import pytest

from tests.emulated.arithmetic import (dot_bytes, fma, half2, half_fma, halves, larger, leading_zeros,
                                       permute_bytes, reverse_bits, to_int)
from tests.emulated.random_kernels import LATER_OPS, LEAVES, OPS, RECORDED, Program

CI_SEEDS = [*range(8), *range(RECORDED, RECORDED + 4)]
MORE_SEEDS = [*range(8, RECORDED), *range(RECORDED + 4, RECORDED + 100)]


def check(card, seed):
    program = Program(seed)
    assert not program.differences(program.run(card)), program.source()


@pytest.mark.parametrize("seed", CI_SEEDS)
def test_random_kernel(card, seed):
    check(card, seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", MORE_SEEDS)
def test_more_random_kernels(card, seed):
    check(card, seed)


def test_the_same_seed_gives_the_same_program():
    assert Program(5).source() == Program(5).source() != Program(6).source()
    assert all((a == b).all() for a, b in zip(Program(5).expected(), Program(5).expected()))


def test_every_operation_and_statement_occurs():
    text = "\n".join(Program(seed).source() for seed in MORE_SEEDS)
    for op in OPS + LATER_OPS:
        assert max(re.split(r"{\d?}", op.text), key=len) in text, op.text
    for leaf in (leaf for leaves in LEAVES.values() for leaf, _ in leaves):
        assert leaf in text
    for words in ("for step_", "while ", "else:", "break", "continue", "return", "syncthreads", "shfl_sync",
                  "shfl_up_sync", "shfl_down_sync", "shfl_xor_sync", "all_sync", "any_sync", "eq_sync",
                  "match_any_sync", "atomic.add", "atomic.max", "atomic.min", "permuted[", "scatter[", "local["):
        assert words in text, words


def test_the_outputs_depend_on_the_program():
    """A generator whose kernels compute little would agree with anything."""
    different = [len(np.unique(Program(seed).expected()[0])) for seed in range(100)]
    threads = [Program(seed).n_threads for seed in range(100)]
    assert np.median([d / n for d, n in zip(different, threads)]) > 3


# ---- the arithmetic ----------------------------------------------------------------------------------------

def nearest(value, dtype):
    """A Fraction rounded to nearest even, by trying the neighbours of a first guess. Not for overflow."""
    guess = dtype(float(value))
    around = [np.nextafter(guess, dtype(-np.inf)), guess, np.nextafter(guess, dtype(np.inf))]
    integer = {np.float32: np.uint32, np.float16: np.uint16}[dtype]
    return min(around, key=lambda x: (abs(Fraction(float(x)) - value), int(x.view(integer)) & 1))


def test_fma_rounds_once():
    random = np.random.default_rng(0)
    a, b = (random.standard_normal(3000).astype(np.float32) for _ in range(2))
    c = -(a.astype(np.float64) * b).astype(np.float32)              # the sum cancels: all the low bits matter
    c[1000:2000] *= np.float32(2.0**24)                             # the product lies at the last bit of c
    a[2000:] *= np.float32(2.0**-70)
    b[2000:] *= np.float32(2.0**-70)                                # results below the normal range
    c[2000:] = np.float32(2.0**-149) * random.integers(-9, 9, 1000)
    for x, y, z, got in zip(a, b, c, fma(a, b, c)):
        assert got == nearest(Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z)), np.float32)


def test_fma_where_a_float64_sum_would_round_twice():
    # 1 + 2**-24 lies halfway between two floats; 2**-80 more decides, and is lost in a float64 sum.
    a, b, c = np.float32([1 + 2.0**-12]), np.float32([2.0**-12 - 2.0**-24]), np.float32([1.0])
    assert fma(a, b, c)[0] == nearest(Fraction(float(a[0])) * Fraction(float(b[0])) + 1, np.float32)
    tiny, half_ulp = np.float32([2.0**-40]), np.float32([2.0**-24])
    x = fma(tiny, tiny, np.float32([1.0]))
    assert x[0] == 1.0
    assert fma(half_ulp, np.float32([1 + 2.0**-23]), np.float32([1.0]))[0] == np.float32(1 + 2.0**-23)


def test_fma_of_infinities_and_nan():
    inf, nan = np.inf, np.nan
    with np.errstate(all="ignore"):
        got = fma(*np.float32([[inf, 0, 3e38, nan, 1], [1, inf, 10, 1, 1], [-inf, 0, 0, 0, -1]]))
    assert np.isnan(got[[0, 1, 3]]).all() and got[2] == inf and got[4] == 0 and not np.signbit(got[4])


def test_half_fma_rounds_once():
    random = np.random.default_rng(1)
    a, b, c = (random.integers(0, 2**32, 2000, dtype=np.uint32) for _ in range(3))
    with np.errstate(all="ignore"):
        got = halves(half_fma(a, b, c)).ravel()
    for x, y, z, g in zip(halves(a).ravel(), halves(b).ravel(), halves(c).ravel(), got):
        if np.isfinite([x, y, z, g]).all() and abs(g) < 60000:
            assert g == nearest(Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z)), np.float16)


def test_larger_orders_zeros_and_ignores_nan():
    a, b = np.float32([0.0, -0.0, np.nan, 1, -0.0]), np.float32([-0.0, 0.0, 2, np.nan, -0.0])
    assert (larger(a, b).view(np.uint32) == np.float32([0.0, 0.0, 2, 1, -0.0]).view(np.uint32)).all()
    assert np.isnan(larger(a[2:3], a[2:3]))


def test_integers():
    words = np.uint32([0, 1, 0x80000000, 0xFFFFFFFF, 0x00F0])
    assert leading_zeros(words).tolist() == [f"{w:032b}".find("1") if w else 32 for w in words.tolist()]
    assert reverse_bits(words).tolist() == [int(f"{w:032b}"[::-1], 2) for w in words.tolist()]
    floats = np.float32([0.5, 1.5, -2.5, 3e9, -np.inf, np.nan])
    assert to_int(floats).tolist() == [0, 2, -2, 2**31 - 1, -2**31, 0]
    a, b = np.uint32([0x80FF0102]), np.uint32([0x80017F03])
    assert dot_bytes(a, b, np.int32([5])).tolist() == [16384 - 1 + 127 + 6 + 5]
    a, b = np.uint32([0x33221180]), np.uint32([0x77665544])
    assert permute_bytes(a, b, np.uint32([0x8407])).tolist() == [0xFF448077]
    assert half2(np.float16([[1, np.nan]])).tolist() == [0x7E003C00]
