"""Apply the operations of the slot table to the runner."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from ....errors import ProviderRuntimeError
from ....providers.base import Runner
from ..requests.chunk import Save
from .slots import Operation, Release, SlotTable, Trim
from .tiers.mover import KVMover

_log = logging.getLogger(__name__)


class SlotOperations:
    """Carry out releases, copies, saves and trims, in the order in which they were queued.

    Args:
        runner: holds the KV of the slots.
        slots: the slot table that queued the operations.
        mover: saves KV to the tiers.
    """

    def __init__(self, runner: Runner, slots: SlotTable, mover: KVMover) -> None:
        self._runner = runner
        self._slots = slots
        self._mover = mover

    def apply(self, operations: Sequence[Operation]) -> set[int]:
        """Carry out operations that were taken from the table; return the slots whose copy failed."""
        lost = set[int]()
        for operation in operations:
            if isinstance(operation, Release):
                self._runner.release(operation.slot)
                continue
            if isinstance(operation, Save):
                if operation.slot not in lost:
                    self._mover.save(operation)
                continue
            if isinstance(operation, Trim):
                self._runner.trim(operation.slot, operation.length)
                continue
            if operation.source in lost:  # its own copy failed, so its content is invalid
                lost.add(operation.target)
                continue
            try:
                self._runner.copy_prefix(operation.source, operation.target, operation.length)
            except ProviderRuntimeError as error:
                _log.warning("%s failed; the target slot is computed again: %s", operation, error)
                lost.add(operation.target)
                if self._slots.is_idle(operation.source):  # otherwise the request would match it again
                    lost.add(operation.source)
        return lost
