import numpy as np
import pytest

from kernels import embedding


@pytest.mark.parametrize("kind", [np.int8, np.float16, np.uint16, np.float32])
@pytest.mark.parametrize("case", embedding.CASES, ids=str)
def test_bits_equal_the_reference(card, case, kind):
    embedding.check(card, *case, kind)
