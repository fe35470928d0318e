"""The self-test of carryall's CUDA kernels, on those of the emulator."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from cuda_emulator import EmulatedCudaOnCpu

from carryall.errors import ProviderUnavailableError
from carryall.providers.base import RunnerConfig
from carryall.providers.cuda import paged_self_test
from carryall.providers.cuda.self_test import self_test
from carryall.providers.ort.slot_memory import shared_value

WRONG = {
    "float": "SiluAndMul in float",
    "bfloat16": "SiluAndMul in bfloat16",
    "few": "MatMulNBits without zero points, 3 rows",
    "more": "MatMulNBits without zero points, 20 rows",
    "pointed": "MatMulNBits with zero points, 3 rows",
    "many": "MatMulNBits with zero points, 150 rows",
    "top_token_ids": "DrawTokens returns other top_token_ids",
    "logsumexp": "DrawTokens returns another log-sum-exp",
    "drawn_tokens": "DrawTokens draws other tokens",
}


class Opened:
    """A session, the second of which has one wrong output.

    Args:
        wrong: the name of the output.
    """

    def __init__(self, wrong: str) -> None:
        self.wrong, self.count = wrong, 0

    def __call__(self, content: bytes) -> Any:
        self.count += 1
        session = EmulatedCudaOnCpu()._small_session(0, content)
        return session if self.count == 1 else _Wrong(session, self.wrong)


class _Wrong:
    def __init__(self, session: Any, wrong: str) -> None:
        self.session, self.wrong = session, wrong

    def run(self, names: list[str], feeds: Any) -> list[Any]:
        results = self.session.run(names, feeds)
        array = results[names.index(self.wrong)].copy()
        array.flat[-1] += 1
        results[names.index(self.wrong)] = array
        return results  # type: ignore[no-any-return]


@pytest.mark.long
def test_the_kernels_agree_with_onnxruntimes_operators() -> None:
    provider = EmulatedCudaOnCpu()
    before = provider.emulator.launches
    assert self_test(lambda content: provider._small_session(0, content)) is None
    assert provider.emulator.launches == before + 8  # three types, the tokens; four of three products


@pytest.mark.long
@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_kernel_is_named(name: str) -> None:
    assert (self_test(Opened(name)) or "").startswith(WRONG[name])


class Spoiled:
    """A session of the second graph, whose results of a step are wrong.

    Args:
        session: the session.
        step: which one.
    """

    def __init__(self, session: Any, step: int) -> None:
        self.session, self.step = session, step

    def run_with_iobinding(self, binding: Any) -> None:
        self.session.run_with_iobinding(binding)
        self.step -= 1

    def io_binding(self) -> Any:
        binding = self.session.io_binding()
        if self.step:
            return binding
        outputs = binding.get_outputs

        class Changed:
            def get_outputs(self) -> list[Any]:
                array = outputs()[0].numpy()
                array.flat[-1] += 1
                return [shared_value(array)]

            def __getattr__(self, name: str) -> Any:
                return getattr(binding, name)

        return Changed()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.session, name)


@pytest.fixture
def decoding_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave steps of one token a row: others are onnxruntime's PagedAttention, which CPUs do not have."""
    steps = paged_self_test.STEPS
    monkeypatch.setattr(paged_self_test, "STEPS", {"single tokens": steps["single tokens"]})


@pytest.mark.long
def test_paged_decode_agrees_with_the_definition_of_paged_attention(decoding_only: None) -> None:
    provider = EmulatedCudaOnCpu()
    before = provider.emulator.launches
    opened = partial(provider._small_session, 0)
    assert paged_self_test.paged_self_test(opened, provider.device(0)) is None
    assert provider.emulator.launches == before + 2 * 2  # two caches; parts and their join


@pytest.mark.long
@pytest.mark.parametrize("cache", ["float16", "int8"])
def test_wrong_attention_is_named(decoding_only: None, cache: str) -> None:
    provider, count = EmulatedCudaOnCpu(), 0

    def opened(content: bytes) -> Any:
        nonlocal count
        count += 1
        session = provider._small_session(0, content)
        return Spoiled(session, 0) if count == (2 if cache == "float16" else 4) else session

    found = paged_self_test.paged_self_test(opened, provider.device(0))
    assert (
        found == f"PagedDecode, single tokens with a cache of {cache}, has other results than onnxruntime's"
    )


@pytest.mark.long
def test_a_step_that_needs_an_operator_which_is_not_there_is_an_error() -> None:
    provider = EmulatedCudaOnCpu()
    with pytest.raises(Exception, match="rows of several tokens need onnxruntime's PagedAttention: "):
        paged_self_test.paged_self_test(partial(provider._small_session, 0), provider.device(0))


@pytest.mark.long
def test_the_choice_of_kernels_follows_the_self_test(
    decoding_only: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    provider = EmulatedCudaOnCpu()
    monkeypatch.setattr(EmulatedCudaOnCpu, "_complaints", {})
    assert provider.resolve_options(RunnerConfig()).options["kernels"] == "carryall"
    monkeypatch.setattr(EmulatedCudaOnCpu, "_complaints", {(EmulatedCudaOnCpu, 0): "DrawTokens is wrong"})
    assert provider.resolve_options(RunnerConfig()).options["kernels"] == "onnxruntime"
    assert "onnxruntime's kernels are used in place of carryall's: DrawTokens is wrong" in caplog.text
    with pytest.raises(ProviderUnavailableError, match="kernels=carryall cannot be used: DrawTokens"):
        provider.resolve_options(RunnerConfig(options={"kernels": "carryall"}))
