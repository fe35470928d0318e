"""The kernels under the sanitizers of addresses, undefined behaviour and threads."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from native_kernels import isas
from operator_calls import MAKERS
from operator_host import OperatorHost, build_host

from carryall.providers.native.build import build_library
from carryall.providers.native.compiler import find_compiler

KITS = Path(__file__).resolve().parents[2] / "kits"
IMPORTS = """
import sys
from pathlib import Path
import numpy as np
from native_attention import filled
from native_kernels import isas, linear
from paged_attention_reference import random_case
from quantized_linear_reference import random_weight
from stored_weight import stored_weight

from carryall.graph_opt.lower.products.stored_tiles import FORMS

library, rng = Path(sys.argv[1]), np.random.default_rng(0)
"""
LINEAR = """
for case in range(150):
    bits, block = int(rng.choice([4, 8])), int(rng.choice([16, 32, 64, 128, 256]))
    outputs, inputs = int(rng.integers(1, 70)), 2 * int(rng.integers(1, 300))
    weight = random_weight(rng, outputs, inputs, bits, block, case % 3)
    x = rng.standard_normal((int(rng.integers(1, 40)), inputs)).astype(np.float32)
    bias = rng.standard_normal(outputs).astype(np.float32) if case % 2 else None
    for isa in isas(library):
        steps = (int(rng.integers(1, 40)), int(rng.integers(1, 6)))
        linear(library, isa, x, weight, bias, steps=steps, shift=4 * int(rng.integers(0, 16)))
"""
STORED = """
for kind in sorted(FORMS):
    for rows in (1, 5, 12, 39):
        weight = stored_weight(library, kind, int(rng.integers(1, 70)), 256 * int(rng.integers(1, 4)), rows)
        x = rng.standard_normal((rows, weight.inputs)).astype(np.float32)
        for isa in isas(library):
            steps = (int(rng.integers(1, 40)), int(rng.integers(1, 6)))
            linear(library, isa, x, weight, None, steps=steps, shift=4 * int(rng.integers(0, 16)))
"""
ATTENTION = """
for case in range(12):
    size, rows = int(rng.integers(1, 257)), int(rng.integers(1, 4))
    lengths = [int(rng.integers(1, 50)) for _ in range(rows)]
    past = [int(rng.integers(0, 600)) for _ in range(rows)]
    options = {
        "heads": [(6, 2), (1, 1), (50, 1)][case % 3],
        "rotary": 2 * int(rng.integers(0, size // 2 + 1)),
        "sinks": case % 2 == 0,
        "slopes": case % 4 < 2,
        "ahead": case % 8 < 3,
        "block": 16 * int(rng.integers(1, 5)),
        "window": int(rng.choice([0, 1, 100])),
        "softcap": float(rng.choice([0, 20])),
        "cache": int(rng.integers(0, 3)),
    }
    made = random_case(rng, size=size, lengths=lengths, past=past, **options)
    for isa in isas(library):
        filled(library, isa, made, rng, separate=int(rng.choice([0, 1000])))
"""
ROUNDING = """
from carryall.graph_opt.quantize.algorithms.blockwise import BlockFormat
from carryall.providers.native.rounding import BlockRounding

for case in range(60):
    bits, block, group = [(4, 32, 64), (4, 16, 64), (4, 256, 0), (8, 64, 0)][case % 4]
    form = BlockFormat(bits=bits, block_size=block, symmetric=not group, group_size=group)
    shape = int(rng.integers(1, 6)) * block, int(rng.integers(1, 60))
    matrix = np.asarray(rng.standard_normal(shape), np.float32, order="CF"[case // 4 % 2])
    for isa in isas(library):
        BlockRounding(library, ("rtn", "kquant")[case // 8 % 2], isa)(matrix, form)
"""
DRAWS = """
from carryall.providers.base import BestLogits
from carryall.providers.native.best_draws import BestDraws, pack_options

for case in range(200):
    size, count = int(rng.integers(1, 2000)), int(rng.integers(1, 40))
    rows = []
    for row in range(count):
        kept = int(rng.integers(1, min(size, 700) + 1))
        logits = -np.sort(-rng.normal(0, 3, kept).astype(np.float32))
        rows.append(BestLogits(np.arange(kept), logits, float(logits[0]) + 1.0, size, list, case % 2 == 0))
    options = [
        pack_options(float(rng.uniform(0.1, 3)), int(rng.integers(900)), float(rng.uniform(0.1, 1)), 0.0, row)
        for row in range(count)
    ]
    draws = BestDraws(library)
    draws(rows, options, range(count))
    if size > 64:
        logits = list(rng.normal(0, 3, (count, size)).round(case % 3).astype(np.float32))
        draws.largest(logits, int(rng.integers(1, 65)), [case % 2 == 0] * count)
"""
END = 'print("clean")'
_ADDRESS = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-g"]
_THREAD = ["-fsanitize=thread", "-g"]


@pytest.fixture(scope="module", params=[_ADDRESS, _THREAD], ids=["address", "thread"])
def sanitized(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, list[str]]:
    """Return the library with a sanitizer, which takes minutes to compile, and its flags."""
    if find_compiler() is None:
        pytest.skip("there is no C++ compiler")
    folder = tmp_path_factory.mktemp("sanitized")
    return build_library(folder / "kernels.so", extra=request.param), request.param


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="preloads GCC's sanitizer")
@pytest.mark.parametrize("sanitized", [_ADDRESS], ids=["address"], indirect=True)
@pytest.mark.parametrize(
    "script",
    [LINEAR, STORED, ATTENTION, ROUNDING, DRAWS],
    ids=["linear", "stored", "attention", "rounding", "draws"],
)
def test_no_access_outside_of_the_arrays(sanitized: tuple[Path, list[str]], script: str) -> None:
    compiler = find_compiler() or []
    asked = [*compiler, "-print-file-name=libasan.so"]
    preloaded = subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip()
    if not Path(preloaded).is_absolute():
        pytest.skip("the compiler has no address sanitizer to preload")
    paths = [str(KITS / "devices"), str(KITS / "graphs"), *sys.path]
    environment = {
        **os.environ,
        "LD_PRELOAD": preloaded,
        "ASAN_OPTIONS": "detect_leaks=0",
        "PYTHONPATH": os.pathsep.join(paths),
        "PYTHONMALLOC": "malloc",
    }
    done = subprocess.run(
        [sys.executable, "-c", IMPORTS + script + END, str(sanitized[0])],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "clean\n"), done.stderr[-3000:]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="needs GCC's sanitizers")
def test_operators_in_several_threads(
    library: Path, tmp_path: Path, sanitized: tuple[Path, list[str]]
) -> None:
    """Each call computes three copies at the same time on one kernel, each on three threads."""
    compiler = find_compiler() or []
    kernels, flags = sanitized
    try:
        command = [str(build_host(compiler, tmp_path / "host", *flags)), str(kernels)]
    except subprocess.CalledProcessError as error:
        pytest.skip(f"the compiler has no such sanitizer: {error.stderr.splitlines()[-1]}")
    for isa in isas(library):
        rng = np.random.default_rng(0)
        environment = {"CARRYALL_KERNELS_ISA": isa, "TSAN_OPTIONS": "halt_on_error=1"}
        with OperatorHost(command, environment | {"ASAN_OPTIONS": "detect_leaks=0"}) as host:
            for _ in range(5):
                for make in MAKERS.values():
                    host.run(make(rng, threads=3, copies=3).call)
            assert host.end() == ""
