"""The products of a mixture of experts in decode steps: bits, out-of-reach experts, formats of the shared expert."""

import pytest

from kernels import expert_gemv
from kernels.formats import FORMATS
from tests.kinds import BY_KIND


@pytest.mark.parametrize("name", BY_KIND)
@pytest.mark.parametrize("sizes", expert_gemv.CASES, ids=str)
def test_bits_of_the_products_of_single_experts(card, name, sizes):
    expert_gemv.check(card, FORMATS[name], sizes, FORMATS[name], absent=(1,))
