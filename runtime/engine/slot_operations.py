"""Lets the runner do to its slots what the books say."""

from __future__ import annotations

import logging
from typing import cast

from ...providers.base import Runner, TrimmingRunner
from ..errors import ProviderRuntimeError
from .kv_tiers.mover import KVMover
from .scheduler import StepPlan
from .slots import Release, Save, SlotTable

_log = logging.getLogger(__name__)

_TRIM_EVERY = 256  # tokens


class SlotOperations:
    """Carries out releases, copies and saves, in the order in which they were decided.

    Args:
        runner: whose slots they are.
        slots: the books.
        mover: saves KV.
        trims: whether layers with a sliding window may forget what lies behind it.
    """

    def __init__(self, runner: Runner, slots: SlotTable, mover: KVMover, *, trims: bool) -> None:
        self._runner = runner
        self._slots = slots
        self._mover = mover
        self._trims = trims

    def apply(self) -> set[int]:
        """Do what was decided since the last time; return slots that did not get their copy."""
        lost = set[int]()
        for operation in self._slots.take_operations():
            if isinstance(operation, Release):
                self._runner.release(operation.slot)
                continue
            if isinstance(operation, Save):
                if operation.slot not in lost:
                    self._mover.save(operation.slot, operation.keys)
                continue
            if operation.source in lost:  # it holds half a copy, or nothing
                lost.add(operation.target)
                continue
            try:
                self._runner.copy_prefix(operation.source, operation.target, operation.length)
            except ProviderRuntimeError as error:
                _log.warning("%s failed, its target will be computed again: %s", operation, error)
                lost.add(operation.target)
                if self._slots.is_idle(operation.source):  # or its request would take it again and again
                    lost.add(operation.source)
        return lost

    def trim(self, plan: StepPlan) -> None:
        """Now and then, give back what lies behind the sliding windows of the plan's requests."""
        if not self._trims:
            return
        for row, request in zip(plan.rows, plan.requests, strict=True):
            if request.num_computed // _TRIM_EVERY > row.start // _TRIM_EVERY:
                cast(TrimmingRunner, self._runner).trim(row.slot, request.num_computed)
