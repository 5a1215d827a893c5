"""The same bits everywhere: whatever the card, the chunk size, the batch and the slot.

tests/data/logits.json holds hashes of logits of tests/data/tiny-Q8_0.gguf, for each KV format. They were written once
and hold for every card, emulated or real; `python -m tests.test_reproducible` prints what a card computes.
"""

import hashlib
import json
import sys

import numpy as np
import pytest

import qengine
from engine.prefix import pages_for
from kernels.advance import TOKENS
from kernels.kv_formats import KV_FORMATS
from kernels.open import open_cards
from tests.kinds import KV_BY_KIND
from tests.oracle import DATA

MODEL = str(DATA / "tiny-Q8_0.gguf")
RECORDED = DATA / "logits.json"
ENGLISH = "The quick brown fox jumps over the lazy dog while the kernel counts its pipes. " * 3
KOREAN = "느린 카드에서도 문장은 한 글자씩 또박또박 이어진다. 반올림 하나가 다음 글자를 바꾼다. "


def load(card, **options):
    return qengine.load(MODEL, card=card, ctx=512, progress=False, **options)


@pytest.fixture(scope="module")
def engine(card):
    engine = load(card, slots=4)
    yield engine
    engine.close()


def prompts(engine):
    return [engine.tokenizer.encode(text) for text in (ENGLISH, KOREAN, "1 2 3")]


def start(pipeline, scheduler, sequences):
    """Prefills a text into each slot; returns the first sampled tokens."""
    tokens = []
    for slot, ids in enumerate(sequences):
        pipeline.prepare_slot(slot, qengine.Request(ids))
        pages = pages_for(len(ids) + 8)
        pipeline.set_pages(slot, list(range(slot * 8, slot * 8 + pages)))
        for at in range(0, len(ids), scheduler.chunk):
            pipeline.prefill(ids[at:at + scheduler.chunk], slot, at)
        at = qengine.answer_of(0, slot, len(ids) - 1)
        tokens.append(int(pipeline.sample_row((len(ids) - 1) % scheduler.chunk, at).read()[0, TOKENS]))
    return tokens


def decode_logits(engine, batches, steps=4):
    """Logits of `steps` decode steps of every sequence, float32 [sequences, steps, vocabulary], the slots taken
    together as `batches` says, e.g. [[0, 1], [2]]."""
    sequences, pipeline = prompts(engine), engine.pipeline
    with engine.scheduler.stepping:
        newest = start(pipeline, engine.scheduler, sequences)
        positions = [len(ids) for ids in sequences]
        found = np.empty((len(sequences), steps, engine.config.n_vocab), np.float32)
        for step in range(steps):
            for slots in batches:
                pipeline.place([qengine.answer_of(newest[s], s, positions[s]) for s in slots])
                tokens = pipeline.step(qengine.StepShape(len(slots))).read()[:, TOKENS]
                found[slots, step] = engine.cards[0].download(pipeline.last.model.logits[:len(slots)])
                for slot, token in zip(slots, tokens):
                    newest[slot] = int(token)
                    positions[slot] += 1
    return found


def hashes(engine):
    """Name -> hash of the bits of the logits of prompts and of decoded tokens."""
    named = {f"prompt {i}": engine.evaluate(ids) for i, ids in enumerate(prompts(engine))}
    named["decode"] = decode_logits(engine, [[0, 1, 2]])
    return {name: hashlib.sha256(logits.tobytes()).hexdigest() for name, logits in named.items()}


def recorded():
    """KV format -> hashes."""
    return json.loads(RECORDED.read_text())


def test_recorded_bits(engine):
    assert hashes(engine) == recorded()["float16"]


@pytest.mark.parametrize("name", KV_BY_KIND)
def test_recorded_bits_in_few_bits(card, name):
    engine = load(card, slots=4, kv=name)
    found = hashes(engine)
    engine.close()
    assert found == recorded()[name]


def test_all_formats_are_recorded():
    found = recorded()
    assert list(found) == list(KV_FORMATS)
    assert len({name for each in found.values() for name in each.values()}) == sum(map(len, found.values()))


def test_chunk_size_changes_no_bit(card, engine):
    ids = (prompts(engine)[0] * 3)[:300]
    want = engine.evaluate(ids)
    for chunk in (64, 128, 256):
        other = load(card, chunk=chunk)
        np.testing.assert_array_equal(other.evaluate(ids), want, err_msg=f"chunk {chunk}")
        other.close()


def test_batch_changes_no_bit(engine):
    alone = decode_logits(engine, [[0], [1], [2]])
    for batches in ([[0, 1, 2]], [[2, 0], [1]]):
        np.testing.assert_array_equal(decode_logits(engine, batches), alone)


def test_companions_change_no_token(engine):
    """Requests of several clients at once give the tokens that each gives alone, drawn ones too."""
    requests = [qengine.Request(ids, max_tokens=12, temperature=t, top_k=40, seed=5, ignore_eos=True)
                for ids in prompts(engine) for t in (0.0, 1.0)]
    alone = [[delta.token_id for delta in engine.submit(request)] for request in requests]
    together = [engine.submit(request) for request in requests]
    assert [[delta.token_id for delta in generation] for generation in together] == alone


if __name__ == "__main__":
    bits = {}
    for name in KV_FORMATS:
        engine = load(open_cards(sys.argv[1] if len(sys.argv) > 1 else None)[0], slots=4, kv=name)
        bits[name] = hashes(engine)
        engine.close()
    print(json.dumps(bits, indent=2))
