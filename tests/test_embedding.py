import pytest

from kernels import embedding
from kernels.formats import FORMATS


@pytest.mark.parametrize("kind", [*embedding.FLOATS, *FORMATS])
@pytest.mark.parametrize("case", embedding.CASES, ids=str)
def test_bits_equal_the_reference(card, case, kind):
    embedding.check(card, *case, kind)
