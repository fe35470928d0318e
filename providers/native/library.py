"""Find and load the library of CPU kernels: that of the installation, or one of the cache."""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

from ...errors import ProviderUnavailableError
from ...graph_opt.lower.products.tiles import LAYOUT
from ...records import dataclass
from .build import built_library
from .compiler import installed_library

ISA_VARIABLE = "CARRYALL_KERNELS_ISA"  # forces an instruction set, for tests
PORTABLE = "portable"  # the instruction set of every processor
BUILD = "build them with `carryall doctor --build-kernels`"


@dataclass(frozen=True, slots=True)
class KernelLibrary:
    """The library of this machine.

    Args:
        path: its file.
        isa: the instruction set that its kernels use now.
        supported: all of its instruction sets that this processor supports, the fastest first.
    """

    path: Path
    isa: str
    supported: tuple[str, ...]


def find_library() -> Path | None:
    """Return the file of the library, None if it is neither installed nor in the cache."""
    installed = installed_library()
    return installed if installed.is_file() else built_library()


def kernel_library() -> KernelLibrary:
    """Load the library and return its facts.

    Raises:
        ProviderUnavailableError: there is none, it cannot be loaded, it reads another layout of weights, or
            ``CARRYALL_KERNELS_ISA`` names no instruction set of this processor.
    """
    path = find_library()
    if path is None:
        raise ProviderUnavailableError(f"the CPU kernels are not built; {BUILD}")
    functions = load(path)
    version = functions.carryall_layout_version()
    if version != LAYOUT:
        raise ProviderUnavailableError(
            f"{path} reads weights of layout version {version}, not {LAYOUT}; {BUILD} again"
        )
    supported: list[str] = []
    while name := functions.carryall_supported_isa(len(supported)).decode():
        supported.append(name)
    isa = functions.carryall_isa().decode()
    if not isa:
        raise ProviderUnavailableError(
            f"{ISA_VARIABLE} names no instruction set of this processor; it supports {', '.join(supported)}"
        )
    return KernelLibrary(path, isa, tuple(supported))


def stores_pairs(head_size: int, block_size: int, cache_type: int) -> bool:
    """Return whether the kernels in use hold keys and values in pairs, see ``sources/attention.h``.

    Args:
        head_size: elements of a head.
        block_size: positions of a block.
        cache_type: 0 for float32, 1 for bfloat16, 2 for int8.

    Raises:
        ProviderUnavailableError: see ``kernel_library``.
    """
    library = kernel_library()
    functions = load(library.path)
    return bool(functions.carryall_stores_pairs(library.isa.encode(), head_size, block_size, cache_type))


def splits_floats() -> bool:
    """Return whether the kernels in use multiply split weights as bfloat16, see ``sources/split_products.h``.

    Raises:
        ProviderUnavailableError: see ``kernel_library``.
    """
    library = kernel_library()
    return bool(load(library.path).carryall_splits_floats(library.isa.encode()))


@functools.cache
def load(path: Path) -> ctypes.CDLL:
    """Load a library and declare its functions.

    Raises:
        ProviderUnavailableError: the file cannot be loaded, or is another library.
    """
    try:
        functions = ctypes.CDLL(str(path))
        functions.carryall_layout_version.restype = ctypes.c_int64
        functions.carryall_isa.restype = ctypes.c_char_p
        functions.carryall_prefer_isa.argtypes = [ctypes.c_char_p]
        functions.carryall_supported_isa.restype = ctypes.c_char_p
        functions.carryall_supported_isa.argtypes = [ctypes.c_int64]
        functions.carryall_stores_pairs.argtypes = [ctypes.c_char_p, *[ctypes.c_int64] * 3]
        functions.carryall_splits_floats.argtypes = [ctypes.c_char_p]
        functions.carryall_linear.restype = ctypes.c_int
        functions.carryall_linear.argtypes = [
            ctypes.c_char_p,
            *(ctypes.c_void_p, ctypes.c_int64) * 2,
            ctypes.c_void_p,
            *[ctypes.c_int64] * 8,
            *(ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int64),
        ]
        for function in (functions.carryall_round, functions.carryall_sweep):
            function.restype = ctypes.c_int64
            function.argtypes = [ctypes.c_char_p, ctypes.c_void_p, *[ctypes.c_int64] * 2]
        functions.carryall_pack_stored.restype = ctypes.c_int64
        functions.carryall_pack_stored.argtypes = [ctypes.c_void_p, *[ctypes.c_int64] * 8, ctypes.c_void_p]
    except (OSError, AttributeError) as error:
        raise ProviderUnavailableError(f"{path} cannot be loaded: {error}; {BUILD} again") from error
    return functions
