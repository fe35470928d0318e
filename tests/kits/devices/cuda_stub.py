"""Run the CUDA provider of onnxruntime-gpu without a GPU, over ``cudart_stub.cpp`` and an empty cuBLAS.

The wheel is downloaded on demand, the libraries are built by the system's compiler.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import zoo
from filelock import FileLock

ROOT = Path(__file__).parents[3]
SOURCE = Path(__file__).with_name("cudart_stub.cpp")
SCENARIOS = Path(__file__).with_name("cuda_scenarios.py")
_HEADING = (ROOT / "providers" / "ort" / "registrations" / "cuda.txt").read_text().splitlines()[0]
VERSION = _HEADING.split()[4].rstrip(",")
_RUNTIME = "libcudart.so.13"
_LIBRARIES = (_RUNTIME, "libcublas.so.13", "libcublasLt.so.13", "libcurand.so.10", "libcuda.so.1")
# Everything else succeeds and does nothing.
_SPECIAL = {
    r"\w+Create(_v2)?": "int {0}(void **handle) {{ *handle = calloc(1, 256); return 0; }}",
    r"\w+GetStatus\w+": 'const char *{0}(int code) {{ return "stub"; }}',
    r"cublasDestroy(_v2)?": "int {0}(void *handle) {{ free(handle); return cudaDeviceSynchronize(); }}",
    r"cublasGetMathMode": "int {0}(void *handle, int *mode) {{ *mode = 0; return 0; }}",
    r"cublasLtMatmulAlgoGetHeuristic": (  # its results are structures of 96 bytes
        "int {0}(void *a, void *b, void *c, void *d, void *e, void *f, void *g, int count, char *results, "
        "int *found) {{ memset(results, 0, 96 * count); *found = 1; return 0; }}"
    ),
}
# The driver's functions that carryall's operators call.
_DRIVER = """
int stub_launch(const void *, const char *, unsigned, unsigned, void *);
int cudaGetDevice(int *);
int cuInit(unsigned flags) { return 100; }  // CUDA_ERROR_NO_DEVICE: NVRTC then asks for nothing more
int cuDeviceGet(int *device, int index) { *device = index; return 0; }
int cuDevicePrimaryCtxRetain(void **context, int device) { *context = calloc(1, 8); return 0; }
int cuCtxPushCurrent_v2(void *context) { return 0; }
int cuCtxPopCurrent_v2(void **context) { return 0; }
int cuCtxGetDevice(int *device) { return cudaGetDevice(device); }
int cuModuleLoadData(void **module, const void *image) { *module = calloc(1, 8); return 0; }
int cuModuleGetFunction(void **function, void *module, const char *name) {
  *function = strdup(name);
  return 0;
}
int cuLaunchKernel(void *function, unsigned x, unsigned y, unsigned z, unsigned threads, unsigned b,
                   unsigned c, unsigned shared, void *stream, void **arguments, void **extra) {
  return stub_launch(function, function, x * y * z, threads * b * c, stream);
}
int cuGetErrorString(int code, const char **text) { *text = "stub"; return 0; }
"""
# What a process over the stub runs first, so that the kit of measurements and `carryall serve` do too. The
# environment of the tests also has onnxruntime for the CPU; the stub's kernels compute nothing that could
# agree; NVRTC asks the driver for functions that the stub lacks, and the stub runs no machine code.
_CUSTOMIZE = f"""import os
from carryall.providers.cuda import kernels
from carryall.providers.ort import ort
from carryall.providers.targets import cuda
ort.installed_wheels = lambda: {{"onnxruntime-gpu": "{VERSION}"}}
kernels.Nvrtc = lambda: None
kernels.kernel_images = lambda compiler, capability: [b"\\0"]
cuda.self_test = lambda open_session: None
cuda.paged_self_test = lambda open_session, device: None
cuda.PagedAgreement.on_device = cuda.PagedAgreement.complaint
cuda.PagedAgreement.complaint = lambda *_: os.environ.get("CUDA_STUB_COMPLAINT")
cuda.joint_prompts_agree = lambda runner: True
cuda.padded_runs_agree = lambda runner, pad: True
"""
_EMPTY = "int {0}(void) {{ return 0; }}"


@dataclass(frozen=True)
class Outcome:
    """What a process over the stub printed, and what its calls of CUDA were.

    Attributes:
        result: JSON of the last line of its output.
        log: lines of the stub, such as ``begin 0`` or ``illegal cudaMalloc``.
    """

    result: Any
    log: list[str]

    def count(self, word: str) -> int:
        """Return how many lines begin with a word."""
        return Counter(line.split()[0] for line in self.log)[word]

    def illegal(self) -> list[str]:
        """Return the calls that CUDA would have refused."""
        return [line for line in self.log if line.startswith("illegal")]


def run(scenario: str, *arguments: str, **environment: str) -> Outcome:
    """Run a function of ``cuda_scenarios.py`` in a process whose onnxruntime has the CUDA provider."""
    with tempfile.TemporaryDirectory(prefix="cuda-stub-") as scratch:
        log = Path(scratch) / "log"
        done = subprocess.run(
            [sys.executable, "-X", "faulthandler", str(SCENARIOS), scenario, *arguments],
            env={**variables(Path(scratch)), **environment},
            capture_output=True,
            text=True,
            timeout=570,
            check=False,
        )
        assert done.returncode == 0, f"exit code {done.returncode}\n{done.stderr[-3000:]}"
        return Outcome(json.loads(done.stdout.splitlines()[-1]), log.read_text().splitlines())


def variables(scratch: Path) -> dict[str, str]:
    """Return the environment of a process over the stub, which logs to ``scratch / "log"``."""
    wheel = _wheel()
    (scratch / "sitecustomize.py").write_text(_CUSTOMIZE)
    paths = [scratch, wheel, ROOT / "src", *(ROOT / "tests" / "kits").glob("*/"), ROOT / "tests" / "kits"]
    (scratch / "log").touch()
    return {
        **os.environ,
        "LD_LIBRARY_PATH": str(build(wheel)),
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
        "CARRYALL_CACHE": str(scratch / "cache"),
        "CUDA_STUB_LOG": str(scratch / "log"),
    }


def build(wheel: Path) -> Path:
    """Build the libraries that the provider of a wheel is linked with; return their folder."""
    compiler = shutil.which("g++")
    if compiler is None or shutil.which("nm") is None or not sys.platform.startswith("linux"):
        pytest.skip("the stub of CUDA needs Linux, g++ and nm")
    provider = wheel / "onnxruntime" / "capi" / "libonnxruntime_providers_cuda.so"
    key = hashlib.sha256(SOURCE.read_bytes() + Path(__file__).read_bytes() + VERSION.encode()).hexdigest()
    folder = zoo.folder() / "cuda-stub" / key[:16]
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{folder}.lock"):  # of several workers, one builds
        if not folder.is_dir():
            _build(compiler, provider, folder)
    return folder


def _build(compiler: str, provider: Path, folder: Path) -> None:
    wanted = _symbols(provider)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        made = Path(scratch) / "libraries"
        made.mkdir()
        for library in _LIBRARIES:
            source = SOURCE if library == _RUNTIME else Path(scratch) / f"{library}.c"
            if source is not SOURCE:
                names = [name for name in wanted.get(library, []) if f" {name}(" not in _DRIVER]
                more = _DRIVER if library == "libcuda.so.1" else ""
                source.write_text(_empty_library(names) + more)
            _compile(compiler, source, made / library)
        lacking = set(wanted[_RUNTIME]) - set(_symbols(made / _RUNTIME, defined=True)[_RUNTIME])
        assert not lacking, f"{SOURCE.name} lacks {', '.join(sorted(lacking))}"
        made.rename(folder)


def _wheel() -> Path:
    """Return a folder with onnxruntime-gpu; skip the test if it cannot be downloaded."""
    folder = zoo.folder() / f"onnxruntime-gpu-{VERSION}"
    if not (folder / "onnxruntime" / "capi").is_dir():
        try:
            zoo.install(f"onnxruntime-gpu=={VERSION}", folder)
        except zoo.ZooError as error:
            pytest.skip(str(error))
    return folder


def _symbols(library: Path, *, defined: bool = False) -> dict[str, list[str]]:
    """Return the functions of versioned libraries that a library uses, or defines, by library."""
    option = "--defined-only" if defined else "--undefined-only"
    listed = subprocess.run(["nm", "-D", option, library], capture_output=True, text=True, check=True).stdout
    found: dict[str, list[str]] = {}
    for name, owner in re.findall(r" [A-Za-z] (\w+)@+(lib\w+\.so\.\d+)", listed):
        found.setdefault(owner, []).append(name)
    unversioned = re.findall(r" [A-Z] (cu[A-Z]\w+)$", listed, re.MULTILINE)
    return {**found, "libcuda.so.1": unversioned}


def _empty_library(names: list[str]) -> str:
    def body(name: str) -> str:
        special = (text for pattern, text in _SPECIAL.items() if re.fullmatch(pattern, name))
        return next(special, _EMPTY).format(name)

    known = ["#include <stdlib.h>", "#include <string.h>", "int cudaDeviceSynchronize(void);"]
    return "\n".join([*known, *map(body, names)])


def _compile(compiler: str, source: Path, library: Path) -> None:
    versions = library.with_suffix(".map")
    versions.write_text(f"{library.name} {{ global: cu*; __cu*; stub_*; local: *; }};\n")
    flags = ["-shared", "-fPIC", "-O1", "-w", f"-Wl,-soname,{library.name}"]
    if source.suffix == ".cpp":
        flags.append("-std=c++17")
    else:
        flags += ["-x", "c"]
    script = [] if library.name == "libcuda.so.1" else [f"-Wl,--version-script={versions}"]
    runtime = [] if library.name == _RUNTIME else ["-x", "none", str(library.with_name(_RUNTIME))]
    subprocess.run([compiler, *flags, str(source), *script, *runtime, "-o", str(library)], check=True)
    versions.unlink()
