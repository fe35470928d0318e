"""Weight-only quantization of a portable graph: replace float weights by DequantizeLinear of int4 or int8."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import field
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import onnx_ir as ir

from ....contract import INPUT_IDS
from ....errors import GraphError, UsageError
from ....records import dataclass
from ....storage.writing import save_tensors
from ...graph.edit import add_initializer, insert, int_attribute, weight
from ...graph.half_scales import GROUP_SIZE, Widened
from ...graph.lazy import Array, SharedComputation, lazy, pack_nibbles, shape_of
from ...passes.base import GraphPass
from ..algorithms.blockwise import BLOCK_SIZES, BlockFormat, Quantized, Quantizer, round_to_nearest
from .routers import is_router

if TYPE_CHECKING:
    from ....storage.cache import CachedParts

_log = logging.getLogger(__name__)

Promote = Callable[[ir.Graph], Iterable[ir.Value]]
Arrays = tuple[Array, ...]
_KEPT_FILE = "weight.safetensors"
LEAST_KEPT = 1 << 22  # values of a weight; to keep a smaller one takes 10 ms, as long as it takes to round it


@dataclass(frozen=True, slots=True)
class WeightFormats:
    """The format of each weight of a graph.

    Args:
        form: format of all weights that ``overrides`` does not name.
        embedding: format of the embedding and a tied head; None for ``form``.
        overrides: other formats by weight name; None keeps the weight float.
        float_embedding: whether the embedding and a tied head stay float.
    """

    form: BlockFormat
    embedding: BlockFormat | None = None
    overrides: Mapping[str, BlockFormat | None] = field(default_factory=dict)
    float_embedding: bool = False

    def wanted(self, value: ir.Value) -> BlockFormat | None:
        """Return the requested format of a weight, None for float."""
        usual: BlockFormat | None = self.form
        if any(use.node.op_type == "Gather" for use in value.uses()):
            usual = None if self.float_embedding else self.embedding or self.form
        return self.overrides.get(str(value.name), usual)

    def of(self, value: ir.Value) -> BlockFormat | None:
        """Return the format of a weight with a block size that divides its inputs; None for float."""
        axis, form = summed_axis(value), self.wanted(value)
        if axis is None or form is None or value.const_value is None:
            return None
        if any(is_router(use.node) for use in value.uses()):
            return None
        return form.fitted(shape_of(value.const_value)[axis])

    def promoting(self, values: Iterable[ir.Value]) -> WeightFormats:
        """Return the formats with 8 bits for the values that no override names."""
        wide = {str(value.name): self.form.wide() for value in values}
        return dataclasses.replace(self, overrides={**wide, **self.overrides})


class WeightOnlyQuantizationPass(GraphPass):
    """Quantize the weights of linear layers, of the embedding and of the head, lazily.

    Args:
        form: see ``WeightFormats``.
        embedding: see ``WeightFormats``.
        overrides: see ``WeightFormats``.
        float_embedding: see ``WeightFormats``.
        quantizer: computes values, scales and zero points.
        calibrated: returns by weight name a function that reads its result, or None to use ``quantizer``.
        promote: the weights of a graph that get 8 bits, besides ``overrides``.
        kept: returns what holds the results of ``quantizer`` for large weights, or None to keep none; called
            if there is such a weight.
    """

    def __init__(
        self,
        form: BlockFormat,
        *,
        embedding: BlockFormat | None = None,
        overrides: Mapping[str, BlockFormat | None] | None = None,
        float_embedding: bool = False,
        quantizer: Quantizer = round_to_nearest,
        calibrated: Callable[[str], Callable[[], Quantized] | None] | None = None,
        promote: Promote | None = None,
        kept: Callable[[], CachedParts | None] = lambda: None,
    ) -> None:
        super().__init__()
        self.forms = WeightFormats(form, embedding, dict(overrides or {}), float_embedding)
        self.quantizer = quantizer
        self.calibrated = calibrated
        self.promote = promote
        self._open_kept = cache(kept)
        self._late: deque[ir.Value] = deque()

    def rewrite(self, graph: ir.Graph) -> None:
        """Quantize every weight that is summed along one axis by all its consumers."""
        if self.promote is not None:
            self.forms = self.forms.promoting(self.promote(graph))
        for value in list(graph.initializers.values()):
            axis, form = summed_axis(value), self.forms.of(value)
            if axis is not None and form is not None:
                self._quantize(graph, value, axis, form)
                self.fired += 1
            elif (reason := self._obstacle(value)) is not None:
                self.refuse(next(iter(value.uses())).node, f"weight {value.name} {reason}")
        self._register_late(graph, keep=0)

    def _obstacle(self, value: ir.Value) -> str | None:
        """Return why a weight that should be quantized cannot be; None for one that should stay float."""
        axis = summed_axis(value)
        if axis is None:
            return "is summed along different axes by its consumers" if len(_axes(value)) > 1 else None
        if self.forms.wanted(value) is None or value.const_value is None:
            return None
        if any(is_router(use.node) for use in value.uses()):
            return "is a router's, which is not quantized"
        return f"has {shape_of(value.const_value)[axis]} inputs, which is not a multiple of {BLOCK_SIZES[0]}"

    def _quantize(self, graph: ir.Graph, value: ir.Value, axis: int, form: BlockFormat) -> None:
        source, name = value.const_value, str(value.name)
        if source is None:
            raise GraphError(f"initializer {name} has no content")
        users = {use.node: use.idx for use in value.uses()}
        stored = self.calibrated(name) if self.calibrated is not None else None
        quantized = stored or partial(_rounded, source, axis, form, self.quantizer)
        compute = partial(_computed, quantized, axis, form, name)
        large = stored is None and math.prod(shape_of(source)) >= LEAST_KEPT
        if large and (kept := self._open_kept()) is not None:
            compute = partial(_kept, kept, f"{name} {form}", compute)
        parts = _parts(source, axis, form, compute)
        operands = [add_initializer(graph, f"{name}.values", parts[0])]
        small = [_unregistered(f"{name}.{what}", part) for what, part in zip(_SMALL, parts[1:], strict=False)]
        attributes = {"axis": axis, "block_size": form.block_size}
        first = next(node for node in graph if node in users)
        dequantized = insert(first, "DequantizeLinear", [*operands, *small], attributes)
        dequantized.name = f"{name}/DequantizeLinear"
        for node, position in users.items():
            node.replace_input_with(position, dequantized.outputs[0])
        del graph.initializers[name]
        self._late.extend(small)
        self._register_late(graph, keep=4)

    def _register_late(self, graph: ir.Graph, keep: int) -> None:
        """Register the scales of all but the ``keep`` latest tensors.

        Several threads write initializers in order. With the scales of a weight a few weights later, they do
        not all wait for the same weight.
        """
        while len(self._late) > keep:
            graph.register_initializer(self._late.popleft())


_FLOATS = frozenset({ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16})
_SMALL = ("scales", "zero_points")


def summed_axis(value: ir.Value) -> int | None:
    """Return the axis along which all consumers of a weight sum; None if there is none or they differ."""
    axes = _axes(value)
    return axes.pop() if len(axes) == 1 else None


def _axes(value: ir.Value) -> set[int | None]:
    tensor = weight(value)
    if tensor is None or len(tensor.shape) != 2 or tensor.dtype not in _FLOATS:
        return set()
    return {_summed_axis(use.node, use.idx) for use in value.uses()}


def _summed_axis(node: ir.Node, position: int) -> int | None:
    if node.domain:
        return None
    if node.op_type == "MatMul" and position == 1:
        return 0
    if node.op_type == "Gemm" and position == 1 and int_attribute(node, "transB", 0):
        return 1
    indices = node.inputs[1] if node.op_type == "Gather" and position == 0 else None
    if indices is not None and indices.is_graph_input() and indices.name == INPUT_IDS:
        return 1 if int_attribute(node, "axis", 0) == 0 else None
    return None


def _parts(
    source: ir.TensorProtocol, axis: int, form: BlockFormat, compute: Callable[[], Arrays]
) -> list[ir.LazyTensor]:
    """Return lazy values, scales and, if asymmetric, zero points, with the axes of ``source``."""
    shape = shape_of(source)
    blocks = [size // form.block_size if i == axis else size for i, size in enumerate(shape)]
    shared = SharedComputation(compute)
    half = lazy(lambda: shared.part(1), ir.DataType.FLOAT16, blocks)
    half.meta[GROUP_SIZE] = form.group_size
    parts = [lazy(lambda: shared.part(0), form.dtype, shape), Widened(half)]
    if not form.symmetric:
        parts.append(lazy(lambda: shared.part(2), form.dtype, blocks))
    return parts


def _rounded(source: ir.TensorProtocol, axis: int, form: BlockFormat, quantizer: Quantizer) -> Quantized:
    matrix = source.numpy()
    return quantizer(matrix if axis == 0 else matrix.T, form)


def _computed(quantized: Callable[[], Quantized], axis: int, form: BlockFormat, name: str) -> Arrays:
    """Return the arrays of a weight as they are stored."""
    try:
        result = quantized()
    except GraphError as error:
        raise GraphError(f"weight {name} cannot be quantized: {error}") from error
    return _stored(result, axis, form, name)


def _kept(kept: CachedParts, part: str, compute: Callable[[], Arrays]) -> Arrays:
    """Return the arrays of a weight as kept; compute them if they are not, and keep them."""
    new: list[Arrays] = []

    def build(folder: Path) -> None:
        new.append(compute())
        save_tensors({str(index): array for index, array in enumerate(new[0])}, folder / _KEPT_FILE)

    try:
        folder = kept.folder(part, build)
    except (OSError, UsageError) as error:  # the cache cannot be used, or is full
        _log.warning("%s is not kept for a second try: %s", part, error)
        return new[0] if new else compute()
    if new:
        return new[0]
    from safetensors import safe_open

    with safe_open(folder / _KEPT_FILE, "numpy") as file:
        return tuple(file.get_tensor(str(index)) for index in range(len(file.keys())))


def _stored(result: Quantized, axis: int, form: BlockFormat, name: str) -> Arrays:
    """Return the arrays as they are stored, the scales in float16.

    Raises:
        GraphError: a scale exceeds float16.
    """
    values, scales, *zero_points = (
        np.ascontiguousarray(array if axis == 0 else array.T) for array in result if array is not None
    )
    with np.errstate(over="ignore"):
        half = scales.astype(np.float16)
    if not np.isfinite(half).all():
        raise GraphError(f"weight {name} has a scale of {np.abs(scales).max():.3g}; float16 ends at 65504")
    integers = [array if form.bits == 8 else pack_nibbles(array) for array in (values, *zero_points)]
    return integers[0], half, *integers[1:]


def _unregistered(name: str, tensor: ir.LazyTensor) -> ir.Value:
    tensor.name = name
    return ir.Value(name=name, type=ir.TensorType(tensor.dtype), shape=tensor.shape, const_value=tensor)
