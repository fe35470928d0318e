"""Does a runner agree with itself? Equal prompts have equal logits, however they are run."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from ...errors import ProviderUnavailableError
from ..base import Row, Runner

_PIECE = 16  # kernels for prompts of the known providers start at 32 new tokens
_COMPARED = 32  # last tokens of the prompt: kernels that are wrong change them all
# Parts of the largest logit. Rounding measured on the embedded model: 7e-7 in 32 bits, 4e-3 in 16; kernels of
# WebGPU 0.4.0 in software that are wrong: 3e-2 at 32 tokens, 1e-1 at 128.
_WORST_FLOAT, _WORST_HALF = 0.01, 0.05


def check_agreement(runner: Runner, source: str, remedy: str, *, chunk: int, half: bool) -> None:
    """Run one prompt in three ways, and release its slot.

    Finds kernels that ignore the cache, kernels that are wrong for long prompts, and inputs that do not reach
    the device.

    Args:
        runner: the runner, none of whose slots is in use.
        source: the provider and the model in the message.
        remedy: what to do, for the message.
        chunk: most tokens that the runner computes at once; the prompt has as many, at least 32.
        half: whether it computes in 16-bit floats.

    Raises:
        ProviderUnavailableError: logits differ by more than 1 % of the largest, 5 % in 16-bit floats.
    """
    count = min(max(chunk, _COMPARED), runner.info.context_length)
    tokens = _tokens(runner, count)
    worst = _WORST_HALF if half else _WORST_FLOAT
    first, last = min(_PIECE, count), min(_COMPARED, count)
    pieces = _logits(runner, tokens, _PIECE)
    for length, lone, other, how in (
        (first, _logits(runner, tokens[:first], 1), pieces[:first], "one by one"),
        (count, _logits(runner, tokens, count, last), pieces[-last:], f"in pieces of {_PIECE}"),
    ):
        difference = _difference(lone, other)
        if not difference <= worst:  # NaN compares as wrong
            raise ProviderUnavailableError(
                f"{source} computes wrong results here: logits of {length} tokens at once and {how} "
                f"differ by {difference:.1%} of the largest. {remedy}"
            )


def joint_prompts_agree(runner: Runner) -> bool:
    """Return whether two new prompts have the same logits in one step and in a step each, within 5 %.

    Args:
        runner: the runner, none of whose slots is in use; with one slot there is nothing to compare.
    """
    if runner.info.max_slots < 2:
        return True
    longest = min(_COMPARED, runner.info.context_length)
    prompts = [_tokens(runner, longest)[::-1].copy(), _tokens(runner, max(2, longest - 5))]
    rows = [Row(slot, tokens, 0) for slot, tokens in enumerate(prompts)]
    try:
        alone = [runner.forward([row])[0].copy() for row in rows]
        together = runner.forward(rows)
        return all(_difference(*pair) <= _WORST_HALF for pair in zip(alone, together, strict=True))
    finally:
        for row in rows:
            runner.release(row.slot)


def padded_runs_agree(runner: Runner, pad: Callable[[bool], None]) -> bool:
    """Return whether prompts and tokens after them have the same logits padded and in their size, within 5 %.

    Args:
        runner: the runner, none of whose slots is in use.
        pad: chooses whether runs are padded.
    """
    longest = min(_COMPARED, runner.info.context_length - 1)
    if longest < 1:
        return True
    lengths = [longest, max(1, longest - 13)][: runner.info.max_slots]
    texts = [_tokens(runner, length + 1)[::-1].copy() for length in lengths]
    prompts = [Row(slot, text[:-1], 0) for slot, text in enumerate(texts)]
    singles = [Row(slot, text[-1:], len(text) - 1) for slot, text in enumerate(texts)]
    results = []
    try:
        for way in (True, False):
            pad(way)
            results.append([logits.copy() for rows in (prompts, singles) for logits in runner.forward(rows)])
            for row in prompts:
                runner.release(row.slot)
    finally:
        pad(True)
        for row in prompts:
            runner.release(row.slot)
    return all(_difference(*pair) <= _WORST_HALF for pair in zip(*results, strict=True))


def _tokens(runner: Runner, count: int) -> npt.NDArray[np.int64]:
    return np.arange(1, count + 1, dtype=np.int64) * 7919 % (runner.info.num_tokens or runner.info.vocab_size)


def _difference(one: npt.NDArray[np.float32], other: npt.NDArray[np.float32]) -> float:
    """Return the largest difference as a part of the largest value; NaN if one is NaN."""
    largest = np.maximum(np.abs(one), np.abs(other)).max()
    return float(np.abs(one - other).max() / largest) if largest else 0.0


def _logits(
    runner: Runner, tokens: npt.NDArray[np.int64], size: int, wanted: int | None = None
) -> npt.NDArray[np.float32]:
    """Return the logits of the last ``wanted`` tokens of each piece of ``size`` tokens, of all by default."""
    slot = runner.info.max_slots - 1
    last_logits = []
    try:
        for start in range(0, len(tokens), size):
            piece = tokens[start : start + size]
            (logits,) = runner.forward([Row(slot, piece, start, num_logits=wanted or len(piece))])
            last_logits.append(logits.copy())
    finally:
        runner.release(slot)
    return np.concatenate(last_logits)
