"""NVRTC, the compiler of CUDA that ``carryall[cuda]`` installs with onnxruntime-gpu. It needs no device.

Source: NVRTC's documentation, "User Interface".
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import Any

from ...errors import ProviderUnavailableError
from ..host import libraries, nvidia
from ..host.libraries import Library

_REMEDY = "Install it with: pip install 'carryall[cuda]'"


def nvrtc_library() -> Library:
    """Return NVRTC of the CUDA version that the installed onnxruntime was built for."""
    cuda = nvidia.cuda_version()
    return Library(f"NVRTC {cuda}", f"libnvrtc.so.{cuda}", f"nvrtc64_{cuda}0_0.dll", _REMEDY)


class Nvrtc:
    """The compiler.

    Args:
        library: its library, loaded; None finds it.

    Raises:
        ProviderUnavailableError: it is not installed, or a call failed; so do all methods.
    """

    def __init__(self, library: ctypes.CDLL | None = None) -> None:
        wanted = nvrtc_library() if library is None else None
        loaded = library if wanted is None else libraries.load(wanted.file)
        if loaded is None:
            raise ProviderUnavailableError(str(wanted and libraries.complaint([wanted])))
        self._library = loaded
        self._library.nvrtcGetErrorString.restype = ctypes.c_char_p

    @property
    def version(self) -> tuple[int, int]:
        """The version: (13, 0)."""
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._check("nvrtcVersion", ctypes.byref(major), ctypes.byref(minor))
        return major.value, minor.value

    def compile(
        self, source: str, name: str, headers: Mapping[str, str], capability: tuple[int, int]
    ) -> bytes:
        """Compile a source to the machine code of a device.

        Args:
            source: CUDA C++.
            name: its file name, for messages.
            headers: what it includes, by name.
            capability: compute capability of the device: (9, 0).

        Raises:
            ProviderUnavailableError: the compiler refuses the source or the capability; with its message.
        """
        program = ctypes.c_void_p()
        texts = (ctypes.c_char_p * len(headers))(*(text.encode() for text in headers.values()))
        names = (ctypes.c_char_p * len(headers))(*(file.encode() for file in headers))
        content = source.encode(), name.encode(), len(headers), texts, names
        self._check("nvrtcCreateProgram", ctypes.byref(program), *content)
        try:
            flags = [f"--gpu-architecture=sm_{capability[0]}{capability[1]}", "--std=c++17"]
            options = (ctypes.c_char_p * len(flags))(*(flag.encode() for flag in flags))
            if self._library.nvrtcCompileProgram(program, len(flags), options):
                log = self._read(program, "ProgramLog").decode(errors="replace").rstrip("\0\n")
                raise ProviderUnavailableError(f"NVRTC cannot compile {name} for {flags[0][-5:]}: {log}")
            return self._read(program, "CUBIN")
        finally:
            self._check("nvrtcDestroyProgram", ctypes.byref(program))

    def _read(self, program: ctypes.c_void_p, what: str) -> bytes:
        size = ctypes.c_size_t()
        self._check(f"nvrtcGet{what}Size", program, ctypes.byref(size))
        content = ctypes.create_string_buffer(size.value)
        self._check(f"nvrtcGet{what}", program, content)
        return content.raw

    def _check(self, call: str, *arguments: Any) -> None:
        code = getattr(self._library, call)(*arguments)
        if code:
            text = self._library.nvrtcGetErrorString(code).decode(errors="replace")
            raise ProviderUnavailableError(f"{call} failed: {text}")
