"""What a prompt sees: places, keys and rotary positions of pictures; and models that see, with given rows."""

import threading

import numpy as np
import pytest

import qengine
from engine.images import Limits, Picture, Reader, prompt_fields
from engine.request import EngineStopped, RequestError
from engine.sight import FIRST_KEY, NAN_ROWS, NAN_UNKNOWN, Eyes, Gallery, PromptPictures, limits_for, pictures_of
from engine.turns import Turns
from kernels.emulated.card import EmulatedCard
from tests.models import load_tiny
from tests.oracle import oracle_json, oracle_npz, oracle_path
from tests.until import PATIENCE

PAD = 7


def picture(rows, columns, seed=0):
    return Picture.of(np.random.default_rng(seed).integers(0, 256, (32 * rows, 32 * columns, 3), np.uint8))


# ---- places of pictures in a prompt ----------------------------------------------------------------------------------

def test_places_keys_and_positions():
    first, second = picture(2, 3), picture(1, 1, 1)
    ids = prompt_fields([1, 2, PAD, 3, PAD, 4, 5], [first, second], Reader(pad=PAD))["prompt_ids"]
    pictures = PromptPictures(ids, [first, second], PAD)
    assert pictures.starts == [2, 9]
    np.testing.assert_array_equal(pictures.rope, [[0, 1, 2, 2, 2, 2, 2, 2, 5, 6, 7, 8],
                                                  [0, 1, 2, 2, 2, 3, 3, 3, 5, 6, 7, 8],
                                                  [0, 1, 2, 3, 4, 2, 3, 4, 5, 6, 7, 8]])
    assert pictures.lag == len(ids) - 9
    keys = pictures.keys(ids)
    assert [key for key in keys if key < FIRST_KEY] == [1, 2, 3, 4, 5] and len(set(keys)) == len(ids)
    assert keys == pictures.keys(ids) and keys != PromptPictures(ids, [picture(2, 3, 5), second], PAD).keys(ids)
    assert [tuple(view)[1:] for view in pictures.views(4, 10)] == [(0, 2, 4), (5, 0, 1)]
    assert pictures.views(0, 2) == [] and pictures.after(8) == [second] and pictures.after(7) == [first, second]


@pytest.mark.parametrize("ids, said", [([1, PAD, PAD, 2], "no 6 tokens for picture 1"),
                                       ([1, *[PAD] * 6], "ends with a picture"), ([1, 2], "no 6 tokens")])
def test_prompts_without_the_tokens_of_a_picture(ids, said):
    with pytest.raises(RequestError, match=said):
        PromptPictures(ids, [picture(2, 3)], PAD)


def test_a_picture_that_has_more_tokens_than_the_tower_takes():
    """Whoever makes pictures without the engine's reader is told so, before cards are asked."""
    eyes, large = Reader(Limits(1, 16), PAD), picture(1, 17)
    assert len(pictures_of([*[PAD] * 16, 1], [picture(4, 4)], eyes).starts) == 1
    with pytest.raises(RequestError, match="^pictures: a picture may have 16 tokens, and one has 17"):
        pictures_of([*[PAD] * 17, 1], [large], eyes)


def test_positions_of_the_reference():
    golden = oracle_npz("dense_mtp-vision")
    for case in "aligned", "unaligned":
        ids, (_, height, width) = golden[f"{case}_ids"].tolist(), golden[f"{case}_grid_thw"][0]
        seen = picture(height // 2, width // 2)
        pad = max(set(ids), key=ids.count)
        np.testing.assert_array_equal(PromptPictures(ids, [seen], pad).rope, golden[f"{case}_positions_thw"])


def test_limits_follow_the_context():
    assert limits_for(None, 4096)[:3] == (64, 2048, 4096)
    assert limits_for(None, 1 << 18)[:3] == (64, 4096, 1 << 14)
    assert limits_for(None, 100)[:3] == (64, 64, 100)
    assert limits_for((100, 3000), 2048)[:3] == (100, 3000, 3000)


# ---- rows of pictures on a card --------------------------------------------------------------------------------------

def test_rows_of_a_gallery_never_overlap():
    """Random pictures, of which those that are needed must always have rows."""
    rng = np.random.default_rng(3)
    shown = [picture(*rng.integers(1, 5, 2), seed) for seed in range(30)]
    gallery, encoded = Gallery(64, 16), []
    for _ in range(500):
        now = [shown[i] for i in rng.integers(0, 30, 3)]
        had = set(gallery.kept)
        placed = gallery.place(now, [shown[i] for i in rng.integers(0, 30, 5)])
        encoded += placed
        assert {each.digest for each in now} <= gallery.kept.keys()
        assert bool(placed) == any(each.digest not in had for each in now)
        ends = 0
        for first, n in sorted(gallery.kept.values()):
            assert first >= ends
            ends = first + n
        assert ends <= 64
        assert all(gallery.first_row(each) == row for each, row in placed)
    assert len(encoded) > 300


# ---- models that see -------------------------------------------------------------------------------------------------

class GivenRows:
    """A tower whose rows are known: those of each digest. encoded: the pictures that it was asked for. A picture has
    n_pieces, and on_piece(number) is called when one of them is queued; the rows come with the last."""

    def __init__(self, rows):
        self.rows, self.encoded = rows, []
        self.n_pieces, self.on_piece = 1, lambda number: None

    def load(self, card, max_tokens):
        self.card = card
        return self

    def encode(self, pictures, outs):
        for each, out in zip(pictures, outs):
            self.encoded.append(each)
            for number in range(1, self.n_pieces + 1):
                self.on_piece(number)
                if number == self.n_pieces:
                    self.card.copy_in(out, self.rows[each.digest])
                yield

    def rehearse(self):
        """It has no kernels."""

    def seconds(self, pictures, speed):
        return [0.01] * self.n_pieces * len(pictures)


class Golden:
    """A case of the reference: its picture, rows, token ids and logits."""

    def __init__(self, case):
        golden = oracle_npz("dense_mtp-vision")
        self.ids, (_, height, width) = golden[f"{case}_ids"].tolist(), golden[f"{case}_grid_thw"][0]
        self.picture = picture(height // 2, width // 2)
        self.rows = golden[f"{case}_hf_image_embeds"]
        self.logits, self.greedy = golden[f"{case}_hf_logits_tail"], golden[f"{case}_hf_greedy"].tolist()
        self.margin = golden[f"{case}_hf_greedy_margin"]


@pytest.fixture(scope="module")
def golden():
    return [Golden(case) for case in ("aligned", "unaligned")]


def load_seeing(card, golden, monkeypatch, **options):
    """An engine of the reference model, and its tower, which knows the pictures of the reference."""
    opened = qengine.open_model(oracle_path("gguf/dense_mtp-Q8_0.gguf"))
    tower = GivenRows({case.picture.digest: case.rows for case in golden})
    pad = opened.tokenizer.control["<|image_pad|>"]
    monkeypatch.setattr(qengine, "open_eyes", lambda *_: Eyes(tower, lambda n_ctx: Limits(), pad))
    return qengine.load(opened, card=card, progress=False, **{"ctx": 512, "slots": 4} | options), tower


def tokens_of(engine, ids, pictures, n=32, **fields):
    return [delta.token_id for delta in engine.submit(qengine.Request(list(ids), max_tokens=n, pictures=tuple(pictures),
                                                                      ignore_eos=True, **fields))]


@pytest.fixture
def seeing(card, golden, monkeypatch):
    """An engine of the reference model, and its tower."""
    engine, tower = load_seeing(card, golden, monkeypatch)
    yield engine, tower
    engine.close()


def test_logits_behind_a_picture(seeing, golden):
    """Within the band of 8-bit activations, and greedy tokens of the reference until a margin is below its noise."""
    band = oracle_json("manifest.json")["models"]["dense_mtp-Q8_0"]["agreement"]["long"]
    band, engine = band["llamacpp_quantised_f16kv__vs__hf_f32"], seeing[0]
    for case in golden:
        tail = engine.evaluate(case.ids, pictures=[case.picture])[-len(case.logits):]
        assert np.linalg.norm(tail - case.logits) <= band["rel_l2"] * np.linalg.norm(case.logits)
        found = tokens_of(engine, case.ids, [case.picture], len(case.greedy))
        first = next((i for i, pair in enumerate(zip(found, case.greedy)) if pair[0] != pair[1]), None)
        assert first is None or case.margin[first] <= band["max_abs"]


def test_a_picture_matters(seeing, golden):
    """Rows of another picture, and none, give other logits."""
    engine, case = seeing[0], golden[0]
    blind = engine.evaluate(case.ids)[-1]
    assert np.linalg.norm(engine.evaluate(case.ids, pictures=[case.picture])[-1] - blind) > 0.1 * np.linalg.norm(blind)


def conversation(golden):
    """Token ids with both pictures, text between them and behind, some 370 tokens; and the pictures."""
    first, second = golden
    return first.ids + list(range(300, 400)) + second.ids + list(range(500, 580)), [first.picture, second.picture]


def test_chunks_cards_drafts_and_neighbours_change_no_bit(card, golden, monkeypatch):
    ids, pictures = conversation(golden)
    engine, _ = load_seeing(card, golden, monkeypatch, draft=0)
    try:
        logits, want = engine.evaluate(ids, pictures=pictures), tokens_of(engine, ids, pictures)
    finally:
        engine.close()
    for options in {"chunk": 64}, {"chunk": 128, "draft": 3}, {"draft": "auto"}:
        engine, _ = load_seeing(card, golden, monkeypatch, **options)
        try:
            np.testing.assert_array_equal(engine.evaluate(ids, pictures=pictures), logits)
            running = [engine.submit(qengine.Request(ids[:n], max_tokens=9, pictures=pictures[:k], ignore_eos=True))
                       for n, k in ((120, 1), (60, 0))] if options.get("chunk") != 64 else []
            assert tokens_of(engine, ids, pictures) == want
            for each in running:
                each.wait()
        finally:
            engine.close()
    if card.kind == "emulated":
        cards = [EmulatedCard(number, memory_bytes=256 << 20) for number in range(2)]
        engine, _ = load_seeing(cards, golden, monkeypatch, split=(3, 5), chunk=128)
        try:
            np.testing.assert_array_equal(engine.evaluate(ids, pictures=pictures), logits)
            assert tokens_of(engine, ids, pictures) == want
        finally:
            engine.close()


def test_the_next_turn_neither_encodes_nor_reads_a_picture_again(seeing, golden):
    engine, tower = seeing
    ids, pictures = conversation(golden)
    answer = tokens_of(engine, ids, pictures)
    assert tower.encoded == pictures
    generation = engine.submit(qengine.Request(ids + answer + [55] * 70, max_tokens=4, pictures=tuple(pictures)))
    generation.wait()
    assert generation.n_cached >= len(ids) // 64 * 64 and tower.encoded == pictures


def test_another_picture_of_the_same_size_is_not_taken_for_it(seeing, golden):
    """Its keys differ, so nothing of the first prompt's pages is used."""
    engine, tower = seeing
    ids, pictures = conversation(golden)
    want = tokens_of(engine, ids, pictures)
    other = picture(pictures[0].rows, pictures[0].columns, 99)
    tower.rows[other.digest] = tower.rows[pictures[0].digest][::-1].copy()
    generation = engine.submit(qengine.Request(ids, max_tokens=32, pictures=(other, pictures[1]), ignore_eos=True))
    found = [delta.token_id for delta in generation]
    assert generation.n_cached == 0 and found != want
    assert tokens_of(engine, ids, pictures) == want


def test_pictures_of_waiting_requests_are_encoded_together(seeing, golden, monkeypatch):
    engine, tower = seeing
    batches, encode = [], tower.encode
    monkeypatch.setattr(tower, "encode", lambda pictures, outs: (batches.append(pictures), encode(pictures, outs))[1])
    with engine.scheduler.between_steps():
        running = [engine.submit(qengine.Request(case.ids, max_tokens=2, pictures=(case.picture,))) for case in golden]
    for each in running:
        each.wait()
    assert batches == [[case.picture for case in golden]]


def test_answers_go_on_while_pictures_are_encoded(seeing, golden):
    """In pieces, between which steps of the running answer are queued; and both are what they are alone."""
    engine, _ = seeing
    text, (ids, pictures) = list(range(900, 1000)), conversation(golden)
    alone = tokens_of(engine, text, [], 60), tokens_of(engine, ids, pictures)
    engine.clear_cache()
    running = engine.submit(qengine.Request(text, max_tokens=60, ignore_eos=True))
    next(iter(running))
    found = tokens_of(engine, ids, pictures)
    assert found == alone[1] and [alone[0][0], *(delta.token_id for delta in running)] == alone[0]


@pytest.fixture
def in_pieces(seeing, golden, monkeypatch):
    """(engine, its tower, the request of a picture, its answer, the numbers of the pieces that were queued).
    The picture has 300 pieces, which are queued one at a time."""
    engine, tower = seeing
    case, queued = golden[0], []
    want = tokens_of(engine, case.ids, [case.picture], 4)
    engine.clear_cache()
    tower.n_pieces, tower.on_piece = 300, queued.append
    monkeypatch.setattr(engine.scheduler.turns, "n_pieces", lambda pieces, has_answers: 1)
    request = qengine.Request(case.ids, max_tokens=4, pictures=(case.picture,), ignore_eos=True)
    return engine, tower, request, want, queued


def begun(tower, queued, seconds=0.0):
    """Two Events: some pieces are queued; a test has begun what it wants to begin meanwhile. seconds: that each further
    piece takes until then, many times what a test needs."""
    event, has_begun = threading.Event(), threading.Event()

    def on_piece(number):
        queued.append(number)
        if number >= 5:
            event.set()
            has_begun.wait(seconds)

    tower.on_piece = on_piece
    return event, has_begun


def test_passes_between_the_pieces_of_a_picture_are_short(in_pieces, monkeypatch):
    """Each piece may wait for such a pass."""
    engine, tower, request, _, queued = in_pieces
    scheduler, asked = engine.scheduler, []
    most_rows = scheduler.turns.most_rows

    def noted(chunk, pieces, is_shared):
        asked.append((scheduler.encoding is not None, is_shared))
        return most_rows(chunk, pieces, is_shared)

    monkeypatch.setattr(scheduler.turns, "most_rows", noted)
    event, has_begun = begun(tower, queued, seconds=0.1)
    slow = engine.submit(request)
    event.wait()
    engine.submit(qengine.Request(list(range(900, 960)), max_tokens=1)).wait()
    has_begun.set()
    slow.wait()
    assert (True, True) in asked and (True, False) not in asked


def test_a_question_is_answered_while_a_picture_is_encoded(in_pieces):
    """Its prompt has passes and its answer has steps between two pieces, and no bit changes."""
    engine, tower, request, want, queued = in_pieces
    text = list(range(900, 900 + len(request.prompt_ids) // 2))     # the shorter prompt comes first
    alone = tokens_of(engine, text, [], 3)
    engine.clear_cache()
    event, has_begun = begun(tower, queued, seconds=0.1)
    slow = engine.submit(request)
    assert event.wait(PATIENCE)
    with engine.scheduler.between_steps(leaves_pictures=True):      # as the meter of pipes does
        assert len(queued) < 200
    assert tokens_of(engine, text, [], 3) == alone
    assert len(queued) < 300 and len(tower.encoded) == 2            # 1: of the fixture
    has_begun.set()
    assert [delta.token_id for delta in slow] == want and queued == list(range(1, 301)) and len(tower.encoded) == 2


def test_parts_of_encodings_are_as_long_as_encodings_tell():
    """Planned times of encodings are wrong by another factor than those of passes over text: on an emulated card by
    many times."""
    turns, pieces = Turns(1), [0.001] * 100
    turns.factors_of[False].extend([5.0] * 5)
    assert turns.n_pieces(pieces, False) == 33                  # of three equal parts
    turns.is_encoding = True
    assert turns.n_pieces(pieces, False) == 1                   # nothing is measured
    turns.factors_of[True].append(100.0)
    assert turns.n_pieces(pieces, False) == 2                   # of 0.1 s each
    assert turns.most_rows(512, lambda rows: [rows / 1e4], False) == 384 and not turns.is_encoding


def test_another_picture_waits_until_the_first_is_encoded(in_pieces, golden):
    engine, tower, request, want, queued = in_pieces
    other, (event, _) = golden[1], begun(tower, queued)
    slow = engine.submit(request)
    assert event.wait(PATIENCE)
    tokens_of(engine, other.ids, [other.picture], 4)
    assert queued == 2 * list(range(1, 301)) and [delta.token_id for delta in slow] == want
    assert [each.digest for each in tower.encoded[1:]] == [request.pictures[0].digest, other.picture.digest]


def test_steps_of_an_answer_run_between_the_pieces_of_a_picture(in_pieces, monkeypatch):
    engine, tower, request, _, queued = in_pieces
    step, order, has_begun = engine.pipeline.step, [], threading.Event()

    def counted(*given):
        order.append("step")
        assert len(order) < 100 or has_begun.wait(PATIENCE)     # or the answer may be over before the picture begins
        return step(*given)

    monkeypatch.setattr(engine.pipeline, "step", counted)
    answer = engine.submit(qengine.Request([900, 901], max_tokens=400, ignore_eos=True))
    next(iter(answer))
    tower.n_pieces, tower.on_piece = 20, order.append
    slow = engine.submit(request)
    has_begun.set()
    slow.wait()
    answer.cancel()
    answer.wait()
    first, last = order.index(1), order.index(20)
    assert all("step" in order[order.index(n):order.index(n + 1)] for n in range(1, 20)), order[first:last]


def test_pieces_of_a_picture_whose_request_is_cancelled_are_not_queued(in_pieces):
    """At most the next ones, which the scheduler may have posted. Then others have the card, or the engine closes."""
    engine, tower, request, want, queued = in_pieces
    for close in False, True:
        queued.clear()
        event, has_begun = begun(tower, queued, seconds=0.1)
        doomed = engine.submit(request)
        assert event.wait(PATIENCE)
        doomed.cancel()
        n = len(queued)
        has_begun.set()
        if close:
            engine.close(grace=20)
        else:
            tokens_of(engine, [900, 901], [], 2)
        assert n <= len(queued) <= n + 3 < 300
    assert doomed.wait(PATIENCE)


def test_a_request_that_is_cancelled_while_its_picture_is_encoded(seeing, golden):
    engine, _ = seeing
    ids, pictures = conversation(golden)
    want = tokens_of(engine, ids, pictures)
    engine.clear_cache()
    for _ in range(3):
        engine.submit(qengine.Request(ids, pictures=tuple(pictures))).cancel()
    assert tokens_of(engine, ids, pictures) == want


def test_what_is_refused(seeing, golden):
    engine, _ = seeing
    case = golden[0]
    for ids, pictures, said in ((case.ids, [case.picture] * 65, "64 pictures"),
                                ([1, 2], [case.picture], "no 70 tokens"),
                                (case.ids[:-20], [case.picture], "text must follow")):
        with pytest.raises(RequestError, match=said):
            engine.submit(qengine.Request(ids, pictures=tuple(pictures)))


def bad_picture(golden, tower, value=np.nan):
    """A picture like that of the first case, whose rows hold such a value."""
    bad, rows = picture(golden[0].picture.rows, golden[0].picture.columns, 77), golden[0].rows.copy()
    rows[-1, -1] = value
    tower.rows[bad.digest] = rows
    return bad


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_picture_with_a_nan_ends_its_own_request_alone(value, seeing, golden):
    engine, tower = seeing
    case, bad = golden[0], bad_picture(golden, tower, value)
    want = tokens_of(engine, case.ids, [case.picture])
    for _ in range(2):
        running = engine.submit(qengine.Request(case.ids, max_tokens=32, pictures=(case.picture,), ignore_eos=True))
        with pytest.raises(RequestError, match=f"^{NAN_ROWS}$"):
            tokens_of(engine, case.ids, [bad])
        assert [delta.token_id for delta in running] == want


def test_a_nan_behind_a_picture_whose_rows_are_gone(seeing, golden):
    """Its pages are kept, so it is not encoded again: nobody can tell, and the request alone ends."""
    engine, tower = seeing
    case, bad = golden[0], bad_picture(golden, tower)
    ids = case.ids + [55] * 130
    with pytest.raises(RequestError, match=f"^{NAN_ROWS}$"):
        tokens_of(engine, ids, [bad])
    n_encoded = len(tower.encoded)
    engine.pipeline.gallery.clear()
    with pytest.raises(RequestError, match=f"^{NAN_UNKNOWN}$"):
        tokens_of(engine, ids, [bad])
    assert len(tower.encoded) == n_encoded
    assert len(tokens_of(engine, case.ids, [case.picture], 4)) == 4


def test_a_nan_that_no_picture_has_made_is_told_as_without_pictures(seeing, golden):
    """The rows of the request's picture are finite. The layers are wrong, or a card, and that concerns all."""
    engine, _ = seeing
    engine.cards[0].poison(engine.pipeline.last.model.head_norm)
    with pytest.raises(EngineStopped, match="the engine has stopped: the logits hold a NaN"):
        tokens_of(engine, golden[0].ids, [golden[0].picture])


def test_rows_that_are_not_written_say_nothing(seeing, golden):
    """Another prompt has just got rows for them: what lies there now is of other pictures."""
    engine, tower = seeing
    bad, pipeline = bad_picture(golden, tower), engine.pipeline
    ids = prompt_fields([1, engine.eyes.pad, 2], [bad], engine.eyes)["prompt_ids"]
    with engine.scheduler.between_steps():
        pictures = PromptPictures(ids, [bad], engine.eyes.pad)
        placed = pictures.place(0, len(ids), pipeline.gallery)
        assert str(pipeline.blame(pictures, placed)) == NAN_UNKNOWN
        pipeline.encode(placed).result()
        assert str(pipeline.blame(pictures, ())) == NAN_ROWS
        fine = PromptPictures(golden[0].ids, [golden[0].picture], engine.eyes.pad)
        pipeline.encode(fine.place(0, len(golden[0].ids), pipeline.gallery)).result()
        assert pipeline.blame(fine, ()) is None


@pytest.mark.parametrize("forget", [lambda engine: engine.use(), lambda engine: engine.clear_cache()],
                         ids=["use", "clear_cache"])
def test_rows_are_forgotten_with_what_was_computed_from_them(forget, seeing, golden):
    engine, tower = seeing
    case = golden[0]
    want = tokens_of(engine, case.ids, [case.picture])
    tower.encoded.clear()
    forget(engine)
    assert tokens_of(engine, case.ids, [case.picture]) == want and tower.encoded == [case.picture]


def test_a_model_without_eyes(card):
    engine = load_tiny(card)
    try:
        with pytest.raises(RequestError, match="no eyes"):
            engine.submit(qengine.Request([1, 2], pictures=(picture(1, 1),)))
    finally:
        engine.close()


def test_a_picture_of_which_a_part_was_encoded_for_a_cancelled_request(seeing, golden, monkeypatch):
    """Its rows were never written, so the next request with it has it encoded."""
    engine, tower = seeing
    ids, pictures = conversation(golden)
    want = tokens_of(engine, ids, pictures)
    engine.clear_cache()
    engine.pipeline.gallery.kept.clear()
    tower.encoded.clear()
    scheduler, running = engine.scheduler, engine.submit(qengine.Request([900, 901], max_tokens=400, ignore_eos=True))
    next(iter(running))
    monkeypatch.setattr(scheduler.turns, "n_pieces", lambda pieces, has_answers: 1)
    doomed, queue_part = engine.submit(qengine.Request(ids, pictures=tuple(pictures))), scheduler._queue_part

    def cancelled(run):
        queue_part(run)
        doomed.cancel()

    monkeypatch.setattr(scheduler, "_queue_part", cancelled)
    doomed.wait()
    running.cancel()
    running.wait()
    monkeypatch.undo()
    rows = engine.pipeline.stages[0].sight.rows
    engine.cards[0].poison(rows)
    assert tokens_of(engine, ids, pictures) == want


def test_prompts_whose_pictures_push_each_other_out_come_to_an_end(seeing, golden, monkeypatch):
    """Each encoding is followed by the pass that it is for."""
    engine, tower = seeing
    gallery, (ids, pictures) = engine.pipeline.gallery, conversation(golden)
    monkeypatch.setattr(gallery, "n_rows", sum(each.n_tokens for each in pictures))     # of one pass
    others = [picture(each.rows, each.columns, 50 + i) for i, each in enumerate(pictures)]
    for mine, other in zip(pictures, others):
        tower.rows[other.digest] = tower.rows[mine.digest][::-1].copy()
    with engine.scheduler.between_steps():
        running = [engine.submit(qengine.Request(given, max_tokens=2, pictures=tuple(shown), ignore_eos=True))
                   for given, shown in ((ids + [5] * 20, pictures), (ids, others))]
    try:
        for each in running:
            assert each.wait(PATIENCE)
        assert len(tower.encoded) <= 8
    finally:
        for each in running:
            each.cancel()
