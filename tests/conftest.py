"""The cards that tests run on: the emulated one and every NVIDIA card of this machine."""

import gc
from functools import cache

import pytest

pytest.register_assert_rewrite("tests.card_cases")      # before anything imports it

from kernels import workers
from kernels.nvidia import open_nvidia_cards
from kernels.open import open_cards
from tests.oracle import EMBEDDING, RERANKER, oracle_path

pytest.register_assert_rewrite("tests.clients", "tests.four_ways")     # what test files share


@cache
def _cards():
    """One card of each kind and number, by name."""
    return {card.name: card for card in open_cards("emulated") + open_nvidia_cards(required=False)}


def pytest_configure(config):
    """Processes that share the suite on as many processors compile all kernels themselves, since each remembers the
    device functions that it has compiled."""
    workers.sharers = getattr(config, "workerinput", {}).get("workercount", 1)


def pytest_terminal_summary(terminalreporter):
    """Says which cards the tests ran on, also where -q hides the header."""
    for card in _cards().values():
        terminalreporter.write_line(f"tested on {card.describe()}")


# Files that take longest, mostly to compile kernels. Two processes share the suite file by file: a long file at the end
# would leave one of them without work. Files that need the same kernels are not neighbours: both processes would
# compile each kernel at the same time.
LONGEST = ("test_ptx.py", "test_attend_decode.py", "test_notebooks.py", "test_quantized_models.py", "test_q8_gemm.py",
           "test_across_cards.py", "test_expert_gemv.py", "test_tensor_gemm.py", "test_plan.py", "test_expert_gemm.py",
           "test_several_models.py", "test_nvidia.py", "test_quant_gemv.py", "test_decode_tile.py",
           "test_decode_tensor.py")


def pytest_collection_modifyitems(items):
    """The longest files first; the others stay in their order. What is slow on the emulated card is `slow` there."""
    for item in items:
        if item.get_closest_marker("slow_if_emulated") and _cards()[item.callspec.params["card"]].kind == "emulated":
            item.add_marker("slow")
    items.sort(key=lambda item: LONGEST.index(item.path.name) if item.path.name in LONGEST else len(LONGEST))


def pytest_generate_tests(metafunc):
    if "card" in metafunc.fixturenames:
        metafunc.parametrize("card", list(_cards()), indirect=True, scope="session")


@pytest.fixture(scope="session")
def card(request):
    """Each card in turn. It is shared by all tests: a test that breaks a card opens its own."""
    return _cards()[request.param]


@pytest.fixture(scope="module", autouse=True)
def _former_files_are_left_out_of_collections():
    """Compiling leaves millions of objects, and a collection that looks through them takes seconds. Many tests ask for
    one."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def compiled_when_launched(monkeypatch):
    """Engines compile a kernel at its first launch, instead of all that may be launched when they start: for tests of
    models with kernels of their own, many of which they never launch."""
    import qengine                          # not where only kernels are tested
    monkeypatch.setattr(qengine.Stage, "needed_kernels", lambda stage: {})


@pytest.fixture(scope="module")
def engine(card):
    """The small model of the tests on a card, for a module's tests to share; each leaves it as it was."""
    from tests.models import load_tiny      # not where only kernels are tested
    engine = load_tiny(card)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def embedder(card):
    """The reference's embedding model on a card."""
    yield from _reference(card, EMBEDDING)


@pytest.fixture(scope="module")
def reranker(card):
    """The reference's reranker on a card."""
    yield from _reference(card, RERANKER)


def _reference(card, name):
    import qengine                          # not where only kernels are tested
    engine = qengine.load(oracle_path(f"gguf/{name}.gguf"), card=card, progress=False, ctx=512)
    yield engine
    engine.close()
