"""`kernel[grid, block](x, ...)`: a launch as Numba's users write it, on the card that the arrays are on.

Numba's own `kernel[grid, block]` always launches on NVIDIA's current device and knows no Array of ours. Notebooks,
and whoever knows Numba, should be able to write their usual line and run it on any card, emulated ones included.
So `accept_configurations` replaces one method of Numba, `CUDADispatcher.__getitem__`, for the whole process. A launch
whose arguments hold no Array still goes to Numba itself, on a machine that has an NVIDIA driver.

Cards of both kinds call it when they are made: before there is a card there is no Array to launch with.
"""

from contextlib import nullcontext

from numba.cuda import is_available
from numba.cuda.dispatcher import CUDADispatcher

from kernels.card import Array, LaunchError


class Configured:
    """What `kernel[grid, block]` gives; a stream and the bytes of dynamic shared memory may follow the block.

    Calling it with an Array among the arguments is `launch` on that array's card. Raises LaunchError if there is none,
    and no driver either with which Numba could launch.

    careful(configured, card, args): the context manager that such a launch runs in. Notebooks set it: there launches
    on an emulated card are checked (kernels/emulated/checking.py), and a LaunchError is raised at this very call.
    """

    careful = None

    def __init__(self, kernel, grid, block, stream=0, shared=0):
        self.kernel, self.grid, self.block, self.stream, self.shared = kernel, grid, block, stream, shared

    def __call__(self, *args):
        array = next((value for value in args if type(value) is Array), None)
        if array is None and not is_available():
            raise LaunchError(f"{self.kernel.__name__}: none of its arguments is an array of a card, and a NumPy "
                              "array x becomes one by card.upload(x)")
        if array is None:
            return self.kernel.configure(self.grid, self.block, self.stream, self.shared)(*args)
        if array.card is None:
            raise LaunchError(f"{self.kernel.__name__}: {array!r}")
        card = array.card
        with self.careful(card, args) if self.careful else nullcontext():
            card.launch(self.kernel, self.grid, self.block, *args, shared=self.shared, stream=self.stream or None)


def _configured(kernel, configuration):
    if not isinstance(configuration, tuple) or len(configuration) < 2:
        raise LaunchError(f"{kernel.__name__}[{configuration}]: a kernel is launched with its blocks and threads, "
                          f"{kernel.__name__}[blocks, threads](...)")
    return Configured(kernel, *configuration)


def accept_configurations():
    """Lets every kernel of this process take Arrays in `kernel[grid, block](...)`. A second call changes nothing."""
    CUDADispatcher.__getitem__ = _configured
