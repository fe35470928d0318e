"""NCCL, by which the operators of models that are cut over devices add up."""

from __future__ import annotations

import ctypes
from pathlib import Path

from ...errors import ProviderUnavailableError
from ..host import libraries, nvidia
from ..host.libraries import Library
from ..native.library import load


def load_nccl(operators: Path) -> None:
    """Load NCCL for the operators of a library.

    Raises:
        ProviderUnavailableError: it is not installed.
    """
    cuda = nvidia.cuda_version()
    remedy = f"Install it with: pip install nvidia-nccl-cu{cuda}"
    wanted = Library("NCCL 2", "libnccl.so.2", "nccl.dll", remedy)
    lacking = libraries.complaint(libraries.missing([wanted]))
    if lacking is not None:
        raise ProviderUnavailableError(lacking)
    functions = load(operators)
    functions.carryall_nccl_load.restype = ctypes.c_char_p
    # Now that it is loaded, the linker finds it by its name.
    wrong = functions.carryall_nccl_load(wanted.file.encode())
    if wrong is not None:
        raise ProviderUnavailableError(f"{wanted.file} cannot be used: {wrong.decode()}")
