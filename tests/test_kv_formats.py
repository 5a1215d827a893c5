"""Every KV format of the registry; what kernels do with it: test_kv_cache, test_attention, test_attend_decode."""

import numpy as np
import pytest

from kernels.kv_formats import KV_FORMATS, PAGE

each_format = pytest.mark.parametrize("format", KV_FORMATS.values(), ids=KV_FORMATS)


@each_format
@pytest.mark.parametrize("head_dim", [256, 128])
def test_bytes_are_those_of_the_arrays(format, head_dim):
    n_pages, n_kv = 5, 3
    arrays = format.arrays(n_pages, n_kv, head_dim)
    assert set(arrays) == {"keys", "values"}
    n_bytes = sum(np.prod(shape) * np.dtype(dtype).itemsize for shape, dtype in arrays.values())
    assert n_bytes == n_pages * format.page_bytes(n_kv, head_dim)
    assert format.page_bytes(n_kv, head_dim) == PAGE * format.token_bytes(n_kv, head_dim)
    for shape, _ in arrays.values():
        assert shape[:3] == (n_pages, n_kv, PAGE)


@each_format
@pytest.mark.parametrize("head_dim", [256, 128])
def test_a_row_comes_back_within_the_tolerance(format, head_dim):
    x = np.random.default_rng(0).standard_normal((7, 2, head_dim)) * 3
    rows = format.encode(x)
    assert rows.shape == (7, 2, format.row(head_dim)) and rows.dtype == format.dtype
    found = format.decode(rows)
    assert found.shape == x.shape and found.dtype == np.float16
    assert (np.abs(found - x) <= format.tolerance * np.abs(x).max(axis=-1, keepdims=True)).all()


@each_format
@pytest.mark.parametrize("head_dim", [256, 128])
def test_loads_are_aligned(format, head_dim):
    """A row begins, and 8 dims do, where the widest load of the format may begin."""
    itemsize = np.dtype(format.dtype).itemsize
    assert format.row(head_dim) >= head_dim // 8 * format.eight
    assert format.row(head_dim) * itemsize % (format.eight * itemsize) == 0


def test_names_are_unique_and_known():
    assert all(name == format.name for name, format in KV_FORMATS.items())
    float16 = KV_FORMATS["float16"]
    assert (float16.token_bytes(4, 256), float16.page_bytes(4, 256)) == (4096, 262144)
