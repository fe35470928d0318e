"""Diagnose this machine: cores, memory speed, packages, and each provider on a tiny model."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import platform
import re
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from ...errors import CarryallError, UsageError
from ...graph_opt.graph.saving import save_model
from ...records import dataclass
from ...storage.root import cache_root
from ...storage.scratch import scratch_folder
from .. import get_provider, provider_names
from ..base import Provider
from ..ort import ort
from . import libraries, machine, nvidia
from .machine import memory_bandwidth
from .tuning import Tuning, stored_tuning, tuned_kernels

_PCI = Path("/sys/bus/pci/devices")
_VENDORS = {"0x10de": "NVIDIA", "0x1002": "AMD", "0x8086": "Intel", "0x17cb": "Qualcomm"}
# Base classes of the PCI Code and ID Assignment Specification.
_KINDS = {"0x03": "GPU", "0x12": "accelerator"}
_DISPLAY_ADAPTERS = r"SYSTEM\CurrentControlSet\Control\Class\{4d36e968-e325-11ce-bfc1-08002be10318}"


def accelerators() -> list[str]:
    """Return names that start with the vendor: ``NVIDIA GPU (10de:2335)``; empty if they cannot be listed."""
    if sys.platform == "win32":
        return _display_adapters()
    names = []
    for device in sorted(_PCI.glob("*")):
        kind = _KINDS.get(_read(device / "class")[:4])
        vendor = _VENDORS.get(_read(device / "vendor"))
        if kind is not None and vendor is not None:
            identity = f"{_read(device / 'vendor')[2:]}:{_read(device / 'device')[2:]}"
            names.append(f"{vendor} {kind} ({identity})")
    return names


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _display_adapters() -> list[str]:
    """Return the display adapters in the Windows registry."""
    import winreg

    registry: dict[str, object] = vars(winreg)
    names: list[str] = []
    open_key, query = registry["OpenKey"], registry["QueryValueEx"]
    for index in range(16):
        try:
            key = open_key(registry["HKEY_LOCAL_MACHINE"], f"{_DISPLAY_ADAPTERS}\\{index:04}")  # type: ignore[operator]
            names.append(str(query(key, "DriverDesc")[0]))  # type: ignore[operator]
        except OSError:
            continue
    return names


__all__ = ["Diagnosis", "ProviderReport", "diagnose", "memory_bandwidth"]

_SELFTEST = """
<ir_version: 10, opset_import: ["" : 21]>
selftest (float[2, 3] x, float[3, 2] w) => (float[2, 2] y) { y = MatMul(x, w) }
"""


@dataclass(frozen=True, slots=True)
class ProviderReport:
    """The result of trying one provider."""

    name: str
    works: bool
    detail: str  # what it ran, or why it failed and the remedy
    milliseconds: float | None = None  # to open a tiny model and run it once
    devices: tuple[str, ...] = ()  # values of the option ``device``, described
    counts: bool = True  # False for a test double that runs no graphs


@dataclass(frozen=True, slots=True)
class CacheFacts:
    """The cache of carryall; all of it can be deleted."""

    folder: str
    size: int  # bytes
    free: int  # free bytes of its disk


@dataclass(frozen=True, slots=True)
class KernelFacts:
    """Carryall's own CPU kernels; see ``docs/cpu_kernels.md``."""

    path: str | None  # the file of the library; None if it cannot be used
    isa: str | None  # the instruction set that it uses
    missing: str | None  # why it cannot be used, and the remedy
    tuning: Tuning | None = None  # what `carryall doctor --autotune` measured


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The result of `carryall doctor`."""

    machine: machine.Machine
    memory_bandwidth: float  # GB/s (1e9 bytes) that all usable cores read together
    python: str
    packages: dict[str, str | None]  # version of each package that carryall can use; None if not installed
    wheel_conflict: str | None  # onnxruntime wheels that overwrite each other, and the remedy
    providers: list[ProviderReport]
    accelerators: list[str]  # GPUs and NPUs of the machine
    # Whether NVIDIA's libraries can be loaded, by file name; empty without an NVIDIA device.
    libraries: dict[str, bool]
    kernels: KernelFacts
    cache: CacheFacts
    next_steps: list[str]

    @property
    def healthy(self) -> bool:
        """Whether a provider works, test doubles aside, and no onnxruntime wheels conflict."""
        return self.wheel_conflict is None and any(
            report.works and report.counts for report in self.providers
        )

    @property
    def exit_code(self) -> int:
        """0 if healthy, else 1."""
        return 0 if self.healthy else 1

    def to_dict(self) -> dict[str, Any]:
        """Return the diagnosis as JSON types."""
        return {**dataclasses.asdict(self), "healthy": self.healthy}


def diagnose(progress: Callable[[str], None] = lambda step: None) -> Diagnosis:
    """Measure the machine and try all providers; takes a second or two.

    Args:
        progress: called with the name of each step.
    """
    progress("memory speed")
    bandwidth = memory_bandwidth()
    progress("packages")
    packages = installed_packages()
    present = accelerators()
    progress("libraries")
    found = _libraries() if any(name.startswith("NVIDIA") for name in present) else {}
    reports = []
    for name in provider_names():
        progress(f"provider {name}")
        reports.append(_try(name))
    conflict = ort.wheel_conflict(ort.installed_wheels())
    kernels = kernel_facts()
    return Diagnosis(
        machine=machine.describe_machine(),
        memory_bandwidth=bandwidth,
        python=platform.python_version(),
        packages=packages,
        wheel_conflict=conflict,
        providers=reports,
        accelerators=present,
        libraries=found,
        kernels=kernels,
        cache=_cache(),
        next_steps=[*next_steps(reports, present, conflict), *_kernel_steps(kernels)],
    )


def next_steps(reports: Sequence[ProviderReport], present: Sequence[str], conflict: str | None) -> list[str]:
    """Return what to install or repair to use this machine's hardware; empty if nothing is missing.

    Args:
        reports: the results of trying the providers.
        present: accelerators, as names that start with the vendor.
        conflict: the conflict of installed wheels, None if there is none.
    """
    if conflict is not None:
        return [conflict]  # other failures may follow from it
    steps = [
        f"{report.name}, for {', '.join(owned)}: {report.detail}"
        for report in reports
        if not report.works and (owned := [n for n in present if n.startswith(_vendors(report.name))])
    ]
    if not any(report.works and report.counts for report in reports):
        steps += [f"{r.name}: {r.detail}" for r in reports if r.name == "cpu"]
    return steps


def _vendors(name: str) -> tuple[str, ...]:
    try:
        return tuple(get_provider(name).vendors)
    except CarryallError:  # its ProviderReport has the error
        return ()


def _libraries() -> dict[str, bool]:
    try:
        wanted = [*nvidia.cuda_libraries(), nvidia.cudnn(), *nvidia.tensorrt_libraries()]
    except CarryallError:  # onnxruntime is missing, which the provider reports say
        return {}
    return {library.file: libraries.load(library.file) is not None for library in wanted}


def kernel_facts() -> KernelFacts:
    """Return the facts of the library of CPU kernels."""
    try:
        found = tuned_kernels()
    except CarryallError as error:
        return KernelFacts(path=None, isa=None, missing=str(error))
    return KernelFacts(path=str(found.path), isa=found.isa, missing=None, tuning=stored_tuning())


def _kernel_steps(kernels: KernelFacts) -> list[str]:
    if kernels.missing is None:
        return []
    lost = "models with int4 or int8 weights are slower on the CPU and take more memory"
    return [f"{kernels.missing}. Without them, {lost}"]


def _cache() -> CacheFacts:
    folder = cache_root()
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
    return CacheFacts(str(folder), size, shutil.disk_usage(existing).free)


def installed_packages() -> dict[str, str | None]:
    """Return the versions of all packages in carryall's metadata, except those of the extra ``test``."""
    try:
        requirements = importlib.metadata.requires("carryall") or []
    except importlib.metadata.PackageNotFoundError:  # run from a checkout that is not installed
        requirements = ["numpy", "onnx", "onnx-ir", "onnxruntime", "openvino"]
    used = [requirement for requirement in requirements if not re.search(r"extra == .test.", requirement)]
    names = sorted({re.split(r"[^\w.-]", requirement, maxsplit=1)[0] for requirement in used})
    return {name: _version(name) for name in names}


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _try(name: str) -> ProviderReport:
    try:
        provider = get_provider(name)
        reason = provider.available()
        if reason is not None:
            return ProviderReport(name, works=False, detail=reason, counts=not provider.takes_argument)
        return _selftest(provider)
    except CarryallError as error:
        return ProviderReport(name, works=False, detail=str(error))
    except Exception as error:  # noqa: BLE001 -- a broken installation may raise anything; it is reported
        return ProviderReport(name, works=False, detail=f"{type(error).__name__}: {ort.one_line(error)}")


def _selftest(provider: Provider) -> ProviderReport:
    """Open a model of one matrix product, run it, and compare with NumPy."""
    x, w = np.arange(6, dtype=np.float32).reshape(2, 3), np.ones((3, 2), np.float32)
    with scratch_folder() as folder:
        path = folder / "selftest.onnx"
        save_model(ir.from_onnx_text(_SELFTEST), path)
        start = time.perf_counter()
        try:
            session = provider.session(path)
        except UsageError as error:
            return ProviderReport(provider.name, works=True, detail=str(error), counts=False)
        (y,) = session.run(None, {"x": x, "w": w})
        milliseconds = (time.perf_counter() - start) * 1e3
    if not np.allclose(y, x @ w, rtol=1e-2):
        detail = f"the results are wrong: {y.tolist()} instead of {(x @ w).tolist()}"
        return ProviderReport(provider.name, works=False, detail=detail, milliseconds=milliseconds)
    devices = tuple(provider.device_descriptions())
    return ProviderReport(
        provider.name, works=True, detail="a tiny model runs", milliseconds=milliseconds, devices=devices
    )
