"""Compile the library of CPU kernels with the system's C++ compiler, or with ``ziglang`` from PyPI.

It imports the standard library only: ``setup.py`` loads it before carryall's dependencies are installed.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

SOURCES = Path(__file__).resolve().parent / "sources"
COMMON = ("-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden", "-fno-exceptions", "-fno-rtti")
# a * b + c written as two operations must stay two: the result must not depend on the compiler.
EXACT = ("-ffp-contract=off",)
_AVX2 = ("-mavx2", "-mfma", "-mf16c")
_AVX512 = (*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx512vnni")
_AMX = (*_AVX512, "-mamx-tile", "-mamx-int8")
_AVX512_BF16 = (*_AVX512, "-mavx512bf16")
_AMX_BF16 = (*_AMX, "-mavx512vbmi", "-mavx512bf16", "-mamx-bf16")
_SHARED = (
    "cpu",
    "linear",
    "gguf_blocks",
    "attention",
    "experts",
    "operators",
    "attention_operator",
    "cross_operator",
    "experts_operator",
    "gate_operator",
    "heads_operator",
    "recurrent",
    "recurrent_operator",
    "chain",
    "chain_program",
    "chain_operator",
    "ranks",
    "ranks_operator",
    "cuda_driver",
    "cuda_operators",
    "cuda_decode_operator",
    "cuda_product_operator",
    "cuda_ranks_operator",
    "nccl",
    "entry",
    "portable",
    "rounding",
    "best_draws",
    "best_logits",
    "attention_portable",
)
_Flags = dict[str, tuple[str, ...]]
_X86: _Flags = {
    "avx2": _AVX2,
    "attention_avx2": _AVX2,
    "rounding_avx2": _AVX2,
    "rounding_avx512": _AVX512,
    "avxvnni": (*_AVX2, "-mavxvnni"),
    "avx512vnni": _AVX512,
    "attention_avx512": _AVX512,
    "attention_avx512bf16": _AVX512_BF16,
    "amx": _AMX,
    "attention_amx": _AMX_BF16,
    "split_amx": _AMX_BF16,
}
_ARM: _Flags = {
    "dotprod": ("-march=armv8.2-a+dotprod",),
    "i8mm": ("-march=armv8.2-a+dotprod+i8mm",),
    "attention_neon": (),
}
_OF_MACHINE: dict[str, _Flags] = {"x86_64": _X86, "amd64": _X86, "aarch64": _ARM, "arm64": _ARM}
_REMEDY = "install a C++17 compiler (c++, g++ or clang++), or one from PyPI: pip install 'carryall[native]'"


class CompilerError(Exception):
    """There is no compiler, or it failed."""


def library_name() -> str:
    """Return the file name of the library on this system."""
    suffix = {"win32": ".dll", "darwin": ".dylib"}.get(sys.platform, ".so")
    return f"carryall_kernels{suffix}"


def flags_of_sources(machine: str | None = None) -> Mapping[str, tuple[str, ...]]:
    """Return the flags of each source, by its name without suffix.

    Args:
        machine: a name of ``platform.machine()``; None is this machine.
    """
    shared: _Flags = dict.fromkeys(_SHARED, ())
    return shared | _OF_MACHINE.get((machine or platform.machine()).lower(), {})


@functools.cache
def sources_key() -> str:
    """Return a hash of the sources, their flags and the kind of machine."""
    digest = hashlib.sha256()
    for path in sorted(SOURCES.iterdir()):
        digest.update(f"{path.name} {hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    digest.update(repr((COMMON, EXACT, sorted(flags_of_sources().items()), sys.platform)).encode())
    return digest.hexdigest()[:16]


@functools.cache
def installed_library(package: Path = SOURCES.parent) -> Path:
    """Return where an installation keeps the library of these sources, whether or not it is there.

    Args:
        package: the folder of this module, or where a build will have it.
    """
    return package / "built" / sources_key() / library_name()


def find_compiler() -> list[str] | None:
    """Return the command of a C++ compiler: ``$CXX``, the system's, or ziglang's; None if there is none."""
    stated = os.environ.get("CXX", "")
    try:
        words = shlex.split(stated)
    except ValueError:  # a quotation without its end: the error of the start shows it
        words = [stated]
    if words:
        return words
    for name in ("c++", "g++", "clang++"):
        if (path := shutil.which(name)) is not None:
            return [path]
    return [sys.executable, "-m", "ziglang", "c++"] if importlib.util.find_spec("ziglang") else None


def required_compiler() -> list[str]:
    """Return the command of a C++ compiler.

    Raises:
        CompilerError: there is none.
    """
    compiler = find_compiler()
    if compiler is None:
        raise CompilerError(f"the CPU kernels cannot be built without a compiler: {_REMEDY}")
    return compiler


def compile_library(
    compiler: Sequence[str], target: Path, *, extra: Sequence[str] = (), machine: str | None = None
) -> None:
    """Compile the sources on all cores and replace a file by the library.

    Args:
        compiler: its command.
        target: the file to write; its folder is made.
        extra: more flags for compiling and linking.
        machine: the machine for which the compiler makes programs, see ``flags_of_sources``.

    Raises:
        CompilerError: the compiler failed.
        OSError: the file cannot be written.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".build-") as folder:
        made = _build(compiler, Path(folder), extra, flags_of_sources(machine))
        made.replace(target)  # in one step: another process may be reading it


def _build(
    compiler: Sequence[str], folder: Path, extra: Sequence[str], sources: Mapping[str, tuple[str, ...]]
) -> Path:
    def compiled(name: str, flags: Sequence[str]) -> str:
        object_file = str(folder / f"{name}.o")
        source = str(SOURCES / f"{name}.cpp")
        chosen = flags_for(compiler, flags)
        output_of(
            [*compiler, *COMMON, *EXACT, *chosen, *extra, "-c", source, "-o", object_file], f"{name}.cpp"
        )
        return object_file

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = list(pool.map(compiled, sources.keys(), sources.values()))
    out = folder / library_name()
    # The library of a wheel must not need the C++ library of the machine that built it.
    static = (
        ["-static-libgcc", "-static-libstdc++"]
        if sys.platform == "linux" and "ziglang" not in compiler
        else []
    )
    if sys.platform == "linux":
        static.append("-ldl")  # of C libraries before glibc 2.34
    output_of([*compiler, "-shared", *static, *extra, *objects, "-o", str(out)], "linking")
    if not out.is_file():
        raise CompilerError(f"the compiler {shlex.join(compiler)} made no file")
    return out


def flags_for(compiler: Sequence[str], flags: Sequence[str]) -> list[str]:
    """Return the flags of a source for a compiler: ziglang takes ARM architectures as processors only."""
    if "ziglang" not in compiler:
        return list(flags)
    return [flag.replace("-march=armv8.2-a+", "-mcpu=generic+") for flag in flags]


def output_of(command: Sequence[str], what: str) -> str:
    """Run the compiler and return what it prints.

    Args:
        command: the whole command.
        what: what it does, for the error.

    Raises:
        CompilerError: it cannot be started, or failed.
    """
    name = shlex.join(command[:1])
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    except OSError as error:
        raise CompilerError(f"the compiler {name} cannot be started: {error.strerror}") from error
    if done.returncode:
        lines = done.stderr.splitlines()
        detail = next((line for line in lines if "error" in line), f"exit code {done.returncode}")
        raise CompilerError(f"the compiler {name} failed on {what}: {detail.strip()}")
    return done.stdout
