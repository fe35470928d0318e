"""Lets the runner do to its slots what the books say."""

from __future__ import annotations

import logging
from typing import cast

from ....errors import ProviderRuntimeError
from ....providers.base import Runner, TrimmingRunner
from .slots import Release, Save, SlotTable, Trim
from .tiers.mover import KVMover

_log = logging.getLogger(__name__)


class SlotOperations:
    """Carries out releases, copies, saves and trims, in the order in which they were decided.

    Args:
        runner: whose slots they are.
        slots: the books.
        mover: saves KV.
    """

    def __init__(self, runner: Runner, slots: SlotTable, mover: KVMover) -> None:
        self._runner = runner
        self._slots = slots
        self._mover = mover

    def apply(self) -> set[int]:
        """Do what was decided since the last time; return slots that did not get their copy."""
        lost = set[int]()
        for operation in self._slots.take_operations():
            if isinstance(operation, Release):
                self._runner.release(operation.slot)
                continue
            if isinstance(operation, Save):
                if operation.slot not in lost:
                    self._mover.save(operation.slot, operation.keys, operation.start)
                continue
            if isinstance(operation, Trim):
                cast(TrimmingRunner, self._runner).trim(operation.slot, operation.length)
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
