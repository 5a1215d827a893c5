"""Engines whose experts do not all lie on the card: the same answers, plans that say so, and faults that are heard."""

import errno
import gc
import itertools
import logging
import math
import os
import re
import threading
from pathlib import Path

import numpy as np
import pytest

import qengine
from cli.main import main
from engine import expert_file, expert_store, plan
from engine.plan import Demand, Planner
from engine.request import EngineStopped, ModelError, RequestError
from kernels.card import CardError, OutOfMemory, is_pinned, show_bytes
from kernels.emulated.card import EmulatedCard
from kernels.host_experts import DEADLINE
from tests.clients import CHAT, HI, app_of
from tests.models import write_as_float32
from tests.oracle import oracle_path
from tests.until import PATIENCE, wait_until

pytestmark = pytest.mark.usefixtures("compiled_when_launched")

TINY = "synthetic:tiny-moe"
PROMPT = [5, 300, 77, 100, 9, 200, 31] * 30
MB = 1 << 20


def load(card, model=TINY, **options):
    return qengine.load(model, card=card, progress=False, **{"ctx": 512, "slots": 2} | options)


def answers(engine):
    """Tokens of two answers side by side, and logits of a text."""
    running = [engine.submit(qengine.Request(prompt, max_tokens=24, ignore_eos=True))
               for prompt in (PROMPT, PROMPT[3:20])]
    return [[delta.token_id for delta in each] for each in running], engine.evaluate(PROMPT[:100])


def same(found, expected):
    assert found[0] == expected[0]
    np.testing.assert_array_equal(found[1], expected[1])


@pytest.fixture
def small_machine(monkeypatch):
    """A function: from now on, this machine has no memory for all experts, and so much for a window."""
    def small(of_window):
        monkeypatch.setattr(plan, "machine_bytes", lambda: 4 * MB)
        monkeypatch.setattr(plan, "free_memory", lambda: math.ceil(of_window / plan.WINDOW_SHARE))
    return small


class RefusedHost(expert_store.HostCard):
    """Of all experts together, none of which may lie in page-locked memory."""

    def __init__(self, card, refusal):
        super().__init__(card, "host memory cannot be page-locked")


def files_without_names(folder):
    """Descriptors of this process that are of such files."""
    links = Path("/proc/self/fd").iterdir()
    return [link for link in links if re.fullmatch(f"{folder}/.* \\(deleted\\)", os.path.realpath(link))]


def closing(engine):
    try:
        return answers(engine), engine.stats()
    finally:
        engine.close()


@pytest.fixture(scope="module")
def resident(card):
    """What an engine with all experts on the card says."""
    found, counts = closing(load(card))
    assert "expert_hits" not in counts
    return found


# ---- the same answers --------------------------------------------------------------------------------------

@pytest.mark.parametrize("memory", [0, MB, 3 * MB])
def test_the_same_answers_wherever_experts_lie(card, resident, memory):
    found, counts = closing(load(card, expert_memory=memory))
    same(found, resident)
    assert counts["expert_misses"] and (counts["expert_hits"] > 0) == (memory > 0)
    assert counts["expert_bytes_staged"] and counts["expert_bytes_read"]


@pytest.mark.parametrize("model, options", [(TINY, {"expert_memory": 0}), (TINY, {"expert_memory": 2 * MB}),
                                            ("synthetic:tiny-moe+mtp", {"expert_memory": MB, "draft": 3})])
def test_the_same_answers_if_the_host_computes(resident, monkeypatch, model, options):
    """Over a slow link, experts are computed where they lie."""
    monkeypatch.setattr(expert_store, "measure_host", lambda *_: 1e15)
    engine = load(EmulatedCard(link_gbs=0.5), model, **options)
    assert "computed by the host's processor: 0.42 ms to fetch" in str(engine.pipeline.stages[0].store)
    found, counts = closing(engine)
    same(found, resident)
    assert 0 < counts["expert_computed"] and counts["expert_host_seconds"] > 0 and counts["expert_bytes_read"] == 0


def test_the_faster_way_is_taken(resident, monkeypatch):
    monkeypatch.setattr(expert_store, "measure_host", lambda *_: 1e6)
    engine = load(EmulatedCard(link_gbs=0.5), expert_memory=MB)
    assert "fetched over the link: 0.42 ms to fetch, 2.1e+02 ms to compute" in str(engine.pipeline.stages[0].store)
    same(closing(engine)[0], resident)


def test_with_memory_for_all_experts_none_is_elsewhere(card, resident):
    found, counts = closing(load(card, expert_memory=100 * MB))
    same(found, resident)
    assert "expert_hits" not in counts


@pytest.mark.parametrize("options", [{"late": True}, {"link_gbs": 0.5}], ids=str)
def test_on_other_emulated_cards(resident, options):
    same(closing(load(EmulatedCard(**options), expert_memory=2 * MB))[0], resident)


def test_on_several_cards(resident):
    for split in (2, 2), (1, 2, 1):
        cards = [EmulatedCard(number) for number in range(len(split))]
        found, counts = closing(load(cards, split=split, expert_memory=MB))
        same(found, resident)
        assert counts["expert_misses"] > 0


def test_drafts_and_a_model_of_two_implementations(card):
    """The oracle's model, with its draft block, whose experts are in the store, too."""
    path = str(oracle_path("gguf/moe_mtp-Q8_0.gguf"))
    expected, _ = closing(load(card, path, draft=3))
    found, counts = closing(load(card, path, draft=3, expert_memory=2 * MB))
    same(found, expected)
    assert counts["expert_misses"] > 0


def test_experts_as_floats(card, tmp_path):
    write_as_float32(oracle_path("gguf/moe_mtp-Q8_0.gguf"), tmp_path / "float.gguf")
    expected, _ = closing(load(card, tmp_path / "float.gguf"))
    found, counts = closing(load(card, tmp_path / "float.gguf", expert_memory=4 * MB))
    same(found, expected)
    assert counts["expert_misses"] > 0


def test_counts_are_of_all_steps(card):
    """Of each of the 63 steps of an answer, four layers have used two experts. The first token is of the prompt."""
    engine = load(card, expert_memory=3 * MB)
    for _ in range(2):
        list(engine.submit(qengine.Request(PROMPT, max_tokens=64, ignore_eos=True)))
    counts = engine.stats()
    engine.close()
    assert counts["expert_promoted"] > 0
    used = counts["expert_hits"] + counts["expert_misses"]
    assert used % 8 == 0 and 8 * 100 < used <= 8 * 126      # the last steps may not have been counted


def test_metrics_and_the_log(card, caplog):
    caplog.set_level(logging.INFO, "qengine.requests")
    engine = load(card, expert_memory=3 * MB)
    client = app_of(engine).test_client()
    client.post(CHAT, json={"messages": [HI], "max_tokens": 32, "temperature": 0}).close()
    said, counts = client.get("/metrics").text, engine.stats()
    assert client.get("/health").json["counts_experts"] is True
    assert client.get("/experts").json == {"hits": counts["expert_hits"],
                                           "used": counts["expert_hits"] + counts["expert_misses"]}
    engine.close()
    found = {name: float(value) for name, value in re.findall(r"^qengine:(expert\w+)_total{.*} (\S+)$", said, re.M)}
    assert {name.removeprefix("expert_"): counts[name] for name in counts if name.startswith("expert_")} == {
        name.removeprefix("experts_").removeprefix("expert_"): value for name, value in found.items()}
    share = counts["expert_hits"] / (counts["expert_hits"] + counts["expert_misses"])
    assert re.search(r" expert_hits=(\S+) ", caplog.text)[1] == f"{share:.2f}"


# ---- plans -------------------------------------------------------------------------------------------------

def planner(card, model=TINY, **demand):
    opened = qengine.open_model(model)
    return Planner(qengine.PlannedModel(opened.config, opened.weights), [card], Demand(512, **demand))


@pytest.mark.parametrize("memory", [0, 2 * MB])
def test_a_plan_takes_what_the_engine_takes(memory):
    card = EmulatedCard()
    planned, free = planner(card, expert_memory=memory), card.free_bytes
    stage, = planned.plan.stages
    engine = load(card, slots=1, expert_memory=memory, draft=0)
    assert free - card.free_bytes == stage.total
    host, = (each.store.host_bytes for each in engine.pipeline.stages)
    assert host == planned.plan.on_paper[0].store.host_bytes == planned.costs.expert_bytes
    engine.close()


def test_what_does_not_fit_lies_in_host_memory(resident):
    whole = planner(EmulatedCard()).plan.stages[0].total
    small = EmulatedCard(memory_bytes=whole + 30 * MB)
    engine = load(small)                                 # slots, checkpoints and the rest take what is left
    assert engine.pipeline.stages[0].store is None
    engine.close()
    least = planner(EmulatedCard(), expert_memory=0, checkpoint_memory=0).plan.stages[0].total
    small = EmulatedCard(memory_bytes=least + MB)
    made = planner(small, checkpoint_memory=0)
    assert made.plan.fits and 0 <= made.demand.expert_memory < made.costs.expert_bytes
    report = made.report()
    assert f"all in {show_bytes(made.costs.expert_bytes)} of page-locked host memory" in report
    times = re.search(r"expected time of a token: (\S+) ms with all experts on the card, (\S+), (\S+), (\S+) ms where "
                      r"80%, 90%, 95% ", report)
    whole, *others = map(float, times.groups())
    assert whole <= others[2] <= others[1] <= others[0]


def test_when_all_experts_have_left_the_card_more_is_spared():
    """Of what is still on the card, a checkpoint is spared (not the embeddings, since this model's head multiplies with
    them)."""
    sizes = {"checkpoint_memory": 0, "chunk": 64, "kv_tokens": 512}
    least = planner(EmulatedCard(), expert_memory=0, **sizes).plan
    state, total = least.on_paper[0].state_bytes, least.stages[0].total
    for missing, n_checkpoints in (0, 2), (256, 1), (state, 1):
        made = planner(EmulatedCard(memory_bytes=total - missing), **sizes)
        assert made.plan.fits and made.plan.sizes.n_checkpoints == n_checkpoints
        assert made.plan.on_paper[0].store.n_slots == least.on_paper[0].store.n_slots       # experts on the card
    lacking = planner(EmulatedCard(memory_bytes=total - state - 256), **sizes).plan.stages[0]
    assert lacking.total - lacking.free == 256              # and not the experts, too


def test_a_slow_link_shows_in_the_plan():
    card = EmulatedCard(link_gbs=0.01)
    made = planner(card, expert_memory=MB)
    whole, worst = (float(each) for each in re.search(r"of a token: (\S+) ms .* card, (\S+),", made.report()).groups())
    used = made.plan.on_paper[0].costs.work.expert_bytes_read(1)
    assert worst - whole == pytest.approx(1e3 * 0.2 * used / 0.01e9, abs=0.11)


def test_steps_are_patient_with_the_largest_request(monkeypatch, small_machine):
    """Of all pairs of a step, computed more slowly than measured, with experts that a slow disk brings first."""
    size = 10_000_000
    assert expert_store.longest_wait(8, 256, size, 10e9, False) == DEADLINE
    assert expert_store.longest_wait(512, 256, size, 1e9, False) == 4 * 5.12
    assert expert_store.longest_wait(512, 256, size, 1e9, True) == 4 * 5.12 + 25.6
    small_machine(2 * MB)
    monkeypatch.setattr(expert_store, "SLOWEST_DISK", 1e3)
    engine = load(EmulatedCard(), expert_memory=2 * MB)
    store = engine.pipeline.stages[0].store
    assert store.helper.deadline > 4 * store.sizes.max() / 1e3
    engine.close()


@pytest.mark.parametrize("memory", [0, 2 * MB])
@pytest.mark.parametrize("of_window", [2 * MB, 3 * MB, 8 * MB])
def test_host_memory_that_is_too_small(resident, small_machine, memory, of_window):
    """The experts lie in one file, those needed last in host memory. The plan says so; nothing of the file stays."""
    small_machine(of_window)
    card, words = EmulatedCard(), f"{show_bytes(of_window)} of page-locked host memory"
    assert f"all in a file of 6.4 MB in {card.cache_dir}, those needed last in {words}" in planner(
        card, expert_memory=memory).report()
    before = sorted(card.cache_dir.iterdir())
    engine = load(card, expert_memory=memory)
    store = engine.pipeline.stages[0].store
    n_slots = min(of_window // store.slot_bytes, 4 * 8)
    assert ("computed by the host's processor (more than this machine's memory holds: a file in "
            f"{card.cache_dir}, {n_slots} of 32 in a window of {show_bytes(n_slots * store.slot_bytes)}") in str(store)
    assert len(files_without_names(card.cache_dir)) == 1 and sorted(card.cache_dir.iterdir()) == before
    found, counts = closing(engine)
    same(found, resident)
    assert counts["expert_computed"] > 0 and (counts["expert_promoted"] > 0) == (memory > 0)
    once = 32 * store.slot_bytes
    assert counts["expert_bytes_from_file"] > once if n_slots < 20 else 0 < counts["expert_bytes_from_file"] <= once
    del engine, store
    wait_until(lambda: gc.collect() >= 0 and not files_without_names(card.cache_dir))


@pytest.mark.parametrize("options", [{"late": True}, {"link_gbs": 0.5}], ids=str)
def test_a_file_and_other_emulated_cards(resident, small_machine, options):
    small_machine(2 * MB)
    same(closing(load(EmulatedCard(**options), expert_memory=2 * MB))[0], resident)


def test_a_file_for_each_of_several_cards(resident, small_machine):
    """They share host memory by what each of them lacks: three of eight experts of a layer, six of two layers, three.
    But each gets at least what a step needs, and that is all eight of a layer here."""
    small_machine(8 * MB)
    engine = load([EmulatedCard(number) for number in range(3)], split=(1, 2, 1), expert_memory=MB)
    stores = [stage.store for stage in engine.pipeline.stages]
    assert [store.n_slots for store in stores] == [5, 2, 5]
    for store, need in zip(stores, (8, 12, 8), strict=True):
        assert store.window_bytes == pytest.approx(8 * MB * need / 28, abs=2)
    found, counts = closing(engine)
    same(found, resident)
    assert counts["expert_bytes_from_file"] > 0


def test_windows_are_as_large_as_planned(small_machine, monkeypatch):
    """Free memory is measured once: while cards are filled, it becomes less."""
    small_machine(8 * MB)
    measured = []
    monkeypatch.setattr(plan, "free_memory", lambda: measured.append(12 * MB // (len(measured) + 1)) or measured[-1])
    cards = [EmulatedCard(number) for number in range(2)]
    engine = load(cards, split=(1, 3), expert_memory=MB)
    assert sum(stage.store.window_bytes for stage in engine.pipeline.stages) == pytest.approx(8 * MB, abs=2)
    assert len(measured) == 1
    engine.close()


def test_a_card_that_lacks_no_expert_needs_no_window(small_machine):
    small_machine(8 * MB)
    engine = load([EmulatedCard(number) for number in range(2)], split=(1, 3), expert_memory=2 * MB)
    first, second = (stage.store for stage in engine.pipeline.stages)
    assert first is None and second.window_bytes == 8 * MB
    engine.close()


def test_floats_do_not_lie_in_a_file(small_machine, tmp_path):
    """The plan refuses them, before anything is written."""
    write_as_float32(oracle_path("gguf/moe_mtp-Q8_0.gguf"), tmp_path / "float.gguf")
    small_machine(8 * MB)
    card = EmulatedCard()
    before = set(files_without_names(card.cache_dir))   # of engines that nobody has collected yet
    with pytest.raises(OutOfMemory, match="this machine's processor would compute with them; it cannot with "
                                          "F32, only with quantised experts: take a weight format like Q8_0"):
        load(card, tmp_path / "float.gguf", expert_memory=MB)
    assert set(files_without_names(card.cache_dir)) <= before


def test_a_file_and_drafts(card, small_machine):
    path = str(oracle_path("gguf/moe_mtp-Q8_0.gguf"))
    expected, _ = closing(load(card, path, draft=3))
    small_machine(4 * MB)
    found, counts = closing(load(card, path, draft=3, expert_memory=2 * MB))
    same(found, expected)
    assert counts["expert_bytes_from_file"] > 0


def test_a_plan_says_what_a_disk_costs(small_machine, monkeypatch):
    small_machine(2 * MB)
    monkeypatch.setattr(plan, "DISK", 1e7)
    made = planner(EmulatedCard(), expert_memory=0)
    found = re.search(r"of a token: (\S+) ms .* card, (\S+), (\S+), (\S+) ms where 80%, 90%, 95% of its experts are "
                      r"there or in host memory and the others come from a disk of 0.01 GB/s", made.report())
    whole, *others = map(float, found.groups())
    used = made.plan.on_paper[0].costs.work.expert_bytes_read(1)
    for share, seconds in zip((0.2, 0.1, 0.05), others):
        assert seconds - whole == pytest.approx(1e3 * share * used / 1e7, abs=0.11)


def test_a_window_takes_its_share_of_what_is_free(monkeypatch):
    """And leaves some of it to checkpoints, which are page-locked, too."""
    assert 0 < plan.free_memory() <= plan.machine_bytes()
    assert plan.window_bytes(0.25, 12 * MB) == 2 * MB
    monkeypatch.setattr(plan, "machine_bytes", lambda: 6 * MB)
    monkeypatch.setattr(plan, "free_memory", lambda: 6 * MB)
    made = planner(EmulatedCard(), slots=4, kv_tokens=1 << 16, expert_memory=MB).plan
    (window, state_bytes), = ((stage.store.window_bytes, stage.state_bytes) for stage in made.on_paper)
    assert window == 4 * MB and made.sizes.n_host_checkpoints == (6 * MB - window) // 8 // state_bytes


def test_a_window_that_is_too_small(small_machine):
    small_machine(MB)
    with pytest.raises(OutOfMemory, match=r"tiny-moe: experts lie in a file, and a step of 16 rows needs 8 of a layer "
                                          r"in 1.6 MB of host memory, of which 1.0 MB are there for it: take fewer"):
        load(EmulatedCard(), expert_memory=0)


def test_a_window_that_cannot_be_page_locked(resident, small_machine, monkeypatch):
    small_machine(2 * MB)
    card = EmulatedCard()
    monkeypatch.setattr(card, "pinned", lambda shape, dtype: (
        refuse(shape, dtype) if np.prod(shape) > 100_000 else EmulatedCard.pinned(card, shape, dtype)))
    engine = load(card, expert_memory=2 * MB)
    assert "of host memory, which is not page-locked: cuMemHostAlloc: out of memory" in str(
        engine.pipeline.stages[0].store)
    found, counts = closing(engine)
    same(found, resident)
    assert counts["expert_promoted"] > 0


@pytest.mark.parametrize("experts_in", ["page-locked memory", "other memory", "file"])
def test_promotions_wait_for_nothing(resident, small_machine, monkeypatch, experts_in):
    """Their copies begin in page-locked memory: a real card copies from other memory only when its queue is done."""
    card, begins = EmulatedCard(), []
    copy_in = card.copy_in
    if experts_in == "file":
        small_machine(3 * MB)
    if experts_in == "other memory":        # a little can be page-locked all the same
        monkeypatch.setattr(expert_store, "HostCard", RefusedHost)
    engine = load(card, expert_memory=2 * MB)
    store = engine.pipeline.stages[0].store
    assert bool(store.host.refusal) == (experts_in != "page-locked memory")

    def watched(dst, host, stream=None):
        if stream in (store.promotions, store.stagings) and host.nbytes > 4096:
            begins.append((stream.name, is_pinned(host)))
        copy_in(dst, host, stream)

    card.copy_in = watched
    same(closing(engine)[0], resident)
    assert {name for name, _ in begins} == {"experts into slots", "experts of prompts"}
    assert all(is_locked for _, is_locked in begins)


def test_checkpoints_leave_host_memory_to_experts(monkeypatch):
    """Both are page-locked: together they must not ask for more than the machine has."""
    monkeypatch.setattr(plan, "machine_bytes", lambda: 8 * MB)
    wishes = {"slots": 4, "kv_tokens": 1 << 16}
    whole, moved = (planner(EmulatedCard(), expert_memory=memory, **wishes).plan for memory in (None, MB))
    experts, = (stage.store.host_bytes for stage in moved.on_paper)
    state_bytes, = (stage.state_bytes for stage in moved.on_paper)
    assert whole.sizes.n_host_checkpoints == MB // state_bytes
    assert moved.sizes.n_host_checkpoints == (8 * MB - experts) // 8 // state_bytes < whole.sizes.n_host_checkpoints


def test_a_disk_that_is_too_small(monkeypatch):
    monkeypatch.setattr(plan, "machine_bytes", lambda: 4 * MB)
    monkeypatch.setattr(plan, "free_of_disk", lambda folder: 3 * MB)
    with pytest.raises(OutOfMemory, match="experts take 6.4 MB; .* 4.0 MB of memory in all, and 3.0 MB are free"):
        load(EmulatedCard(), expert_memory=MB)


def test_a_disk_that_others_fill(monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(plan, "machine_bytes", lambda: 4 * MB)
    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with pytest.raises(CardError, match="experts: no file of .* in .*: No space left on device"):
        load(EmulatedCard(), expert_memory=MB)


def test_two_cards_that_hold_all_experts_are_better_than_one_that_does_not(monkeypatch):
    fixed = {"kv_tokens": 512, "checkpoint_memory": 0}
    whole = planner(EmulatedCard(), **fixed).plan.stages[0].total
    cards = [EmulatedCard(number, memory_bytes=whole - MB) for number in range(2)]
    monkeypatch.setattr(qengine, "open_cards", lambda name: cards)
    opened = qengine.open_model(TINY)
    assert planner(cards[0], **fixed).demand.expert_memory is not None
    found = qengine.make_planner(opened, None, Demand(512, **fixed))
    assert len(found.cards) == 2 and found.plan.fits and found.demand.expert_memory is None


def test_a_dense_model_has_no_experts(card):
    with pytest.raises(RequestError, match="synthetic:tiny has no experts"):
        load(card, "synthetic:tiny", expert_memory=MB)
    with pytest.raises(RequestError, match="expert_memory must be 0 or more"):
        load(card, expert_memory=-1)


def test_the_command_line_takes_gigabytes(capsys):
    assert main(["-m", TINY, "--plan", "--card", "emulated", "--ctx", "512", "--expert-memory", "0.002"]) == 0
    assert "2 experts of each layer lie on the card" in capsys.readouterr().out


# ---- faults ------------------------------------------------------------------------------------------------

def has_free(card, n_bytes):
    """The error of a load that failed refers to frames, and these to arrays. Copies that were queued before hold some
    until a thread has done them."""
    gc.collect()
    return card.free_bytes == n_bytes


@pytest.mark.parametrize("memory", [None, MB])
def test_a_file_that_is_cut_before_it_is_loaded(card, memory, tmp_path):
    """One sentence; no memory stays taken. Afterwards nothing reads the file any more."""
    path = tmp_path / "model.gguf"
    path.write_bytes(oracle_path("gguf/moe_mtp-Q8_0.gguf").read_bytes())
    opened = qengine.open_model(path)
    os.truncate(path, path.stat().st_size // 2)
    own = EmulatedCard()
    free = own.free_bytes
    with pytest.raises(ModelError, match="model.gguf: tensor '.*' ends at byte .* has become shorter since it was "):
        load(own, opened, expert_memory=memory)
    wait_until(lambda: has_free(own, free))


@pytest.mark.parametrize("memory", [None, MB])
@pytest.mark.parametrize("what, words", [("cut", "tensor '.*' ends at byte .* has become shorter since it was opened"),
                                         ("fail", "tensor '.*' cannot be read: Input/output error")])
def test_a_file_that_is_lost_while_it_is_loaded(card, memory, what, words, tmp_path, monkeypatch):
    """In the middle of a tensor."""
    path, preadv, reads = tmp_path / "model.gguf", os.preadv, itertools.count(1)
    path.write_bytes(oracle_path("gguf/moe_mtp-Q8_0.gguf").read_bytes())

    def read(file, buffers, offset):
        if next(reads) == 30:
            if what == "fail":
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            os.truncate(path, offset + len(buffers[0]) // 2)
        return preadv(file, buffers, offset)

    monkeypatch.setattr(os, "preadv", read)
    own = EmulatedCard()
    free = own.free_bytes
    with pytest.raises(ModelError, match=f"model.gguf: {words}"):
        load(own, path, expert_memory=memory)
    wait_until(lambda: has_free(own, free))


def test_a_file_that_is_cut_while_the_engine_runs(card, tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(oracle_path("gguf/moe_mtp-Q8_0.gguf").read_bytes())
    engine = load(card, path, expert_memory=MB)
    os.truncate(path, 0)
    answers(engine)
    engine.close()


def refuse(shape, dtype):
    raise CardError("cuMemHostAlloc: out of memory")


def test_host_memory_that_cannot_be_page_locked(resident, monkeypatch):
    """The host's processor computes what the card cannot read, and the start says why."""
    card = EmulatedCard()
    monkeypatch.setattr(card, "pinned", lambda shape, dtype: (
        refuse(shape, dtype) if np.prod(shape) > 100_000 else EmulatedCard.pinned(card, shape, dtype)))
    engine = load(card, expert_memory=2 * MB)
    assert re.search(r"2 of 8 experts of each layer on the card; .* computed by the host's processor \(.* cannot be "
                     r"page-locked for experts .*--expert-memory", str(engine.pipeline.stages[0].store))
    found, counts = closing(engine)
    same(found, resident)
    assert counts["expert_computed"] > 0 and counts["expert_bytes_read"] == 0


def test_floats_that_cannot_be_page_locked(tmp_path, monkeypatch):
    """The host's processor computes with quantised experts only. No memory stays taken."""
    write_as_float32(oracle_path("gguf/moe_mtp-Q8_0.gguf"), tmp_path / "float.gguf")
    monkeypatch.setattr(expert_store, "HostCard", RefusedHost)
    card = EmulatedCard()
    free = card.free_bytes
    with pytest.raises(CardError, match="host memory cannot be page-locked"):
        load(card, tmp_path / "float.gguf", expert_memory=MB)
    wait_until(lambda: has_free(card, free))


def test_a_processor_that_does_not_answer(monkeypatch):
    monkeypatch.setattr(expert_store, "measure_host", lambda *_: 1e15)
    engine = load(EmulatedCard(link_gbs=0.5), slots=1, expert_memory=MB)
    running = engine.submit(qengine.Request(PROMPT[:20], max_tokens=400, ignore_eos=True))
    with pytest.raises((CardError, EngineStopped), match="the host's processor did not compute the experts of layer"):
        next(iter(running))
        engine.pipeline.stages[0].store.helper.close()
        list(running)
    engine.close()


def test_a_copy_of_an_expert_that_fails():
    """The request hears one sentence, the next one is refused with it, and nothing hangs."""
    card = EmulatedCard()
    engine = load(card, slots=1, expert_memory=2 * MB)

    def fail(*_):
        raise CardError("the link is gone")

    with pytest.raises((CardError, EngineStopped), match="the link is gone"):
        running = engine.submit(qengine.Request(PROMPT[:20], max_tokens=400, ignore_eos=True))
        next(iter(running))
        card._transfer = fail
        list(running)
    with pytest.raises((CardError, EngineStopped), match="the link is gone"):
        list(engine.submit(qengine.Request(PROMPT[:20], max_tokens=4)))
    engine.close()


# ---- faults of the disk ------------------------------------------------------------------------------------

class Disk:
    """Reads of the experts' file; `lose` makes the next ones fail."""

    def __init__(self, monkeypatch):
        self.fault, self.may_end, self.has_waited = None, threading.Event(), False
        preadv = os.preadv

        def read(file, buffers, offset):
            if self.fault == "fails":
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            if self.fault == "hangs":
                self.has_waited = not self.may_end.wait(PATIENCE)
            return preadv(file, buffers, offset)

        monkeypatch.setattr(os, "preadv", read)

    def lose(self, engine, fault):
        self.fault, file = fault, engine.pipeline.stages[0].store.file
        if fault == "is cut":
            os.ftruncate(file.file.fileno(), file.nbytes // 16)


@pytest.fixture
def disk(monkeypatch):
    made = Disk(monkeypatch)
    yield made
    made.may_end.set()


FAULTS = {"is cut": r"it has become shorter: \d+ of \d+ bytes are left", "fails": "Input/output error",
          "hangs": "no answer within 0.3 s"}


@pytest.mark.parametrize("when", ["a step", "a prompt"])
@pytest.mark.parametrize("fault, why", FAULTS.items(), ids=list(FAULTS))
def test_a_file_of_experts_that_is_lost(small_machine, disk, monkeypatch, fault, why, when):
    """The request hears one sentence, the next one is refused with it, and nothing hangs."""
    monkeypatch.setattr(expert_file, "SLOWEST_DISK", 1e12)
    small_machine(2 * MB)
    engine = load(EmulatedCard(), slots=1, expert_memory=0)
    words = f"experts cannot be read from their file in .*: {why}"
    if when == "a step":
        running = engine.submit(qengine.Request(PROMPT[:20], max_tokens=400, ignore_eos=True))
        next(iter(running))
    monkeypatch.setattr(expert_file, "PATIENCE", 0.3)
    disk.lose(engine, fault)
    if when == "a prompt":
        running = engine.submit(qengine.Request(PROMPT[:20], max_tokens=4))
    with pytest.raises((CardError, EngineStopped), match=words):
        list(running)
    with pytest.raises((CardError, EngineStopped), match=words):
        list(engine.submit(qengine.Request(PROMPT[:20], max_tokens=4)))
    engine.close()
    assert not disk.has_waited                  # for the disk that hangs


def test_a_lost_file_is_no_matter_as_long_as_experts_are_in_memory(resident, small_machine, disk):
    """Decode steps go on; only a prompt, which meets all experts, needs the file."""
    small_machine(8 * MB)
    engine = load(EmulatedCard(), expert_memory=0, slots=1)
    running = engine.submit(qengine.Request(PROMPT, max_tokens=300, ignore_eos=True))
    first = [delta.token_id for delta in itertools.islice(iter(running), 100)]
    before = engine.stats()["expert_bytes_from_file"]
    disk.lose(engine, "fails")
    first += [delta.token_id for delta in running]
    assert first[:24] == resident[0][0] and len(first) == 300
    assert before == engine.stats()["expert_bytes_from_file"] == 32 * engine.pipeline.stages[0].store.slot_bytes
    engine.close()
