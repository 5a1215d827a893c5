"""Every published size of the family runs, with the shapes of its heads and few of all else."""

import contextlib

import pytest

import qengine
from engine import hyperparameters

pytestmark = pytest.mark.usefixtures("compiled_when_launched")
SMALL = {"n_layers": 4, "n_vocab": 1024, "ffn_dim": 512, "expert_dim": 256, "shared_dim": 256}     # at most
TABLES = [(hyperparameters.SYNTHETIC_FIELDS, hyperparameters.SYNTHETIC),
          (hyperparameters.SYNTHETIC_MOE_FIELDS, hyperparameters.SYNTHETIC_MOE),
          (hyperparameters.SYNTHETIC_FIELDS, hyperparameters.SYNTHETIC_QWEN3)]


def small(fields, sizes):
    """The sizes of a model, those of SMALL cut, with four times as many experts as a token uses."""
    named = {field: min(size, SMALL.get(field, size)) for field, size in zip(fields, sizes, strict=True)}
    if "n_experts" in named:
        named["n_experts"] = 4 * named["n_used_experts"]
    return tuple(named.values())


@pytest.mark.parametrize("fields, table, name", [(*each, name) for each in TABLES for name in each[1]],
                         ids=[name for _, table in TABLES for name in table])
def test_a_prompt_and_an_answer(card, monkeypatch, fields, table, name):
    monkeypatch.setitem(table, name, small(fields, table[name]))
    with contextlib.closing(qengine.load(f"synthetic:{name}", card=card, ctx=192, progress=False)) as engine:
        ask = qengine.Request([*range(70)], max_tokens=4, temperature=0.0, ignore_eos=True)
        first, again = ([delta.token_id for delta in engine.submit(ask)] for _ in range(2))
        assert len(first) == 4 and first == again
