"""The memory of a slot runner's caches and step arrays, on the host or on a device.

The runner keeps its step arrays on the host, and the memory binds them to a run. On the host they are shared.
For a device, inputs are copied before each run and results after it.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Collection, Mapping
from dataclasses import field
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from ...contract import present_of
from ...records import dataclass
from ..kv.kv_memory import KVSpec, reserve
from . import ort

Array = npt.NDArray[Any]

# The numbers of element types in ONNX (TensorProto.DataType) that NumPy lacks.
BFLOAT16, FLOAT8 = 16, 17


@dataclass(slots=True)
class SlotBinding:
    """An IO binding, and the copies between host and device before and after each of its runs.

    Args:
        binding: binds all inputs and outputs of the graph.
        uploads: copy the inputs to the device.
        downloads: pairs of a device value and the host array that receives it, by name of the result.
        options: ``onnxruntime.RunOptions``, None for the default.
        lora: the bound rows of LoRA adapters, and their version.
    """

    binding: Any
    uploads: list[Callable[[], None]] = field(default_factory=list)
    downloads: dict[str, tuple[Any, Array]] = field(default_factory=dict)
    options: Any = None
    lora: tuple[int, int, int] | None = None

    def run(self, session: Any, late: Collection[str] = ()) -> None:
        """Run once; all results except the ``late`` ones are on the host afterwards."""
        for upload in self.uploads:
            upload()
        self._execute(session, self.options)
        for name in self.downloads.keys() - set(late):
            self.fetch(name)

    def _execute(self, session: Any, options: Any) -> None:
        session.run_with_iobinding(self.binding, *(() if options is None else (options,)))

    def fetch(self, name: str) -> None:
        """Copy a ``late`` result of the last run to the host."""
        if name in self.downloads:
            value, array = self.downloads[name]
            array[...] = value.numpy()


class SlotMemory(abc.ABC):
    """KV buffers [slots, heads, length, width], and the binding of a run's inputs and results."""

    slots: int
    length: int  # positions per slot
    slices: bool = True  # whether ``hold`` takes parts of an array without a copy

    def hold(self, name: str, array: Array) -> Any:
        """Return an ``OrtValue`` of an array for an input; ``refresh`` follows each change of the array."""
        return shared_value(array)

    def refresh(self, value: Any, array: Array) -> None:  # noqa: B027 -- the host shares the array
        """Make a value of ``hold`` equal to its array again."""

    @abc.abstractmethod
    def bind_caches(self, binding: Any, first: int, count: int) -> None:
        """Bind the caches of slots [first, first + count), each as input and output in the same memory."""

    def enter(self) -> None:  # noqa: B027 -- most memories have nothing to do
        """Make this thread ready for the memory's device; called before each step."""

    def prepare(self, first: int, count: int) -> None:  # noqa: B027 -- most memories have nothing to do
        """Make the caches of slots [first, first + count) ready for a run that binds them."""

    @abc.abstractmethod
    def bind_step(
        self, binding: Any, feeds: Mapping[str, Array], results: Mapping[str, Array], *, capture: bool
    ) -> SlotBinding:
        """Bind arrays for many runs; their content changes in place.

        Args:
            binding: a binding with bound caches.
            feeds: inputs by name.
            results: outputs by name.
            capture: let the device capture the run and replay it.
        """

    def bind_once(
        self,
        binding: Any,
        feeds: Mapping[str, Array],
        results: Mapping[str, Array],
        late: Collection[str] = (),
    ) -> SlotBinding:
        """Bind host arrays for one run; on a device, inputs are copied now and results after the run.

        Args:
            binding: a binding with bound caches.
            feeds: inputs by name.
            results: outputs by name.
            late: results that may stay on the device, for ``BoundRun.fetch``.
        """
        for name, array in feeds.items():
            binding.bind_ortvalue_input(name, shared_value(array))
        for name, array in results.items():
            binding.bind_ortvalue_output(name, shared_value(array))
        return SlotBinding(binding)

    @abc.abstractmethod
    def held_bytes(self, lengths: npt.NDArray[np.int32]) -> int:
        """Return the bytes of the caches if slot i holds ``lengths[i]`` tokens."""

    @abc.abstractmethod
    def copy_prefix(self, source: int, target: int, length: int) -> None:
        """Copy at least positions [0, length) from slot ``source`` to slot ``target``."""

    @abc.abstractmethod
    def release(self, slot: int) -> None:
        """Free the slot's memory if possible; its content is lost."""

    @abc.abstractmethod
    def close(self) -> None:
        """Free all memory."""


class HostMemory(SlotMemory):
    """Host memory in reserved address space, shared with the kernels without copies.

    For graphs that were lowered to slots for kernels on the host. A page takes memory from its first write
    and keeps it.
    """

    def __init__(self, specs: Mapping[str, KVSpec], slots: int, length: int) -> None:
        self.slots, self.length = slots, length
        self._token_bytes = sum(spec.bytes_per_token for spec in specs.values())
        self._buffers: dict[str, Array] = {}
        for name, spec in specs.items():
            flat = np.frombuffer(reserve(name, slots * length * spec.bytes_per_token), spec.dtype)
            self._buffers[name] = flat.reshape(slots, spec.heads, length, spec.width)

    def bind_caches(self, binding: Any, first: int, count: int) -> None:
        for past, buffer in self._buffers.items():
            value = shared_value(buffer[first : first + count])
            binding.bind_ortvalue_input(past, value)
            binding.bind_ortvalue_output(present_of(past), value)

    def bind_step(
        self, binding: Any, feeds: Mapping[str, Array], results: Mapping[str, Array], *, capture: bool
    ) -> SlotBinding:
        return self.bind_once(binding, feeds, results)

    def held_bytes(self, lengths: npt.NDArray[np.int32]) -> int:
        return self._token_bytes * int(lengths.sum())

    def copy_prefix(self, source: int, target: int, length: int) -> None:
        for buffer in self._buffers.values():
            buffer[target, :, :length] = buffer[source, :, :length]

    def release(self, slot: int) -> None:
        """Do nothing: the slot's pages are used again."""

    def close(self) -> None:
        """Drop the buffers; their address space is unmapped with the last view."""
        self._buffers.clear()


def shared_value(array: Array) -> Any:
    """Return an ``OrtValue`` that shares the array's memory, so that it sees later changes in place."""
    value = ort.load_onnxruntime("a slot runner").OrtValue
    if array.dtype == ml_dtypes.bfloat16:
        return value.ortvalue_from_numpy_with_onnx_type(array.view(np.uint16), BFLOAT16)
    return value.ortvalue_from_numpy(array)


def element_type(dtype: np.dtype[Any]) -> Any:
    """Return what onnxruntime's Python API takes as the type of elements."""
    known = {np.dtype(ml_dtypes.bfloat16): BFLOAT16, np.dtype(ml_dtypes.float8_e4m3fn): FLOAT8}
    return known.get(dtype, dtype.type)
