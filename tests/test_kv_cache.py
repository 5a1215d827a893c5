import numpy as np
import pytest

from kernels import kv_cache


@pytest.mark.parametrize("case", kv_cache.CASES, ids=str)
def test_rows_land_in_their_pages(card, case):
    kv_cache.check(card, case)


def test_reading_pages_back():
    n_kv, n = 2, 130
    rows = np.random.default_rng(0).standard_normal((n, n_kv, 256)).astype(np.float16)
    table = np.array([[4, 4, 4], [3, 0, 2]])
    pages = np.zeros((5, n_kv, 64, 256), np.float16)
    for t, row in enumerate(rows):
        pages[table[1, t // 64], :, t % 64] = row
    np.testing.assert_array_equal(kv_cache.read_pages(pages, table, 1, n), rows)
