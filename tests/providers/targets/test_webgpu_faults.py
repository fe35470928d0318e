"""WebGPU on a driver whose memory ends and whose device is lost: requests fail, and the process lives."""

from __future__ import annotations

from pathlib import Path

import pytest
import vulkan_faults

from carryall.providers import get_provider

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def device() -> None:
    if (reason := get_provider("webgpu").available()) is not None:
        pytest.skip(reason)


def test_out_of_memory_at_load_is_a_typed_error(tmp_path: Path) -> None:
    error, other_works = vulkan_faults.run("memory_at_load", tmp_path)
    assert error.startswith("ProviderRuntimeError: copying a slot failed")
    assert error.endswith("Lower bank, max_slots or context_length.")
    assert other_works == "True"


def test_out_of_memory_in_a_step_fails_its_request_only(tmp_path: Path) -> None:
    (reason, error), later = vulkan_faults.run("memory_in_a_step", tmp_path)
    assert reason == "error"
    assert "Invalid Buffer" in error  # what WebGPU gives in place of memory
    assert later == ["length", "None"]


def test_a_lost_device_fails_its_requests_and_other_providers_run(tmp_path: Path) -> None:
    before, during, after, elsewhere = vulkan_faults.run("lost", tmp_path)
    assert before == elsewhere == ["length", "None"]
    for reason, error in (during, after):
        assert reason == "error"
        assert "[Device] is lost" in error
