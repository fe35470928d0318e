"""The self-test of a provider: generate with a small model, and compare the logits with the CPU's."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from ...graph_opt.graph.saving import save_model
from ...graph_opt.pipeline.pipeline import run
from ...records import dataclass
from ...storage.scratch import scratch_folder
from ..base import Provider, Row, Runner, RunnerConfig

SLOTS = 3
# Tolerances for 16-bit floats and int8 activations: logit error as a share of the largest logit, and the
# share of equal tokens.
_WORST, _AGREEMENT = 0.05, 0.9

Logits = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class SelftestReport:
    """The comparison of a provider with the reference."""

    provider: str
    reference: str
    tokens: int  # generated after the prompt
    agreement: float  # share of tokens equal to the reference's
    worst: float  # largest difference of logits, as a share of the largest logit
    load_seconds: float  # without lowering, with compilation for the device
    first_prompt_seconds: float  # includes what the device compiles at its first run
    prompt_tokens_per_second: float
    decode_tokens_per_second: float

    @property
    def passed(self) -> bool:
        """Whether the provider's results are within the tolerances."""
        return self.agreement >= _AGREEMENT and self.worst <= _WORST

    def to_dict(self) -> dict[str, Any]:
        """Return the report as JSON types."""
        return {**dataclasses.asdict(self), "passed": self.passed}


def selftest(
    provider: Provider,
    reference: Provider,
    make_model: Callable[[], ir.Model],
    prompt: Sequence[int],
    *,
    new_tokens: int = 24,
    options: dict[str, Any] | None = None,
) -> SelftestReport:
    """Generate greedily with the reference, run its tokens on the provider, then time the provider.

    Args:
        provider: the provider to test; a test double is compared with itself.
        reference: the provider with the right results.
        make_model: returns a portable decoder.
        prompt: token ids.
        new_tokens: number of tokens to generate.
        options: ``RunnerConfig.options`` of the provider.

    Raises:
        CarryallError: the provider is not available, or failed.
    """
    if not provider.runs_models:
        reference = provider
    prompt_tokens = np.array(prompt, np.int64)
    config = RunnerConfig(
        max_slots=SLOTS, context_length=len(prompt_tokens) + new_tokens, options=options or {}
    )
    with scratch_folder() as folder:
        expected = _expected(reference, make_model, prompt_tokens, new_tokens, folder / "reference", config)
        tokens = np.concatenate([prompt_tokens, expected.argmax(axis=1)])
        path = _lowered(provider, make_model, config, folder / "model")
        start = time.perf_counter()
        runner = provider.runner(path, config)
        loaded = time.perf_counter()
        try:
            got = _generate(runner, tokens, len(prompt_tokens))
            warm = time.perf_counter()
            prompt_seconds, decode_seconds = _timed(runner, tokens, len(prompt_tokens))
        finally:
            runner.close()
    return SelftestReport(
        provider=provider.name,
        reference=reference.name,
        tokens=new_tokens,
        agreement=float((got.argmax(axis=1) == expected.argmax(axis=1)).mean()),
        worst=float(np.abs(got - expected).max() / np.abs(expected).max()),
        load_seconds=loaded - start,
        first_prompt_seconds=warm - loaded,
        prompt_tokens_per_second=len(prompt_tokens) / prompt_seconds,
        decode_tokens_per_second=(new_tokens - 1) / decode_seconds,
    )


def _expected(
    reference: Provider,
    make_model: Callable[[], ir.Model],
    prompt: npt.NDArray[np.int64],
    new_tokens: int,
    folder: Path,
    config: RunnerConfig,
) -> Logits:
    """Return logits [new_tokens, vocab_size] of greedy generation by the reference."""
    config = dataclasses.replace(config, options={})
    runner = reference.runner(_lowered(reference, make_model, config, folder), config)
    try:
        (logits,) = runner.forward([Row(0, prompt, 0)])
        chosen = [logits[0].copy()]
        for position in range(len(prompt), len(prompt) + new_tokens - 1):
            token = np.array([chosen[-1].argmax()], np.int64)
            chosen.append(runner.forward([Row(0, token, position)])[0][0].copy())
    finally:
        runner.close()
    return np.stack(chosen)


def _lowered(
    provider: Provider, make_model: Callable[[], ir.Model], config: RunnerConfig, folder: Path
) -> Path:
    model, _ = run(make_model(), provider.passes(config))
    folder.mkdir()
    save_model(model, folder / "model.onnx")
    return folder / "model.onnx"


def _generate(runner: Runner, tokens: npt.NDArray[np.int64], prompt: int, slot: int = 0) -> Logits:
    """Return logits [new_tokens, vocab_size] after the prompt and each further token except the last."""
    (logits,) = runner.forward([Row(slot, tokens[:prompt], 0)])
    got = [logits[0].copy()]
    for end in range(prompt + 1, len(tokens)):
        got.append(runner.forward([Row(slot, tokens[end - 1 : end], end - 1)])[0][0].copy())
    return np.stack(got)


def _timed(runner: Runner, tokens: npt.NDArray[np.int64], prompt: int) -> tuple[float, float]:
    """Return the seconds of the prompt and of all decode steps, on an empty slot."""
    start = time.perf_counter()
    runner.forward([Row(1, tokens[:prompt], 0)])
    middle = time.perf_counter()
    for end in range(prompt + 1, len(tokens)):
        runner.forward([Row(1, tokens[end - 1 : end], end - 1)])
    return middle - start, max(time.perf_counter() - middle, 1e-9)
