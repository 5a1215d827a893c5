import pytest

from kernels import embedding
from kernels.formats import FLOATS, FORMATS


@pytest.mark.parametrize("kind", [*FLOATS, *FORMATS])
@pytest.mark.parametrize("case", embedding.CASES, ids=str)
def test_bits_equal_the_reference(card, case, kind):
    embedding.check(card, *case, kind)
