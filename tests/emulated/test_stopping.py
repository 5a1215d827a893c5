"""Kernels of readers, from notebooks and scripts, can be stopped by Ctrl-C, and the card goes on."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from numba import cuda
from numba.types import uint32

from kernels.emulated.card import EmulatedCard
from kernels.emulated.translate import Translator
from kernels.emulated.watching import Stoppable

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 120                           # far more than any of this takes

PROGRAM = '''
import os, signal, sys, threading, time
import numpy as np
from numba import cuda
from numba.types import uint32
from kernels.emulated.card import EmulatedCard

@cuda.jit
def endless(y, n):
    b = uint32(0)
    while b < n:
        y[uint32(cuda.grid(1))] += uint32(1)

@cuda.jit
def waiting(y, n):
    """One half of the block at a barrier, for the other one."""
    b = uint32(0)
    while b < n and cuda.threadIdx.x >= uint32(32):
        if y[uint32(0)] == uint32(77):
            b = n
    cuda.syncthreads()

@cuda.jit
def add_one(y):
    y[uint32(cuda.grid(1))] += uint32(1)

signal.signal(signal.SIGINT, signal.default_int_handler)        # programs in the background ignore it

def interrupted(wait):
    """Ctrl-C, a second after a wait has begun."""
    threading.Timer(1, os.kill, (os.getpid(), signal.SIGINT)).start()
    try:
        wait()
    except KeyboardInterrupt:
        print("interrupted", flush=True)

card = EmulatedCard(0, late=sys.argv[1] == "late")
y, z = card.zeros(64 * 64, np.uint32), card.zeros(64, np.uint32)
n = 0
for kernel in endless, waiting:
    for wait in card.synchronize, lambda: card.download(y), lambda: (time.sleep(0.3), card.synchronize()):
        kernel[64, 64](y, 1)
        interrupted(wait)
        add_one[1, 64](z)
        n += 1
        assert (card.download(z) == n).all()
with card.counting() as log:
    add_one[1, 64](z)
assert log[0].counts.global_ == 4 and (card.download(z) == n + 1).all()
print("on")
'''


@pytest.mark.parametrize("when", ["soon", "late"])
def test_interrupts_end_kernels_of_readers(tmp_path, when):
    """Whichever thread runs them. Only a program of its own can be interrupted here."""
    (tmp_path / "program.py").write_text(PROGRAM)
    done = subprocess.run([sys.executable, tmp_path / "program.py", when], capture_output=True, text=True,
                          timeout=SECONDS, env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert done.stdout == 6 * "interrupted\n" + "on\n", done.stderr


TWO = PROGRAM[:PROGRAM.index("card = ")] + '''
@cuda.jit
def long(y, n):
    """A second or more on any processor."""
    for _ in range(n):
        y[uint32(cuda.threadIdx.x)] += uint32(1)

@cuda.jit
def longer(y, n):
    for _ in range(n):
        y[uint32(cuda.threadIdx.x)] += uint32(1)

a, b = EmulatedCard(0), EmulatedCard(1)
own, other = {"same": (long, long), "another": (long, longer)}[sys.argv[1]]
y, z = a.zeros(1, np.uint32), b.zeros(1, np.uint32)
for kernel, array in (own, y), (other, z):
    kernel[1, 1](array, 1)                  # compiled
    array.card.synchronize()
said = []

def work():
    try:
        own[1, 1](y, 1_000_000_000)
        said.append(int(a.download(y)[0]))
    except Exception as error:
        said.append(str(error))

thread = threading.Thread(target=work)
thread.start()
other[1, 1](z, 1_000_000_000)
interrupted(b.synchronize)
thread.join()
print(said[0])
other[1, 1](z := b.zeros(1, np.uint32), 5)
print(int(b.download(z)[0]))
'''


@pytest.mark.parametrize("kernels", ["same", "another"])
def test_an_interrupt_falsifies_nothing_at_another_card(tmp_path, kernels):
    """A kernel there goes on. Where it is the same one, it ends with an error if it was running."""
    (tmp_path / "program.py").write_text(TWO)
    done = subprocess.run([sys.executable, tmp_path / "program.py", kernels], capture_output=True, text=True,
                          timeout=SECONDS, env={**os.environ, "PYTHONPATH": str(ROOT)})
    first, said, after = done.stdout.splitlines()
    assert (first, after) == ("interrupted", "5"), done.stderr
    assert said == "1000000001" or kernels == "same" and "by Ctrl-C at another card" in said


def test_a_program_that_leaves_an_endless_kernel_can_be_ended(tmp_path):
    """At its end Python waits for what was queued; then Ctrl-C is heard, too."""
    program = re.sub(r"\ncard = (?s:.*)", '''
card = EmulatedCard(0)
endless[1, 64](card.zeros(64, np.uint32), 1)
print("queued", flush=True)
''', PROGRAM)
    (tmp_path / "program.py").write_text(program)
    with subprocess.Popen([sys.executable, tmp_path / "program.py"], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                          text=True, env={**os.environ, "PYTHONPATH": str(ROOT)}) as started:
        try:
            assert started.stdout.readline() == "queued\n"
            with pytest.raises(subprocess.TimeoutExpired):
                started.wait(2)
            started.send_signal(signal.SIGINT)
            started.wait(SECONDS)
        finally:
            started.kill()


def test_only_kernels_of_readers_look_at_a_flag(tmp_path):
    """The project's own are translated as ever, at no cost."""
    @cuda.jit
    def own(y):
        for i in range(y.size):
            y[uint32(i)] = uint32(i)

    code = "@cuda.jit\ndef foreign(y):\n    for i in range(y.size):\n        y[uint32(i)] = uint32(i)\n"
    (tmp_path / "foreign.py").write_text(code)
    names = {"cuda": cuda, "uint32": uint32}
    exec(compile(code, tmp_path / "foreign.py", "exec"), names)
    card = EmulatedCard(0)
    for kernel, translator in (own, Translator), (names["foreign"], Stoppable):
        y = card.zeros(5, np.uint32)
        kernel[1, 1](y)
        assert card.download(y).tolist() == [0, 1, 2, 3, 4]
        function = next(f for types, f in card._functions.items() if types[0] is kernel)
        assert function.handle.translator is translator
