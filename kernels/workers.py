"""Many kernels at once: jobs that fill the caches on the disk, shared out among processes of their own.

    job = partial(make, kernel, ...)  ──pickled──→  a worker: python, waiting at its standard input
                                      ←──a byte───  done

Numba holds its lock while it compiles, so threads would take turns. A process that has talked to an NVIDIA driver must
not fork, so workers are started afresh; they open no card. Kernels travel by value, closures and notebook cells
included, and have the same key in the cache on both sides. Workers only save time: a job that failed, or whose worker
died, is left for whoever needs the kernel, and fails there with its own words.
"""

import os
import pickle
import subprocess
import sys
import threading
from queue import Empty, SimpleQueue

from numba.cuda import cloudpickle

MOST_WORKERS = 16           # each takes about 250 MB
START = "import pickle, sys; sys.path[:] = pickle.load(sys.stdin.buffer); from kernels.workers import work; work()"


def usable_processors():
    """How many processors this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def work():
    """The life of a worker: jobs from standard input until it ends, a byte to standard output after each."""
    while True:
        try:
            job = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        except Exception:       # an object that cannot be made here
            job = None
        try:
            job()
        except Exception:       # whoever needs the kernel hears of it
            pass
        os.write(1, b".")


def run(jobs, on_done, n_workers=None):
    """Runs jobs, a dict of name -> function without arguments, in other processes; all are done, or given up, when
    it returns. on_done(name) is called for each as it ends, by this thread."""
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
        for worker in workers:  # idle by now, unless Ctrl-C led here
            worker.kill()
            worker.communicate()


def _start():
    """A worker. It is not in the terminal's group: Ctrl-C is for us."""
    worker = subprocess.Popen([sys.executable, "-c", START], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                              stderr=subprocess.DEVNULL, start_new_session=True)
    worker.stdin.write(pickle.dumps(sys.path))
    return worker


def _feed(worker, todo, ended):
    """Gives a worker one job after the other; at the end, of the jobs or of the worker, None is put into `ended`."""
    try:
        while True:
            name, job = todo.get_nowait()
            worker.stdin.write(job)
            worker.stdin.flush()
            if not worker.stdout.read(1):
                break
            ended.put(name)
    except (Empty, OSError, ValueError):        # no more jobs; the worker died; it was killed and its pipes closed
        pass
    ended.put(None)
