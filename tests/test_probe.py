"""The probe: its loops in PTX, its table on the emulated card, and what follows from a report."""

import json
import math
import re
from types import SimpleNamespace

import numpy as np
import pytest

from kernels import compile as compiler
from kernels import assembler, probe
from kernels.bench import OPS_PER_RESULT
from kernels.open import open_cards
from kernels.probe import PIPES, Report, Row, float32

KEYS = ["dp4a", "dp2a", "imad", "half2", "ffma", "fp32", "tensor", "shared", "read", "copy", "launch",
        "replay", "grid_sync", "to_card", "from_card", "peer"]


@pytest.fixture
def emulated(monkeypatch, tmp_path):
    """A card whose report is kept in a folder of its own, and whose loops are short."""
    monkeypatch.setattr(probe, "TARGET_SECONDS", 1e-3)
    monkeypatch.setattr(probe, "path_of", lambda card: tmp_path / "probe" / "card.json")
    return open_cards("emulated")[0]


def report_of(**shares):
    """A Report on a card of 10 SMs at 1 GHz, whose pipes reach these shares of what is expected."""
    rows = []
    for key in ("dp4a", "dp2a", "imad", "ffma", "fp32"):
        expected = 64 * 10 * 1e9 * OPS_PER_RESULT[key] / 1e12
        rows.append(Row(key, key, expected * shares.get(key, 0.99), "TOPS", expected, 1e9, "64 lanes"))
    rows.append(Row("read", "memory, read", 800.0, "GB/s", 829.0))
    return Report({"name": "a card"}, {"numba": "1"}, "2026-01-01T00:00:00+00:00", tuple(rows))


# ---- the loops ---------------------------------------------------------------------------------------------

@pytest.mark.parametrize("cc", [(7, 0), (7, 5), (9, 0)], ids=str)
def test_loops_have_their_instructions_and_nothing_else(cc):
    if cc not in compiler.supported_ccs():
        pytest.skip("the installed CUDA toolkit cannot compile for this card")
    found = assembler.find_assembler()
    for pipe in (*PIPES, probe.tensor_pipe(cc), *probe.forms_of(cc)):
        number = "float32" if pipe.kind == float32 else "uint32"
        types = f"{number}[1]", "uint64[1]", "uint32", number, number
        compiled = compiler.compile_kernel(probe.loop_kernel(pipe), types, cc)
        loop = re.search(r"(\$L_\w+):((?:(?!\$L_\w+:).)*?)@%p\d+ bra\s+\1;", compiled.ptx, re.S)[2]
        opcode = re.match(r"[\w.]+", pipe.text)[0]
        assert loop.count(opcode) == probe.UNROLLED // pipe.n_lines
        inside = [line for line in re.split(r"[;\n]", loop) if re.match(r"\s*[a-z]\w*[. ]", line)]
        assert len(inside) <= probe.UNROLLED + 40       # counting the rounds, and moves that ptxas drops
        assert ("mma.sync" in compiled.ptx) == (pipe.key == "tensor" or pipe.key in probe.FORMS)
        assert compiled.ptx.count("%clock64") == 2
        if found:
            _, words = assembler.run_assembler(found[0], compiled, cc)
            assert re.findall(r"(\d+) bytes spill", words) == ["0", "0"]
            assert int(re.search(r"Used (\d+) registers", words)[1]) <= 64      # or 1,024 threads do not fit


def test_chains_start_apart():
    """Each accumulator appears in as many instructions as the others."""
    pipe, types = PIPES[0], ("uint32[1]", "uint64[1]", "uint32", "uint32", "uint32")
    compiled = compiler.compile_kernel(probe.loop_kernel(pipe), types, compiler.supported_ccs()[-1])
    results = re.findall(r"dp4a\.s32\.s32 (%r\d+), \1,", compiled.ptx)
    assert len(results) == probe.UNROLLED and len(set(results)) == pipe.n_words
    assert len({results.count(result) for result in results}) == 1


# ---- memory ------------------------------------------------------------------------------------------------

def test_all_of_the_memory_is_read(card):
    """And each word once: the exclusive or of the threads' results is that of the words."""
    blocks, threads, rounds = 3, 64, 2
    x = np.random.default_rng(0).integers(0, 2**32, rounds * 4 * blocks * threads * 4, np.uint32)
    out = card.zeros(blocks * threads, np.uint32)
    card.launch(probe.probe_read, blocks, threads, out, card.upload(x), rounds)
    assert np.bitwise_xor.reduce(card.download(out)) == np.bitwise_xor.reduce(x)


def test_shared_memory_is_read_as_the_loop_says(card):
    """Reads of a round: N_SHARED_LOADS times 16 bytes per lane, of words that hold their place squared."""
    out, clocks = card.zeros(probe.THREADS, np.uint32), card.zeros(1, np.uint64)
    card.launch(probe.shared_kernel(with_clock=card.kind != "emulated"), 1, probe.THREADS, out, clocks, 1)
    words = np.arange(probe.N_SHARED_WORDS, dtype=np.uint32) ** 2
    per_lane = np.bitwise_xor.reduce(words.reshape(probe.N_SHARED_LOADS, 32, 4), axis=(0, 2))
    assert len(set(per_lane.tolist())) > 8
    np.testing.assert_array_equal(card.download(out), np.tile(per_lane, probe.THREADS // 32))


# ---- on the emulated card ----------------------------------------------------------------------------------

def test_report(emulated):
    report = probe.measure(emulated)
    assert [row.key for row in report.rows] == KEYS
    for row in report.rows:
        if row.key in ("tensor", "grid_sync", "peer"):
            assert row.value is None and row.note.startswith(("skipped: ", "none, "))
        else:
            assert row.value > 0 and row.unit
        assert row.expected is None and row.clock is None           # nothing is claimed of a processor
    assert report.clock is None and report.throttled() == []
    assert report.dp4a_peak == 1e12 * report.value("dp4a")
    table, paste = report.table(), report.markdown()
    for row in report.rows:
        assert re.search(rf"^{re.escape(row.name)} ", table, re.M) and f"\n| {row.name} | " in paste
    assert emulated.describe() in table.splitlines()[0]
    assert "numba-cuda: " in paste and "CUDA toolkit: " in paste and "throttled" not in table


def test_reports_are_kept(emulated):
    assert probe.load(emulated) is None and probe.saved_replacements(emulated) == ()
    report = report_of(dp4a=1 / 16)
    path = probe.save(emulated, report)
    assert probe.load(emulated) == report == probe.saved_or_measured(emulated)
    assert probe.saved_replacements(emulated) == (("dp4a", "dp2a"),)
    for text in ("{", "[]", json.dumps({"format": 0}), json.dumps(report.to_dict() | {"rows": [{}]})):
        path.write_text(text)
        assert probe.load(emulated) is None


# ---- what follows ------------------------------------------------------------------------------------------

@pytest.mark.parametrize("shares, tops", [({}, 0.99 * 5.12), ({"dp4a": 1 / 16}, 0.99 * 2.56)])
def test_speed_of_products(emulated, shares, tops):
    """By the saved report: of dp4a, or two dp2a for each."""
    probe.save(emulated, report_of(**shares))
    assert probe.dot_speed(emulated) == pytest.approx(1e12 * tops)


@pytest.mark.parametrize("cc", [(7, 0), (99, 0)])
def test_speed_of_products_without_a_report(tmp_path, cc):
    """64 lanes of dp4a per SM and clock, on cards that are not known too."""
    card = SimpleNamespace(facts=dict, name="none", cache_dir=tmp_path, cc=cc, n_sms=80, clock=1.5e9)
    assert probe.dot_speed(card) == pytest.approx(61.44e12)


def test_speed_of_cards(tmp_path):
    """Of emulated ones by their type, of real ones by the report, the table, or lanes and clock."""
    plain, v100 = open_cards("emulated:1@0.5")[0], open_cards("emulated:v100")[0]
    assert probe.speed_of(v100) == (80 * 1.38e9 * 64 * 8, 80 * 1.38e9 * 64 * 4, 830e9, 15.75e9)
    assert probe.speed_of(plain) == (68 * 1.38e9 * 64 * 8, 68 * 1.38e9 * 64 * 4, 818e9, 0.5e9)
    assert probe.speed_of(open_cards("emulated")[0]).link == math.inf
    facts = {"memory GB/s": 300.0, "link GB/s": 8.0}
    card = SimpleNamespace(kind="cuda", facts=lambda: facts, name="none", cache_dir=tmp_path, cc=(7, 5), n_sms=10,
                           clock=1e9)
    assert probe.speed_of(card) == (10e9 * 64 * 8, 10e9 * 64 * 4, 300e9, 8e9)
    card.model = "Tesla V100-PCIE-16GB"
    assert probe.speed_of(card) == probe.speed_of(v100)
    more = Row("half2", "half2", 2.0, "TFLOPS"), Row("to_card", "", 3.0), Row("from_card", "", 2.5)
    rows = report_of(dp4a=0.5).rows + more
    probe.save(card, Report({"name": "a card"}, {}, "2026-01-01T00:00:00+00:00", rows))
    assert probe.speed_of(card) == (pytest.approx(10e9 * 64 * 8 * 0.5), 2e12, 800e9, 2.5e9)


@pytest.mark.parametrize("shares, instruction", [
    ({}, "dp4a"), ({"dp4a": 1 / 16}, "dp2a"), ({"dp4a": 1 / 16, "dp2a": 1 / 16}, "imad"),
    ({"dp4a": 0.5}, "dp4a"), ({"dp2a": 1 / 16}, "dp4a"),
    ({"dp4a": 1 / 16, "dp2a": 1 / 16, "imad": 1 / 16}, "dp4a")])
def test_choice_of_the_dot_product(shares, instruction):
    assert probe.fastest_dot(report_of(**shares)) == instruction


@pytest.mark.parametrize("shares, pairs", [
    ({}, ()), ({"ffma": 1 / 16}, (("ffma", "fp32"),)), ({"ffma": 1 / 8, "fp32": 1 / 8}, ()),
    ({"dp4a": 1 / 16, "ffma": 1 / 16}, (("dp4a", "dp2a"), ("ffma", "fp32")))])
def test_replacements(shares, pairs):
    report = report_of(**shares)
    assert probe.replacements(report) == pairs
    for old, new in pairs:
        assert f"the engine's kernels use {new} instead of {old} on this card" in report.table()


def test_the_probe_measures_the_instruction_itself(emulated, monkeypatch):
    emulated.replace([("dp4a", "imad")])
    seen = []
    load = emulated._load
    monkeypatch.setattr(emulated, "_load", lambda compiled: seen.append(compiled.ptx) or load(compiled))
    probe.measure(emulated)
    assert sum("dp4a.s32.s32" in ptx for ptx in seen) == 1 and emulated.replace(()) == (("dp4a", "imad"),)


def test_throttled_paths_are_named():
    words = report_of(dp4a=1 / 16, ffma=1 / 8).table()
    assert "throttled: dp4a gives 0.320 TOPS, 1/16.0 of what" in words
    assert "throttled: ffma" in words and "1/8.0" in words and "throttled: dp2a" not in words
    assert "no path is throttled" in report_of().table()


def test_expected_follows_the_clock(emulated, monkeypatch):
    """A card that gives 48 of its 64 lanes, at a clock that is read from it."""
    per_second = 48 * 1e9 / (probe.UNROLLED * probe.THREADS)        # rounds per second at 1 GHz
    monkeypatch.setattr(probe, "has_clock", lambda card: True)
    monkeypatch.setattr(probe, "loop_seconds", lambda *arguments: (per_second, 1e9))
    monkeypatch.setattr(emulated, "cc", (7, 0))
    row = probe.measure_pipe(emulated, PIPES[0])
    assert row.share == pytest.approx(0.75) and row.expected == pytest.approx(64 * 8 * emulated.n_sms * 1e-3)
    assert row.note == "64 lanes per SM and clock, 1.000 GHz"
    assert probe.measure_tensor(emulated).expected == pytest.approx(512 * 2 * emulated.n_sms * 1e-3)
    row, = probe.measure_forms(emulated)
    assert row.key == "m8n8k4" and row.expected == pytest.approx(512 * 2 * emulated.n_sms * 1e-3)
    monkeypatch.setattr(emulated, "cc", (7, 5))
    row, = probe.measure_forms(emulated)
    assert row.key == "m8n8k16" and row.expected == pytest.approx(1024 * 2 * emulated.n_sms * 1e-3)
    monkeypatch.setattr(emulated, "cc", (9, 0))
    assert [(row.key, row.expected) for row in probe.measure_forms(emulated)] == [("m16n8k32", None), ("m8n8k16", None)]
    monkeypatch.setattr(emulated, "cc", (12, 0))
    row = probe.measure_pipe(emulated, PIPES[0])
    assert row.expected is None and row.note == "no figure for sm_120 is known"


def test_lanes_of_the_tables():
    """Those that this project or the programming guide states, see kernels/emulated/cards.py."""
    lanes = {cc: [probe.expected_per_clock(cc, key) for key in ("dp4a", "half2", "ffma")]
             for cc in [(7, 0), (7, 5), (8, 0), (8, 6), (9, 0)]}
    assert lanes == {(7, 0): [64, 64, 64], (7, 5): [64, 64, 64], (8, 0): [64, 128, 64], (8, 6): [64, 64, 128],
                     (9, 0): [64, 128, 128]}


def test_numbers():
    assert [probe.show(x, "s") for x in (0.0712, 1.2345, 48.01, 133.7, 2970.4, None)] == [
        "0.0712 s", "1.23 s", "48.0 s", "134 s", "2,970 s", ""]
