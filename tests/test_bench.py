"""The table of `python -m kernels.<name>`, and `qengine.py --bench` and `--probe`."""

import ast
import json
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import qengine
from cli import bench as engine_bench
from cli import checks
from cli.bench import Bench, estimated_rates
from cli.main import main
from kernels import bench, probe
from kernels.bench import Case, Result
from kernels.emulated.cards import CARDS, CMP_100_210, H100, V100
from kernels.open import open_cards
from tests.doubling import double
from tests.models import TINY

N = 100_000


def failing():
    assert 1 == 2, "error 3.0 of the largest value"


def test_table(card, capsys):
    x = card.zeros(N, "float32")

    def launch():
        card.launch(double, -(-N // 256), 256, x, N)

    cases = [Case("100000", lambda: 0.25, launch, n_bytes=8 * N), Case("only timed", None, launch),
             Case("only checked", lambda: 0.0), Case("wrong", failing, launch)]
    results = bench.bench(card, "double", cases)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"double on {card.describe()}"
    assert "2.50e-01" in lines[3] and "µs" in lines[3]
    assert "FAILED: error 3.0" in lines[6]
    assert 1e-7 < results[0].seconds < 0.1 and 1e-7 < results[1].seconds < 0.1
    assert results[2].seconds != results[2].seconds and results[3].failure


def gives_a_value(body):
    """Whether the statements `body` of a function end with an exception or a value, never with None."""
    last = body[-1]
    if isinstance(last, ast.With):
        return gives_a_value(last.body)
    if isinstance(last, ast.If):
        return bool(last.orelse) and gives_a_value(last.body) and gives_a_value(last.orelse)
    return isinstance(last, ast.Raise) or isinstance(last, ast.Return) and last.value is not None


def checks_of(source):
    """{name: whether it gives a value} of the functions of a file that its Cases take as checks."""
    tree = ast.parse(source)
    cases = [call for call in ast.walk(tree) if isinstance(call, ast.Call) and getattr(call.func, "id", "") == "Case"]
    checks = [check for case in cases for check in
              [*case.args[1:2], *(field.value for field in case.keywords if field.arg == "check")]]
    named = {node.id for check in checks for node in ast.walk(check) if isinstance(node, ast.Name)}
    return {node.name: gives_a_value(node.body) for node in tree.body
            if isinstance(node, ast.FunctionDef) and node.name in named}


KERNELS = Path(bench.__file__).parent
TABLES = [file.stem for file in sorted(KERNELS.glob("*.py")) if "\ndef cases(" in file.read_text(encoding="utf-8")]


@pytest.mark.parametrize("name", TABLES)
def test_every_check_gives_a_number(name):
    """The largest error, which the table shows; 0 where bits are compared."""
    found = checks_of((KERNELS / f"{name}.py").read_text(encoding="utf-8"))
    assert found and all(found.values()), found


@pytest.mark.parametrize("end, value", [("return 1.0", True), ("return", False), ("x = 1", False), ("raise x", True),
                                        ("if x:\n  return 1\n else:\n  return 2", True),
                                        ("if x:\n  return 1", False), ("for y in x:\n  return 1", False),
                                        ("with x:\n  return 1", True), ("with x:\n  y = 1", False)])
def test_a_check_without_a_number_is_found(end, value):
    for case in "Case('a', partial(check, 1))", "Case('a', lambda: check(1))", "Case('a', check=check)":
        assert checks_of(f"def check(x):\n {end}\ndef cases(card):\n yield {case}") == {"check": value}


def test_time_is_of_one_call(card):
    x = card.zeros(N, "float32")
    long = bench.seconds_per_call(card, lambda: card.launch(double, 1, 256, x, N))
    both = bench.seconds_per_call(card, lambda: [card.launch(double, 1, 256, x, N) for _ in range(8)])
    assert both > 1.5 * long                             # 8 times; a busy machine blurs it


def test_peaks():
    case = Case("x", n_bytes=297_000_000, n_ops=133_824_000, pipe="dp4a")
    assert bench.fraction_of_peak(case, 1e-4, H100) == "100 % memory"
    case = Case("x", n_ops=10_000_000, n_bytes=1, pipe="dp4a")
    assert bench.fraction_of_peak(case, 1e-7, H100) == "75 % dp4a"
    assert bench.fraction_of_peak(case, 1e-7, None) == ""
    assert bench.fraction_of_peak(Case("x"), 1e-7, H100) == ""

    def model(name):
        return bench.model_of(SimpleNamespace(model=name))

    assert model("NVIDIA H100 80GB HBM3") is H100 and model("Tesla V100-PCIE-16GB") is V100
    assert model("NVIDIA CMP 100-210") is CMP_100_210 and model("NVIDIA A100") is None
    assert bench.model_of(SimpleNamespace()) is None


def test_main_reports_by_exit_code(monkeypatch, capsys):
    for arguments, cases, code in ((["x", "--card", "emulated"], [Case("a", lambda: 0.0)], 0),
                                   (["x", "--card", "emulated"], [Case("a", failing)], 1),
                                   (["x", "--card", "nothing"], [], "unknown card 'nothing'")):
        monkeypatch.setattr("sys.argv", arguments)
        with pytest.raises(SystemExit) as end:
            bench.main("title", lambda card: cases)
        assert end.value.code == code or code in end.value.code


def test_main_can_check_alone(monkeypatch, capsys):
    """--check launches nothing to time it, and leaves out what has no check."""
    monkeypatch.setattr("sys.argv", ["x", "--card", "emulated", "--check"])
    with pytest.raises(SystemExit):
        bench.main("title", lambda card: [Case("checked", lambda: 0.25, launch=failing), Case("timed", launch=failing)])
    lines = capsys.readouterr().out.splitlines()
    assert any(line.split() == ["checked", "2.50e-01"] for line in lines) and not any("timed" in line for line in lines)


def test_numbers():
    shown = [bench.show_time(t) for t in (2.0, 0.5, 1.23e-5, 1e-8)]
    assert shown == ["  2.00 s ", "500.00 ms", " 12.30 µs", "  0.01 µs"]
    assert bench.line(Result(Case("a"), 0.5)) == "a" + " " * (bench.NAME_WIDTH + 2) + "5.00e-01"


# ---- the engine's bench ------------------------------------------------------------------------------------

@pytest.fixture
def bench_of_tiny(monkeypatch):
    """Runs `qengine.py --bench` on the smallest random model, with a report instead of the probe."""
    rows = probe.Row("dp4a", "dp4a", 0.1, "TOPS"), probe.Row("read", "memory, read", 10.0, "GB/s")
    report = probe.Report({"name": "a card"}, {}, "2026-01-01", rows)
    monkeypatch.setattr(probe, "saved_or_measured", lambda card: report)
    return lambda *options, model="synthetic:tiny": main(["-m", model, "--card", "emulated", "--bench", *options])


@pytest.mark.parametrize("kv", ["float16", "q8+3"])
def test_contexts_are_made_up(kv):
    """In every page, all numbers are finite and hardly any is zero."""
    engine = qengine.load(TINY, card="emulated", ctx=64 * 37, progress=False, draft="off", kv=kv)
    stage = engine.pipeline.last
    stage.worker.ask(engine_bench.make_up_pages, stage).result()
    for pages in stage.cache.pages.values():
        for rows, array in zip(pages.format.kinds.values(), (pages.k, pages.v)):
            held = rows.decode(stage.card.download(array))
            assert len(held) >= 37 and np.isfinite(held).all()
            assert (np.abs(held.astype(np.float32)).mean(axis=(1, 2, 3)) > 0.5).all()
    engine.close()


def test_bench_of_an_engine(bench_of_tiny, capsys, tmp_path, monkeypatch):
    estimates = dict.fromkeys(("prefill", "decode"), {"a card of the table": 1234.0})
    monkeypatch.setattr(engine_bench, "DECODE_STEPS", 3)
    monkeypatch.setattr(Bench, "estimates", lambda *arguments: estimates)
    file = tmp_path / "bench.json"
    lengths = "--prompt-lengths", "70,5", "--contexts", "9"
    assert bench_of_tiny(*lengths, "--batch", "2", "--json", str(file)) == 0
    found = json.loads(file.read_text())
    assert [speed["context"] for speed in found["prefill"]] == [5, 70]
    assert [(speed["context"], speed["batch"]) for speed in found["decode"]] == [(9, 2)]
    for speed in found["prefill"] + found["decode"]:
        assert speed["tokens_per_s"] > 0 and len(speed["repeats"]) == 1 and speed["percent_of_peak"] > 0
        assert speed["launches"] == sum(operation["launches"] for operation in speed["operations"])
        assert all(operation["seconds"] > 0 for operation in speed["operations"])
    decode = {operation["name"]: operation["launches"] for operation in found["decode"][0]["operations"]}
    assert decode["gemv_kernel"] == 4 * 3 + 1 and decode["gemv_swiglu_kernel"] == 4
    assert decode["gdn_decode_kernel"] == 3 and decode["attend"] == 1
    assert found["kv"] == "float16"
    assert set(found) == {"kv", "model", "date", "cards", "layers", "versions", "probes", "products",
                          "peak_memory_bytes", "prefill", "decode", "estimates"}
    assert found["peak_memory_bytes"] > 4e6 and "numba" in found["versions"] and found["probes"][0]["format"]
    assert found["products"] == [None]          # nothing was measured that could be chosen from
    assert len(found["cards"]) == 1 and found["layers"] == [[0, 3]]
    out = capsys.readouterr().out
    assert "gemm_q8_q8_kernel" in out and "peak memory" in out and "of dp4a measured" in out
    assert re.search(r"^ESTIMATES .* not measured\na card of the table +1,234 +1,234$", out, re.M)
    assert found["estimates"] == estimates


def test_bench_of_one_card_and_of_two_side_by_side(bench_of_tiny, capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(engine_bench, "DECODE_STEPS", 3)
    monkeypatch.setattr(Bench, "estimates", lambda *arguments: {"prefill": {}, "decode": {}})
    file, trace = tmp_path / "bench.json", tmp_path / "trace.json"
    lengths = "--prompt-lengths", "70", "--contexts", "9", "--batch", "2", "--split", "3,1"
    two = *lengths, "--card", "emulated:3", "--cards", "2"
    assert bench_of_tiny(*two, "--trace", str(trace), "--json", str(file)) == 0
    alone = json.loads(file.read_text())
    assert alone["layers"] == [[0, 2], [3, 3]] and len(alone["cards"]) == len(alone["probes"]) == 2
    decode = {operation["name"]: operation["launches"] for operation in alone["decode"][0]["operations"]}
    assert decode["gdn_decode_kernel"] == 2 * 3 and decode["attend"] == 2       # two groups of one answer
    assert "outgoing hidden states" in trace.read_text()
    assert bench_of_tiny(*lengths[:-2], "--card", "emulated:3", "--cards", "1,2", "--json", str(file)) == 0
    runs = json.loads(file.read_text())["runs"]
    assert [len(run["cards"]) for run in runs] == [1, 2]
    first, second = (run["decode"][0]["tokens_per_s"] for run in runs)
    out = capsys.readouterr().out
    assert re.search(r"^tokens/s +1 card +2 cards$", out, re.M)
    assert re.search(rf"^decode at 9, batch 2 +{first:,.1f} +{second:,.1f}  {second / first:.2f} x$", out, re.M)
    assert bench_of_tiny("--card", "emulated:2", "--cards", "3") == 2
    assert "--cards 3: there are 2 to take them from" in capsys.readouterr().err


def test_bench_with_made_up_experts(bench_of_tiny, capsys, tmp_path, monkeypatch):
    """Of the eight experts of a layer two are hot, and three have slots on the card. The more often a row uses the hot
    ones, the more of its experts are found there."""
    monkeypatch.setattr(engine_bench, "DECODE_STEPS", 24)
    monkeypatch.setattr(Bench, "estimates", lambda *arguments: {})
    monkeypatch.setattr(engine_bench, "estimate_table", str)
    file, shares = tmp_path / "bench.json", {}
    for hits in ("0.5", "0.9"):
        assert bench_of_tiny("--prompt-lengths", "5", "--contexts", "9", "--expert-memory", "0.003",
                             "--expert-hits", hits, "--json", str(file), model="synthetic:tiny-moe") == 0
        found = json.loads(file.read_text())
        assert found["made_up_hits"] == float(hits)
        counts = found["experts"]
        shares[hits] = counts["expert_hits"] / (counts["expert_hits"] + counts["expert_misses"])
        out = capsys.readouterr().out
        assert f"made up: {float(hits):.0%} are among 2 of the 8 of their layer" in out
        assert f"experts: {shares[hits]:.1%} of those that decode steps used lay on the card" in out
        assert "no times of their own" in out and not found["decode"][0]["operations"]
    assert shares["0.5"] + 0.15 < shares["0.9"]


def test_what_a_step_reads_of_made_up_experts():
    """One row reads the experts that it uses. Eight rows have more of them in common if the choice is more local."""
    engine = qengine.load("synthetic:tiny-moe", card="emulated", ctx=128, slots=8, progress=False)
    even, *made_up = (Bench(engine, None, 1, 8, hits) for hits in (None, 0.5, 1.0))
    engine.close()
    assert [each.expert_bytes(range(1), 9) for each in made_up] == [even.expert_bytes(range(1), 9)] * 2
    half, all_hot = (each.expert_bytes(range(8), 9) for each in made_up)
    assert all_hot < half < even.work().expert_bytes


def test_made_up_experts_are_for_synthetic_mixtures(bench_of_tiny, capsys):
    assert bench_of_tiny("--expert-hits", "0.9") == 2
    assert "--expert-hits: synthetic:tiny has no experts to choose from" in capsys.readouterr().err
    assert bench_of_tiny("--expert-hits", "0.9", model=str(qengine.DEFAULT_MODEL)) == 2
    assert "--expert-hits makes up the experts of synthetic models" in capsys.readouterr().err


def test_bench_of_drafts(bench_of_tiny, capsys, tmp_path, monkeypatch):
    """The real engine: drafts of the right tokens are accepted, wrong ones are not, and no token changes."""
    monkeypatch.setattr(engine_bench, "DECODE_STEPS", 2)
    monkeypatch.setattr(Bench, "estimates", lambda *arguments: {"prefill": {}, "decode": {}})
    monkeypatch.setattr(checks, "EMULATED_TOKENS", 20)
    file = tmp_path / "bench.json"
    options = "--prompt-lengths", "5", "--contexts", "57", "--batch", "2", "--json", str(file)
    assert bench_of_tiny(*options, "--draft", "3", "--acceptance", "1", "--check-widths", "1,4") == 0
    found = json.loads(file.read_text())
    [drafted], costs = found["drafted"], found["checks"]
    assert (drafted["drafts"], drafted["batch"], drafted["context"]) == (3, 2, 57)
    assert 2.5 < drafted["tokens_per_check"] < 4        # a check ends at the page's end
    assert [(cost["rows"], cost["with_drafting"]) for cost in costs] == [(1, None), (4, None)]
    assert all(cost["cost"] > 0 for cost in costs)
    out = capsys.readouterr().out
    assert re.search(r"^57 +2 +3 +100 % +[\d,.]+ +[\d,.]+ +[\d.]+ +[\d.]+ +[\d.]+$", out, re.M)
    assert len(re.findall(r"^57 +2 +[14] +[\d.]+ +[\d.]+$", out, re.M)) == 2
    assert bench_of_tiny(*options, "--draft", "1", "--acceptance", "0") == 0
    assert json.loads(file.read_text())["drafted"][0]["tokens_per_check"] == 1


def test_estimates_of_other_cards():
    """What the launches of two chunks and of a step of two slots are estimated to take."""
    card = open_cards("emulated")[0]
    x = card.zeros(N, "float32")

    def launch():
        card.launch(double, -(-N // 256), 256, x, N)

    with card.counting() as log:
        launch()
    found = estimated_rates(card, {"prefill": (10, lambda: [launch(), launch()]), "decode": (2, launch)})
    for model in CARDS:
        seconds = log[0].estimate(model).seconds
        assert found["prefill"][model.name] == pytest.approx(10 / (2 * seconds))
        assert found["decode"][model.name] == pytest.approx(2 / seconds)


def test_what_a_step_moves_and_a_prompt_computes():
    engine = qengine.load("synthetic:tiny", card="emulated", ctx=128, slots=2, progress=False)
    c, b = engine.config, Bench(engine, None, 1, 2)
    products = [m for m in b.weights() if m.is_quantized]
    n_weights = sum(m.n * m.k for m in products)
    states = sum(kind == "linear" for kind in c.layer_kinds) * 4 * (
        2 * c.n_value_heads * 128 * 128 + c.conv_width * c.conv_dim)
    positions = 64 + engine_bench.DECODE_STEPS // 2
    kept = sum(kind == "attention" for kind in c.layer_kinds) * 2 * c.kv_dim * 2 * positions
    assert b.step_bytes(64) == n_weights * 34 // 32 + 2 * (states + kept)
    head = c.n_vocab * c.hidden_dim
    assert b.prompt_operations(10) == 2 * (10 * (n_weights - head) + head)
    assert len(products) == len(b.weights()) == 4 * 4 + 1
    engine.close()


def test_operations_are_timed_alone(card):
    x = card.zeros(N, "float32")

    def work():
        card.launch(double, 1, 256, x, N)
        card.copy(x[:8], x[8:16])
        card.launch(double, -(-N // 256), 256, x, N)

    work()
    times = bench.operation_seconds(card, work)
    assert {name: n for name, (n, _) in times.items()} == {"double": 2, "copy": 1}
    assert all(seconds > 0 for _, seconds in times.values())
    assert bench.operation_seconds(card, work, times)["double"][0] == 4
    assert card.launch.__func__ is type(card).launch    # left as it was


@pytest.mark.parametrize("arguments, words", [
    (["--bench", "--ctx", "64"], "--ctx is not for --bench"),
    (["--bench", "--prompt-lengths", "3,x"], "must be whole numbers from 1 on with commas, not '3,x'"),
    (["--bench", "--contexts", "0"], "must be whole numbers"),
    (["--bench", "--repeats", "0"], "must be from 1 to 1000"),
    (["--bench", "--draft", "auto"], "--draft auto is not for --bench"),
    (["--bench", "--draft", "8"], "must be from 0 to 7"),
    (["--chat", "--draft", "all"], "must be auto, off, or the most drafts from 1 to 7, not 'all'"),
    (["--bench", "--draft", "off", "--acceptance", "0.5"], "--acceptance is for the drafts of --draft N"),
    (["--bench", "--draft", "2", "--acceptance", "1.5"], "must be from 0 to 1"),
    (["--bench", "--check-widths", "2,9"], "a step has 1 to 8 rows"),
    (["-p", "x", "--check-widths", "2"], "--check-widths goes with --bench"),
    (["--perplexity", "f", "--draft", "2"], "--draft goes with -p or --chat or --serve or --bench or --plan"),
    (["--probe", "-m", "synthetic:tiny"], "-m is not for --probe"),
    (["-p", "x", "--repeats", "2"], "--repeats goes with --bench"),
    (["-p", "x", "--json", "f"], "--json goes with --bench or --probe"),
    (["--chat", "--expert-hits", "0.9"], "--expert-hits goes with --bench"),
    (["--bench", "--expert-hits", "90"], "must be from 0 to 1"),
    (["--probe", "--batch", "2"], "--batch goes with --bench")])
def test_options_that_make_no_sense(capsys, arguments, words):
    with pytest.raises(SystemExit) as end:
        main(arguments)
    assert end.value.code == 2 and words in capsys.readouterr().err


def test_probe_on_the_command_line(capsys, monkeypatch, tmp_path):
    rows = probe.Row("dp4a", "dp4a", 0.1, "TOPS"),
    report = probe.Report({"name": "a card"}, {"numba": "1"}, "2026-01-01", rows)
    monkeypatch.setattr(probe, "measure", lambda card: report)
    monkeypatch.setattr(probe, "path_of", lambda card: tmp_path / "probe" / "card.json")
    file = tmp_path / "report.json"
    assert main(["--probe", "--card", "emulated", "--json", str(file)]) == 0
    out = capsys.readouterr().out
    assert "probe of a card" in out and "### qengine probe" in out
    assert str(tmp_path / "probe" / "card.json") in out
    assert [probe.Report.from_dict(data) for data in json.loads(file.read_text())] == [report]
