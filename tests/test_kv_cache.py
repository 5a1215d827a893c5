import itertools

import numpy as np
import pytest

from kernels import kv_cache
from kernels.kv_cache import Pages
from kernels.kv_formats import KV_FORMATS
from kernels.records import Places
from kernels.rope import QWEN3, QWEN35, heads_of, sample_qkv, upload_qkv


@pytest.mark.parametrize("case", kv_cache.CASES, ids=str)
@pytest.mark.parametrize("format", KV_FORMATS.values(), ids=KV_FORMATS)
def test_rows_land_in_their_pages(card, format, case):
    kv_cache.check(card, format, case)


@pytest.mark.parametrize("shape", [QWEN35, QWEN3], ids=str)
@pytest.mark.parametrize("format", KV_FORMATS.values(), ids=KV_FORMATS)
def test_what_is_not_finite_is_never_hidden(card, format, shape):
    """In a key or in a value, it makes the value that is kept not finite: of that row and head alone."""
    bad = [(row, column, x) for row, (column, x) in enumerate(itertools.product("kv", (np.nan, np.inf, -np.inf, 2e6)))]
    heads, rng, rows = heads_of(2, 2, shape), np.random.default_rng(0), 64
    qkv = sample_qkv(rng, heads, np.zeros((3, rows), np.int32))
    starts = {"k": heads.k_column, "v": heads.v_column}
    for row, column, x in bad:
        qkv.products.values[row, starts[column] + heads.head_dim + 9] = x
    qkv.k_norm[9] = 1e4             # otherwise the norm would make a large key small
    positions = np.arange(rows, dtype=np.int32)
    pages = Pages.alloc(card, format, (1, 2, heads.head_dim), card.zeros((1, 1), np.int32), "")
    places = Places(card.zeros(rows, np.int32), card.upload(positions))
    kv_cache.store_kv(card, pages, upload_qkv(card, qkv), places, rows)
    found = np.isfinite(format.values.decode(card.download(pages.v)[0])).all(axis=-1)       # [heads, rows]
    assert found[0].all() and (found[1] == (positions >= len(bad))).all()


@pytest.mark.parametrize("head_dim", [256, 128])
@pytest.mark.parametrize("format", KV_FORMATS.values(), ids=KV_FORMATS)
def test_reading_pages_back(format, head_dim):
    n_kv, n = 2, 130
    table = np.array([[4, 4, 4], [3, 0, 2]])
    for name, kind in format.kinds.items():
        rows = kind.encode(np.random.default_rng(0).standard_normal((n, n_kv, head_dim)))
        pages = np.zeros(*format.arrays(5, n_kv, head_dim)[name])
        for t, row in enumerate(rows):
            pages[table[1, t // 64], :, t % 64] = row
        found = kv_cache.read_pages(kind, pages, table, 1, n)
        assert found.shape == (n, n_kv, head_dim)
        np.testing.assert_array_equal(found, kind.decode(rows))
