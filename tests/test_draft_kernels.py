"""The kernels of the draft block: its rows, its inputs, its choice."""

import pytest

from kernels import draft_head, draft_input, draft_list
from kernels.formats import FLOATS, FORMATS


@pytest.mark.parametrize("case", draft_input.CASES, ids=str)
def test_inputs_equal_the_reference(card, case):
    draft_input.check(card, *case)


@pytest.mark.parametrize("case", draft_input.ROW_CASES, ids=str)
def test_rows_equal_the_reference(card, case):
    draft_input.check_rows(card, *case)


@pytest.mark.parametrize("case", draft_head.CASES, ids=str)
def test_drafts_equal_the_reference(card, case):
    draft_head.check(card, *case)


@pytest.mark.parametrize("kind", [*FLOATS, *FORMATS])
@pytest.mark.parametrize("case", draft_list.CASES, ids=str)
def test_listed_logits_equal_the_reference(card, case, kind):
    draft_list.check(card, *case, kind)


def test_too_many_columns_are_refused():
    with pytest.raises(ValueError, match="1048576"):
        draft_head.scratch_shape(1, draft_head.MAX_COLUMNS + 1)
