"""kernels/nvidia.py without a GPU: the tests of every card over a stand-in for the driver, and its errors."""

import itertools
import re
import threading
import warnings
from types import SimpleNamespace

import numpy as np
import pytest
from cuda.pathfinder import DynamicLibNotFoundError
from numba import cuda
from numba.types import uint32

import qengine
from engine.worker import Worker
from kernels import assembler
from kernels import compile as compiler
from kernels import nvidia, workers
from kernels.card import CardError, LaunchError
from kernels.intrinsics import let_next_begin, wait_for_previous
from kernels.open import open_cards
from tests import card_cases, fake_driver
from tests.card_cases import CASES, add_scaled


@cuda.jit
def double_after_previous(x, n):
    let_next_begin()
    i = uint32(uint32(cuda.blockIdx.x) * uint32(cuda.blockDim.x) + uint32(cuda.threadIdx.x))
    wait_for_previous()
    if i < n:
        x[i] = x[i] + x[i]


class FakeCard(nvidia.NvidiaCard):
    """What is collected after a test finds the real driver back in its place and must not call it."""

    def finalize(self, name, *args):
        if nvidia.driver is fake_driver:
            super().finalize(name, *args)


@pytest.fixture
def fake_card(monkeypatch):
    monkeypatch.setattr(nvidia, "driver", fake_driver)
    monkeypatch.setattr(nvidia, "NvidiaCard", FakeCard)
    monkeypatch.setattr(assembler, "assemble", fake_driver.assembled(assembler.assemble))
    return FakeCard(0)


# The stand-in has one thread.
OF_THREADS = card_cases.launches_from_several_threads, card_cases.other_threads_are_not_recorded


@pytest.mark.parametrize("case", [case for case in CASES if case not in OF_THREADS], ids=lambda case: case.__name__)
def test_as_every_card(fake_card, case):
    case(fake_card)


def test_a_plan_leaves_memory_for_the_code_of_kernels(fake_card, monkeypatch):
    """But an array gets this memory, too, if it wants it."""
    taken = fake_driver.TOTAL - fake_driver.cuMemGetInfo()[1]
    monkeypatch.setattr(fake_driver, "TOTAL", taken + nvidia.CODE_BYTES + 1024)
    assert fake_card.free_bytes == 1024
    array = fake_card.alloc(2048, np.uint8)
    assert len(array) == 2048 and fake_card.free_bytes == 0


def test_description(fake_card):
    assert fake_card.describe() == "Fake Card, sm_86, 68 SMs, 4.0 GB"


def test_facts(fake_card, tmp_path, monkeypatch):
    """A CMP 100-210's memory and link: 829 GB/s, and 250 MB/s of PCIe 1.0 x1."""
    folder = tmp_path / "0000:0a:00.0"
    folder.mkdir()
    monkeypatch.setattr(nvidia, "PCI_DEVICES", tmp_path)
    facts = fake_card.facts()
    assert facts["uuid"] == bytes(range(16)).hex() and facts["driver"].endswith("CUDA 12.9")
    assert facts["memory"] == "810 MHz × 4096 bit" and round(facts["memory GB/s"]) == 829
    assert "link" not in facts
    for speed, lanes, gigabytes in (("2.5 GT/s PCIe", 1, 0.25), ("32.0 GT/s PCIe", 16, 63.0)):
        (folder / "current_link_speed").write_text(f"{speed}\n")
        (folder / "current_link_width").write_text(f"{lanes}\n")
        assert fake_card.facts()["link GB/s"] == pytest.approx(gigabytes, rel=1e-3)
    assert not fake_card.can_access(fake_card)


def test_context_is_left_as_it_was_by_finalizers(fake_card):
    x = fake_card.zeros(4, "float32")
    fake_driver.cuCtxSetCurrent("of somebody else")
    del x
    assert fake_driver.contexts == ["of somebody else"]


def test_what_the_default_stream_runs_goes_first(fake_card):
    """Before the kernels of other streams: those of decode steps before those of prompts."""
    least, greatest = fake_card.call(fake_driver.cuCtxGetStreamPriorityRange)
    assert fake_card.default_stream.handle.priority == greatest < least == fake_card.stream().handle.priority


def test_choice(fake_card, monkeypatch):
    assert [card.name for card in open_cards()] == [card.name for card in open_cards("cuda:0")] == ["cuda:0"]
    with pytest.raises(CardError, match="no NVIDIA card 1: the driver knows of 1"):
        open_cards("cuda:0,1")
    with pytest.raises(CardError, match="named twice: cuda:0,0"):
        open_cards("cuda:0,0")
    monkeypatch.setitem(fake_driver.ATTRIBUTES, "COMPUTE_CAPABILITY_MAJOR", 6)
    assert open_cards()[0].name == "emulated card 0"
    with pytest.raises(CardError, match="7.0 or newer"):
        open_cards("cuda")
    monkeypatch.setattr(fake_driver, "cuDeviceGetCount", lambda: (fake_driver.OK, 0))
    assert open_cards()[0].name == "emulated card 0"
    with pytest.raises(CardError, match="no NVIDIA card: the driver knows of 0"):
        open_cards("cuda")


@pytest.mark.parametrize("status, why", [
    (DynamicLibNotFoundError("no library"), "NVIDIA's driver is not installed \\(there is no libcuda.so.1\\)"),
    (RuntimeError("no cuInit_v2"), "NVIDIA's driver is too old, 525 or newer is needed \\(no cuInit_v2\\)"),
    (fake_driver.CUresult.CUDA_ERROR_SYSTEM_DRIVER_MISMATCH, "NVIDIA's driver does not start \\(CUDA_ERROR_SYSTEM_"),
    (fake_driver.CUresult.CUDA_ERROR_NO_DEVICE, "the driver knows of 0")])
def test_a_card_without_a_working_driver_is_named(fake_card, monkeypatch, tmp_path, status, why):
    """It is a 3D controller, as mining cards are. No word of it where the machine has no such card."""
    def init(flags):
        if isinstance(status, Exception):
            raise status
        return (status,)

    monkeypatch.setattr(fake_driver, "cuInit", init)
    monkeypatch.setattr(nvidia, "PCI_DEVICES", tmp_path)
    for bus, vendor, kind in ("0000:00:02.0", "0x8086", "0x030000"), ("0000:01:00.1", "0x10de", "0x040300"):
        (tmp_path / bus).mkdir()
        (tmp_path / bus / "vendor").write_text(vendor + "\n")
        (tmp_path / bus / "class").write_text(kind + "\n")
    with pytest.raises(CardError, match=f"^no NVIDIA card: {why}"):
        open_cards("cuda")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert open_cards()[0].kind == "emulated"
    (tmp_path / "0000:01:00.1" / "class").write_text("0x030200\n")
    with pytest.warns(UserWarning, match=f"^the NVIDIA card at 0000:01:00.1 of the PCI bus cannot be used: {why}"):
        assert open_cards()[0].kind == "emulated"


def kernel_of(text):
    return SimpleNamespace(name="mine", ptx=text, entry="kernel_mine", signature=())


needs_assembler = pytest.mark.skipif(not assembler.find_assembler(), reason="ptxas of the toolkit is not installed")


@needs_assembler
def test_kernels_are_loaded_as_machine_code_kept_on_disk(fake_card, tmp_path, monkeypatch):
    monkeypatch.setattr(fake_driver, "machine_code", {})     # line tables hold dates: equal PTX, other bytes
    fake_card.cache_dir = tmp_path
    x = fake_card.zeros(4, "float32")
    fake_card.launch(add_scaled, 1, 32, x, x, 4, 1.0)
    compiled = compiler.compile_kernel(add_scaled, ("float32[1]", "float32[1]", "uint32", "float32"), (8, 6), tmp_path)
    cubin, = [cubin for cubin, ptx in fake_driver.machine_code.items() if ptx == compiled.ptx]
    assert cubin.startswith(b"\x7fELF")
    file, = (tmp_path / "cubin").iterdir()
    assert compiler.load(file) == cubin
    monkeypatch.setattr(assembler, "run_assembler", None)           # assembled once: the next one comes from the disk
    assert assembler.assemble(compiled, (8, 6), tmp_path) == cubin
    file.write_bytes(b"damaged")
    with pytest.raises(TypeError):
        assembler.assemble(compiled, (8, 6), tmp_path)
    with pytest.raises(TypeError):                       # another architecture is another file
        assembler.assemble(compiled, (8, 0), tmp_path)


@needs_assembler
def test_kernels_of_a_model_are_assembled_by_workers(fake_card, tmp_path, monkeypatch):
    fake_card.cache_dir = tmp_path
    x = fake_card.zeros(4, "float32")
    with fake_card.collecting() as needed:
        for n in (4, np.int32(4), np.int64(4), np.uint8(4)):             # a kernel each
            fake_card.launch(add_scaled, 1, 32, x, x, n, 1.0)
    monkeypatch.setattr(assembler, "run_assembler", None)                   # not by this process
    monkeypatch.setattr(workers, "sharers", 1)
    monkeypatch.setattr(workers, "usable_processors", lambda: 2)
    fake_card.compile_kernels(needed)
    for kernel in needed:
        fake_card.load_kernel(*kernel)
    assert len(fake_card._functions) == len(list((tmp_path / "cubin").iterdir())) == 4
    assert not any(fake_card.download(x))


SUPPORTED = [cc for cc in compiler.supported_ccs() if cc >= nvidia.OLDEST]


@needs_assembler
@pytest.mark.parametrize("cc", SUPPORTED, ids="{0[0]}.{0[1]}".format)
def test_every_architecture_of_the_toolkit_is_assembled(cc, tmp_path):
    text = ".version 7.8\n.target sm_52\n.address_size 64\n.visible .entry kernel_mine() { ret; }\n"
    assert assembler.assemble(kernel_of(text), cc, tmp_path).startswith(b"\x7fELF")


def test_a_card_newer_than_the_toolkit_is_given_ptx(fake_card, monkeypatch):
    monkeypatch.setitem(fake_driver.ATTRIBUTES, "COMPUTE_CAPABILITY_MINOR", 99)
    assert_ptx_is_loaded(FakeCard(0), monkeypatch)


@pytest.mark.parametrize("version", ["", "ptxas: NVIDIA (R) Ptx optimizing assembler\nrelease 1.0, V1.0.0"],
                         ids=["none", "old"])
def test_without_an_assembler_of_the_toolkit_the_driver_is_given_ptx(fake_card, monkeypatch, version):
    monkeypatch.setattr(assembler.pathfinder, "find_nvidia_binary_utility", lambda name: "ptxas" if version else None)
    monkeypatch.setattr(assembler.subprocess, "run", lambda *args, **options: SimpleNamespace(stdout=version))
    assembler.find_assembler.cache_clear()
    try:
        assert_ptx_is_loaded(fake_card, monkeypatch)
    finally:
        assembler.find_assembler.cache_clear()


def assert_ptx_is_loaded(card, monkeypatch):
    monkeypatch.setattr(fake_driver, "machine_code", {})
    x = card.upload(np.ones(4, np.float32))
    card.launch(add_scaled, 1, 32, x, x, 4, 2.0)
    assert card.download(x).tolist() == [3.0] * 4 and not fake_driver.machine_code


@needs_assembler
def test_ptx_that_cannot_be_assembled(fake_card):
    text = ".version 8.0\n.target sm_80\n.address_size 64\nnonsense\n"
    with pytest.raises(CardError, match="mine cannot be assembled for sm_86: ptxas PTX, line 4.*nonsense"):
        fake_card._load(kernel_of(text))


def test_an_image_that_the_driver_refuses(fake_card, monkeypatch):
    monkeypatch.setattr(assembler, "assemble", lambda *args: b"broken\0")
    message = "mine does not load on Fake Card, driver for CUDA 12.9: .*INVALID_PTX.* line"
    with pytest.raises(CardError, match=message):
        fake_card._load(kernel_of(""))


def test_small_copies_are_read_when_they_are_given(fake_card, monkeypatch):
    """The driver copies as late as it may; meanwhile the host goes on, and the pageable memory changes."""
    late, copy = [], fake_driver.cuMemcpyHtoDAsync

    def catch_up(wait):
        def first_copy(*arguments):
            while late:
                copy(*late.pop(0))
            return wait(*arguments)
        return first_copy

    monkeypatch.setattr(fake_driver, "cuMemcpyHtoDAsync", lambda *copied: late.append(copied) or (fake_driver.OK,))
    for name in "cuEventSynchronize", "cuStreamSynchronize":
        monkeypatch.setattr(fake_driver, name, catch_up(getattr(fake_driver, name)))
    n, waited = nvidia.STAGED // 3, 0
    arrays = [fake_card.alloc((n + i,), np.uint8) for i in range(9)]
    for i, array in enumerate(arrays):
        host = np.full(n + i, i, np.uint8)
        fake_card.copy_in(array, host)
        host[:] = 99
        waited += not late
    assert late and not waited
    for i, array in enumerate(arrays):
        assert (fake_card.download(array) == i).all()


@pytest.mark.parametrize("timeout", [None, 1])
def test_what_was_waited_for_is_progress(fake_card, timeout):
    before = fake_card.n_done
    fake_card._await(fake_card.default_stream.record(), timeout)
    assert fake_card.n_done == before + 1


def test_what_the_host_asks_of_the_driver_for_a_token(fake_card, monkeypatch):
    """The worker: one replay and, beside the next, one copy of the tokens; each 64 tokens a page, and the place of a
    checkpoint, which the step itself takes. Others wait for the copy alone."""
    def uncompiled(kernel, types, cc, cache_dir):       # kernels do nothing here, and are not worth compiling
        return compiler.Compiled(kernel.__name__, types, kernel.__name__, "")

    monkeypatch.setattr(compiler, "find_kernel", uncompiled)
    monkeypatch.setattr(compiler, "compile_kernel", uncompiled)
    monkeypatch.setattr(FakeCard, "_is_cached", lambda *arguments: True)
    monkeypatch.setattr(assembler, "assemble", lambda *arguments: None)
    for name, result in {"cuModuleLoadDataEx": "", "cuModuleGetFunction": "", "cuFuncGetAttribute": 0}.items():
        monkeypatch.setattr(fake_driver, name, lambda *arguments, result=result: (fake_driver.OK, result))
    for name in "cuFuncSetAttribute", "cuLaunchKernel":
        monkeypatch.setattr(fake_driver, name, lambda *arguments: (fake_driver.OK,))
    engine, calls = qengine.load("synthetic:tiny", card=fake_card, ctx=256, progress=False, draft="off",
                                 products="dp4a"), {True: [], False: []}
    monkeypatch.setattr(fake_card, "fill", lambda *arguments: None)
    for each in itertools.chain(*engine.pipeline.last.sampler.results):     # kernels do nothing: a step gives token 0
        fake_card.copy_in(each.outcomes, np.array([[1, *[0] * 8, *[-1] * 7]], np.int32))
    engine.submit(qengine.Request([3])).wait()          # what the first asks of the card is not asked again
    for name in dir(fake_driver):
        if name.startswith("cu") and not re.fullmatch("cuCtx.*|cuEventDestroy", name):
            function = getattr(fake_driver, name)
            monkeypatch.setattr(fake_driver, name, lambda *a, name=name, f=function: calls[
                isinstance(threading.current_thread(), Worker)].append(name) or f(*a))
    engine.submit(qengine.Request([1, 2], max_tokens=100, ignore_eos=True)).wait()
    steps = " ".join(calls[True]).split("cuGraphLaunch ")[2:-1]
    once = "cuEventRecord cuStreamWaitEvent cuMemcpyDtoHAsync cuEventRecord ", "cuStreamWaitEvent "
    assert len(steps) == 97 and steps.count("".join(once)) == 95
    assert steps.count("cuMemcpyHtoDAsync cuMemcpyHtoDAsync ".join(once)) == 1  # a page, and where a checkpoint goes
    assert steps.count("cuMemcpyHtoDAsync ".join(once)) == 1                        # no checkpoint until the next page
    assert set(calls[False]) == {"cuEventQuery", "cuEventElapsedTime"}
    assert calls[False].count("cuEventElapsedTime") <= 3        # how long a part of a prompt took, from three events
    engine.close()


@pytest.mark.parametrize("cc, launch", [((8, 0), "cuLaunchKernel"), ((9, 0), "cuLaunchKernelEx")])
def test_a_kernel_that_waits_by_itself_is_launched_early_where_a_card_can(fake_card, monkeypatch, cc, launch):
    fake_card.cc, launches = cc, []
    for name in "cuLaunchKernel", "cuLaunchKernelEx":
        function = getattr(fake_driver, name)
        monkeypatch.setattr(fake_driver, name, lambda *a, name=name, f=function: launches.append(name) or f(*a))
    x = fake_card.upload(np.arange(33, dtype=np.float32))
    fake_card.launch(double_after_previous, (2, 1, 1), (32, 1, 1), x, 33)
    assert launches[0] == launch and (fake_card.download(x) == 2 * np.arange(33)).all()


def test_errors_of_launch_and_of_waiting(fake_card, monkeypatch):
    x = fake_card.zeros(4, "float32")
    fake_card.launch(add_scaled, 1, 32, x, x, 4, 1.0)
    fault = (fake_driver.CUresult.CUDA_ERROR_ILLEGAL_ADDRESS,)
    with monkeypatch.context() as patch:
        patch.setattr(fake_driver, "cuStreamSynchronize", lambda stream: fault)
        with pytest.raises(LaunchError, match="cuda:0 is broken: .*ILLEGAL_ADDRESS.*words.*: add_scaled"):
            fake_card.synchronize()
    with monkeypatch.context() as patch:
        patch.setattr(fake_driver, "cuLaunchKernel", lambda *arguments: fault)
        with pytest.raises(LaunchError, match=r"add_scaled, grid \(2, 1, 1\), block .*ILLEGAL_ADDRESS"):
            fake_card.launch(add_scaled, 2, 32, x, x, 4, 1.0)
