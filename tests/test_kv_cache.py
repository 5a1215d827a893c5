import numpy as np
import pytest

from kernels import kv_cache
from kernels.kv_formats import KV_FORMATS


@pytest.mark.parametrize("case", kv_cache.CASES, ids=str)
@pytest.mark.parametrize("format", KV_FORMATS.values(), ids=KV_FORMATS)
def test_rows_land_in_their_pages(card, format, case):
    kv_cache.check(card, format, case)


@pytest.mark.parametrize("head_dim", [256, 128])
@pytest.mark.parametrize("format", KV_FORMATS.values(), ids=KV_FORMATS)
def test_reading_pages_back(format, head_dim):
    n_kv, n = 2, 130
    rows = format.encode(np.random.default_rng(0).standard_normal((n, n_kv, head_dim)))
    table = np.array([[4, 4, 4], [3, 0, 2]])
    pages = np.zeros(*format.arrays(5, n_kv, head_dim)["keys"])
    for t, row in enumerate(rows):
        pages[table[1, t // 64], :, t % 64] = row
    found = kv_cache.read_pages(format, pages, table, 1, n)
    assert found.shape == (n, n_kv, head_dim)
    np.testing.assert_array_equal(found, format.decode(rows))
