import numpy as np
import pytest

from kernels import swiglu


@pytest.mark.parametrize("case", swiglu.CASES, ids=str)
def test_equal_the_reference(card, case):
    swiglu.check(card, *case)


def test_swiglu_far_from_zero(card):
    gate = np.array([-1e30, -200, -90, 0, 90, 200, 1e30, np.inf] * 4, np.float32)
    y = card.alloc(32, np.float32)
    swiglu.swiglu(card, y, card.upload(np.concatenate([gate, np.ones(32, np.float32)])), 1, 32)
    np.testing.assert_array_equal(card.download(y), np.where(gate > 0, gate, 0))


def test_rows_that_are_not_whole_blocks_are_refused(card):
    with pytest.raises(ValueError, match="multiple of 32"):
        swiglu.swiglu(card, None, None, 1, 36)
