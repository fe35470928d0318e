"""Read and compile OpenVINO models, and map PagedAttention to OpenVINO's operator. Imports openvino."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import openvino
from openvino import opset13 as ops
from openvino.frontend.onnx import ConversionExtension
from openvino.op import _PagedAttentionExtension as PagedAttentionExtension

from ...errors import GraphError, ModelNotFoundError, ProviderUnavailableError
from ...graph_opt.lower.pipelines.paged_form import DOMAIN, OPERATOR
from ...storage.root import cache_root
from ..host.machine import has_exact_byte_sums
from .recurrent import causal_convolution, linear_attention
from .trial import ends_process

KEY_CACHE_INPUT, VALUE_CACHE_INPUT = 3, 4
_SINKS, _SLOPES = 10, 11  # indices of our operator's optional inputs
# Compute quantized tensors in integers. Without VNNI the CPU plugin's sums of them saturate (2026.4).
_INTEGER_PRODUCTS = "LP_TRANSFORMS_MODE"


class Input(NamedTuple):
    """An input of a model; sizes that a run may choose are None."""

    name: str
    shape: list[int | None]


class OpenVinoSession:
    """A compiled model with ``run`` and ``get_inputs`` of ``onnxruntime.InferenceSession``."""

    def __init__(self, compiled: Any) -> None:
        self.compiled = compiled
        self._outputs = {port.get_any_name(): index for index, port in enumerate(compiled.outputs)}

    def get_inputs(self) -> list[Input]:
        """Return the inputs in the order of the graph."""
        sizes = [
            [None if size.is_dynamic else size.get_length() for size in port.partial_shape]
            for port in self.compiled.inputs
        ]
        return [
            Input(port.get_any_name(), shape) for port, shape in zip(self.compiled.inputs, sizes, strict=True)
        ]

    def run(
        self, output_names: list[str] | None, feeds: Mapping[str, npt.NDArray[Any]]
    ) -> list[npt.NDArray[Any]]:
        """Run once; return the outputs in the order of ``output_names``, or all in the order of the graph."""
        results = self.compiled(dict(feeds), share_inputs=True)
        return [np.array(results[self._outputs[name]]) for name in output_names or self._outputs]


def open_core(device: str) -> Any:
    """Return the process's ``openvino.Core`` with our operators registered, after checking the device.

    Raises:
        ProviderUnavailableError: there is no such device.
    """
    present = present_devices()
    if not any(name == device or name.split(".")[0] == device for name in present):
        raise ProviderUnavailableError(
            f"OpenVINO finds no device '{device}'; it finds {', '.join(present) or 'none'}. Choose one of "
            "them with the option 'device', or install the device's driver."
        )
    return _core()


def present_devices() -> list[str]:
    """Return the devices that OpenVINO finds."""
    return list(_core().available_devices)


@cache
def _core() -> Any:
    """Return the only core of the process, which is never freed.

    The CPU plugin of a core replaces the thread's alternate signal stack until the core is freed. If two
    cores are freed in the order of their creation, the second restores the freed stack of the first, and the
    next signal kills the process.
    """
    core = openvino.Core()
    core.add_extension(ConversionExtension(OPERATOR, DOMAIN, _paged_attention))
    core.add_extension(ConversionExtension("LinearAttention", "", linear_attention))
    core.add_extension(ConversionExtension("CausalConvWithState", "", causal_convolution))
    if not has_exact_byte_sums() and "CPU" in core.available_devices:
        core.set_property("CPU", {_INTEGER_PRODUCTS: False})
    return core


def read(core: Any, path: Path) -> Any:
    """Read an ONNX file as an ``openvino.Model``.

    Raises:
        ModelNotFoundError: there is no such file.
        GraphError: OpenVINO cannot read it.
    """
    if not path.is_file():
        raise ModelNotFoundError(f"there is no model file {path}")
    if ends_process(path):
        raise GraphError(
            f"OpenVINO cannot read {path}: it has an operator that OpenVINO does not convert, and its result "
            "reaches a Clip without one of its bounds, which would end the process"
        )
    try:
        model = core.read_model(path)
    except RuntimeError as error:
        raise GraphError(f"OpenVINO cannot read {path}: {one_line(error)}") from error
    _free_caches(model)
    _order_ties(model)
    return model


def _order_ties(model: Any) -> None:
    """Order equal values of TopK by index, as ONNX does: the frontend leaves their order open (2026.4)."""
    for node in model.get_ops():
        known = node.get_attributes() if node.get_type_name() == "TopK" else {"stable": True}
        if not known["stable"] and known["sort"] != "none":
            names = ("axis", "mode", "sort", "index_element_type")
            inputs = (node.input_value(index) for index in range(2))
            stable = ops.topk(*inputs, *(known[name] for name in names), stable=True)
            for index in range(2):
                node.output(index).replace(stable.output(index))


def compile_model(core: Any, model: Any, device: str, settings: Mapping[str, str]) -> Any:
    """Compile a model for one device only.

    Raises:
        GraphError: the device cannot run the model.
    """
    try:
        compiled = core.compile_model(model, device, {**settings, "CACHE_DIR": str(_cache_folder())})
        if compiled.get_property("LOADED_FROM_CACHE") and _rotates(compiled):
            compiled = core.compile_model(model, device, settings)
        return compiled
    except RuntimeError as error:
        raise GraphError(f"OpenVINO cannot compile this model for {device}: {one_line(error)}") from error


def _rotates(compiled: Any) -> bool:
    """Return whether a compiled model has a rotary embedding of OpenVINO's.

    A cached one reads the angles of the second half behind those of the first, where no angles are (2026.4).
    """
    nodes = compiled.get_runtime_model().get_ops()
    return any(str(node.get_rt_info()["layerType"].astype(str)).lower() == "rope" for node in nodes)


def own_precision(core: Any, device: str) -> str:
    """Return the default inference precision of a device, such as bf16."""
    precision: str = core.get_property(device, "INFERENCE_PRECISION_HINT").to_string()
    return precision


def one_line(error: BaseException) -> str:
    """Return the message of an error without line breaks."""
    return " ".join(str(error).split())


def _cache_folder() -> Path:
    """Return the folder where OpenVINO caches compiled models."""
    return cache_root() / "openvino"


def _free_caches(model: Any) -> None:
    """Make dtype and shape of the KV caches dynamic, so that the device's plugin chooses them."""
    for node in model.get_ops():
        if node.get_type_name() != "PagedAttentionExtension":
            continue
        for index in (KEY_CACHE_INPUT, VALUE_CACHE_INPUT):
            parameter = node.input_value(index).get_node()
            parameter.set_element_type(openvino.Type.dynamic)
            parameter.set_partial_shape(openvino.PartialShape([-1] * 4))
    model.validate_nodes_and_infer_types()


def _paged_attention(node: Any) -> list[Any]:
    """Convert our PagedAttention to OpenVINO's operator, with its optional features disabled."""
    operands = [node.get_input(index) for index in range(node.get_input_size())]
    off = _constant(0, np.int32)
    floats, ints, bytes_ = (_empty(kind) for kind in (np.float32, np.int32, np.uint8))
    scale = _constant(node.get_attribute("scale"), np.float32)
    window = _constant(max(node.get_attribute("local_window_size"), 0), np.int32)
    attention = PagedAttentionExtension(
        [
            *operands[:9],
            *(scale, window),
            operands[_SLOPES] if _given(operands, _SLOPES) else floats,
            operands[9],  # max_context_len
            ints,  # score aggregation window
            *(ints, ints, floats),  # cache rotation
            *(floats, off, off),  # XAttention
            _by_head(operands[_SINKS]) if _given(operands, _SINKS) else _empty(np.float32, (0, 0, 0, 0)),
            *(off, ints, ints, ints),  # adaptive eviction
            *(ints, bytes_, ints),  # token types and query-query bias
        ]
    )
    heads, size = node.get_attribute("kv_num_heads"), operands[3].get_partial_shape()[3].get_length()
    facts = attention.get_rt_info()
    for part in "kv":
        facts[f"num_{part}_heads"], facts[f"{part}_head_size"] = heads, size
    return [attention.output(0)]


def _given(operands: Sequence[Any], index: int) -> bool:
    """Return whether a node has an optional input; OpenVINO puts a node in the place of an absent one."""
    return len(operands) > index and operands[index].get_node().get_type_name() != "NullNode"


def _by_head(sinks: Any) -> Any:
    """Return sinks [heads] as [1, heads, 1, 1]."""
    return ops.reshape(sinks, np.array([1, -1, 1, 1]), special_zero=False).output(0)


def _constant(value: float, dtype: npt.DTypeLike) -> Any:
    return ops.constant(np.array(value, dtype)).output(0)


def _empty(dtype: npt.DTypeLike, shape: tuple[int, ...] = (0,)) -> Any:
    return ops.constant(np.zeros(shape, dtype)).output(0)
