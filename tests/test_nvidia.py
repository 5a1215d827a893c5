"""kernels/nvidia.py without a GPU: the tests of every card over a stand-in for the driver, and its errors."""

import inspect
from types import SimpleNamespace

import pytest

from kernels import nvidia
from kernels.card import CardError, LaunchError, open_cards
from tests import fake_driver, test_card
from tests.test_card import add_scaled


class FakeCard(nvidia.NvidiaCard):
    """What is collected after a test finds the real driver back in its place and must not call it."""

    def finalize(self, name, *args):
        if nvidia.driver is fake_driver:
            super().finalize(name, *args)


@pytest.fixture
def fake_card(monkeypatch):
    monkeypatch.setattr(nvidia, "driver", fake_driver)
    monkeypatch.setattr(nvidia, "NvidiaCard", FakeCard)
    return FakeCard(0)


# The stand-in has one thread.
OTHERS = {"test_launches_from_several_threads", "test_other_threads_are_not_recorded"}
SHARED_TESTS = [test for name, test in vars(test_card).items() if name.startswith("test_")
                and name not in OTHERS and list(inspect.signature(test).parameters) == ["card"]]


@pytest.mark.parametrize("test", SHARED_TESTS, ids=lambda test: test.__name__[5:])
def test_as_every_card(fake_card, test):
    test(fake_card)


def test_description(fake_card):
    assert fake_card.describe() == "Fake Card, sm_86, 68 SMs, 4.0 GB"


def test_context_is_left_as_it_was_by_finalizers(fake_card):
    x = fake_card.zeros(4, "float32")
    fake_driver.cuCtxSetCurrent("of somebody else")
    del x
    assert fake_driver.contexts == ["of somebody else"]


def test_choice(fake_card, monkeypatch):
    assert [card.name for card in open_cards()] == [card.name for card in open_cards("cuda:0")] == ["cuda:0"]
    with pytest.raises(CardError, match="no NVIDIA card 1: the driver knows of 1"):
        open_cards("cuda:0,1")
    monkeypatch.setitem(fake_driver.ATTRIBUTES, "COMPUTE_CAPABILITY_MAJOR", 6)
    assert open_cards()[0].name == "emulated card 0"
    with pytest.raises(CardError, match="7.0 or newer"):
        open_cards("cuda")
    monkeypatch.setattr(fake_driver, "cuDeviceGetCount", lambda: (fake_driver.OK, 0))
    assert open_cards()[0].name == "emulated card 0"
    with pytest.raises(CardError, match="no NVIDIA card: the driver knows of 0"):
        open_cards("cuda")


def test_ptx_that_the_driver_refuses(fake_card):
    compiled = SimpleNamespace(name="mine", ptx="broken", entry="kernel_mine", signature=())
    message = "mine does not load on Fake Card, driver for CUDA 12.9: .*INVALID_PTX.* line"
    with pytest.raises(CardError, match=message):
        fake_card._load(compiled)


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
