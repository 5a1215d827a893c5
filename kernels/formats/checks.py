"""Checks of repacking against NumPy, and its time."""

from functools import partial

import numpy as np

from kernels.bench import Case
from kernels.formats import FORMATS
from kernels.formats.format import head_of, pack, pack_scales, random_raw, repack, scale_rows, split

SHAPES = [(1, 1), (5, 3), (33, 2)]  # rows, blocks of the file in one


def check_repack(card, format, n, k):
    """Repacks random blocks in two pieces; the bits must be the reference's, and a bad scale must be seen."""
    raw = random_raw(np.random.default_rng(n), format, n, k)
    wq, wd = (card.alloc((rows + 1, width), dtype) for (rows, width), dtype in format.arrays(n, k))
    bad, cut = card.zeros(1, np.uint32), len(raw) // 3
    card.poison(wq), card.poison(wd)
    for first, part in ((cut, raw[cut:]), (0, raw[:cut])):
        if len(part):
            repack(card, format, wq[:n], wd[:n], card.upload(part), bad, first, k)
    planes, want_wd = split(format, raw)
    want_wq, used = pack(format, planes, n), k * format.bits // 8  # what follows in a row stays as it was
    got_wq, got_wd = card.download(wq).view(np.uint8), card.download(wd).view(np.uint16)
    np.testing.assert_array_equal(got_wq[:n, :used], want_wq[:, :used])
    want_wd = pack_scales(format, want_wd, n)
    np.testing.assert_array_equal(got_wd[:n], want_wd)
    assert (got_wq[n] == 255).all() and (got_wd[n] == 65535).all(), "wrote past the end"
    assert card.download(bad)[0] == 0
    if format.row_head:
        scale_rows(card, format, wd[:n], n, k, 0.3)
        want_wd[:, :2] = head_of(format, 0.3).reshape(1).view(np.uint16)
        got_wd = card.download(wd).view(np.uint16)
        np.testing.assert_array_equal(got_wd[:n], want_wd)
        assert (got_wd[n] == 65535).all(), "wrote past the end"
    for place, value in format.scales.bad():
        wrong = raw.copy()
        wrong[-1, place:place + len(value)] = value
        card.fill(bad, 0)
        repack(card, format, wq[:n], wd[:n], card.upload(wrong), bad, 0, k)
        assert card.download(bad)[0] == 1, f"did not see {value}"
    return 0.0


def cases(card):
    """The checks, then the time of a matrix of 16 M weights."""
    for format in FORMATS.values():
        for n, blocks in SHAPES:
            k = blocks * format.file_block
            yield Case(f"{n} x {k} of {format.name}", partial(check_repack, card, format, n, k))
    n = k = 4096
    for format in FORMATS.values():
        wq, wd = (card.alloc(*array) for array in format.arrays(n, k))
        raw, bad = card.zeros(n * k // format.file_block * format.file_bytes, np.uint8), card.zeros(1, np.uint32)
        yield Case(f"time of {n} x {k} of {format.name}", n_bytes=raw.nbytes + wq.nbytes + wd.nbytes,
                   launch=partial(repack, card, format, wq, wd, raw, bad, 0, k))
