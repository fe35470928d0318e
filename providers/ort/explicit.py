"""Sessions of graphs with explicit KV in ONNX Runtime; the caches stay on the device between runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy.typing as npt

from ...contract import (
    LAST_HIDDEN_STATE,
    LOGITS,
    present_of,
)
from ...errors import GraphError
from ..kv.decoder_graph import DecoderGraph, read_graph
from ..runners.explicit_runner import Logits
from . import ort
from .device_memory import Device
from .slot_memory import shared_value


class OrtExplicitSession:
    """An ``ExplicitSession`` on an execution provider.

    Args:
        session: an open ``onnxruntime.InferenceSession`` of a portable graph.
        device: the device that holds the caches between runs.
        source: the name of the model in error messages.

    Raises:
        GraphError: the graph does not follow the contract of portable graphs.
    """

    def __init__(self, session: Any, device: Device, source: str) -> None:
        self._session, self._device = session, device
        self.graph = _read(session, source)

    def run(
        self, feeds: Mapping[str, npt.NDArray[Any]], past: Sequence[Any], states: Logits | None = None
    ) -> tuple[Logits, list[Any]]:
        self._device.ready()
        binding = self._session.io_binding()
        try:
            for name, array in feeds.items():
                binding.bind_ortvalue_input(name, shared_value(array))
            names = self.graph.explicit_inputs
            for name, value in zip(names, past, strict=True):
                binding.bind_ortvalue_input(name, value)
            binding.bind_output(LOGITS, "cpu")
            for name in names:
                binding.bind_output(present_of(name), self._device.name, self._device.index)
            if states is not None:  # last, since the results are in the order of binding
                binding.bind_ortvalue_output(LAST_HIDDEN_STATE, shared_value(states[None]))
            self._session.run_with_iobinding(binding)
        except ort.runtime_errors() as error:
            raise ort.run_error(1, error) from error
        results = binding.get_outputs()  # in the order of binding
        return results[0].numpy()[0], results[1 : 1 + len(names)]

    def to_host(self, value: Any) -> npt.NDArray[Any]:
        array: npt.NDArray[Any] = value.numpy()
        return array

    def from_host(self, array: npt.NDArray[Any]) -> Any:
        return shared_value(array)


def _read(session: Any, source: str) -> DecoderGraph:
    graph, outputs = read_graph(session, source), {value.name for value in session.get_outputs()}
    lacking = [name for name in map(present_of, graph.explicit_inputs) if name not in outputs]
    if not (graph.caches or graph.states) or lacking:
        what = f"no output '{lacking[0]}'" if lacking else "no KV cache inputs"
        raise GraphError(f"{source} has {what}; lower a portable decoder with provider.passes()")
    return graph
