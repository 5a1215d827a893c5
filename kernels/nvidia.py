"""The Card interface on NVIDIA's driver, which is called through `cuda.bindings` (12.9 and 13.x) alone.

Each card uses the primary context of its device and makes that context current in the calling thread at each
operation, so that any thread can use several cards. CUDA's legacy default stream is never used, and our streams do not
synchronize with it.

Kernels are loaded as machine code (kernels/assembler.py says why). Where ptxas is missing or older than the card,
the driver is given the PTX.
"""

import ctypes
import re
import sys
import threading
import time
from collections import deque
from functools import partial
from pathlib import Path

import numpy as np
from cuda.bindings import driver
from cuda.pathfinder import DynamicLibNotFoundError

from kernels import assembler
from kernels import compile as compiler
from kernels.card import Card, CardError, Event, LaunchError, Pinned, Recording, Stream, show_bytes
from kernels.configured import accept_configurations

OLDEST = (7, 0)                                          # the first with half2 arithmetic and dp4a at full rate
PCI_DEVICES = Path("/sys/bus/pci/devices")
SUCCESS, NOT_READY = driver.CUresult.CUDA_SUCCESS, driver.CUresult.CUDA_ERROR_NOT_READY
_prctl = getattr(ctypes.CDLL(None), "prctl", None) if sys.platform == "linux" else None
POLL_SECONDS, POLL_SHARE = 10e-6, 1e-3                   # pause between two queries: at least; as a share of the wait
PR_SET_TIMERSLACK, TIMER_SLACK = 29, 1000                # Linux's option; nanoseconds that a sleep may be late
STAGED = 128 << 10                                       # bytes: smaller pageable copies go through pinned memory
CODE_BYTES = 32 << 20                                    # left to the driver for machine code of kernels
                                                         # (benchmarks/results.md, section kv_formats)


def open_nvidia_cards(numbers=None, cache_dir=compiler.CACHE_DIR, required=True):
    """The cards with these device numbers, or all from sm_70 on. CardError: `required`, and there is none."""
    count, why = _count()
    wanted = range(count) if numbers is None else numbers
    if len(set(wanted)) < len(wanted):
        raise CardError(f"a card is named twice: cuda:{','.join(map(str, wanted))}")
    missing = [number for number in wanted if not 0 <= number < count]
    if missing or (required and not count):
        raise CardError(f"no NVIDIA card{f' {missing[0]}' if missing else ''}: {why}")
    cards = [NvidiaCard(number, cache_dir) for number in wanted if numbers or _capability(number) >= OLDEST]
    if required and not cards:
        raise CardError("no NVIDIA card of compute capability 7.0 or newer")
    return cards


def _count():
    """(number of cards that the driver knows of, a clause for the case that there are too few)."""
    try:
        status = driver.cuInit(0)[0]
    except DynamicLibNotFoundError:
        return 0, "NVIDIA's driver is not installed (there is no libcuda.so.1)"
    except RuntimeError as error:       # of a function that the driver lacks
        return 0, f"NVIDIA's driver is too old, 525 or newer is needed ({error})"
    if status not in (SUCCESS, driver.CUresult.CUDA_ERROR_NO_DEVICE):
        return 0, f"NVIDIA's driver does not start ({_explain(status)})"
    count = _call(driver.cuDeviceGetCount) if status == SUCCESS else 0
    return count, f"the driver knows of {count}"


def unusable_card():
    """A sentence about an NVIDIA card that is in the machine, while the driver offers none; "" if there is none, or if
    the system does not tell."""
    count, why = _count()
    buses = [] if count else [folder.name for folder in sorted(PCI_DEVICES.glob("*")) if _is_nvidia_card(folder)]
    return f"the NVIDIA card at {buses[0]} of the PCI bus cannot be used: {why}" if buses else ""


def _is_nvidia_card(folder):
    """Whether a folder of PCI_DEVICES is of a display (class 03) of NVIDIA (vendor 10de)."""
    try:
        vendor, kind = ((folder / name).read_text().strip() for name in ("vendor", "class"))
    except OSError:
        return False
    return vendor == "0x10de" and kind.startswith("0x03")


def _call(function, *args):
    """Calls a driver function and returns its value. Raises CardError with the driver's own words."""
    status, *values = function(*args)
    if status != SUCCESS:
        raise CardError(f"{function.__name__}: {_explain(status)}")
    return values[0] if len(values) == 1 else values


def _sleep(seconds):
    """Sleeps without the 50 µs that Linux adds to every sleep unless it is told otherwise."""
    if _prctl:
        _prctl(PR_SET_TIMERSLACK, TIMER_SLACK)
    time.sleep(seconds)


def _explain(status):
    text = driver.cuGetErrorString(status)[1]
    return f"{status.name}, {text.decode() if text else 'unknown error'}"


def _capability(number):
    device = _call(driver.cuDeviceGet, number)
    return _attribute(device, "COMPUTE_CAPABILITY_MAJOR"), _attribute(device, "COMPUTE_CAPABILITY_MINOR")


def _attribute(device, name):
    which = getattr(driver.CUdevice_attribute, "CU_DEVICE_ATTRIBUTE_" + name)
    return _call(driver.cuDeviceGetAttribute, which, device)


def driver_version():
    """The driver's version, "580.65.06, CUDA 13.0"; "CUDA 13.0" alone where the system does not tell the first."""
    cuda = "CUDA %d.%d" % divmod(_call(driver.cuDriverGetVersion) // 10, 100)
    try:
        text = Path("/proc/driver/nvidia/version").read_text()
    except OSError:
        return cuda
    number = re.search(r"\b\d+\.\d+(?:\.\d+)?\b", text)
    return f"{number[0]}, {cuda}" if number else cuda


def _link(bus):
    """Facts on the PCIe link of the device at address `bus`; {} where the system does not tell."""
    folder = PCI_DEVICES / bus.lower()[-12:]
    try:
        speed, width = ((folder / f"current_link_{name}").read_text().strip() for name in ("speed", "width"))
        transfers = float(speed.split()[0])
        width = int(width)
    except (OSError, ValueError, IndexError):
        return {}
    bits = 8 / 10 if transfers < 8 else 128 / 130        # of data per bit transferred: the encoding of the generation
    return {"link": f"{transfers:g} GT/s × {width} lanes", "link GB/s": transfers * width * bits / 8}


def _fill_cubin(compiled, block, cc, cache_dir):
    assembler.assemble(compiled, cc, cache_dir)


class NvidiaCard(Card):
    """The NVIDIA card with device number `number`."""

    granule = 2 << 20                                    # the driver's pages

    def __init__(self, number=0, cache_dir=compiler.CACHE_DIR):
        _call(driver.cuInit, 0)
        self.number, self.device = number, _call(driver.cuDeviceGet, number)
        self.model = _call(driver.cuDeviceGetName, 256, self.device).split(b"\0")[0].decode()
        cc = _capability(number)
        try:
            compiler.target_cc(cc)
        except compiler.CompileError as error:
            raise CardError(f"{self.model}: {error}") from error
        super().__init__(f"cuda:{number}", cc, _attribute(self.device, "MULTIPROCESSOR_COUNT"),
                         _call(driver.cuDeviceTotalMem, self.device),
                         _attribute(self.device, "MAX_SHARED_MEMORY_PER_BLOCK_OPTIN"), Path(cache_dir))
        self.clock = 1e3 * _attribute(self.device, "CLOCK_RATE")         # Hz, the highest of the SMs
        self._context = _call(driver.cuDevicePrimaryCtxRetain, self.device)
        self.streams, self.idle_events, self.n_done = [], [], 0
        self.priorities = self.call(driver.cuCtxGetStreamPriorityRange)  # the least, the greatest
        self.default_stream = self.stream("default", is_first=True)
        self._transfers = self.stream("uploads")         # for `upload` and `zeros`, which wait for it
        accept_configurations()

    def describe(self):
        return f"{self.model}, sm_{self.cc[0]}{self.cc[1]}, {self.n_sms} SMs, {show_bytes(self.memory_bytes)}"

    def twin(self):
        """Another Card of this device."""
        twin = NvidiaCard(self.number, self.cache_dir)
        twin.taken, twin._memory_lock = self.taken, self._memory_lock
        return twin

    def facts(self):
        """Adds UUID, driver, memory clock and bus width, and the speed at which the link runs at this moment."""
        uuid = bytes(_call(driver.cuDeviceGetUuid, self.device).bytes)
        clock = _attribute(self.device, "MEMORY_CLOCK_RATE")             # kHz
        bits = _attribute(self.device, "GLOBAL_MEMORY_BUS_WIDTH")
        facts = {"name": self.describe(), "uuid": uuid.hex(), "driver": driver_version(),
                 "memory": f"{clock / 1000:.0f} MHz × {bits} bit"}
        if clock and bits:
            facts["memory GB/s"] = 2 * clock * 1e3 * bits / 8 / 1e9
        return facts | _link(_call(driver.cuDeviceGetPCIBusId, 64, self.device).split(b"\0")[0].decode())

    def can_access(self, other):
        """Whether kernels of this card can read the memory of NVIDIA card `other`."""
        return bool(_call(driver.cuDeviceCanAccessPeer, self.device, other.device))

    def call(self, function, *args):
        """Calls a driver function in this card's context."""
        driver.cuCtxSetCurrent(self._context)
        return _call(function, *args)

    def finalize(self, name, *args):
        """Calls driver function `name` from a finalizer. A finalizer may interrupt a thread between any two calls, so
        the thread's current context is put back."""
        if driver is not None and not self.hangs and driver.cuCtxPushCurrent(self._context)[0] == SUCCESS:
            getattr(driver, name)(*args)                 # an error now is of Python's exit or of a broken card
            driver.cuCtxPopCurrent()

    # -- memory --

    @property
    def unused_bytes(self):
        """Less CODE_BYTES: the driver loads a kernel before its first launch, when all other memory may be taken."""
        return max(self.call(driver.cuMemGetInfo)[0] - CODE_BYTES, 0)

    def _take(self, nbytes):
        driver.cuCtxSetCurrent(self._context)
        status, ptr = driver.cuMemAlloc(nbytes)
        if status == driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY:
            raise MemoryError
        if status != SUCCESS:
            raise CardError(f"cuMemAlloc of {show_bytes(nbytes)}: {_explain(status)}")
        return int(ptr), None

    def _give(self, memory):
        self.finalize("cuMemFree", memory.ptr)

    def pinned(self, shape, dtype):
        """A NumPy array in page-locked memory. Copies access it when they run, see kernels/card.py."""
        nbytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
        ptr = int(self.call(driver.cuMemHostAlloc, max(nbytes, 1), driver.CU_MEMHOSTALLOC_PORTABLE))
        memory = Pinned(ptr, nbytes, lambda: self.finalize("cuMemFreeHost", ptr))
        return np.asarray(memory).view(dtype).reshape(shape)

    # -- copies --

    def _fill_now(self, array, byte):
        with self.observed("fill", self._transfers, array):
            self._fill(array, byte, self._transfers)
        self._transfers.synchronize()

    def _upload_now(self, array, host):
        with self.observed("copy_in", self._transfers, array):
            self._copy_in(array, host, False, self._transfers)
        self._transfers.synchronize()

    def _copy_in(self, dst, host, pinned, stream):
        host = np.ascontiguousarray(host)
        if not pinned and host.nbytes <= STAGED:
            stream.copy_staged(dst, host)
            return
        self.call(driver.cuMemcpyHtoDAsync, dst.ptr, host.ctypes.data, host.nbytes, stream.handle)
        if not pinned:                                   # the driver may read pageable memory after the call
            stream.synchronize()

    def _copy_out(self, host, src, pinned, stream):
        self.call(driver.cuMemcpyDtoHAsync, host.ctypes.data, src.ptr, host.nbytes, stream.handle)
        if not pinned:
            stream.synchronize()

    def _copy(self, dst, src, stream):
        self.call(driver.cuMemcpyDtoDAsync, dst.ptr, src.ptr, src.nbytes, stream.handle)

    def _fill(self, array, byte, stream):
        self.call(driver.cuMemsetD8Async, array.ptr, byte, array.nbytes, stream.handle)

    # -- launches --

    def _load(self, compiled):
        log = bytearray(8192)
        options = [driver.CUjit_option.CU_JIT_ERROR_LOG_BUFFER,
                   driver.CUjit_option.CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES]
        image = assembler.assemble(compiled, self.cc, self.cache_dir) or compiled.ptx.encode() + b"\0"
        driver.cuCtxSetCurrent(self._context)
        status, module = driver.cuModuleLoadDataEx(image, 2, options, [log, len(log)])
        if status != SUCCESS:
            text = log.partition(b"\0")[0].decode(errors="replace").strip()
            version = "%d.%d" % divmod(_call(driver.cuDriverGetVersion) // 10, 100)
            raise CardError(f"{compiled.name} does not load on {self.model}, driver for CUDA {version}: "
                            f"{_explain(status)} {text}".rstrip())
        function = self.call(driver.cuModuleGetFunction, module, compiled.entry.encode())
        has = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES
        may_have = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        static = self.call(driver.cuFuncGetAttribute, has, function)
        self.call(driver.cuFuncSetAttribute, function, may_have, self.max_shared - static)
        return _Loaded(module, function, compiled), static

    def _is_cached(self, compiled, block):
        path = assembler.cubin_path(compiled, self.cc, self.cache_dir)
        return path is None or path.exists()

    def _cache_filler(self):
        return partial(_fill_cubin, cc=self.cc, cache_dir=self.cache_dir)

    def _make_ready(self, function, block):
        pass                                             # a loaded kernel takes blocks of any shape

    def _enqueue(self, stream, function, grid, block, shared, params, args):
        loaded = function.handle
        driver.cuCtxSetCurrent(self._context)
        with loaded.lock:                                # the driver copies the parameters during the call
            loaded.params[:] = params
            if loaded.overlaps:
                config = _overlapping_launch(grid, block, shared, stream)
                status, = driver.cuLaunchKernelEx(config, loaded.function, loaded.pointers, 0)
            else:
                status, = driver.cuLaunchKernel(loaded.function, *grid, *block, shared, stream.handle,
                                                loaded.pointers, 0)
        if status != SUCCESS:
            raise LaunchError(f"{function.name}, grid {grid}, block {block}, dynamic shared memory {shared} "
                              f"bytes: {_explain(status)}")
        stream.recent.append(function.name)

    # -- order --

    def stream(self, name="", is_first=False):
        """A new Stream. is_first: where its kernels and those of others wait for room on an SM, its go first."""
        stream = NvidiaStream(self, name, is_first)
        self.streams.append(stream)
        return stream

    def synchronize(self):
        """Waits for every stream of the card. Raises what went wrong."""
        for stream in list(self.streams):
            stream.synchronize()

    def _hold(self, stream, event):
        self.call(driver.cuStreamWaitEvent, stream.handle, event.handle, 0)

    def _replay(self, recording, stream):
        self.call(driver.cuGraphLaunch, recording.graph, stream.handle)
        stream.recent.append("a recording")

    def _await(self, event, timeout):
        """Whether `event` is done, after waiting for at most `timeout` seconds.

        The driver cannot wait for a limited time, so it is asked again and again.
        """
        if timeout is None:
            self.call(driver.cuEventSynchronize, event.handle)
            self.n_done += 1
            return True
        driver.cuCtxSetCurrent(self._context)
        start = time.monotonic()
        while (status := driver.cuEventQuery(event.handle)[0]) == NOT_READY:
            waited = time.monotonic() - start
            if waited > timeout:
                return False
            _sleep(max(POLL_SECONDS, POLL_SHARE * waited))
        if status != SUCCESS:
            raise CardError(f"cuEventQuery: {_explain(status)}")
        self.n_done += 1
        return True

    def _begin_recording(self):
        return NvidiaRecording(self)

    def _end_recording(self, recording):
        recording.finish()


def _overlapping_launch(grid, block, shared, stream):
    """The CUlaunchConfig of a kernel that itself waits for the kernel before it (`wait_for_previous` of
    kernels/intrinsics.py), so that the driver may start it before that one has ended."""
    attribute = driver.CUlaunchAttribute()
    attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    attribute.value.programmaticStreamSerializationAllowed = 1
    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = grid
    config.blockDimX, config.blockDimY, config.blockDimZ = block
    config.sharedMemBytes, config.hStream = shared, stream.handle
    config.attrs, config.numAttrs = [attribute], 1
    return config


class _Loaded:
    """A kernel in a card: the module, the function, and the memory from which launches take the parameters."""

    def __init__(self, module, function, compiled):
        self.module, self.function, self.lock = module, function, threading.Lock()
        self.overlaps = "griddepcontrol.wait" in compiled.ptx
        offsets, nbytes = compiler.parameter_layout(compiled.signature)
        buffer = (ctypes.c_uint64 * (nbytes // 8 + 1))()
        self.params = memoryview(buffer).cast("B")[:nbytes]
        base = ctypes.addressof(buffer)
        self._keep = (ctypes.c_void_p * max(len(offsets), 1))(*[base + offset for offset in offsets])
        self.pointers = ctypes.addressof(self._keep)


class NvidiaStream(Stream):
    def __init__(self, card, name, is_first=False):
        self.card, self.name, flags = card, name, driver.CUstream_flags.CU_STREAM_NON_BLOCKING
        self.handle = card.call(driver.cuStreamCreateWithPriority, flags, card.priorities[is_first])
        self.recent = deque(maxlen=4)                    # names of the last kernels, for messages
        self._staging = None                             # pinned memory in two halves, made when first used
        self._half, self._used = 0, 0                    # the half that is being filled, and its bytes in use
        self._left = [None, None]                        # for each half, the event after which it may be filled again
        self._staging_lock = threading.Lock()

    def copy_staged(self, dst, host):
        """Queues a copy of `host`, which has at most STAGED bytes, through pinned memory, so that nobody waits."""
        with self._staging_lock:
            if self._staging is None:
                self._staging = self.card.pinned((2, STAGED), np.uint8)
            if self._used + host.nbytes > STAGED:        # go on in the other half, once its last copy is done
                self._left[self._half] = self.record()
                self._half, self._used = 1 - self._half, 0
                if self._left[self._half] is not None:
                    self._left[self._half].synchronize()
            place = self._staging[self._half, self._used:self._used + host.nbytes]
            place[:] = host.reshape(-1).view(np.uint8)
            self._used += host.nbytes
            self.card.call(driver.cuMemcpyHtoDAsync, dst.ptr, place.ctypes.data, host.nbytes, self.handle)

    def record(self):
        self.card.target(self, "an event")
        return NvidiaEvent(self)

    def synchronize(self):
        driver.cuCtxSetCurrent(self.card._context)
        status, = driver.cuStreamSynchronize(self.handle)
        if status != SUCCESS:
            recent = "; ".join(f"{s.name}: {', '.join(s.recent)}" for s in self.card.streams if s.recent)
            raise LaunchError(f"{self.card.name} is broken: {_explain(status)}; "
                              f"last kernels of its streams: {recent or 'none'}")

    def __del__(self):
        if hasattr(self, "handle"):
            self.card.finalize("cuStreamDestroy", self.handle)


class NvidiaEvent(Event):
    """An event of the driver. Events are used again: making and destroying one takes four calls of the driver, at
    moments when cards wait."""

    MOST_IDLE = 64              # events that a card keeps for later use

    def __init__(self, stream):
        self.card = stream.card
        try:
            self.handle = self.card.idle_events.pop()
        except IndexError:
            self.handle = self.card.call(driver.cuEventCreate, driver.CUevent_flags.CU_EVENT_DEFAULT)
        self.card.call(driver.cuEventRecord, self.handle, stream.handle)

    @property
    def done(self):
        driver.cuCtxSetCurrent(self.card._context)
        return driver.cuEventQuery(self.handle)[0] != NOT_READY

    def seconds_since(self, earlier):
        return self.card.call(driver.cuEventElapsedTime, earlier.handle, self.handle) * 1e-3

    def __del__(self):
        if hasattr(self, "handle"):
            if len(self.card.idle_events) < self.MOST_IDLE:
                self.card.idle_events.append(self.handle)
            else:
                self.card.finalize("cuEventDestroy", self.handle)


class NvidiaRecording(Recording):
    """A CUDA graph. It is captured in relaxed mode, which allows allocating, loading kernels and other streams' work
    meanwhile. Its kernels have the priority of the stream that replays them."""

    def __init__(self, card):
        super().__init__(card, NvidiaStream(card, "recording"))
        self.graph = None
        card.call(driver.cuStreamBeginCapture, self.stream.handle,
                  driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED)

    def finish(self):
        captured = self.card.call(driver.cuStreamEndCapture, self.stream.handle)
        self.graph = self.card.call(driver.cuGraphInstantiate, captured, 0)
        self.card.call(driver.cuGraphDestroy, captured)

    def __del__(self):
        if getattr(self, "graph", None) is not None:
            self.card.finalize("cuGraphExecDestroy", self.graph)
