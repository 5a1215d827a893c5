import pytest

from kernels import synthetic


@pytest.mark.parametrize("case", synthetic.CASES, ids=str)
def test_equals_the_reference_bit_for_bit(card, case):
    synthetic.check(card, case)
