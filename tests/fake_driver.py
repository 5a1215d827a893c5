"""A stand-in for cuda.bindings.driver that needs no GPU: device memory is host memory, streams run at once,
kernels run in the native code of the emulated card. It checks what a real driver would refuse: missing
context, calls that cannot be captured, handles of the wrong kind. For kernels/nvidia.py and its tests;
enumerations are the real ones.
"""

import ctypes
import re
import time
from types import SimpleNamespace

import numpy as np
from cuda.bindings import driver
from cuda.bindings.driver import (CU_MEMHOSTALLOC_PORTABLE, CUdevice_attribute, CUevent_flags,
                                  CUfunction_attribute, CUjit_option, CUlaunchAttributeID, CUresult,
                                  CUstream_flags, CUstreamCaptureMode)

from kernels.compile import FROM_HOPPER_ON
from kernels.emulated import native

TOTAL = 1 << 32                                          # bytes of memory
OK = CUresult.CUDA_SUCCESS
ATTRIBUTES = {"COMPUTE_CAPABILITY_MAJOR": 8, "COMPUTE_CAPABILITY_MINOR": 6, "MULTIPROCESSOR_COUNT": 68,
              "MAX_SHARED_MEMORY_PER_BLOCK_OPTIN": 99 << 10, "MEMORY_CLOCK_RATE": 810_000, "CLOCK_RATE": 1_500_000,
              "GLOBAL_MEMORY_BUS_WIDTH": 4096}

memory = {}                                              # address -> buffer
machine_code = {}                                        # cubin -> the PTX it was made of, see `assembled`
contexts = [None]                                        # the stack of this (single) thread


def cuInit(flags):
    return (OK,)


def cuDriverGetVersion():
    return OK, 12090


def cuDeviceGetCount():
    return OK, 1


def cuDeviceGet(number):
    return OK, driver.CUdevice(number)


def cuDeviceGetName(length, device):
    return OK, b"Fake Card".ljust(length, b"\0")


def cuDeviceGetAttribute(attribute, device):
    return OK, ATTRIBUTES[CUdevice_attribute(attribute).name.removeprefix("CU_DEVICE_ATTRIBUTE_")]


def cuDeviceGetUuid(device):
    return OK, SimpleNamespace(bytes=bytes(range(16)))


def cuDeviceGetPCIBusId(length, device):
    return OK, b"0000:0A:00.0".ljust(length, b"\0")


def cuDeviceCanAccessPeer(device, other):
    return OK, int(device != other)


def cuDeviceTotalMem(device):
    return OK, TOTAL


def cuDevicePrimaryCtxRetain(device):
    return OK, "context"


def cuCtxSetCurrent(context):
    contexts[-1] = context
    return (OK,)


def cuCtxPushCurrent(context):
    contexts.append(context)
    return (OK,)


def cuCtxPopCurrent():
    return OK, contexts.pop()


def cuGetErrorString(status):
    return OK, b"words of the driver"


# ---- memory ------------------------------------------------------------------------------------------------

def cuMemAlloc(n):
    assert contexts[-1]
    if sum(buffer.size for buffer in memory.values()) + n > TOTAL:
        return CUresult.CUDA_ERROR_OUT_OF_MEMORY, None
    buffer = np.empty(n + 256, np.uint8)
    ptr = buffer.ctypes.data + -buffer.ctypes.data % 256
    memory[ptr] = buffer
    return OK, driver.CUdeviceptr(ptr)


def cuMemHostAlloc(n, flags):
    assert flags == CU_MEMHOSTALLOC_PORTABLE
    return OK, int(cuMemAlloc(n)[1])


def cuMemFree(ptr):
    del memory[int(ptr)]
    return (OK,)


cuMemFreeHost = cuMemFree


def cuMemGetInfo():
    return OK, TOTAL - sum(buffer.size for buffer in memory.values()), TOTAL


# ---- streams, events, copies -------------------------------------------------------------------------------

def _queue(stream, work, may_be_captured):
    assert contexts[-1]
    if stream.captured is None:
        work()
    elif not may_be_captured:
        return (CUresult.CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED,)
    else:
        stream.captured.append(work)
    return (OK,)


def cuCtxGetStreamPriorityRange():
    return OK, 0, -5


def cuStreamCreateWithPriority(flags, priority):
    assert CUstream_flags(flags) == CUstream_flags.CU_STREAM_NON_BLOCKING
    return OK, SimpleNamespace(captured=None, priority=priority)


def cuStreamSynchronize(stream):
    return _queue(stream, lambda: None, False)


def cuStreamWaitEvent(stream, event, flags):
    return _queue(stream, lambda: event.time, True)


def cuEventCreate(flags):
    assert CUevent_flags(flags) == CUevent_flags.CU_EVENT_DEFAULT
    return OK, SimpleNamespace(time=None)


def cuEventRecord(event, stream):
    return _queue(stream, lambda: setattr(event, "time", time.perf_counter()), True)


def cuEventSynchronize(event):
    return (OK,)


def cuEventQuery(event):
    return (OK if event.time else CUresult.CUDA_ERROR_NOT_READY,)


def cuEventElapsedTime(start, end):
    return OK, 1e3 * (end.time - start.time)


def cuStreamDestroy(handle):
    assert contexts[-1]
    return (OK,)


cuEventDestroy = cuGraphExecDestroy = cuGraphDestroy = cuStreamDestroy


def cuMemcpyHtoDAsync(dst, host, n, stream):
    assert n
    return _queue(stream, lambda: ctypes.memmove(dst, host, n), False)


def cuMemcpyDtoHAsync(host, src, n, stream):
    assert n
    return _queue(stream, lambda: ctypes.memmove(host, src, n), False)


def cuMemcpyDtoDAsync(dst, src, n, stream):
    assert n
    return _queue(stream, lambda: ctypes.memmove(dst, src, n), True)


def cuMemsetD8Async(dst, byte, n, stream):
    assert n
    return _queue(stream, lambda: ctypes.memset(dst, byte, n), True)


# ---- kernels and graphs ------------------------------------------------------------------------------------

def assembled(assemble):
    """`kernels.assembler.assemble`, observed: what it made of which PTX, so that the native code can stand for it."""
    def assemble_and_note(compiled, *args):
        cubin = assemble(compiled, *args)
        if cubin is not None:
            machine_code[cubin] = compiled.ptx
        return cubin

    return assemble_and_note


def cuModuleLoadDataEx(image, n_options, options, values):
    assert contexts[-1] and n_options == len(options) == len(values)
    assert all(isinstance(option, CUjit_option) for option in options)
    if image in machine_code:
        return OK, machine_code[image]
    assert image.endswith(b"\0")
    if b"broken" in image:
        values[0][:5] = b"line\0"
        return CUresult.CUDA_ERROR_INVALID_PTX, None
    return OK, image[:-1].decode()


def cuModuleGetFunction(ptx, name):
    assert f".entry {name.decode()}(" in ptx
    sizes = [int(bits) // 8 for bits in re.findall(rf"\.param \.[a-z](\d+) {name.decode()}_param", ptx)]
    one_by_one = FROM_HOPPER_ON.sub("", ptx)  # as launches run here
    return OK, SimpleNamespace(kernel=native.load(one_by_one), sizes=sizes, attributes={})


def cuFuncGetAttribute(attribute, function):
    assert attribute == CUfunction_attribute.CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES
    return OK, function.kernel.static_shared


def cuFuncSetAttribute(function, attribute, value):
    function.attributes[CUfunction_attribute(attribute)] = value
    return (OK,)


def cuLaunchKernel(function, gx, gy, gz, bx, by, bz, shared, stream, params, extra):
    """`params`: address of the addresses of the parameters; their sizes stand in the PTX."""
    most = CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    if not contexts[-1] or extra or shared > function.attributes[most]:
        return (CUresult.CUDA_ERROR_INVALID_VALUE,)
    packed = b""
    for address, size in zip((ctypes.c_void_p * len(function.sizes)).from_address(params), function.sizes):
        packed += bytes(-len(packed) % size) + ctypes.string_at(address, size)
    launch = function.kernel.prepare((gx, gy, gz), (bx, by, bz), packed, shared)
    return _queue(stream, lambda: native.execute([launch]), True)


class CUlaunchAttribute(SimpleNamespace):
    def __init__(self):
        super().__init__(value=SimpleNamespace())


CUlaunchConfig = SimpleNamespace


def cuLaunchKernelEx(config, function, params, extra):
    """A launch with attributes, of which the driver knows one."""
    attribute, = config.attrs
    assert config.numAttrs == 1 and attribute.value.programmaticStreamSerializationAllowed == 1
    assert attribute.id == CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    grid, block = ([getattr(config, f"{of}Dim{axis}") for axis in "XYZ"] for of in ("grid", "block"))
    return cuLaunchKernel(function, *grid, *block, config.sharedMemBytes, config.hStream, params, extra)


def cuStreamBeginCapture(stream, mode):
    assert mode == CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
    stream.captured = []
    return (OK,)


def cuStreamEndCapture(stream):
    captured, stream.captured = stream.captured, None
    return OK, captured


def cuGraphInstantiate(graph, flags):
    return OK, list(graph)


def cuGraphLaunch(graph, stream):
    return _queue(stream, lambda: [work() for work in graph], True)
