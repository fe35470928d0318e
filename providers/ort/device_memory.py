"""Slot memory on a device of ONNX Runtime: caches and step inputs stay on the device, runs can be captured.

All of it works on the device ``cpu`` too, where it is tested.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np

from ...contract import TOTAL_SEQUENCE_LENGTH, present_of
from ...errors import ProviderRuntimeError, ProviderUnavailableError
from ...records import dataclass
from .. import captures
from ..kv.kv_memory import KVSpec
from . import ort
from .device_block import DeviceBlock, DeviceStream, shapes_of
from .slot_memory import Array, SlotBinding, SlotMemory, element_type, shared_value

# CUDA's kernels read only this input from host memory (onnxruntime's contrib_ops/cuda/bert/
# group_query_attention.cc: InputMemoryType(OrtMemTypeCPUInput, 6)).
_ON_HOST = frozenset({TOTAL_SEQUENCE_LENGTH})
_log = logging.getLogger(__name__)
# Run options; -1 disables capture and replay.
_GRAPH_ID, _NO_WAIT = "gpu_graph_id", "disable_synchronize_execution_providers"


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """A device by its name in ONNX Runtime's allocators and IO bindings.

    Args:
        name: ``cuda``, ``dml``, ``cpu``.
        index: which of several.
        addressable: memory is plain addresses, so that slots can lie in one buffer and a run bind some of
            them. Buffers of Direct3D and WebGPU are handles.
        updates: host arrays can be copied into device values at any time, not only by binding them to a run.
        memory: ``onnxruntime.OrtMemoryInfo`` to allocate by, of a device that has no name of its own.
        enter: makes the calling thread ready for the device; see ``ready``.
        buffer: allocates a number of bytes for a cache, all 0, and returns an object with ``data_ptr()`` that
            owns them; raises ``ProviderUnavailableError``. By default caches are ``OrtValue``.
        stream: makes a stream, which sessions can be given.
    """

    name: str
    index: int = 0
    addressable: bool = True
    updates: bool = True
    memory: Any = None
    enter: Callable[[], None] | None = None
    buffer: Callable[[int], Any] | None = None
    stream: Callable[[], DeviceStream] | None = None

    def ready(self) -> None:
        """Make the calling thread ready for the device.

        Raises:
            ProviderRuntimeError: the device is gone.
        """
        if self.enter is None:
            return
        try:
            self.enter()
        except ProviderUnavailableError as error:  # it was there when the session was opened
            raise ProviderRuntimeError(str(error)) from error

    def allocate(self, shape: Sequence[int], dtype: np.dtype[Any]) -> Any:
        """Return an ``OrtValue`` in this device's memory, its content undefined."""
        make = ort.load_onnxruntime("device memory").OrtValue.ortvalue_from_shape_and_type
        if self.memory is not None:
            return make(list(shape), element_type(dtype), memory_info=self.memory)
        return make(list(shape), element_type(dtype), self.name, self.index)


class DeviceSlots(SlotMemory):
    """KV buffers on a device, allocated in advance.

    Args:
        specs: the shape of each buffer, by name.
        slots: number of slots.
        length: positions per slot.
        device: the device.
        session_factory: opens an ONNX model, given as bytes, on the same device; used to copy slots.
        host_inputs: inputs that the session reads from host memory; a device value bound for one of them
            would be copied once, when it is bound.

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
        session_factory: Any,
        host_inputs: Collection[str] = _ON_HOST,
    ) -> None:
        self.slots, self.length, self._host_inputs = slots, length, host_inputs
        self.slices = False
        self.device, self._specs = device, specs
        self._copier: Any = session_factory(self._copy_model())
        self._graph_ids: Iterator[int] = itertools.count(1)
        self._caches = {name: [self._cache(name, count) for count in self._buffers()] for name in specs}
        if device.buffer is None:
            self._clear()

    def hold(self, name: str, array: Array) -> Any:
        """See ``SlotMemory``; without updates, the array is copied whenever the value is bound."""
        if not self.device.updates:
            return shared_value(array)
        value = self._allocate(name, array.shape, array.dtype)
        value.update_inplace(array)
        return value

    def refresh(self, value: Any, array: Array) -> None:
        if self.device.updates:
            value.update_inplace(array)

    def enter(self) -> None:
        self.device.ready()

    def bind_caches(self, binding: Any, first: int, count: int) -> None:
        for past in self._specs:
            self._bind(binding.bind_input, binding.bind_ortvalue_input, past, past, first, count)
            self._bind(
                binding.bind_output, binding.bind_ortvalue_output, present_of(past), past, first, count
            )

    def bind_step(
        self, binding: Any, feeds: Mapping[str, Array], results: Mapping[str, Array], *, capture: bool
    ) -> SlotBinding:
        if not self.device.updates:
            return _Rebinding(binding, memory=self, feeds=feeds, results=results)
        uncaptured = partial(SlotBinding, binding, options=run_options(None))
        run = self.captured_run(binding) if capture else uncaptured()
        on_host = {name: array for name, array in feeds.items() if name in self._host_inputs}
        super().bind_once(binding, on_host, {})
        run.uploads += self._upload(binding, {name: feeds[name] for name in feeds if name not in on_host})
        for name, array in results.items():
            value = self._allocate(name, array.shape, array.dtype)
            binding.bind_ortvalue_output(name, value)
            run.downloads[name] = (value, array)
        return run

    def captured_run(self, binding: Any, *, waits: bool = True) -> CapturedRun:
        """Return a run of a binding that is captured; replays need not wait for the device."""
        return CapturedRun(binding, next(self._graph_ids), waits=waits)

    def address(self, name: str, slot: int) -> int:
        """Return where a slot begins in a cache of a device with addresses."""
        stride: int = self.length * self._specs[name].bytes_per_token
        return int(self._caches[name][0].data_ptr()) + slot * stride

    def bytes_of(self, size: int) -> Any:
        """Return an ``OrtValue`` of a number of bytes.

        Raises:
            ProviderRuntimeError: the device has not enough memory.
        """
        return self._allocate("inputs and results", (size,), np.dtype(np.uint8))

    def stream(self) -> DeviceStream:
        """Return a new stream of the device.

        Raises:
            ProviderUnavailableError: the device has no streams, or is gone.
        """
        if self.device.stream is None:
            raise ProviderUnavailableError(f"{self.device.name} has no streams")
        return self.device.stream()

    def _upload(self, binding: Any, feeds: Mapping[str, Array]) -> list[Callable[[], None]]:
        """Bind values of the device to inputs; return what copies the arrays to them."""
        if self.device.addressable:
            block = DeviceBlock(shapes_of(feeds), self.bytes_of)
            block.bind_inputs(binding, self.device.name, self.device.index)

            def upload() -> None:
                for name, array in feeds.items():
                    block.arrays[name][...] = array
                block.upload()

            return [upload]
        values = {name: self._allocate(name, array.shape, array.dtype) for name, array in feeds.items()}
        for name, value in values.items():
            binding.bind_ortvalue_input(name, value)
        return [partial(value.update_inplace, feeds[name]) for name, value in values.items()]

    def bind_once(
        self,
        binding: Any,
        feeds: Mapping[str, Array],
        results: Mapping[str, Array],
        late: Collection[str] = (),
    ) -> SlotBinding:
        if not self.device.updates:
            return super().bind_once(binding, feeds, results)
        prompt = {name: array for name, array in results.items() if name not in late}
        run = super().bind_once(binding, feeds, prompt)
        run.options = run_options(None)
        for name in results.keys() - prompt.keys():
            value = self._allocate(name, results[name].shape, results[name].dtype)
            binding.bind_ortvalue_output(name, value)
            run.downloads[name] = (value, results[name])
        return run

    def held_bytes(self, lengths: Array) -> int:
        """Return the size of all buffers, which is constant."""
        return self.slots * self.length * sum(spec.bytes_per_token for spec in self._specs.values())

    def copy_prefix(self, source: int, target: int, length: int) -> None:
        """Copy the whole slot, which is contiguous in each buffer."""
        binding = self._copier.io_binding()
        for name in self._specs:
            self._bind(binding.bind_input, binding.bind_ortvalue_input, name, name, source, 1)
        self._copy_into(binding, target)

    def release(self, slot: int) -> None:
        """Do nothing: the slot's memory stays allocated."""

    def close(self) -> None:
        self._caches.clear()
        self._copier = None

    def _bind(self, by_address: Any, by_value: Any, name: str, cache: str, first: int, count: int) -> None:
        values, spec = self._caches[cache], self._specs[cache]
        if not self.device.addressable:
            if count != 1:
                raise ProviderRuntimeError(f"device {self.device.name} runs one slot at a time, not {count}")
            by_value(name, values[first])
            return
        place = (
            element_type(spec.dtype),
            [count, spec.heads, self.length, spec.width],
            self.address(cache, first),
        )
        by_address(name, self.device.name, self.device.index, *place)

    def _copy_model(self) -> bytes:
        return _copy_model(self._specs, self.length)

    def _buffers(self) -> list[int]:
        """Return the slots of each buffer of a cache: one for all, or one each without addresses."""
        return [self.slots] if self.device.addressable else [1] * self.slots

    def _clear(self) -> None:
        """Fill all slots with zeros: KV after a sequence is masked by 0, but NaN * 0 is NaN."""
        binding = self._copier.io_binding()
        for name, spec in self._specs.items():
            zeros = np.zeros((1, spec.heads, self.length, spec.width), spec.dtype)
            with _runtime_errors(f"clearing '{name}'"):
                binding.bind_ortvalue_input(name, shared_value(zeros))
        self._copy_into(binding, 0)
        for slot in range(1, self.slots):
            self.copy_prefix(0, slot, self.length)

    def _copy_into(self, binding: Any, target: int) -> None:
        for name in self._specs:
            output = present_of(name)
            self._bind(binding.bind_output, binding.bind_ortvalue_output, output, name, target, 1)
        with _runtime_errors("copying a slot"):
            self._copier.run_with_iobinding(binding)

    def _cache(self, name: str, slots: int) -> Any:
        spec = self._specs[name]
        if self.device.buffer is None:
            return self._allocate(name, (slots, spec.heads, self.length, spec.width), spec.dtype)
        size = slots * self.length * spec.bytes_per_token
        return self._made(name, size, partial(self.device.buffer, size))

    def _allocate(self, name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
        size = int(np.prod(shape)) * dtype.itemsize
        return self._made(name, size, partial(self.device.allocate, shape, dtype))

    def _made(self, name: str, size: int, make: Callable[[], Any]) -> Any:
        failures: tuple[type[BaseException], ...] = (ProviderUnavailableError, *ort.runtime_errors())
        try:
            return make()
        except failures as error:
            raise self._no_memory(name, size, error) from error

    def _no_memory(self, name: str, size: int, error: BaseException) -> ProviderRuntimeError:
        return ProviderRuntimeError(
            f"{self.device.name}:{self.device.index} has no memory for '{name}' ({size / 2**30:.2f} GiB): "
            f"{ort.one_line(error)}. Lower max_slots or context_length."
        )


class _Rebinding(SlotBinding):
    """Binds host arrays again for every run: a device without addresses copies them when they are bound."""

    __slots__ = ("_feeds", "_memory", "_results")

    def __init__(
        self, binding: Any, *, memory: SlotMemory, feeds: Mapping[str, Array], results: Mapping[str, Array]
    ) -> None:
        super().__init__(binding)
        self._memory, self._feeds, self._results = memory, feeds, results

    def run(self, session: Any, late: Collection[str] = ()) -> None:
        """Run once; all results are on the host afterwards, also ``late`` ones."""
        self._memory.bind_once(self.binding, self._feeds, self._results)
        super().run(session)


class CapturedRun(SlotBinding):
    """A run that the device captures the first time that no other thread prevents it, and then replays.

    What was captured is freed with the session: ``release_captured_graph`` of onnxruntime 1.31 does nothing
    on CUDA.
    """

    __slots__ = ("_captured", "_first")

    def __init__(self, binding: Any, graph_id: int, *, waits: bool) -> None:
        super().__init__(binding, options=run_options(graph_id, waits=waits))
        self._captured, self._first = False, run_options(graph_id)

    def _execute(self, session: Any, options: Any) -> None:
        if self._captured:
            super()._execute(session, options)
            return
        with captures.capture() as may:
            super()._execute(session, self._first if may else run_options(None))
        self._captured = may


def slots_that_fit(free: int, slot_bytes: int, wanted: int, remedy: str) -> int:
    """Return how many slots (or blocks) fit into the free bytes, at most ``wanted``.

    Raises:
        ProviderRuntimeError: not even one fits; the message ends with ``remedy``.
    """
    slots = min(wanted, free // slot_bytes)
    if slots < 1:
        raise ProviderRuntimeError(
            f"{free / 2**30:.2f} GiB of device memory cannot hold one sequence: its KV takes "
            f"{slot_bytes / 2**30:.2f} GiB. Lower context_length, quantize the model or its KV cache, "
            f"{remedy}."
        )
    if slots < wanted:
        _log.info(
            "%.2f GiB of device memory hold %d instead of %d slots (or blocks) of KV; slots of a lower "
            "context_length are smaller",
            free / 2**30,
            slots,
            wanted,
        )
    return slots


@contextmanager
def _runtime_errors(doing: str) -> Iterator[None]:
    try:
        yield
    except ort.runtime_errors() as error:
        raise ProviderRuntimeError(f"{doing} failed: {ort.one_line(error)}") from error


def run_options(graph_id: int | None, *, waits: bool = True) -> Any:
    """Return options of a run that is captured as a graph of this number, or not captured.

    Args:
        graph_id: a number of its own; None does not capture.
        waits: whether the call returns when the device has computed the run, or when it was given to it.
    """
    options = ort.load_onnxruntime("a device run").RunOptions()
    options.add_run_config_entry(_GRAPH_ID, str(-1 if graph_id is None else graph_id))
    if not waits:
        options.add_run_config_entry(_NO_WAIT, "1")
    return options


def _copy_model(specs: Mapping[str, KVSpec], length: int) -> bytes:
    """Return a serialized graph that copies one slot of every cache to its output."""
    import onnx_ir as ir

    inputs, nodes = [], []
    for name, spec in specs.items():
        shape = [1, spec.heads, length, spec.width]
        inputs.append(ir.val(name, ir.DataType.from_numpy(spec.dtype), shape))
        node = ir.node("Identity", [inputs[-1]])
        node.outputs[0].name = present_of(name)
        node.outputs[0].type, node.outputs[0].shape = inputs[-1].type, inputs[-1].shape
        nodes.append(node)
    outputs = [node.outputs[0] for node in nodes]
    graph = ir.Graph(inputs, outputs, nodes=nodes, opset_imports={"": 21}, name="copy_slot")
    return ir.to_proto(ir.Model(graph, ir_version=10)).SerializeToString()
