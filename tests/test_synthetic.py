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
    """Weights deviate by about 1 / sqrt(k), whatever the format, and have no mean but that of the format's codes.

    A float scale varies by 1 / 12 of its square, an integer scale of 1, 3 ... 31 by a third of its square: so the
    deviation is up to sqrt(13 / 12 * 4 / 3) = 1.2 times 1 / sqrt(k)."""
    format, n, k = FORMATS[name], 64, 1024
    wq, wd = (card.alloc(*array) for array in format.arrays(n, k))
    synthetic.random_matrix(card, format, wq, wd, n, k, seed=3)
    weights = card.alloc((n, k), np.float32)
    embedding.embed(card, name, weights, card.upload(np.arange(n, dtype=np.int32)), wq, wd, n, k)
    weights = card.download(weights) * np.sqrt(k)
    centred = format.minima or format.random.codes != "all"
    mean = 0 if centred else format.values.mean() / format.values.std()
    assert 0.9 < weights.std() < 1.25 and abs(weights.mean() - mean) < 0.1
