"""Checks of a self-test: what is measured, what fails, and what counts as refused."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
from device_stand_ins import CudaOnCpu, DirectMLOnCpu

from carryall.errors import ProviderRuntimeError, UsageError
from carryall.providers import get_provider
from carryall.providers.base import Runner, RunnerConfig
from carryall.providers.host import selftest_checks
from carryall.providers.host.selftest_checks import (
    checked,
    difference,
    logits_of,
    memory_figures,
    speed_figures,
)
from carryall.providers.targets.cpu import CpuProvider
from carryall.runtime.tasks.random_model import random_model
from carryall.runtime.tasks.selftest_models import CONTEXT, FAMILIES, decoder

LLAMA = partial(decoder, "llama", "float")


def test_the_difference_is_a_share_of_both() -> None:
    rng = np.random.default_rng(0)
    first, second = rng.standard_normal((2, 40, 500)).astype(np.float32)
    assert difference(first, first) == 0
    assert difference(first, second) == pytest.approx(2**0.5, rel=0.01)
    assert difference(first * 1.01, first) == pytest.approx(0.01, rel=0.02)
    first[3, 7] = np.nan
    assert difference(first, second) == float("inf")


@pytest.mark.parametrize(
    ("error", "status", "detail"),
    [
        (UsageError("no such dtype"), "refused", "no such dtype"),
        (ProviderRuntimeError("device lost"), "failed", "device lost"),
        (ValueError("broken\nkernel"), "failed", "ValueError: broken kernel"),
    ],
)
def test_an_error_is_a_refusal_or_a_failure(error: Exception, status: str, detail: str) -> None:
    def fails() -> tuple[bool, dict[str, float]]:
        raise error

    check = checked("values", "llama", fails)
    assert (check.status, check.detail) == (status, detail)
    assert checked("values", "llama", lambda: (True, {"x": 1})).status == "passed"
    assert checked("values", "llama", lambda: (False, {"x": 1})).status == "failed"


class WithoutPositions(CpuProvider):
    """A rope table of ones and zeros: results are finite, plausible and wrong."""

    def runner(self, model: Path, config: RunnerConfig) -> Runner:
        content = ir.load(model)
        tables = [value for name, value in content.graph.initializers.items() if name.endswith("_table")]
        assert tables
        for value in tables:
            assert value.const_value is not None
            value.const_value = ir.tensor(np.zeros_like(value.const_value.numpy()), name=value.name)
        ir.save(content, model, external_data="wrong.onnx.data")
        return super().runner(model, config)


def test_right_and_wrong_results_are_told_apart() -> None:
    """The tolerance of float weights is 0.01, the largest is 0.2."""
    expected = logits_of(get_provider("cpu"), LLAMA, CONTEXT, {})
    assert len(expected) == 4 + 1 + 8 + 5 + 2 + 2 + 1 + 2 + 2
    assert difference(logits_of(CudaOnCpu(), LLAMA, CONTEXT, {}), expected) < 1e-5
    assert difference(logits_of(WithoutPositions(), LLAMA, CONTEXT, {}), expected) > 0.4


class LittleMemory(CudaOnCpu):
    """A device with room for three sequences, which does not free what a runner held."""

    leak = 0

    def __init__(self) -> None:
        self.asked = 0

    def free_memory(self, options: object) -> int:
        self.asked += 1
        slot = 2 * 2 * 2 * 64 * 4 * CONTEXT  # layers, keys and values, heads, size, bytes, tokens
        return int(3.5 * slot / 0.9) - (self.leak if self.asked > 3 else 0)


def test_memory_is_offered_as_it_fits_and_must_come_back() -> None:
    passed, figures = memory_figures(LittleMemory(), LLAMA, CONTEXT, {})
    assert passed
    assert (figures["slots_offered"], figures["lost_bytes"]) == (3, 0)
    assert figures["slots_wanted"] == 8
    leaking = LittleMemory()
    leaking.leak = 100_000
    passed, figures = memory_figures(leaking, LLAMA, CONTEXT, {})
    assert not passed
    assert figures["lost_bytes"] == 100_000


def test_speed_is_a_share_of_the_bandwidth() -> None:
    config = {"model_type": "llama", **FAMILIES["llama"], "max_position_embeddings": 512}
    _, figures = speed_figures(CudaOnCpu(), partial(random_model, config), {})
    layer = 256 * (256 + 2 * 128 + 256) + 3 * 256 * 256 + 2 * 256
    weights = 4 * (2 * layer + 256 + 512 * 256)  # float32; the embedding is only gathered from
    assert figures["weight_bytes"] == pytest.approx(weights, rel=0.25)
    assert figures["weight_bytes"] >= weights
    rate = figures["weight_bytes"] * figures["decode_tokens_per_second"]
    assert figures["weight_bytes_per_second"] == pytest.approx(rate)
    assert figures["bandwidth_share"] == pytest.approx(rate / 1e12)
    assert figures["decode_tokens_per_second_of_8"] > figures["decode_tokens_per_second"] / 2


@pytest.mark.parametrize(("patience", "size"), [(1e9, 256), (0.0, 16)])
def test_a_slow_device_gets_a_short_prompt(
    monkeypatch: pytest.MonkeyPatch, patience: float, size: int
) -> None:
    monkeypatch.setattr(selftest_checks, "_PROMPT_SECONDS", patience)
    config = {"model_type": "llama", **FAMILIES["llama"], "max_position_embeddings": 512}
    _, figures = speed_figures(CudaOnCpu(), partial(random_model, config), {})
    assert figures["prompt_tokens"] == size


def test_a_hybrid_is_computed_where_states_have_a_place_and_else_refused() -> None:
    hybrid = partial(decoder, "lfm2", "float")
    expected = logits_of(get_provider("cpu"), hybrid, CONTEXT, {"kernels": "onnxruntime"})
    assert difference(logits_of(get_provider("cpu"), hybrid, CONTEXT, {}), expected) < 1e-5

    assert difference(logits_of(CudaOnCpu(), hybrid, CONTEXT, {}), expected) < 1e-5

    def on_a_device() -> tuple[bool, dict[str, float]]:
        logits_of(DirectMLOnCpu(), hybrid, CONTEXT, {})
        return True, {}

    check = checked("values", "lfm2 float", on_a_device)
    assert check.status == "refused"
    assert "recurrent states (past_conv.0" in check.detail
