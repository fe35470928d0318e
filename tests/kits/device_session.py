"""Sessions on the CPU that behave like those of a provider with memory of its own.

As ONNX Runtime does for such a provider: an input on the host is copied when it is bound, a result on the
host after the run, and nothing may be bound by address.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import onnxruntime
import pytest

from carryall.contract import TOTAL_SEQUENCE_LENGTH
from carryall.providers.ort import ort

HOST = SimpleNamespace(name="Cpu")


@dataclass
class Machine:
    """The device.

    Attributes:
        info: what its sessions say of their inputs' memory.
        values: what was allocated there.
        host_inputs: inputs that its kernels read on the host.
    """

    info: Any
    values: list[Any]
    host_inputs: frozenset[str] = frozenset({TOTAL_SEQUENCE_LENGTH})

    def holds(self, value: Any) -> bool:
        return any(value is held for held in self.values)


class DeviceSession:
    """A session of such a provider."""

    def __init__(self, session: Any, machine: Machine) -> None:
        self._session, self._machine = session, machine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)

    def get_input_memory_infos(self) -> list[Any]:
        names = [value.name for value in self._session.get_inputs()]
        return [HOST if name in self._machine.host_inputs else self._machine.info for name in names]

    def io_binding(self) -> _Binding:
        return _Binding(self._session.io_binding(), self._machine)

    def run_with_iobinding(self, binding: _Binding, options: Any = None) -> None:
        self._session.run_with_iobinding(binding.real, options)
        for device, host in binding.results:
            host.numpy()[...] = device.numpy()


class _Binding:
    def __init__(self, real: Any, machine: Machine) -> None:
        self.real, self._machine = real, machine
        self._results: dict[str, tuple[Any, Any]] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)

    @property
    def results(self) -> list[tuple[Any, Any]]:
        return list(self._results.values())

    def bind_input(self, *_: Any) -> None:
        raise AssertionError("addresses mean nothing on this device")

    def bind_ortvalue_input(self, name: str, value: Any) -> None:
        self.real.bind_ortvalue_input(name, value if self._machine.holds(value) else _copy(value))

    def bind_ortvalue_output(self, name: str, value: Any) -> None:
        self._results.pop(name, None)
        if not self._machine.holds(value):
            host, value = value, _copy(value)
            self._results[name] = (value, host)
        self.real.bind_ortvalue_output(name, value)

    def clear_binding_outputs(self) -> None:
        self._results.clear()
        self.real.clear_binding_outputs()


def _copy(value: Any) -> Any:
    return onnxruntime.OrtValue.ortvalue_from_numpy(value.numpy().copy())


def add_device(monkeypatch: pytest.MonkeyPatch) -> Machine:
    """Let every session that carryall opens be one of such a provider."""
    machine = Machine(info=SimpleNamespace(name="Device_Buf"), values=[])
    allocate, open_session = onnxruntime.OrtValue.ortvalue_from_shape_and_type, ort.open_session

    def on_device(shape: Any, kind: Any, *place: Any, memory_info: Any = None) -> Any:
        value = allocate(shape, kind, *place)
        if memory_info is machine.info:
            value.device_name = lambda: "device"
            machine.values.append(value)
        return value

    monkeypatch.setattr(onnxruntime.OrtValue, "ortvalue_from_shape_and_type", on_device)
    monkeypatch.setattr(
        ort, "open_session", lambda *given, **named: DeviceSession(open_session(*given, **named), machine)
    )
    return machine
