"""Does a runner agree with itself? A prompt at once and token by token must give the same logits."""

from __future__ import annotations

import numpy as np

from ...errors import ProviderUnavailableError
from ..base import Row, Runner

_TOKENS = 32  # kernels for prompts start at 16 or 32 new tokens
_WORST = 0.05  # of the largest logit: what 16-bit floats and int8 activations may change, as in the self-test


def check_agreement(runner: Runner, source: str, remedy: str) -> None:
    """Run one prompt in both ways, and release its slot.

    Finds kernels that ignore the cache, and inputs that do not reach the device.

    Raises:
        ProviderUnavailableError: the logits differ by more than 5 % of the largest.
    """
    count = min(_TOKENS, runner.info.context_length)
    tokens = np.arange(1, count + 1, dtype=np.int64) * 7919 % runner.info.vocab_size
    slot = runner.info.max_slots - 1
    try:
        singles = [runner.forward([Row(slot, tokens[i : i + 1], i)])[0][0].copy() for i in range(count)]
        (whole,) = runner.forward([Row(slot, tokens, 0, num_logits=count)])
    finally:
        runner.release(slot)
    expected = np.stack(singles)
    # NaN compares as wrong.
    if not np.abs(whole - expected).max() <= _WORST * np.abs(expected).max():
        difference = float(np.abs(whole - expected).max() / np.abs(expected).max())
        raise ProviderUnavailableError(
            f"{source} computes wrong results here: logits of {count} tokens at once and one by one "
            f"differ by {difference:.0%} of the largest. {remedy}"
        )
