import numpy as np
import pytest

from kernels import embedding, synthetic
from kernels.formats import FORMATS


@pytest.mark.parametrize("name", FORMATS)
def test_equals_the_reference_bit_for_bit(card, name):
    format = FORMATS[name]
    for n, blocks in synthetic.SHAPES:
        synthetic.check(card, format, n, blocks * format.file_block)


@pytest.mark.parametrize("name", FORMATS)
def test_a_product_is_of_order_one(card, name):
    """Weights deviate by 1 / sqrt(k) and hardly have a mean, whatever the format."""
    format, n, k = FORMATS[name], 64, 1024
    wq, wd = (card.alloc(*array) for array in format.arrays(n, k))
    synthetic.random_matrix(card, format, wq, wd, n, k, seed=3)
    weights = card.alloc((n, k), np.float32)
    embedding.embed(card, name, weights, card.upload(np.arange(n, dtype=np.int32)), wq, wd, n, k)
    weights = card.download(weights) * np.sqrt(k)
    assert 0.9 < weights.std() < 1.2 and abs(weights.mean()) < 0.15
