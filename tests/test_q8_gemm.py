from types import SimpleNamespace

import numpy as np
import pytest

from kernels import assembler
from kernels import compile as compiler
from kernels import formats, q8_gemm
from kernels.formats import FORMATS
from kernels.open import open_cards
from kernels.operands import Matrix, Quantized
from kernels.q8_gemv import random_activations, random_q8, upload_q8
from tests.blocks import added, block_terms
from tests.kinds import BY_KIND, FEW


@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize("multiply", [q8_gemm.gemm_naive, q8_gemm.gemm_tiled, q8_gemm.gemm_q8_q8])
@pytest.mark.parametrize("case", q8_gemm.CASES, ids=str)
def test_within_the_rounding_bound(card, case, multiply, add):
    q8_gemm.check(card, *case, add, multiply)


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_is_within_the_rounding_bound(card, name, monkeypatch):
    monkeypatch.setattr(q8_gemm, "TILES", {8: q8_gemm.TILES[8]})    # one kernel to compile for each
    format = FORMATS[name]
    for n, blocks, rows in q8_gemm.FORMAT_CASES:
        q8_gemm.check(card, n, blocks * format.file_block, rows, rows > 1, format=format)


def product(card, w, x, multiply=q8_gemm.gemm_q8_q8):
    n, rows = len(w[0]), len(x[0])
    y = card.alloc((rows, n), np.float32)
    card.poison(y)
    multiply(card, y, n, *upload_q8(card, w, x), rows)
    return card.download(y)


@pytest.fixture(params=q8_gemm.TILES, ids="rows per warp: {}".format)
def one_tile(request, monkeypatch):
    """gemm_q8_q8 has no other tile to choose from."""
    monkeypatch.setattr(q8_gemm, "TILES", {request.param: q8_gemm.TILES[request.param]})


@pytest.mark.parametrize("case", [(1, 32, 1), (129, 64, 65), (130, 544, 17)], ids=str)
def test_every_tile_is_within_the_bound(card, case, one_tile):
    q8_gemm.check(card, *case)


def test_row_has_the_same_bits_in_any_tile(card, one_tile):
    """And for any number of rows and columns, with tiles or without."""
    rng = np.random.default_rng(1)
    w, (xq, xd) = random_q8(rng, 150, 416), random_activations(rng, 130, 416)
    together = product(card, w, (xq, xd), q8_gemm.gemm_naive)
    np.testing.assert_array_equal(product(card, w, (xq, xd), q8_gemm.gemm_tiled), together)
    for first, rows in ((0, 130), (0, 1), (7, 3), (60, 33), (65, 65)):
        part = slice(first, first + rows)
        np.testing.assert_array_equal(product(card, w, (xq[part], xd[part])), together[part])
    few = product(card, (w[0][100:103], w[1][100:103]), (xq, xd))
    np.testing.assert_array_equal(few, together[:, 100:103])


def test_tiles_fill_the_card():
    card = SimpleNamespace(n_sms=132)
    assert q8_gemm.rows_per_warp(card, 4096, 4096) == 16
    assert q8_gemm.rows_per_warp(card, 4096, 297) == 10    # 256 blocks: two for nearly every SM
    assert q8_gemm.rows_per_warp(card, 24576, 297) == 15   # five tiles of 60 rows, not of 64
    assert q8_gemm.rows_per_warp(card, 4096, 128) == q8_gemm.rows_per_warp(card, 1024, 297) == 8
    assert q8_gemm.rows_per_warp(card, 4096, 64) == q8_gemm.rows_per_warp(card, 1024, 8) == 4


def test_tiles_of_concurrent_products_are_those_of_least_work():
    """Other kernels use the SMs that the last round of blocks leaves idle."""
    card = SimpleNamespace(n_sms=132)
    pages = 1, 3, 9
    assert {q8_gemm.rows_per_warp(card, n, 64 * p, concurrent=True) for n in (1024, 4096) for p in pages} == {16}
    assert [q8_gemm.rows_per_warp(card, 4096, rows, concurrent=True) for rows in (8, 30, 40, 60)] == [4, 8, 10, 15]
    for rows in 512, 1152, 4096:
        halves = [rows // 2] * 2
        assert q8_gemm.relative_time(card, 4096, 4096, halves) < q8_gemm.relative_time(card, 4096, 4096, [rows])


@pytest.mark.parametrize("rows", q8_gemm.TILES)
@pytest.mark.parametrize("name", BY_KIND)
def test_everything_stays_in_registers(name, rows):
    """On sm_70. Arrays in local memory would mean that a loop over rows has not been unrolled."""
    format = FORMATS[name]
    if format.bits < 8 and rows not in (16, 4) and (rows != 10 or format.n_scales == 1):
        pytest.skip("a packed format has the registers of 16 rows for 15, those of 10 for 8 and, with one scale, needs "
                    "fewer for 10 than for 16")
    if (7, 0) not in compiler.supported_ccs() or not assembler.find_assembler():
        pytest.skip("the installed CUDA toolkit cannot compile for sm_70")
    bits = "int8[1]" if format.bits == 8 else "uint8[1]"
    signature = "float32[1]", bits, "uint16[1]", "int8[1]", "float32[1]", *["uint32"] * 4, "bool"
    compiled = compiler.compile_kernel(q8_gemm.pipelined(format, rows), signature, (7, 0))
    _, words = assembler.run_assembler(assembler.find_assembler()[0], compiled, (7, 0))
    assert ".local" not in compiled.ptx and " 0 bytes spill stores" in words, words


@pytest.mark.parametrize("name", BY_KIND)
def test_bits_of_the_chain_of_every_format(card, name, monkeypatch):
    """Per block an fma for each float scale, with an exact integer dot product, and one for each minimum: in NumPy. The
    fewest formats with all parts of a kind have the highest tile, the others that of the tests above."""
    tile = 16 if name in FEW else 8
    monkeypatch.setattr(q8_gemm, "TILES", {tile: q8_gemm.TILES[tile]})
    rng, format, n, k, rows = np.random.default_rng(4), FORMATS[name], 40, 512, 20
    raw, (xq, xd) = formats.random_raw(rng, format, n, k), random_activations(rng, rows, k)
    y = np.zeros((rows, n), np.float32)
    for terms in block_terms(format, raw, n, xq, xd):
        y = added(y, terms)
    w = Matrix(name, n, k, *formats.on_card(card, format, raw, n, k))
    got = card.alloc((rows, n), np.float32)
    q8_gemm.gemm(card, got, n, w, Quantized(card.upload(xq), card.upload(xd)), rows)
    np.testing.assert_array_equal(card.download(got), y)


def test_bits_of_the_chain(card):
    """One fma per block of 32 in increasing k, in NumPy."""
    rng = np.random.default_rng(2)
    k = 416
    (wq, wd), (xq, xd) = random_q8(rng, 70, k), random_activations(rng, 40, k)
    y = np.zeros((40, 70), np.float32)
    for block in range(k // 32):
        part = slice(32 * block, 32 * block + 32)
        dot = xq[:, part].astype(np.int64) @ wq[:, part].astype(np.int64).T
        scale = xd[:, block, None] * wd[:, block].astype(np.float32)
        # The float64 sum of an exact product and a float32 rounds once more only in its 53rd bit.
        y = (dot * scale.astype(np.float64) + y).astype(np.float32)
    np.testing.assert_array_equal(product(card, (wq, wd), (xq, xd)), y)


@pytest.mark.parametrize("name, rows", [("Q8_0", 16), ("Q4_K", 10)])
def test_neither_memory_error_nor_race(name, rows, monkeypatch):
    """Five blocks of k or more, so all buffers in shared memory are used again. The last warps have no rows."""
    monkeypatch.setattr(q8_gemm, "TILES", {rows: q8_gemm.TILES[rows]})
    card, format = open_cards("emulated", checked=True)[0], FORMATS[name]
    q8_gemm.check(card, 130, max(160, format.file_block), 4 * rows + 1, format=format)
