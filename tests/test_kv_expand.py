import pytest

from kernels import kv_expand
from kernels.kv_expand import EXPANDED, Piece
from kernels.kv_formats import KV_FORMATS


@pytest.mark.parametrize("case", kv_expand.CASES, ids=str)
@pytest.mark.parametrize("format", EXPANDED, ids=str)
def test_pages_become_the_halves_that_the_format_says(card, format, case):
    kv_expand.check(card, format, case)


def test_halves_need_no_piece(card):
    assert Piece.alloc(card, KV_FORMATS["float16"], 2, 256, 1) is None
