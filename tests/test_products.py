"""Which kernels multiply the rows of prompts: the same bits by either, and the choice by what was measured."""

import json
import math
import re
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
from numba import cuda

import qengine
from cli.main import main
from cli.options import build_parser
from engine.plan import Grouped, Work, gain_of
from engine.request import RequestError
from kernels import expert_gemm, probe, products, q8_gemm, tensor_gemm
from kernels.card import CardError, OutOfMemory
from kernels.compile import CompileError
from kernels.emulated.card import EmulatedCard
from kernels.formats import FORMATS
from kernels.open import open_cards
from kernels.operands import Matrix, Quantized
from kernels.products import Found, Products, Times
from tests.costs import work_of
from tests.models import TINY, load_tiny, results, write_experts
from tests.oracle import oracle_path
from tests.test_quantized_models import RECORDED as RECORDED_FORMATS
from tests.test_quantized_models import fingerprint
from tests.test_reproducible import RECORDED, hashes

IDS = np.random.default_rng(5).integers(0, 1000, 200).tolist()
TENSOR, DP4A = "gemm_tensor_kernel", "gemm_q8_q8_kernel"
WINS = Found({"dp4a": 50.0, "m16n8k32": 200.0}, {"Q8_0": Times(1e-3, 2e-4, True)})
AS_TIMED = Found(WINS.rates, {"Q8_0": Times(*(time(EmulatedCard(), products.N, products.K, [products.ROWS])
                                               for time in (q8_gemm.relative_time, tensor_gemm.relative_time)), True)})
LOSES = Found({"dp4a": 50.0, "m16n8k32": 6.0})


@pytest.fixture
def kept(monkeypatch, tmp_path):
    """What is kept of cards lies in a folder of its own."""
    monkeypatch.setattr(probe, "path_of", lambda card: tmp_path / "probe" / f"{card.name}.json")
    return tmp_path / "probe"


def kernels_of(card):
    """The names of the kernels of prompts' products that a card has loaded."""
    return {kernel.__name__ for kernel, *_ in card._functions} & {TENSOR, DP4A}


@pytest.fixture
def on_tensor(card, monkeypatch):
    """What makes `load` use tensor cores, which must then multiply."""
    if products.instruction_of(card) is None:
        pytest.skip(f"{card.name} has no tensor cores")
    seen, gemm = [], tensor_gemm.gemm
    monkeypatch.setattr(tensor_gemm, "gemm", lambda *each, **options: (seen.append(each[1]), gemm(*each, **options)))
    yield {"products": "tensor"}
    assert seen


# ---- whole models ----------------------------------------------------------------------------------------------------

def test_recorded_bits_of_tensor_cores(card, on_tensor):
    """The hashes of logits that hold for every card, of prompts and of decode steps after them."""
    engine = load_tiny(card, ctx=512, slots=4, chunk=None, **on_tensor)
    try:
        assert hashes(engine) == json.loads(RECORDED.read_text())["float16"]
    finally:
        engine.close()


@pytest.mark.parametrize("name", ["Q4_K", *(pytest.param(name, marks=pytest.mark.slow) for name in FORMATS
                                            if name != "Q4_K")])
def test_recorded_bits_of_formats(card, name, on_tensor):
    """In every run of the suite one packed format beside Q8_0: a kernel of tensor cores takes long to compile."""
    assert fingerprint(name, card, **on_tensor) == json.loads(RECORDED_FORMATS.read_text())[name]


@pytest.fixture
def path(request, tmp_path):
    """That of a model: of the oracle, or one with experts. It comes before `on_tensor`, which a skip must not reach."""
    if request.param != "experts":
        return oracle_path(request.param)
    write_experts(tmp_path / "experts.gguf")
    return tmp_path / "experts.gguf"


@pytest.mark.parametrize("path", ["experts", "gguf/dense_mtp-Q8_0.gguf", "gguf/moe_mtp-Q8_0.gguf"], indirect=True)
def test_models(card, path, on_tensor, monkeypatch):
    """A mixture of experts, and models with a draft block."""
    seen, grouped_tensor = [], expert_gemm.grouped_tensor
    monkeypatch.setattr(expert_gemm, "grouped_tensor", lambda *each: (seen.append(each), grouped_tensor(*each))[1])
    (want, tokens), (logits, found) = (results(path, card, **how) for how in ({"products": "dp4a"}, on_tensor))
    np.testing.assert_array_equal(logits, want)
    assert found == tokens and want.std() > 0.1
    assert bool(seen) == ("dense" not in str(path))


@pytest.mark.parametrize("path", ["gguf/embed-Q8_0.gguf"], indirect=True)
def test_texts_of_a_pooling_model(card, path, on_tensor):
    """Whose products of queries and keys come in two parts, the second of which is added."""
    said = []
    for how in {"products": "dp4a"}, on_tensor:
        engine = qengine.load(path, card=card, ctx=128, progress=False, **how)
        said.append(engine.embed([IDS[:70], IDS[:9]]))
        engine.close()
    np.testing.assert_array_equal(*said)
    assert np.std(said[0]) > 0


@pytest.mark.parametrize("instruction", tensor_gemm.INSTRUCTIONS)
def test_a_later_choice_makes_no_function(instruction, monkeypatch):
    """To make functions of a kernel takes the host longer than to launch it, and a prompt has many launches."""
    card = SimpleNamespace(kind="cuda", cc=tensor_gemm.INSTRUCTIONS[instruction][0], n_sms=80)
    assert tensor_gemm.instruction_of(card) == instruction
    first = tensor_gemm.shape_for(card, 4096, 297, FORMATS["Q8_0"])
    monkeypatch.setattr(cuda, "jit", lambda *_, **__: pytest.fail("a function was made anew"))
    assert tensor_gemm.shape_for(card, 4096, 297, FORMATS["Q8_0"]) == first


def test_neither_chunks_nor_cards_change_a_bit(kept):
    """One card of two is known for fast tensor cores; and a chunk may end anywhere."""
    alone = load_tiny(EmulatedCard(), products="dp4a")
    want = alone.evaluate(IDS)
    alone.close()
    cards = [EmulatedCard(number, memory_bytes=512 << 20) for number in range(2)]
    products.save(cards[1], WINS)
    for chunk in 64, 128:
        engine = load_tiny(cards, split=(2, 1), chunk=chunk)
        np.testing.assert_array_equal(engine.evaluate(IDS), want)
        engine.close()
        assert [kernels_of(card) for card in cards] == [{DP4A}, {TENSOR}]


def test_the_first_start_goes_by_its_own_measurement(kept, monkeypatch):
    """Of the formats that the model has; whoever names the kernels needs none."""
    asked = []

    def measure(card, formats):
        asked.append((card.name, formats))
        products.save(card, WINS)
        return True

    monkeypatch.setattr(qengine, "measure_products", measure)
    for how, kernels in (("dp4a", DP4A), ("auto", TENSOR)):
        card = EmulatedCard()
        engine = load_tiny(card, products=how)
        engine.evaluate(IDS[:70])
        engine.close()
        assert kernels_of(card) == {kernels}
    assert asked == [("emulated card 0", ["Q8_0"])]


def test_a_users_own_product_goes_before(kept):
    card, seen = EmulatedCard(), []

    def own(card, y, stride, w, x, rows, add=False, *, stream=None):
        seen.append((w.n, w.k))
        q8_gemm.gemm_tiled(card, y, stride, w, x, rows, add, stream=stream)

    engine = load_tiny(card, products="tensor")
    want = engine.evaluate(IDS[:70])
    engine.use(gemm=own)
    seen.clear()
    np.testing.assert_array_equal(engine.evaluate(IDS[:70]), want)
    assert seen
    engine.use()
    seen.clear()
    np.testing.assert_array_equal(engine.evaluate(IDS[:70]), want)
    engine.close()
    assert not seen and kernels_of(card) == {TENSOR}


# ---- the choice ------------------------------------------------------------------------------------------------------

SIZES = [(1, (1,)), (128, (7,)), (4096, (64,)), (4096, (2048,)), (12288, (297, 297))]


def test_every_size_gets_what_is_faster():
    """Tensor cores that need little or much of the time of dp4a at the measured size: all sizes, or none. In between,
    only those whose estimated times say so."""
    card = EmulatedCard(like=None)
    card.n_sms = 80
    for ratio in 1e-3, 0.5, 0.8, 0.99, 1.01, 1.3, 1e3:
        made = Products(card, found=Found(WINS.rates, {"Q8_0": Times(1e-3, ratio * 1e-3, True)}))
        chosen = [made.uses_tensor("Q8_0", n, 4096, sizes) for n, sizes in SIZES]
        assert made.uses_tensor("Q8_0", products.N, products.K, (products.ROWS,)) == (ratio < 1)
        assert ratio not in (1e-3, 1e3) or set(chosen) == {ratio < 1}
        for n, sizes in SIZES:
            assert made.relative_time(n, 4096, sizes) <= q8_gemm.relative_time(card, n, 4096, sizes)
    assert len({tuple(Products(card, found=Found(WINS.rates, {"Q8_0": Times(1.0, ratio, True)})).uses_tensor(
        "Q8_0", n, 4096, sizes) for n, sizes in SIZES) for ratio in np.linspace(0.3, 2, 50)}) > 2


@pytest.mark.parametrize("wish, found, format, chosen", [
    ("auto", WINS, "Q8_0", True), ("auto", WINS, "Q4_K", False), ("auto", LOSES, "Q8_0", False),
    ("auto", None, "Q8_0", False), ("dp4a", WINS, "Q8_0", False), ("tensor", LOSES, "Q2_K", True),
    ("auto", Found(WINS.rates, {"Q8_0": Times(1e-3, 2e-4, False)}), "Q8_0", False)])
def test_the_choice(wish, found, format, chosen):
    """Also: what was not measured, and what had other bits, is left to dp4a."""
    assert Products(EmulatedCard(), wish, found).uses_tensor(format, 4096, 4096, (2048,)) == chosen


@pytest.mark.parametrize("wish, found, instruction, k, columns, chosen", [
    ("auto", WINS, "m16n8k32 mixed", 4096, 32, True), ("auto", WINS, "m16n8k32", 4096, 64, True),
    ("auto", WINS, "m16n8k32", 4096, 1, False), ("auto", WINS, "m16n8k32", 4128, 32, False),
    ("auto", WINS, "m8n8k4", 4096, 32, False), ("auto", WINS, None, 4096, 32, False),
    ("auto", LOSES, "m16n8k32", 4096, 32, False), ("auto", None, "m16n8k32", 4096, 32, False),
    ("dp4a", WINS, "m16n8k32", 4096, 32, False), ("tensor", LOSES, "m16n8k32", 4096, 32, True)])
def test_decode_steps_follow_prompts(wish, found, instruction, k, columns, chosen, monkeypatch):
    """From a number of rows on, where a block of threads has the shared memory; never on emulated cards."""
    card, w = EmulatedCard(), SimpleNamespace(format="Q8_0", n=12352, k=k)
    made = Products(card, wish, found)
    monkeypatch.setattr(products, "instruction_of", lambda card: instruction)
    monkeypatch.setattr(card, "max_shared", 227 << 10)
    assert not made.takes(w, columns)
    monkeypatch.setattr(card, "kind", "pretended")
    assert made.takes(w, columns) == made.takes(w, columns, swiglu=True) == chosen
    monkeypatch.setattr(card, "max_shared", 48 << 10)
    assert not made.takes(w, columns, swiglu=True)


@pytest.mark.parametrize("wish, found, formats, rows, chosen", [
    ("auto", AS_TIMED, ["Q8_0", "Q8_0"], 297, False), ("auto", AS_TIMED, ["Q8_0", "Q8_0"], 1160, True),
    ("auto", WINS, ["Q8_0", "Q8_0"], 8, True), ("auto", WINS, ["Q8_0", "Q4_K"], 4620, False),
    ("auto", LOSES, ["Q8_0"], 4620, False), ("auto", None, ["Q8_0"], 4620, False),
    ("dp4a", WINS, ["Q8_0"], 4620, False), ("tensor", LOSES, ["Q2_K", "Q4_K"], 8, True),
    ("tensor", WINS, ["Q8_0", "F16"], 4620, False)])
def test_the_choice_for_experts(wish, found, formats, rows, chosen):
    """Of a 35B-A3B, for all products of a layer: they share the tiles."""
    experts = [SimpleNamespace(format=format, n=n, k=k, places=range(256))
               for format, (n, k) in zip(formats, [(512, 2048), (2048, 512)])]
    made = Products(EmulatedCard(), wish, found)
    instruction = "m16n8k32 mixed" if chosen else None
    assert made.tiles_of_experts(experts, 8 * rows) == expert_gemm.tiles_for(8 * rows, 256, instruction)


def test_plans_count_what_experts_gain():
    """As much as their products gain, if they are all that a model has; nothing by dp4a, and nothing for few rows."""
    work = Work(grouped=Counter({Grouped(512, 2048, 256, 8, 1): 3}))
    assert gain_of(Products(EmulatedCard(), "auto", LOSES), work) == 1
    assert gain_of(Products(EmulatedCard(), "auto", AS_TIMED), work) > 1.5
    size = 512, 2048, 256, [8 * 297]
    times = [Products(EmulatedCard(), "auto", found).relative_time_of_experts(*size) for found in (LOSES, AS_TIMED)]
    assert times[0] == times[1] > 0


@pytest.mark.parametrize("wish, found, words", [
    ("dp4a", WINS, "dp4a, as asked"), ("tensor", None, r"tensor cores \(mma m16n8k32\), as asked"),
    ("auto", None, None),
    ("auto", LOSES, r"dp4a with 50\.0 TOPS on registers; tensor cores \(mma m16n8k32\) give 6\.0"),
    ("auto", WINS, r"tensor cores .* where they are faster; ms for .* by them and by dp4a: Q8_0 0\.20 and 1\.00"),
    ("auto", Found(WINS.rates, {"Q8_0": Times(1e-3, 2e-3, True)}), "dp4a, mostly faster than .*: Q8_0 2.00 and 1.00"),
    ("auto", Found(WINS.rates, {"Q8_0": Times(1e-3, 2e-4, False)}), "dp4a, .* Q8_0 dp4a alone, for other bits"),
    ("auto", Found(WINS.rates, {"Q2_K": Times(1e-3, 2e-4, True)}),
     "dp4a; the products of tensor cores .* not measured")])
def test_the_reason(wish, found, words):
    made = Products(EmulatedCard(), wish, found)
    said = made.describe(["Q8_0"])
    assert repr(made) == f"<products of prompts on emulated card 0: {made.describe() or 'dp4a'}>"
    assert said is None if words is None else re.fullmatch(words, said), said


@pytest.mark.parametrize("which, form", [
    ("emulated", "m16n8k32"), ("emulated:v100", "m8n8k4"), ("emulated:t4", "m8n8k16"), ("emulated:h100", "m16n8k32")])
def test_the_instruction(which, form):
    """An emulated card that is like another card has the instruction that this other card would choose."""
    card = open_cards(which)[0]
    instruction = products.instruction_of(card)
    assert products.form_of(instruction) == form
    if card.like:
        assert instruction == tensor_gemm.instruction_of(SimpleNamespace(kind="cuda", cc=card.like.cc))


def test_forms_are_those_of_the_kernels():
    oldest = {}
    for instruction, (cc, _) in tensor_gemm.INSTRUCTIONS.items():
        oldest.setdefault(products.form_of(instruction), []).append(cc)
    assert {form: cc for form, (cc, _) in probe.FORMS.items()} == {form: min(ccs) for form, ccs in oldest.items()}
    assert [[pipe.key for pipe in probe.forms_of(cc)] for cc in [(6, 1), (7, 0), (7, 5), (9, 0)]] == [
        [], ["m8n8k4"], ["m8n8k16"], ["m16n8k32", "m8n8k16"]]


def test_cards_without_tensor_cores():
    card = SimpleNamespace(kind="cuda", cc=(6, 1), name="cuda:0", cache_dir="nowhere", facts=dict)
    assert not products.measure_products(card)
    with pytest.raises(CardError, match="cuda:0 has no tensor cores"):
        Products(card, "tensor")
    with pytest.raises(RequestError, match="products must be auto, dp4a, tensor, not 'fast'"):
        qengine.load(TINY, card="emulated", products="fast")


# ---- measurement -----------------------------------------------------------------------------------------------------

@pytest.fixture
def real(kept, monkeypatch):
    """An emulated card that is measured as real ones are, with a small product."""
    card = EmulatedCard()
    monkeypatch.setattr(card, "kind", "pretended")
    monkeypatch.setattr(tensor_gemm, "shape_for", lambda *size: tensor_gemm.SMALLEST)
    monkeypatch.setattr(products, "instruction_of", lambda card: "m16n8k32")
    monkeypatch.setattr(products, "measure_rates", lambda *card: dict(WINS.rates))
    for name, size in {"N": 256, "K": 256, "ROWS": 100, "COMPARED": 64, "TURNS": 1}.items():
        monkeypatch.setattr(products, name, size)
    return card


def test_both_kernels_are_measured_once(real):
    assert products.measure_products(real) and kernels_of(real) == {DP4A, TENSOR}
    found = products.load(real)
    times = found.times["Q8_0"]
    assert found.rates == WINS.rates and times.is_equal and min(times.dp4a, times.tensor) > 0
    assert not products.measure_products(real) and products.load(real) == found
    products.save(real, Found(WINS.rates, {"Q8_0": Times(9.0, 9.0, False)}))
    assert products.measure_products(real, [], anew=True) is False
    assert products.measure_products(real, anew=True) and products.load(real).times["Q8_0"].is_equal


def test_throttled_tensor_cores_cost_nothing(real, monkeypatch):
    """No kernel with them is compiled or launched, and the second start measures nothing."""
    monkeypatch.setattr(products, "measure_rates", lambda *card: dict(LOSES.rates))
    monkeypatch.setattr(products, "measure_times", lambda *card: pytest.fail("measured"))
    assert products.measure_products(real) and products.load(real) == LOSES
    monkeypatch.setattr(products, "measure_rates", lambda *card: pytest.fail("measured again"))
    assert not products.measure_products(real, ["Q8_0", "Q4_K"]) and kernels_of(real) == set()


@pytest.mark.parametrize("error", [OutOfMemory("no room"), CompileError("no kernel")], ids=["memory", "compiler"])
def test_a_measurement_that_fails_leaves_products_to_dp4a(real, monkeypatch, error):
    """And it is tried again at the next start."""
    def fail(*arguments):
        raise error
    with monkeypatch.context() as broken:
        broken.setattr(products, "measure_times", fail)
        assert products.measure_products(real) and products.load(real) == Found(WINS.rates)
        assert not Products.of(real).uses_tensor("Q8_0", 4096, 4096, (2048,))
    assert products.measure_products(real) and "Q8_0" in products.load(real).times


def test_a_plan_for_tensor_cores_that_were_not_measured():
    """By the loops on registers, where these are known."""
    card, size = EmulatedCard(), (4096, 4096, (2048,))
    by_dp4a = q8_gemm.relative_time(card, *size)
    assert Products(card, "tensor").relative_time(*size) == by_dp4a
    assert Products(card, "tensor", LOSES).relative_time(*size) > by_dp4a
    assert Products(card, "tensor", Found(WINS.rates)).relative_time(*size) < by_dp4a


def test_other_bits_are_found(real, monkeypatch):
    """One number in the last row."""
    def wrong(card, y, *rest, **options):
        tensor_gemm_gemm(card, y, *rest, **options)
        if not card.defers:
            card.fill(y[products.ROWS - 1][7:8], 0)

    tensor_gemm_gemm = tensor_gemm.gemm
    monkeypatch.setattr(tensor_gemm, "gemm", wrong)
    assert products.measure_products(real) and not products.load(real).times["Q8_0"].is_equal


def test_the_report_of_the_probe_has_the_rates(kept, monkeypatch):
    """Else both instructions are measured in a loop."""
    card, value = EmulatedCard(), {"dp4a": 50.0, "dp2a": 10.0, "imad": 10.0, "m8n8k4": 90.0}
    rows = tuple(probe.Row(key, key, tops, "TOPS", tops, 1e9) for key, tops in value.items())
    monkeypatch.setattr(probe, "measure_pipe", lambda card, pipe: probe.Row(pipe.key, pipe.name, 7.0))
    assert products.measure_rates(card, "m8n8k4") == {"dp4a": 7.0, "m8n8k4": 7.0}
    probe.save(card, probe.Report({"name": "a card"}, {}, "2026-01-01", rows))
    assert products.measure_rates(card, "m8n8k4") == {"dp4a": 50.0, "m8n8k4": 90.0}
    assert products.measure_rates(card, "m16n8k32") == {"dp4a": 7.0, "m16n8k32": 7.0}


def test_what_is_kept_is_of_these_kernels(kept, monkeypatch):
    card = EmulatedCard()
    assert products.load(card) is None
    products.save(card, WINS)
    path, data = products.path_of(card), json.loads(products.path_of(card).read_text())
    assert products.load(card) == WINS and list(kept.iterdir()) == [path]
    wrong = [{"format": 0}, {"rates": [1]}, {"rates": {"dp4a": 0}}, {"rates": {"dp4a": "fast"}}]
    wrong += [{"times": {"Q8_0": times}}
              for times in ([1], [0, 1, True], [1e999, 1, True], [math.nan, 1, True], ["1"] * 3)]
    for text in "{", "[]", "{}", *(json.dumps(data | each) for each in wrong):
        path.write_text(text)
        assert products.load(card) is None and Products.of(card).describe() is None
    path.write_text(json.dumps(data | {"kernels": "others"}))       # the loops on registers are as they were
    assert products.load(card) == Found(WINS.rates)
    path.write_text(json.dumps(data | {"times": data["times"] | {"Q7": [1, 1, True]}}))
    assert products.load(card) == WINS


# ---- plans, and the command line -------------------------------------------------------------------------------------

def test_a_card_with_fast_tensor_cores_gets_more_layers(kept, monkeypatch):
    """Of two equal ones. And a pass of as many rows as were measured takes it less time, as the measurement says."""
    cards = open_cards("emulated:v100,v100")
    opened = qengine.open_model("synthetic:9b")

    def plan(wish="auto"):
        planner = qengine.make_planner(opened, cards, opened.demand(products=wish))
        return [len(layers) for layers in planner.plan.layers], planner

    assert plan()[0] == [16, 16]
    found = Found({"dp4a": 50.0, "m8n8k4": 100.0}, {"Q8_0": Times(2e-3, 1e-3, True)})
    products.save(cards[1], found)
    layers, planner = plan()
    assert layers[0] < 14 < 18 < layers[1] and plan("dp4a")[0] == [16, 16]
    square = work_of({(products.N, products.K): 3})
    monkeypatch.setattr("engine.plan.PEAK_ROWS", products.ROWS)
    assert gain_of(Products.of(cards[0]), square) == 1.0
    assert gain_of(Products.of(cards[1]), square) == pytest.approx(2, rel=1e-9)
    said = f"products of prompts on {cards[1].name}: {Products.of(cards[1]).describe()}"
    assert said in planner.report() and f"products of prompts on {cards[0].name}" not in planner.report()


def test_the_command_line(capsys, kept):
    """The start line says what multiplies, and why."""
    arguments = ["-m", TINY, "--card", "emulated", "--ctx", "64", "-p", "a", "--raw", "--max-tokens", "2"]
    assert main(arguments) == 0 and "products" not in capsys.readouterr().err
    assert main([*arguments, "--products", "tensor"]) == 0
    assert "products of prompts: tensor cores (mma m16n8k32), as asked" in capsys.readouterr().err
    products.save(EmulatedCard(), WINS)
    assert main(arguments) == 0
    assert "products of prompts: tensor cores (mma m16n8k32) where they are faster; ms for" in capsys.readouterr().err
    assert build_parser().parse_args([]).products == "auto"
    for wrong in ["--products", "fast", "-p", "a"], ["--probe", "--products", "dp4a"]:
        with pytest.raises(SystemExit):
            main(wrong)
        assert "--products" in capsys.readouterr().err


def test_products_side_by_side(card, on_tensor):
    """As micro-batches launch them."""
    rng, n, k, rows = np.random.default_rng(3), 130, 64, 33
    x = Quantized(card.upload(rng.integers(-127, 128, (rows, k), np.int8)),
                  card.upload(rng.random((rows, k // 32), np.float32)))
    w = Matrix("Q8_0", n, k, card.upload(rng.integers(-127, 128, (n, k), np.int8)),
               card.upload(rng.random((n, k // 32)).astype(np.float16)))
    ys = []
    for wish in "dp4a", "tensor":
        y = card.alloc((rows, n), np.float32)
        card.poison(y)
        Products(card, wish).multiply(y, n, w, x, rows, concurrent=True)
        ys.append(card.download(y))
    np.testing.assert_array_equal(*(y.view(np.uint32) for y in ys))
    assert np.isfinite(ys[0]).all()
