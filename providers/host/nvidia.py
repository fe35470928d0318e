"""Requirements of ONNX Runtime's NVIDIA providers: driver, libraries, device memory."""

from __future__ import annotations

import ctypes
import logging
import math
import sys
import time
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from ...errors import ProviderUnavailableError
from ..ort import ort
from . import libraries
from .libraries import Library

_log = logging.getLogger(__name__)

_CUDA_WHEELS = "Install them with: pip install 'carryall[cuda]'"
_THREAD_LOCAL = 1  # cudaStreamCaptureModeThreadLocal
_ANY_DIRECTION = 4  # cudaMemcpyDefault
_NON_BLOCKING, _NO_TIMING = 1, 2  # cudaStreamNonBlocking, cudaEventDisableTiming
_CAPABILITY = (75, 76)  # of cudaDeviceAttr, its major and its minor version
_PROCESSORS = 16
_COPIED, _COPIES, _ROUNDS = 128 << 20, 8, 3  # bytes, more than caches hold; per round
_DRIVER = "Install NVIDIA's display driver"


def cuda_version() -> str:
    """Return the major version of CUDA that the installed onnxruntime was built for."""
    module = ort.load_onnxruntime("NVIDIA devices", "cuda")
    return str(getattr(module, "cuda_version", "") or "13").split(".", maxsplit=1)[0]


def cuda_libraries() -> list[Library]:
    """Return the libraries that ``onnxruntime_providers_cuda`` of onnxruntime-gpu 1.31 is linked with."""
    cuda = cuda_version()
    return [
        Library("NVIDIA's driver", "libcuda.so.1", "nvcuda.dll", _DRIVER),
        Library(f"CUDA {cuda} runtime", f"libcudart.so.{cuda}", f"cudart64_{cuda}.dll", _CUDA_WHEELS),
        Library(f"cuBLASLt {cuda}", f"libcublasLt.so.{cuda}", f"cublasLt64_{cuda}.dll", _CUDA_WHEELS),
        Library(f"cuBLAS {cuda}", f"libcublas.so.{cuda}", f"cublas64_{cuda}.dll", _CUDA_WHEELS),
        Library("cuRAND 10", "libcurand.so.10", "curand64_10.dll", _CUDA_WHEELS),
    ]


def cudnn() -> Library:
    """Return cuDNN, which convolutions need; decoder graphs have none."""
    return Library("cuDNN 9", "libcudnn.so.9", "cudnn64_9.dll", _CUDA_WHEELS)


def tensorrt_libraries() -> list[Library]:
    """Return the libraries that ``onnxruntime_providers_tensorrt`` is linked with, except CUDA and cuDNN."""
    remedy = "Install TensorRT 10 with: pip install 'carryall[tensorrt]'"
    return [
        Library("TensorRT 10", "libnvinfer.so.10", "nvinfer_10.dll", remedy),
        Library("TensorRT 10's ONNX parser", "libnvonnxparser.so.10", "nvonnxparser_10.dll", remedy),
    ]


def device_count() -> int:
    """Return the number of CUDA devices that this process may use.

    Raises:
        ProviderUnavailableError: the CUDA runtime fails, for instance because the driver is too old.
    """
    count = ctypes.c_int()
    _check(_runtime().cudaGetDeviceCount(ctypes.byref(count)), "cudaGetDeviceCount")
    return count.value


def memory(index: int) -> tuple[int, int]:
    """Return free and total memory of a device in bytes.

    Raises:
        ProviderUnavailableError: there is no such device.
    """
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    _check(_runtime().cudaSetDevice(index), f"cudaSetDevice({index})")
    _check(_runtime().cudaMemGetInfo(ctypes.byref(free), ctypes.byref(total)), "cudaMemGetInfo")
    return free.value, total.value


def enter(index: int) -> None:
    """Make a device current in this thread, and let this thread ignore the captures of others.

    onnxruntime captures in CUDA's global mode, in which the allocations and copies of every other thread are
    refused and spoil the capture, unless that thread ignores it; threads that do not come here still do.
    It does not choose the device before it replays a run. Source: CUDA Runtime API,
    cudaThreadExchangeStreamCaptureMode.

    Raises:
        ProviderUnavailableError: there is no such device.
    """
    mode = ctypes.c_int(_THREAD_LOCAL)
    _check(_runtime().cudaThreadExchangeStreamCaptureMode(ctypes.byref(mode)), "choosing a capture mode")
    _check(_runtime().cudaSetDevice(index), f"cudaSetDevice({index})")


class Buffer:
    """Memory of a device, all 0 at first, which is freed with this object.

    onnxruntime allocates the values of its Python API from an arena that grows to a power of two and that no
    call shrinks, so a closed model's caches would keep it until the process ends.

    Raises:
        ProviderUnavailableError: there is no such device, or it has not enough memory.
    """

    def __init__(self, index: int, size: int) -> None:
        enter(index)
        address = ctypes.c_void_p()
        code = _runtime().cudaMalloc(ctypes.byref(address), ctypes.c_size_t(size))
        _check(code, "cudaMalloc")
        self._address = address.value or 0
        weakref.finalize(self, _free, index, self._address).atexit = False
        code = _runtime().cudaMemset(address, 0, ctypes.c_size_t(size))
        _check(code, "cudaMemset")
        # No other stream waits for it.
        _check(_runtime().cudaStreamSynchronize(None), "cudaStreamSynchronize")

    def data_ptr(self) -> int:
        """Return the address."""
        return self._address


class Stream:
    """Work of a device in the order of its calls: copies here, and the runs of sessions that are given it.

    The calling thread must have entered the device (``enter``).

    Args:
        index: the device.

    Raises:
        ProviderUnavailableError: there is no such device, or a call failed; so do all methods.
    """

    def __init__(self, index: int) -> None:
        enter(index)
        self.handle = _created(_runtime().cudaStreamCreateWithFlags, _NON_BLOCKING)
        weakref.finalize(self, _destroy, index, "cudaStreamDestroy", self.handle).atexit = False
        self._index = index

    def host(self, size: int) -> npt.NDArray[np.uint8]:
        """Return a number of bytes on the host, all 0, from which and to which copies need not wait."""
        address = _created(_runtime().cudaHostAlloc, ctypes.c_size_t(size), 0)
        memory = (ctypes.c_uint8 * size).from_address(address)
        weakref.finalize(memory, _destroy, self._index, "cudaFreeHost", address).atexit = False
        array: npt.NDArray[np.uint8] = np.ctypeslib.as_array(memory)
        array[...] = 0
        return array

    def copy(self, target: int, source: int, size: int) -> None:
        """Copy bytes from an address to another one after all former work, without waiting."""
        places = ctypes.c_void_p(target), ctypes.c_void_p(source)
        stream = ctypes.c_void_p(self.handle)
        code = _runtime().cudaMemcpyAsync(*places, ctypes.c_size_t(size), _ANY_DIRECTION, stream)
        _check(code, "cudaMemcpyAsync")

    def mark(self) -> Callable[[], None]:
        """Return a function that waits for all work that was given so far."""
        event = _Event(self._index)
        _check(
            _runtime().cudaEventRecord(ctypes.c_void_p(event.handle), ctypes.c_void_p(self.handle)), "event"
        )
        return event.wait


class _Event:
    def __init__(self, index: int) -> None:
        self.handle = _created(_runtime().cudaEventCreateWithFlags, _NO_TIMING)
        weakref.finalize(self, _destroy, index, "cudaEventDestroy", self.handle).atexit = False

    def wait(self) -> None:
        _check(_runtime().cudaEventSynchronize(ctypes.c_void_p(self.handle)), "cudaEventSynchronize")


def _created(call: Any, *arguments: Any) -> int:
    made = ctypes.c_void_p()
    _check(call(ctypes.byref(made), *arguments), call.__name__)
    return made.value or 0


def _destroy(index: int, call: str, handle: int) -> None:
    try:
        enter(index)
        _check(getattr(_runtime(), call)(ctypes.c_void_p(handle)), call)
    except ProviderUnavailableError as error:  # a lost device has lost it too
        _log.warning("cuda:%d: %s", index, error)


def compute_capability(index: int) -> tuple[int, int]:
    """Return the compute capability of a device: (8, 0).

    Raises:
        ProviderUnavailableError: there is no such device.
    """
    count = device_count()
    if index >= count:
        known = f"this process may use devices 0 to {count - 1}" if count > 1 else "there is only device 0"
        raise ProviderUnavailableError(f"there is no CUDA device {index}; {known} (CUDA_VISIBLE_DEVICES)")
    major, minor = (_attribute(index, attribute) for attribute in _CAPABILITY)
    return major, minor


def device_facts(index: int) -> dict[str, int]:
    """Return the compute capability, the number of processors, and the newest CUDA that the driver supports.

    Raises:
        ProviderUnavailableError: there is no such device.
    """
    driver, (major, minor) = ctypes.c_int(), compute_capability(index)
    _check(_runtime().cudaDriverGetVersion(ctypes.byref(driver)), "cudaDriverGetVersion")
    processors = _attribute(index, _PROCESSORS)
    return {"major": major, "minor": minor, "processors": processors, "driver": driver.value}


def memory_bandwidth(index: int) -> float:
    """Measure the bandwidth of a device's memory in bytes/s, by copies within it: bytes read and written.

    Raises:
        ProviderUnavailableError: there is no such device, or it has not 256 MB for it.
    """
    stream, source, target = Stream(index), Buffer(index, _COPIED), Buffer(index, _COPIED)
    best = math.inf
    for _ in range(_ROUNDS):
        begun = time.perf_counter()
        for _ in range(_COPIES):
            stream.copy(target.data_ptr(), source.data_ptr(), _COPIED)
        stream.mark()()
        best = min(best, time.perf_counter() - begun)
    return 2 * _COPIED * _COPIES / best


def _free(index: int, address: int) -> None:
    try:
        enter(index)
        _check(_runtime().cudaFree(ctypes.c_void_p(address)), "cudaFree")
    except ProviderUnavailableError as error:  # a lost device has lost its memory too
        _log.warning("cuda:%d: %s", index, error)


def _attribute(index: int, attribute: int) -> int:
    value = ctypes.c_int()
    code = _runtime().cudaDeviceGetAttribute(ctypes.byref(value), attribute, index)
    _check(code, f"cudaDeviceGetAttribute({attribute}, {index})")
    return value.value


def _runtime() -> ctypes.CDLL:
    file = f"cudart64_{cuda_version()}.dll" if sys.platform == "win32" else f"libcudart.so.{cuda_version()}"
    loaded = libraries.load(file)
    if loaded is None:
        raise ProviderUnavailableError(f"{file} cannot be loaded. {_CUDA_WHEELS}")
    return loaded


def _check(code: int, call: str) -> None:
    """Raise ProviderUnavailableError unless a call of the CUDA runtime succeeded."""
    if code == 0:
        return
    _runtime().cudaGetLastError()  # else the next call of onnxruntime in this thread reports it again
    describe = _runtime().cudaGetErrorString
    describe.restype = ctypes.c_char_p
    text = describe(code)
    reason = text.decode(errors="replace") if isinstance(text, bytes) else f"error {code}"
    raise ProviderUnavailableError(f"{call} failed: {reason}. Check the driver with nvidia-smi")
