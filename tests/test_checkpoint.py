import pytest

from kernels import checkpoint


@pytest.mark.parametrize("case", checkpoint.CASES)
def test_equals_the_reference(card, case):
    checkpoint.check(card, case)


@pytest.mark.parametrize("case", checkpoint.KEEPS)
def test_what_is_kept_has_the_bits_of_plain_steps(card, case):
    checkpoint.check_keep(card, case)
