"""carryall's CUDA kernels on the CPU: the same sources, compiled as C++ by ``cuda_emulator.cpp``."""

from __future__ import annotations

import ctypes
import functools
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from device_stand_ins import PagedCudaOnCpu

from carryall.providers.cuda.kernels import SOURCES
from carryall.providers.native.compiler import SOURCES as OPERATORS
from carryall.providers.targets.cuda import CARRYALL, CudaProvider

_EMULATOR = Path(__file__).with_name("cuda_emulator.cpp")
_NCCL = Path(__file__).with_name("nccl_stub.cpp")
_ON_CPU = Path(__file__).with_name("cuda_operators_on_cpu.cpp")
Edit = Callable[[str, str], str]  # from the name of a source and its text to another text


class Emulator:
    """NVIDIA's driver of ``cuda_emulator.cpp``.

    Args:
        library: its file.
    """

    def __init__(self, library: Path) -> None:
        self.library, self._functions = library, ctypes.CDLL(str(library))
        self._functions.emulator_launches.restype = ctypes.c_long

    @property
    def launches(self) -> int:
        """The number of launches so far."""
        return int(self._functions.emulator_launches())

    def order(self, number: int) -> None:
        """Choose the order of threads: 0 as they are, 1 reversed, others are seeds of random ones."""
        self._functions.emulator_order(number)

    def launch(self, name: str, blocks: int, threads: int, *arguments: Any) -> None:
        """Run a kernel.

        Args:
            name: of the kernel.
            blocks: their number.
            threads: of a block.
            arguments: arrays, of which the kernel gets the addresses; None; numbers as ctypes' objects.

        Raises:
            RuntimeError: the kernel does not exist, or its threads wait at different barriers.
        """
        function, text = ctypes.c_void_p(), ctypes.c_char_p()
        if self._functions.cuModuleGetFunction(ctypes.byref(function), None, name.encode()):
            raise RuntimeError(f"there is no kernel {name}")
        values = [
            ctypes.c_void_p(None if value is None else value.ctypes.data)
            if value is None or isinstance(value, np.ndarray)
            else value
            for value in arguments
        ]
        addresses = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
        sizes = blocks, 1, 1, threads, 1, 1, 0
        if self._functions.cuLaunchKernel(function, *sizes, None, addresses, None):
            self._functions.cuGetErrorString(1, ctypes.byref(text))
            raise RuntimeError((text.value or b"").decode())


def build_emulator(folder: Path, edit: Edit | None = None) -> Emulator:
    """Build the emulator in a folder, with the kernels as they are or edited; skip without a compiler."""
    sources = folder / "sources"
    shutil.copytree(SOURCES, sources)
    for path in sources.iterdir():
        if edit is not None:
            path.write_text(edit(path.name, path.read_text()))
    library = folder / "libemulator.so"
    _compile(library, [_EMULATOR], "-std=c++17", f"-I{sources}", "-ffp-contract=off")
    return Emulator(library)


def build_nccl(folder: Path) -> Path:
    """Build NCCL's stand-in in a folder; return its library."""
    library = folder / "libnccl.so.2"
    _compile(library, [_NCCL], "-std=c++17")
    return library


@functools.cache
def operators() -> tuple[Emulator, Path]:
    """Return the emulator and the library of the operators over it, loaded, once in a process."""
    folder = Path(tempfile.mkdtemp(prefix="cuda-emulator-"))
    emulator, library = build_emulator(folder), folder / "liboperators.so"
    names = (
        "cuda_driver",
        "cuda_operators",
        "cuda_product_operator",
        "cuda_decode_operator",
        "cuda_ranks_operator",
        "nccl",
        "ranks",
    )
    sources = [_ON_CPU, *(OPERATORS / f"{name}.cpp" for name in names)]
    _compile(library, sources, "-std=c++17", f"-I{OPERATORS}", "-DCARRYALL_CUDA_PROVIDER=nullptr")
    functions = ctypes.CDLL(str(library))
    functions.carryall_cuda_load.restype = ctypes.c_char_p
    wrong = functions.carryall_cuda_load(str(emulator.library).encode(), 0, b"")
    assert wrong is None, wrong
    return emulator, library


def _compile(library: Path, sources: list[Path], *flags: str) -> None:
    compiler = shutil.which("g++")
    if compiler is None or os.name != "posix" or platform.machine() not in ("x86_64", "aarch64"):
        pytest.skip("the emulator of CUDA needs g++")
    command = [compiler, "-O1", "-shared", "-fPIC", "-fvisibility=hidden", *flags, *map(str, sources)]
    subprocess.run([*command, "-o", str(library), "-ldl"], check=True)


class EmulatedCudaOnCpu(PagedCudaOnCpu):
    """CUDA with paged KV, the CPU as the device, and carryall's kernels in the emulator."""

    name = "emulated-cuda-on-cpu"
    _chosen_kernels = CudaProvider._chosen_kernels

    @property
    def emulator(self) -> Emulator:
        """The driver that launches the kernels."""
        return operators()[0]

    def load_kernels(self, index: int) -> None:
        operators()

    def operators_library(self) -> Path:
        return operators()[1]


def options(**more: Any) -> Mapping[str, Any]:
    """Return options that choose carryall's kernels."""
    return {"kernels": CARRYALL, **more}


def bfloat16(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """Return floats rounded to the nearest bfloat16, ties to even."""
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def from_bfloat16(bits: npt.NDArray[np.uint16]) -> npt.NDArray[np.float32]:
    """Return the values of bfloat16 numbers."""
    return (bits.astype(np.uint32) << 16).view(np.float32)
