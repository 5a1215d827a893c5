import pytest

from kernels import pool


@pytest.mark.parametrize("case", pool.CASES, ids=str)
def test_sums_equal_the_reference(card, case):
    pool.check(card, *case)
