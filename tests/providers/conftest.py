"""Fixtures of every available provider and test device, with a runner on a tiny model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import software_gpu
from contract_kit import CONTEXT, LOWERED, SLOTS
from device_stand_ins import STAND_INS
from filelock import FileLock
from paged_cpu import PagedCpu
from tiny_models import write_tiny

from carryall.errors import GraphError
from carryall.exporter.export import export_package
from carryall.exporter.package import Package
from carryall.graph_opt.graph.saving import save_model
from carryall.graph_opt.pipeline.pipeline import run
from carryall.providers import get_provider, provider_names
from carryall.providers.base import Provider, Runner, RunnerConfig
from carryall.providers.native.build import build_library, built_library
from carryall.providers.native.compiler import find_compiler, installed_library

software_gpu.enable()


# The first runs on a software GPU; tests/providers/native tests the second; the others differ from
# "directml-on-cpu" in few places.
SLOW = {"webgpu", PagedCpu.label, "webgpu-on-cpu", "static-directml-on-cpu", "tensorrt-on-cpu"}
PROVIDERS = [
    pytest.param(name, marks=[pytest.mark.long] if name in SLOW else [])
    for name in (*provider_names(), PagedCpu.label, *STAND_INS)
]


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the library of the installation, or build one for all workers; skip without a compiler."""
    if (installed := installed_library()).is_file():
        return installed
    if find_compiler() is None:
        pytest.skip("there is no C++ compiler")
    shared = tmp_path_factory.getbasetemp().parent / "carryall-kernels"
    with pytest.MonkeyPatch.context() as patch, FileLock(f"{shared}.lock"):
        patch.setenv("CARRYALL_CACHE", str(shared))
        return built_library() or build_library()


@pytest.fixture
def kernels_of_this_machine(library: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Let providers find the library."""
    monkeypatch.setattr("carryall.providers.native.library.built_library", lambda: library)
    return library


@pytest.fixture(params=PROVIDERS)
def provider(request: pytest.FixtureRequest) -> Provider:
    if request.param == PagedCpu.label:
        request.getfixturevalue("kernels_of_this_machine")
        return PagedCpu()
    stand_in = STAND_INS.get(request.param)
    provider = stand_in() if stand_in is not None else get_provider(request.param)
    reason = provider.available()
    if reason is not None:
        pytest.skip(reason)
    return provider


@pytest.fixture(scope="module")
def package(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Package:
    """Return a tiny model of the family that the test requests, by default llama."""
    folder = tmp_path_factory.mktemp("contract")
    family = getattr(request, "param", "llama")
    return export_package(write_tiny(family, folder / "checkpoint"), folder / "package")


@pytest.fixture
def model(provider: Provider, package: Package, tmp_path: Path) -> Path:
    """Return a model lowered for the provider; skip if the provider has no kernel for sliding windows."""
    try:
        lowered, _ = run(package.load(), provider.passes(RunnerConfig(context_length=LOWERED)))
    except GraphError as error:
        if "sliding_window" not in (package.model_path.parent / "config.json").read_text():
            raise
        pytest.skip(str(error))
    save_model(lowered, tmp_path / "model.onnx")
    return tmp_path / "model.onnx"


@pytest.fixture
def open_runner(
    provider: Provider, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Runner]]:
    monkeypatch.setenv("CARRYALL_CACHE", str(tmp_path / "cache"))
    runners: list[Runner] = []

    def opener(**changes: object) -> Runner:
        config = {"max_slots": SLOTS, "context_length": CONTEXT, "num_threads": 1, **changes}
        runners.append(provider.runner(model, RunnerConfig(**config)))  # type: ignore[arg-type]
        return runners[-1]

    yield opener
    for runner in runners:
        runner.close()
