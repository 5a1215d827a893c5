"""Kernels whose throttled instructions are replaced: the same bits for dp4a, the same accuracy for fma."""

import importlib

import numpy as np
import pytest

from kernels import compile as compiler
from kernels import q8_gemv, throttled
from kernels.open import open_cards


@pytest.fixture
def emulated():
    """A card of its own: what is replaced on it stays."""
    return open_cards("emulated")[0]


def product(card):
    random = np.random.default_rng(3)
    (wq, wd), (xq, xd) = q8_gemv.random_q8(random, 33, 544), q8_gemv.random_activations(random, 3, 544)
    wq[:4, :32], xq[:, :32] = -128, -127                    # the corner of int8
    y = card.alloc((3, 33), np.float32)
    q8_gemv.gemv_q8_q8(card, y, 33, *q8_gemv.upload_q8(card, (wq, wd), (xq, xd)), 3)
    return card.download(y)


@pytest.mark.parametrize("instead", ["dp2a", "imad"])
def test_dot_products_keep_their_bits(emulated, instead):
    want = product(emulated)
    assert emulated.replace([("dp4a", instead)]) == ()
    np.testing.assert_array_equal(product(emulated), want)


@pytest.mark.parametrize("pair", throttled.REWRITINGS, ids=" ".join)
def test_the_instruction_is_gone(pair):
    """Nothing else has changed, except how many blocks share an SM's registers: this number was chosen for what is
    gone."""
    types = ("float32[1]", "uint32", "int8[1]", "uint16[1]", "int8[1]", "float32[1]", *["uint32"] * 6, "bool")
    kernel = q8_gemv.gemv_kernel(q8_gemv.Q8, 1, q8_gemv.Shape(2, 1, 32, True), False, False)
    ptx = compiler.compile_kernel(kernel, types, compiler.supported_ccs()[0]).ptx
    instruction, new = throttled.REWRITINGS[pair][0], throttled.rewrite(ptx, [pair])
    assert instruction.search(ptx) and not instruction.search(new)
    lines = [line for line in throttled.BLOCKS_PER_SM.sub("", ptx).splitlines() if not instruction.search(line)]
    assert lines == [line for line in new.splitlines() if line in set(lines)]
    assert throttled.rewrite(ptx, ()) == ptx


@pytest.mark.parametrize("name", ["norm", "rope", "gdn", "conv", "swiglu", "attention", "sample"])
def test_without_fused_multiply_add_kernels_pass_their_checks(emulated, name):
    emulated.replace([("ffma", "fp32")])
    checks = [case.check for case in importlib.import_module(f"kernels.{name}").cases(emulated) if case.check]
    for check in checks[:3]:        # of attention: each width of heads
        check()
