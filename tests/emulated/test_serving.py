"""Requests of a card that this machine's processor answers, and what becomes of a program that fails."""

import time

import numpy as np
import pytest
from numba import cuda, uint32

from kernels.emulated import native, serving
from kernels.emulated.card import EmulatedCard
from kernels.emulated.serving import FAILED, MAIL_WORDS, WORD, Service, Supply
from tests.emulated.ptx_runner import module
from tests.until import PATIENCE


@cuda.jit
def count_up(x, step):
    i = uint32(cuda.grid(1))
    x[i] = x[i] + step


@pytest.fixture(params=[1, 2, 4], ids="{} threads".format)
def service(request):
    """(Service with programs that add 1, 10 and 100 to 4,096 numbers; (card, the numbers on it))."""
    card, programs = EmulatedCard(), {}
    x = card.zeros(4096, np.uint32)
    for key, step in {(0, 0): 1, (0, 2): 10, (1, 1): 100}.items():
        with card.record() as recording:
            card.launch(count_up, 64, 64, x, step)
        programs[key] = recording.programs[0]
    made = Service(np.zeros(MAIL_WORDS, np.uint32), programs, request.param)
    made.start()
    yield made, (card, x)
    made.close()


def ask(service, layer, size, request, products=1):
    """What comes as the answer."""
    service.mail[[WORD["layer"], WORD["size"], WORD["products"]]] = layer, size, products
    service.mail[WORD["request"]] = request
    end = time.monotonic() + PATIENCE
    while service.mail[WORD["answer"]] != request and time.monotonic() < end:
        if service.mail[WORD["answer"]] & FAILED:
            break
    return service.mail[WORD["answer"]]


def test_each_request_runs_its_program_once(service):
    service, (card, x) = service
    asked = [(0, 0), (1, 1), (0, 2), (0, 2), (1, 1), (0, 0)] * 50
    for number, key in enumerate(asked):
        assert ask(service, *key, number + 1, products=3) == number + 1
    assert (card.download(x) == 50 * 2 * 111).all()
    assert service.served == len(asked) and service.products == 3 * len(asked) and 0 < service.busy < PATIENCE


@pytest.mark.parametrize("key", [(0, 1), (2, 0), (0, 3), (1, 0), (2**32 - 1, 0), (0, 2**32 - 1)], ids=str)
def test_a_request_without_a_program(service, key):
    service, (card, x) = service
    assert ask(service, 0, 0, 7) == 7
    assert ask(service, *key, 8) == 7 | FAILED
    assert service.failure == serving.UNKNOWN
    service.close()
    assert (card.download(x) == 1).all()


def test_a_program_that_fails():
    kernel = native.NativeKernel(module("mov.u32 %r1, %ctaid.x; setp.eq.u32 %p1, %r1, 3; @%p1 trap;", []))
    program = native.Program([kernel.prepare((5,), (32,), b"")])
    service = Service(np.zeros(MAIL_WORDS, np.uint32), {(0, 0): program}, 2)
    service.start()
    assert ask(service, 0, 0, 1) == FAILED and service.failure == "k stopped at a trap"
    service.close()


@pytest.fixture
def supplied():
    """(Service whose programs of two layers add 1 and 100 to a number; the number's array; wanted; the places of both
    layers; what `bring` was asked for). `bring` says where everything is, except that nobody has number 5."""
    card, asked = EmulatedCard(), []
    x, places = card.zeros(32, np.uint32), np.zeros((2, 8, 2), np.uint64)
    wanted, programs = np.zeros(4, np.int32), {}
    for layer, step in enumerate((1, 100)):
        with card.record() as recording:
            card.launch(count_up, 1, 32, x, step)
        programs[layer, 0] = recording.programs[0]

    def bring(layer, numbers):
        asked.append((layer, numbers.tolist(), card.download(x)[0]))
        if 5 in numbers:
            raise ValueError("there is no 5")
        places[layer, numbers, 0] = 1

    supply = Supply(wanted, [each.ctypes.data for each in places], bring)
    made = Service(np.zeros(MAIL_WORDS, np.uint32), programs, 2, supply)
    made.start()
    yield made, (card, x), wanted, places, asked
    made.close()


def test_what_is_not_there_is_brought_before_the_program_runs(supplied):
    service, (card, x), wanted, places, asked = supplied
    requests = (0, [2, 3]), (0, [3, 2]), (1, [2]), (0, [7]), (1, [2]), (0, [1, 2, 3, 7])
    for number, (layer, numbers) in enumerate(requests):
        wanted[:] = 5                                   # what a request does not want may be missing
        wanted[:len(numbers)] = numbers
        assert ask(service, layer, 0, number + 1, products=len(numbers)) == number + 1
    assert asked == [(0, [2, 3], 0), (1, [2], 2), (0, [7], 102), (0, [1, 2, 3, 7], 203)]
    assert (card.download(x) == 204).all() and (places[0, [1, 2, 3, 7], 0] == 1).all()


def test_what_cannot_be_brought_ends_the_service(supplied):
    service, (card, x), wanted, _, _ = supplied
    wanted[:2] = 4, 5
    assert ask(service, 1, 0, 1) == 1
    assert ask(service, 1, 0, 2, products=2) == 1 | FAILED
    assert service.failure == "there is no 5" and (card.download(x) == 100).all()


def test_an_end_without_a_request(service):
    service, _ = service
    start = time.monotonic()
    service.close()
    service.close()
    assert time.monotonic() - start < PATIENCE and service.mail[WORD["answer"]] == FAILED and not service.failure


def test_waiting_costs_next_to_nothing(service):
    """Of a processor, some time after the last request. Threads of former tests may work meanwhile."""
    service, _ = service

    def used():
        threads = service._thread, *service._pool._threads
        return sum(time.clock_gettime(time.pthread_getcpuclockid(thread.ident)) for thread in threads)

    time.sleep(0.5)
    start = used()
    time.sleep(1)
    assert used() - start < 0.1
