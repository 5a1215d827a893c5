"""Every KV format of the registry; what kernels do with it: test_kv_cache, test_attention, test_attend_decode."""

import numpy as np
import pytest

from kernels.hadamard import ROOT, turn_back_reference, turn_reference
from kernels.kv_formats import KV_FORMATS, PAGE, turned, turned_back
from kernels.limits import FLOAT16, KV_NAMES
from tests.kinds import KV_KINDS

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


KINDS = dict.fromkeys(kind for format in KV_FORMATS.values() for kind in format.kinds.values())
each_kind = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
SHAPE = 7, 2


@each_kind
@pytest.mark.parametrize("head_dim", [256, 128])
@pytest.mark.parametrize("scale", [3e-3, 3, 300])
def test_a_row_comes_back_within_the_tolerance(kind, head_dim, scale):
    """Also one with a dim that is far larger than the others."""
    x = np.random.default_rng(0).standard_normal((*SHAPE, head_dim)) * scale
    x[3, :, 5] *= 30
    rows, want = kind.encode(x), turned(kind, x)
    assert rows.shape == (*SHAPE, kind.row(head_dim)) and rows.dtype == kind.dtype
    found = kind.decode(rows)
    assert found.shape == x.shape and found.dtype == np.float16
    assert (np.abs(found - want) <= kind.tolerance * np.abs(want).max(axis=-1, keepdims=True)).all()


@each_kind
@pytest.mark.parametrize("head_dim", [256, 128])
def test_errors_of_a_gaussian_are_as_small_as_levels_allow(kind, head_dim):
    """Relative L2: a scale that does not fit its codes, or a level that is wrong, would show here."""
    x = np.random.default_rng(1).standard_normal((500, head_dim))
    found = turned_back(kind, kind.decode(kind.encode(x)))
    assert np.linalg.norm(found - x) <= kind.error * np.linalg.norm(x)


@each_kind
def test_zeros_stay_zeros_and_what_is_not_finite_is_not_lost(kind):
    x = np.zeros((3, 256), np.float32)
    x[1, 130], x[2, 130] = np.inf, np.nan
    found = kind.decode(kind.encode(x))
    assert not found[0].any() and not np.isfinite(found[1]).all() and np.isnan(found[2]).any()


@pytest.mark.parametrize("head_dim", [256, 128])
def test_what_is_turned_comes_back(head_dim):
    x = np.random.default_rng(2).standard_normal((5, head_dim))
    y = turn_reference(x) * ROOT
    np.testing.assert_allclose(turn_back_reference(y), x, atol=1e-12)
    np.testing.assert_allclose((y * y).sum(-1), (x * x).sum(-1))            # it keeps lengths
    assert np.abs(y - x).max() > 0.1
    one = np.zeros(128)
    one[77] = 1
    np.testing.assert_allclose(np.abs(turn_reference(one)), 1)              # a dim goes to all dims in equal parts


def test_every_kind_of_rows_is_in_an_engine_that_every_run_tests():
    tested = {rows for name in KV_KINDS for rows in KV_FORMATS[name].kinds.values()}
    assert tested == {rows for format in KV_FORMATS.values() if format.expands for rows in format.kinds.values()}


def test_names_are_unique_and_known():
    assert all(name == format.name for name, format in KV_FORMATS.items())
    float16 = KV_FORMATS["float16"]
    assert (float16.token_bytes(4, 256), float16.page_bytes(4, 256)) == (4096, 262144)
    bytes_of_head = {name: format.token_bytes(1, 256) for name, format in KV_FORMATS.items()}
    assert bytes_of_head == {"float16": 1024, "q8": 520, "q8+4": 392, "q8+3": 360, "q4": 264, "q3": 200}


def test_the_help_names_every_format():
    """It takes the names from a file that imports nothing."""
    assert KV_NAMES == tuple(KV_FORMATS) and KV_NAMES[0] == FLOAT16
