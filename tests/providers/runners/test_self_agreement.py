"""Runners that compute long prompts wrongly are refused, those that only round are not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from carryall.errors import ProviderUnavailableError
from carryall.providers.base import Row
from carryall.providers.runners.self_agreement import check_agreement, joint_prompts_agree

TABLE = np.random.default_rng(0).standard_normal((50, 50)).astype(np.float32)
Fault = Callable[[Row], float]  # the part of the largest logit that a run gets wrong


class Runner:
    """Logits are the running sum of a table's rows; ``fault`` spoils runs."""

    def __init__(self, fault: Fault, context_length: int = 256) -> None:
        self.info = SimpleNamespace(
            vocab_size=50, num_tokens=None, max_slots=2, context_length=context_length
        )
        self._fault, self._sum, self.released = fault, np.zeros(50, np.float32), 0
        self.joint_fault = 0.0

    def forward(self, rows: Sequence[Row]) -> list[npt.NDArray[np.float32]]:
        found = []
        for row in rows:
            if not row.start:
                self._sum = np.zeros(50, np.float32)
            sums = self._sum + np.cumsum(TABLE[row.tokens], 0, dtype=np.float32)
            self._sum = sums[-1]
            together = self.joint_fault if len(rows) > 1 and row.slot else 0
            spoiled = sums + (self._fault(row) + together) * np.abs(sums).max()
            found.append(spoiled[-row.num_logits :])
        return found

    def release(self, slot: int) -> None:
        self.released += 1


def check(runner: Any, *, chunk: int = 128, half: bool = False) -> None:
    check_agreement(runner, "the model", "Change it", chunk=chunk, half=half)


def long(row: Row) -> int:
    return len(row.tokens)


# As measured with WebGPU 0.4.0 in software: 2.6 % at 32 tokens, 10.8 % at 100, in 32 bits and in 16.
@pytest.mark.parametrize(
    ("fault", "half", "why"),
    [
        (lambda row: 0.026 * (long(row) >= 32), False, "of 128 tokens at once and in pieces of 16 differ"),
        (lambda row: 0.108 * (long(row) >= 100), True, "of 128 tokens at once and in pieces of 16 differ"),
        (lambda row: 0.026 * (long(row) == 1), False, "of 16 tokens at once and one by one differ by 2"),
        (lambda row: float("nan") if long(row) > 1 else 0, True, "one by one differ by nan"),
        (lambda row: 0.1 * (row.start > 0), True, "one by one"),
    ],
    ids=["long", "longer, half", "single", "nan", "cache ignored"],
)
def test_wrong_kernels_are_refused(fault: Fault, half: bool, why: str) -> None:
    runner = Runner(fault)
    with pytest.raises(ProviderUnavailableError, match=f"the model computes wrong results.*{why}.*Change it"):
        check(runner, half=half)
    assert runner.released


@pytest.mark.parametrize(
    ("fault", "half"),
    [(lambda row: 1e-6 * long(row) / 128, False), (lambda row: 0.01 * (long(row) > 1), True)],
    ids=["float", "half"],
)
def test_rounding_is_accepted(fault: Fault, half: bool) -> None:
    for chunk, context_length in ((128, 256), (512, 256), (1, 256), (128, 5)):
        check(Runner(fault, context_length), chunk=chunk, half=half)


@pytest.mark.parametrize(
    ("fault", "agree"), [(0.0, True), (0.004, True), (0.06, False), (float("nan"), False)]
)
def test_prompts_that_differ_together_are_found(fault: float, agree: bool) -> None:
    runner: Any = Runner(lambda row: 0)
    runner.joint_fault = fault
    assert joint_prompts_agree(runner) is agree
    assert runner.released == 2
    runner.info.max_slots = 1
    assert joint_prompts_agree(runner)
