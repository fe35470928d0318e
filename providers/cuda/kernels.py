"""The kernels of this folder: compiled for a device, kept in the cache, and loaded for the operators.

The operators are those of ``providers/native/sources/cuda_operators.cpp``, in the library of CPU kernels.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
from pathlib import Path

from ...errors import ProviderUnavailableError
from ...storage.root import cache_root, unusable
from ...storage.writing import write_whole
from ..host import nvidia
from ..native.library import BUILD, find_library, load
from .nvrtc import Nvrtc

SOURCES = Path(__file__).with_name("sources")
MOST_CANDIDATES = 256  # of DrawTokens: kMost of draw_tokens.cu
_DIGEST = hashlib.sha256().digest_size


def operators_library() -> Path:
    """Return the library to register with sessions.

    Raises:
        ProviderUnavailableError: it is not built.
    """
    library = find_library()
    if library is None:
        raise ProviderUnavailableError(f"carryall's operators are not built; {BUILD}")
    return library


@functools.cache
def load_kernels(device: int, capability: tuple[int, int]) -> None:
    """Load the kernels for all sessions of a device, once in a process.

    Args:
        device: index of the device, within CUDA_VISIBLE_DEVICES.
        capability: its compute capability.

    Raises:
        ProviderUnavailableError: NVRTC or the operators are missing, or the driver refuses the kernels.
        UsageError: the cache folder cannot be used.
    """
    functions, driver = load(operators_library()), nvidia.cuda_libraries()[0]
    functions.carryall_cuda_load.restype = ctypes.c_char_p
    functions.carryall_cuda_load.argtypes = [ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p]
    for image in kernel_images(Nvrtc(), capability):
        wrong = functions.carryall_cuda_load(driver.file.encode(), device, image)
        if wrong is not None:
            raise ProviderUnavailableError(f"carryall's CUDA kernels cannot be used: {wrong.decode()}")


def kernel_images(compiler: Nvrtc, capability: tuple[int, int]) -> list[bytes]:
    """Return the machine code of each source for a compute capability, from the cache if it is there.

    Raises:
        ProviderUnavailableError: the compiler refuses a source.
        UsageError: the cache folder cannot be used.
    """
    headers = {path.name: path.read_text(encoding="utf-8") for path in sorted(SOURCES.glob("*.cuh"))}
    images = []
    for path in sorted(SOURCES.glob("*.cu")):
        source = path.read_text(encoding="utf-8")
        key = hashlib.sha256(repr((source, headers, compiler.version, capability)).encode()).hexdigest()
        place = cache_root() / "cuda-kernels" / f"{path.stem}-{key[:32]}.cubin"
        image = _cached(place)
        if image is None:
            image = compiler.compile(source, path.name, headers, capability)
            _keep(place, image)
        images.append(image)
    return images


def _cached(place: Path) -> bytes | None:
    """Return the machine code of a file, None if there is none or it is damaged."""
    try:
        content = place.read_bytes()
    except OSError:
        return None
    image = content[_DIGEST:]
    return image if hashlib.sha256(image).digest() == content[:_DIGEST] else None


def _keep(place: Path, image: bytes) -> None:
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        write_whole(place, hashlib.sha256(image).digest() + image)
    except OSError as error:
        raise unusable(error) from error
