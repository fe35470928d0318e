"""Slot memory on a device whose buffers are handles: no view of a part can be bound to a run.

Slots lie in banks, one buffer [bank, heads, length, width] per cache. A decode run binds a whole bank. A run
of one slot binds the *stage*, a buffer of one slot, into which the slot is copied first; it stays there, and
is copied back when its bank or another slot is needed. A single sequence is thus copied once.

    stage     [ slot 5 ]             prompts, and steps of one sequence
    banks     [ 0 1 2 3 ] [ 4 - 6 7 ]    steps of several
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import numpy as np
import onnx_ir as ir

from ...contract import present_of
from ...errors import ProviderRuntimeError
from ..kv.kv_memory import KVSpec
from . import ort
from .device_memory import Device, DeviceSlots
from .slot_memory import Array, shared_value

_TARGET_ROW, _SOURCE_ROW = "target_row", "source_row"
_SOURCE = "source."  # prefix of the cache that is read


class BankedMemory(DeviceSlots):
    """KV buffers in banks of slots, allocated in advance.

    Args:
        specs: the shape of each buffer, by name.
        slots: number of slots.
        length: positions per slot.
        device: the device.
        session_factory: opens an ONNX model, given as bytes, on the same device; used to copy slots.
        host_inputs: inputs that the session reads from host memory.
        bank: slots of a bank, the largest number of rows of a decode run.

    Raises:
        ProviderRuntimeError: the device has not enough memory.
    """

    def __init__(
        self,
        specs: Mapping[str, KVSpec],
        slots: int,
        length: int,
        *,
        device: Device,
        session_factory: Callable[[bytes], Any],
        host_inputs: Collection[str],
        bank: int,
    ) -> None:
        self._bank = min(bank, slots)
        self._staged: int | None = None  # the slot whose content is in the stage, not in its bank
        super().__init__(
            specs, slots, length, device=device, session_factory=session_factory, host_inputs=host_inputs
        )

    def prepare(self, first: int, count: int) -> None:
        """Copy the slots of the next run to where ``bind_caches`` bound them."""
        if count == 1 and self._bank > 1:
            self._stage(first)
        elif self._staged is not None and first <= self._staged < first + count:
            self._flush()

    def bind_caches(self, binding: Any, first: int, count: int) -> None:
        """See ``SlotMemory``: one slot, or one bank."""
        place = -1 if count == 1 and self._bank > 1 else first // self._bank
        if place >= 0 and (first % self._bank or count != self._buffers()[place]):
            raise ProviderRuntimeError(f"slots {first} to {first + count - 1} are no bank of {self._bank}")
        for past, values in self._caches.items():
            binding.bind_ortvalue_input(past, values[place])
            binding.bind_ortvalue_output(present_of(past), values[place])

    def held_bytes(self, lengths: Array) -> int:
        """Return the size of all buffers, which is constant."""
        staged = self._bank > 1
        return (
            (self.slots + staged) * self.length * sum(spec.bytes_per_token for spec in self._specs.values())
        )

    def copy_prefix(self, source: int, target: int, length: int) -> None:
        """Copy the whole slot."""
        if self._staged == target:
            self._staged = None
        if self._staged == source:
            self._copy((-1, 0), self._place(target))
        else:
            self._copy(self._place(source), self._place(target))

    def release(self, slot: int) -> None:
        """Keep the memory allocated; what lies in the stage need not be copied back."""
        if self._staged == slot:
            self._staged = None

    def _copy_model(self) -> bytes:
        return _copy_model(self._specs, self.length)

    def _buffers(self) -> list[int]:
        """Return the slots of each buffer of a cache: the banks, then the stage."""
        banks = [min(self._bank, self.slots - first) for first in range(0, self.slots, self._bank)]
        return [*banks, 1] if self._bank > 1 else banks

    def _clear(self) -> None:
        """Fill all buffers with zeros: KV after a sequence is masked by 0, but NaN * 0 is NaN."""
        for name, values in self._caches.items():
            spec = self._specs[name]
            for value, slots in zip(values, self._buffers(), strict=True):
                if slots == 1:
                    self._fill(name, value, np.zeros((1, spec.heads, self.length, spec.width), spec.dtype))
        try:
            for slot in range(self.slots):
                if self._buffers()[self._place(slot)[0]] > 1:  # no zeros of a whole bank on the host
                    self._copy((-1, 0), self._place(slot))
        except ProviderRuntimeError as error:  # devices limit the size of a buffer that a kernel binds
            raise ProviderRuntimeError(f"{error}. Lower bank, max_slots or context_length.") from error

    def _fill(self, name: str, value: Any, array: Array) -> None:
        try:
            value.update_inplace(array)
        except ort.runtime_errors() as error:
            raise self._no_memory(name, array.nbytes, error) from error

    def _stage(self, slot: int) -> None:
        if self._staged != slot:
            self._flush()
            self._copy(self._place(slot), (-1, 0))
            self._staged = slot

    def _flush(self) -> None:
        """Copy the staged slot back to its bank."""
        if self._staged is not None:
            self._copy((-1, 0), self._place(self._staged))
            self._staged = None

    def _place(self, slot: int) -> tuple[int, int]:
        """Return the buffer and the row of a slot."""
        return divmod(slot, self._bank)

    def _copy(self, source: tuple[int, int], target: tuple[int, int]) -> None:
        """Copy a row of one buffer to a row of another, or of the same, for every cache."""
        binding = self._copier.io_binding()
        for name, values in self._caches.items():
            binding.bind_ortvalue_input(name, values[target[0]])
            binding.bind_ortvalue_input(_SOURCE + name, values[source[0]])
            binding.bind_ortvalue_output(present_of(name), values[target[0]])
        binding.bind_ortvalue_input(_SOURCE_ROW, shared_value(np.array([source[1]], np.int64)))
        binding.bind_ortvalue_input(_TARGET_ROW, shared_value(np.array([[target[1]]], np.int64)))
        try:
            self._copier.run_with_iobinding(binding)
        except ort.runtime_errors() as error:
            raise ProviderRuntimeError(f"copying a slot failed: {ort.one_line(error)}") from error


def _copy_model(specs: Mapping[str, KVSpec], length: int) -> bytes:
    """Return a serialized graph that copies a row of every cache into a row of another buffer, in place."""
    rows = [ir.val(_SOURCE_ROW, ir.DataType.INT64, [1]), ir.val(_TARGET_ROW, ir.DataType.INT64, [1, 1])]
    inputs, nodes = list(rows), []
    for name, spec in specs.items():
        kind = ir.DataType.from_numpy(spec.dtype)
        source, target = (
            ir.val(prefix + name, kind, [f"{prefix}slots", spec.heads, length, spec.width])
            for prefix in (_SOURCE, "")
        )
        inputs += [source, target]
        row = ir.node("Gather", [source, rows[0]])
        copy = ir.node("ScatterND", [target, rows[1], row.outputs[0]])
        copy.outputs[0].name, copy.outputs[0].type = present_of(name), target.type
        copy.outputs[0].shape = target.shape
        nodes += [row, copy]
    outputs = [node.outputs[0] for node in nodes if node.op_type == "ScatterND"]
    graph = ir.Graph(inputs, outputs, nodes=nodes, opset_imports={"": 21}, name="copy_slot")
    return ir.to_proto(ir.Model(graph, ir_version=10)).SerializeToString()
