"""The kernels for arm64, run by qemu: NumPy's results, and the bits of this machine's kernels."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from operator_calls import MAKERS
from operator_host import OperatorHost, build_host

from carryall.providers.native.build import build_library
from carryall.providers.native.compiler import find_compiler

COMPILER, EMULATOR, ROOT = "aarch64-linux-gnu-g++", "qemu-aarch64", "/usr/aarch64-linux-gnu"
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def arm(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Return the command of the host on an emulated arm64."""
    if shutil.which(COMPILER) is None or shutil.which(EMULATOR) is None:
        pytest.skip(f"needs {COMPILER} and {EMULATOR} (Debian: g++-aarch64-linux-gnu and qemu-user)")
    folder = tmp_path_factory.mktemp("arm")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CXX", COMPILER)
        library = build_library(folder / "kernels.so", machine="aarch64")
    return [EMULATOR, "-L", ROOT, str(build_host([COMPILER], folder / "host")), str(library)]


@pytest.fixture
def here(library: Path, tmp_path: Path) -> Iterator[OperatorHost]:
    """Return the host on this machine, without bfloat16 products: they round where the others do not."""
    command = [str(build_host(find_compiler() or [], tmp_path / "host")), str(library)]
    with OperatorHost(command, {"CARRYALL_KERNELS_ISA": "avx2"}) as host:
        yield host


@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize("isa", ["i8mm", "dotprod", "portable"])
def test_the_reference_and_the_bits_of_this_machine(
    arm: list[str], here: OperatorHost, isa: str, kind: str
) -> None:
    rng = np.random.default_rng(0)
    with OperatorHost(arm, {"CARRYALL_KERNELS_ISA": isa}) as host:
        for case in range(12 if isa == "portable" else 40):
            known = MAKERS[kind](rng, threads=1 + case % 3)
            found = host.outputs(known.call)
            for one, other in zip(found, here.outputs(known.call), strict=True):
                np.testing.assert_array_equal(one, other)
            known.check(found)
