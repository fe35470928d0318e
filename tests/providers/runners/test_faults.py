"""Device faults, injected below the runner: requests fail with a reason, and nothing else is affected."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from device_stand_ins import CudaOnCpu, threaded
from engine_kit import make_request, run
from slot_models import VOCAB, save_slot_model

from carryall.errors import ProviderRuntimeError, ProviderUnavailableError
from carryall.providers.base import Provider, RunnerConfig
from carryall.providers.host import libraries, nvidia
from carryall.providers.host.libraries import Library
from carryall.providers.ort import ort
from carryall.providers.ort.device_memory import DeviceSlots
from carryall.providers.targets.cpu import CpuProvider
from carryall.providers.targets.cuda import CudaProvider
from carryall.runtime.engine.engine import Engine
from carryall.runtime.engine.requests.request import Request

LOST = "CUDA failure 999: unknown error; device lost"
FULL = "Failed to allocate memory for requested buffer of size 1073741824"


class FaultySession:
    """A session whose runs fail if ``faulty`` returns True for the number of earlier runs."""

    def __init__(self, session: Any, message: str, faulty: Callable[[int], bool]) -> None:
        self._session, self._message, self._faulty = session, message, faulty
        self.runs = 0

    def run_with_iobinding(self, *arguments: Any) -> None:
        self.runs += 1
        if self._faulty(self.runs - 1):
            raise RuntimeError(self._message)
        self._session.run_with_iobinding(*arguments)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_slot_model(tmp_path_factory.mktemp("faults") / "model.onnx")


@pytest.fixture(params=[CpuProvider, CudaOnCpu], ids=["cpu", "device"])
def provider(request: pytest.FixtureRequest) -> Provider:
    made: Provider = request.param()
    return made


@pytest.fixture
def engine(provider: Provider, model: Path) -> Iterator[Engine]:
    engine = Engine(provider.runner(model, RunnerConfig(max_slots=4, num_threads=1)))
    yield engine
    engine.close()


def inject(engine: Engine, message: str, faulty: Callable[[int], bool]) -> FaultySession:
    runner = threaded(engine.runner)
    sessions = {runner.session, runner.decode_session} - {None}
    faults = FaultySession(runner.session, message, faulty)
    runner.session = faults
    if len(sessions) > 1:
        runner.decode_session = faults
    return faults


def requests(count: int) -> list[Request]:
    return [make_request(f"r{i}", [(7 * i + j) % VOCAB for j in range(4 + i)]) for i in range(count)]


@pytest.fixture
def undisturbed(provider: Provider, model: Path) -> list[list[int]]:
    engine = Engine(provider.runner(model, RunnerConfig(max_slots=4, num_threads=1)))
    tokens = run(engine, requests(3))
    engine.close()
    return tokens


@pytest.mark.long
@pytest.mark.parametrize("message", [LOST, FULL], ids=["device-lost", "out-of-memory"])
@pytest.mark.parametrize("moment", [0, 2, 5, 9])
def test_a_transient_fault_fails_no_request(
    engine: Engine, undisturbed: list[list[int]], message: str, moment: int
) -> None:
    """After a fault in any run, the rows run again one by one."""
    faults = inject(engine, message, lambda count: count == moment)
    assert run(engine, requests(3)) == undisturbed
    assert faults.runs > moment


@pytest.mark.long
@pytest.mark.parametrize("message", [LOST, FULL], ids=["device-lost", "out-of-memory"])
@pytest.mark.parametrize("moment", [0, 6])
def test_a_lost_device_fails_its_requests_with_the_reason(
    engine: Engine, undisturbed: list[list[int]], model: Path, message: str, moment: int
) -> None:
    other = Engine(CpuProvider().runner(model, RunnerConfig(max_slots=4, num_threads=1)))
    is_lost = True
    inject(engine, message, lambda count: is_lost and count >= moment)
    batch, bystander = requests(3), make_request("other", [1, 2, 3])
    other.add(bystander)
    other.step()
    run(engine, batch)
    for request in batch:
        assert request.finish_reason == "error"
        assert message.split(";")[0] in str(request.error)
    assert not engine.has_work
    run(other)
    assert bystander.finish_reason == "length"
    other.close()

    is_lost = False  # a driver may restore its device
    assert run(engine, requests(3)) == undisturbed


@pytest.mark.parametrize("moment", [0, 1])
def test_out_of_memory_during_binding_fails_no_other_request(
    model: Path, moment: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A binding that failed half-way is not used again."""
    engine = Engine(CudaOnCpu().runner(model, RunnerConfig(max_slots=4, num_threads=1)))
    undisturbed = run(engine, requests(3))
    engine.close()
    engine = Engine(CudaOnCpu().runner(model, RunnerConfig(max_slots=4, num_threads=1)))
    allocate, calls = DeviceSlots._allocate, iter(range(1000))

    def full_once(*arguments: Any) -> Any:
        if next(calls) == moment:
            raise ProviderRuntimeError("cuda:0 has no memory")
        return allocate(*arguments)

    monkeypatch.setattr(DeviceSlots, "_allocate", full_once)
    assert run(engine, requests(3)) == undisturbed
    assert next(calls) > moment + 1
    engine.close()


def test_a_failed_copy_of_a_slot_is_a_typed_error_and_changes_no_other_slot(model: Path) -> None:
    engine = Engine(CudaOnCpu().runner(model, RunnerConfig(max_slots=4, num_threads=1)))
    runner = threaded(engine.runner)
    run(engine, requests(3))
    runner._kv._copier = FaultySession(runner._kv._copier, LOST, lambda count: True)
    with pytest.raises(ProviderRuntimeError, match="device lost"):
        runner.copy_prefix(0, 3, 1)
    longer = [make_request(f"again {i}", [*r.prompt_token_ids, 1, 2]) for i, r in enumerate(requests(3))]
    assert all(len(tokens) == 12 for tokens in run(engine, longer))
    engine.close()


def test_no_memory_at_load(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    living = Engine(CudaOnCpu().runner(model, RunnerConfig(max_slots=2, num_threads=1)))
    with monkeypatch.context() as patched:
        patched.setattr(CudaOnCpu, "free_memory", lambda self, options: 10)
        with pytest.raises(ProviderRuntimeError, match=r"cannot hold one sequence.*Lower context_length"):
            CudaOnCpu().runner(model, RunnerConfig(max_slots=2, num_threads=1))

    def full(*_: object) -> None:
        raise RuntimeError(FULL)

    with monkeypatch.context() as patched:
        value = ort.load_onnxruntime("a test").OrtValue
        patched.setattr(value, "ortvalue_from_shape_and_type", full)
        with pytest.raises(
            ProviderRuntimeError, match=r"has no memory for.*Lower max_slots or context_length"
        ):
            CudaOnCpu().runner(model, RunnerConfig(max_slots=2, num_threads=1))
    assert all(run(living, requests(2)))
    living.close()


def test_a_missing_library_is_named_and_others_run(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    absent = Library("cuDNN 9", "libabsent.so.9", "absent_9.dll", "pip install 'carryall[cuda]'")
    monkeypatch.setattr(ort, "check_available", lambda name: None)
    monkeypatch.setattr(libraries, "missing", lambda wanted: [absent])
    monkeypatch.setattr(nvidia, "device_count", lambda: 1)
    with pytest.raises(ProviderUnavailableError, match=r"cuDNN 9.*carryall\[cuda\]"):
        CudaProvider().runner(model, RunnerConfig())
    engine = Engine(CpuProvider().runner(model, RunnerConfig(max_slots=2, num_threads=1)))
    assert all(run(engine, requests(2)))
    engine.close()
