"""The self-test of carryall's CUDA kernels, on those of the emulator."""

from __future__ import annotations

from typing import Any

import pytest
from cuda_emulator import EmulatedCudaOnCpu

from carryall.errors import ProviderUnavailableError
from carryall.providers.base import RunnerConfig
from carryall.providers.cuda.self_test import self_test

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


@pytest.mark.long
def test_the_choice_of_kernels_follows_the_self_test(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    provider = EmulatedCudaOnCpu()
    monkeypatch.setattr(EmulatedCudaOnCpu, "_complaints", {})
    assert provider.resolve_options(RunnerConfig()).options["kernels"] == "carryall"
    monkeypatch.setattr(EmulatedCudaOnCpu, "_complaints", {(EmulatedCudaOnCpu, 0): "DrawTokens is wrong"})
    assert provider.resolve_options(RunnerConfig()).options["kernels"] == "onnxruntime"
    assert "onnxruntime's kernels are used in place of carryall's: DrawTokens is wrong" in caplog.text
    with pytest.raises(ProviderUnavailableError, match="kernels=carryall cannot be used: DrawTokens"):
        provider.resolve_options(RunnerConfig(options={"kernels": "carryall"}))
