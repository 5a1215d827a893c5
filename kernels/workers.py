"""Compiles many kernels at once: processes of their own share the jobs, which fill the caches on the disk.

    job = partial(make, kernel, ...)  ──pickled──→  a worker: python, waiting at its standard input
                                      ←──a byte───  done

Numba holds a lock while it compiles, so threads would not compile side by side. A process that has talked to an NVIDIA
driver must not fork, so workers are new processes; they open no card. Kernels are sent by value, closures and notebook
cells included, and have the same key in the cache on both sides. Workers only save time: when a job fails or its worker
dies, whoever needs the kernel compiles it, and reports what is wrong.
"""

import os
import pickle
import subprocess
import sys
import threading
from queue import Empty, SimpleQueue

from numba.cuda import cloudpickle

MOST_WORKERS = 16           # each takes about 250 MB
sharers = 1                 # processes that compile at the same time: the suite of tests sets it
START = "import pickle, sys; sys.path[:] = pickle.load(sys.stdin.buffer); from kernels.workers import work; work()"


def usable_processors():
    """How many processors this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def own_processors():
    """How many processors each of the sharers has. Workers are worth their start, 2 s, from two on."""
    return usable_processors() // sharers


def work():
    """What a worker does: it runs jobs from standard input until that ends, and writes a byte after each."""
    while True:
        try:
            job = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        except Exception:       # an object of the job cannot be made in this process
            job = None
        try:
            job()
        except Exception:       # whoever needs the kernel compiles it, and reports the failure
            pass
        os.write(1, b".")


def run(jobs, on_done, n_workers=None):
    """Runs jobs in other processes, and returns when each is done or given up.

    jobs: name -> function without arguments. on_done(name) is called in this thread whenever a job has ended.
    """
    todo, ended, workers = SimpleQueue(), SimpleQueue(), []
    for name, job in jobs.items():
        todo.put((name, cloudpickle.dumps(job)))
    n_workers = min(n_workers or usable_processors(), MOST_WORKERS, len(jobs))
    try:
        for _ in range(n_workers):
            workers.append(_start())
            threading.Thread(target=_feed, args=(workers[-1], todo, ended), daemon=True).start()
        running = n_workers
        while running:
            name = ended.get()
            if name is None:
                running -= 1
            else:
                on_done(name)
    finally:
        for worker in workers:  # they are idle by now, unless this is Ctrl-C
            worker.kill()
            worker.communicate()


def _start():
    """A new worker process. It is not in the terminal's process group, so that Ctrl-C reaches this process alone."""
    worker = subprocess.Popen([sys.executable, "-c", START], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                              stderr=subprocess.DEVNULL, start_new_session=True)
    worker.stdin.write(pickle.dumps(sys.path))
    return worker


def _feed(worker, todo, ended):
    """Gives a worker one job after the other, and puts the names of jobs that have ended into `ended`. None follows
    when no jobs are left or the worker has died."""
    try:
        while True:
            name, job = todo.get_nowait()
            worker.stdin.write(job)
            worker.stdin.flush()
            if not worker.stdout.read(1):
                break
            ended.put(name)
    except (Empty, OSError, ValueError):        # no jobs are left; the worker died; it was killed, its pipes are closed
        pass
    ended.put(None)
