"""Figures of NVIDIA devices, with a stand-in for the CUDA runtime."""

from __future__ import annotations

import pytest

from carryall.errors import ProviderUnavailableError
from carryall.providers import get_provider
from carryall.providers.base import DeviceMemory, RunnerConfig
from carryall.providers.host import nvidia
from carryall.runtime.models.split import device_memory

GIB = 2**30


def test_the_memory_of_a_device_is_read_in_a_thread_that_disturbs_no_capture(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[tuple[str, int]] = []

    def memory(index: int) -> tuple[int, int]:
        calls.append(("memory", index))
        return (10 - index) * GIB, 16 * GIB

    monkeypatch.setattr(nvidia, "enter", lambda index: calls.append(("enter", index)))
    monkeypatch.setattr(nvidia, "memory", memory)
    second = DeviceMemory("cuda:1", 7 * GIB, 16 * GIB)
    assert get_provider("cuda").device_memory({"device": 1}) == second
    assert calls == [("enter", 1), ("memory", 1)]
    assert device_memory("cuda", RunnerConfig()) == [DeviceMemory("cuda:0", 6 * GIB, 16 * GIB)]
    assert device_memory("cpu:0-1,cuda:1:2-3,cuda@process:0:4-5", RunnerConfig()) == [second]
    assert device_memory("cpu", RunnerConfig()) == []


@pytest.mark.parametrize(
    ("count", "known"), [(1, "there is only device 0"), (2, "this process may use devices 0 to 1")]
)
def test_a_device_that_is_not_there_is_named(count: int, known: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvidia, "device_count", lambda: count)
    with pytest.raises(ProviderUnavailableError, match=f"there is no CUDA device 3; {known}"):
        nvidia.compute_capability(3)
