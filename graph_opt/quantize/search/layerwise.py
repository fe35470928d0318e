"""Layer-by-layer calibration: run a graph on a text in stages.

The weights before a stage are those quantized so far, so that a layer is calibrated on the outputs of
quantized layers, as in the sequential order of GPTQ (https://arxiv.org/abs/2210.17323). Between two stages
only the live values are stored, and only one stage's weights are in memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import onnx_ir as ir

from ....errors import GraphError
from ....progress import Progress
from ....records import dataclass
from ....storage.scratch import scratch_folder
from ...graph.edit import nodes_of, weight
from ...graph.lazy import Array, shape_of
from ...graph.session import open_part
from ..algorithms.blockwise import Floats
from ..algorithms.cores import on_all_cores, threads_each
from ..calibration.activations import Tokens, fresh_sequence, placed
from ..calibration.waiting import Values, Waiting

_MAX_BYTES = 4 << 30  # approximate limit of values stored between two stages
HELD_BYTES = 128 << 20  # limit of those in memory
_WINDOWS = 4  # run at a time, on any number of cores: it decides the order in which moments are added
_NO_MOMENTS: Floats = np.zeros((0, 0), np.float32)
_MOMENT_COLUMNS = 128  # of second moments that one core computes at a time
_FIRST_SHARE = 1 / 16  # least weight of a window's first token, relative to the window


@dataclass(frozen=True, slots=True)
class Stage:
    """The weights that multiply one value, and the second moments of that value on the text.

    The means weigh the first token of a window more than the others. All later tokens attend to it in many
    heads, also where its keys and values are small (G. Xiao et al., "Efficient Streaming Language Models with
    Attention Sinks", https://arxiv.org/abs/2309.17453), so an error of it changes all their attention.

    Attributes:
        source: the value.
        weights: initializers; [in, out] for a MatMul, [out, in] for a transposed Gemm.
        moments: E[y y^T] of the value y behind the replaced weights, [in, in]; empty if nobody wants them.
        floats: the contents of the weights by name.
    """

    source: ir.Value
    weights: tuple[ir.Value, ...]
    moments: Floats
    floats: Mapping[str, Floats]


Replace = Callable[[Stage], Mapping[str, Floats]]
"""Receives a stage; returns the weights to go on with by name."""


def calibrate_stages(
    model: ir.Model,
    windows: Sequence[Tokens],
    replace: Replace,
    *,
    context_length: int,
    substitutes: Mapping[str, Floats] | None = None,
    without_moments: Callable[[str], bool] = lambda source: False,
    max_bytes: int = HELD_BYTES,
    progress: Progress | None = None,
) -> None:
    """Call ``replace`` with every stage in the order of the graph.

    Args:
        model: a portable float graph; not changed.
        windows: calibration text, each window run as a separate sequence; only those whose values fit in 4
            GiB are used.
        replace: receives the stages.
        context_length: start positions of the windows are spread over it.
        substitutes: the embeddings to begin with.
        without_moments: whether the stage of a value, by name, wants no moments.
        max_bytes: limit of values in memory between two stages; the rest is stored in files.
        progress: called after every stage.

    Raises:
        GraphError: an activation is NaN or infinite.
        UsageError: the text has too few tokens.
        MissingExtraError: onnxruntime is not installed.
    """
    route = _Route(model.graph)
    read = placed(_affordable(windows, route), context_length)
    shapes = {str(value.name): tuple(value.shape or ()) for value in model.graph.inputs}
    fed = [fresh_sequence(shapes, tokens, start) for tokens, start in read]
    replaced, floats = dict(substitutes or {}), _Contents(())
    with scratch_folder() as folder:
        waiting = Waiting(folder, max_bytes)
        for number, source in enumerate(route.sources):
            sample = waiting.take(0)
            segment = _Segment(model, route, number, fed[0], sample, threads_each(fed[:_WINDOWS]))
            waiting.put(0, sample)
            matrices = segment.matrices({**floats, **replaced})
            moments = None if without_moments(str(source.name)) else _Moments(str(source.name))
            _advance(segment, fed, waiting, matrices, moments)
            for name in segment.weights:
                replaced.pop(name, None)
            floats = _Contents(route.weights[source])
            mean = _NO_MOMENTS if moments is None else moments.mean()
            replaced |= replace(Stage(source, route.weights[source], mean, floats))
            if progress is not None:
                progress(number + 1, len(route.sources), str(source.name))


class _Contents(dict[str, Floats]):
    """The contents of weights by name, read at their first use and kept for the stage that follows."""

    def __init__(self, weights: Sequence[ir.Value]) -> None:
        super().__init__()
        self._tensors = {str(value.name): value.const_value for value in weights}

    def __missing__(self, name: str) -> Floats:
        self[name] = content = _floats(self._tensors[name], name)
        return content


class _Route:
    """The order of the products of a graph, and the live values between them.

    Attributes:
        sources: the values that are multiplied with weights, in the order of the graph.
        weights: the weights by source.
    """

    def __init__(self, graph: ir.Graph) -> None:
        self._index = {node: index for index, node in enumerate(graph)}
        self._texts = _text_dependent(graph)
        sources: dict[ir.Value, list[ir.Value]] = {}
        for op_type in ("MatMul", "Gemm"):
            for node in nodes_of(graph, op_type):
                x, factor = node.inputs[0], node.inputs[1]
                if x in self._texts and factor is not None and is_matrix(factor):
                    sources.setdefault(x, []).append(factor)
        self.sources = sorted(sources, key=self._position)
        self.weights = {value: tuple(factors) for value, factors in sources.items()}

    def live(self, number: int) -> list[ir.Value]:
        """Return the values computed up to source ``number`` that are read after it."""
        if number < 0:
            return []
        here = self._position(self.sources[number])
        return [
            value
            for value in self._texts
            if self._position(value) <= here and any(self._index[use.node] > here for use in value.uses())
        ]

    def _position(self, value: ir.Value) -> int:
        producer = value.producer()
        return -1 if producer is None else self._index[producer]


class _Segment:
    """The nodes from one source to the next, with weights as inputs."""

    def __init__(
        self, model: ir.Model, route: _Route, number: int, fed: Values, held: Values, threads: int
    ) -> None:
        before, outputs = route.live(number - 1), route.live(number)
        new = [value for value in outputs if value not in before]
        self.names = [str(value.name) for value in new]
        self.kept = [str(value.name) for value in outputs if value in before]
        self.weights: dict[str, ir.TensorProtocol | None] = {}
        if new:
            graph = ir.convenience.extract(model.graph, [*model.graph.inputs, *before], new)
            self._open(model, graph, fed | held, threads)

    def _open(self, model: ir.Model, graph: ir.Graph, samples: Values, threads: int) -> None:
        matrices = [value for value in graph.initializers.values() if is_matrix(value)]
        self.weights = {str(value.name): value.const_value for value in matrices}
        for value in matrices:
            del graph.initializers[str(value.name)]
        for value in graph.initializers.values():  # the remaining ones are small; load them
            tensor = value.const_value
            value.const_value = None if tensor is None else ir.tensor(tensor.numpy(), name=value.name)
        inputs = [value for value in graph.inputs if value.uses()] + matrices
        graph.inputs.clear()
        graph.inputs.extend(inputs)
        for value in inputs:
            name = str(value.name)
            kind = ir.DataType.FLOAT if name in self.weights else ir.DataType.from_numpy(samples[name].dtype)
            value.type = ir.TensorType(kind)
        self._inputs = [str(value.name) for value in inputs]
        self._session = open_part(ir.Model(graph, ir_version=model.ir_version), threads=threads)

    def matrices(self, known: Mapping[str, Floats]) -> Values:
        """Return the weights, those in ``known`` without reading them."""
        return {
            name: known[name] if name in known else _floats(tensor, name)
            for name, tensor in self.weights.items()
        }

    def run(self, values: Values, matrices: Values) -> Values:
        """Return the live values after the segment.

        Raises:
            GraphError: a value holds NaN or infinity.
        """
        if not self.names:  # one node has several results: the inputs of experts
            return {name: values[name] for name in self.kept}
        everything = {**values, **matrices}
        feed = {name: everything[name] for name in self._inputs}
        results = dict(zip(self.names, self._session.run(self.names, feed), strict=True))
        for name, value in results.items():
            if value.dtype.kind == "f" and not np.isfinite(value).all():
                raise GraphError(
                    f"{name} holds NaN or infinity on the calibration text; check the float model"
                )
        return results | {name: values[name] for name in self.kept}


def _advance(
    segment: _Segment, fed: Sequence[Values], waiting: Waiting, matrices: Values, moments: _Moments | None
) -> None:
    """Run every window through the segment, and add to the moments of a value at its end."""
    for first in range(0, len(fed), _WINDOWS):
        windows = range(first, min(first + _WINDOWS, len(fed)))
        values = [{**fed[index], **waiting.take(index)} for index in windows]
        results = on_all_cores(lambda value: segment.run(value, matrices), values)
        for index, result in zip(windows, results, strict=True):
            waiting.put(index, result)
        if moments is not None:
            moments.add(results)


class _Moments:
    """The mean of the outer products of a value's rows [tokens, in].

    Args:
        source: the value's name.
    """

    def __init__(self, source: str) -> None:
        self._source = source
        self._total: Floats = np.zeros((0, 0), np.float32)  # what is below the diagonal's blocks
        self._count = 0

    def add(self, results: Sequence[Values]) -> None:
        """Add the outer products of the rows in some windows."""
        rows = np.concatenate([_weighted(_rows(result[self._source])) for result in results])
        size = rows.shape[1]
        if not self._count:
            self._total = np.zeros((size, size), np.float32)
        self._count += len(rows)

        def add_columns(start: int) -> None:
            end = start + _MOMENT_COLUMNS
            self._total[start:, start:end] += rows[:, start:].T @ rows[:, start:end]

        on_all_cores(add_columns, range(0, size, _MOMENT_COLUMNS))

    def mean(self) -> Floats:
        """Return the mean, [in, in]; nothing can be added behind it.

        That of an expert which no token was routed to is that of independent inputs of equal size.
        """
        if not self._count:
            return np.eye(len(self._total), dtype=np.float32)
        mean = self._total

        def finish(start: int) -> None:  # in place, since a matrix of 12,288 inputs takes 600 MB
            end = start + _MOMENT_COLUMNS
            mean[start:, start:end] /= np.float32(self._count)
            corner = np.tril(mean[start:end, start:end])
            mean[start:end, start:end] = corner + np.tril(corner, -1).T
            mean[start:end, end:] = mean[end:, start:end].T

        on_all_cores(finish, range(0, len(mean), _MOMENT_COLUMNS))
        return mean


def _weighted(rows: Floats) -> Floats:
    """Return a window's rows [tokens, in] with a larger first one.

    Its squares sum up to those of ``_FIRST_SHARE`` of the tokens, or more.
    """
    squares = np.einsum("ti,ti->t", rows, rows)
    if not len(rows) or squares[0] <= 0:
        return rows
    root = max(1.0, math.sqrt(_FIRST_SHARE * len(rows) * float(np.median(squares) / squares[0])))
    return np.concatenate([rows[:1] * np.float32(root), rows[1:]])


def _rows(value: Array) -> Floats:
    return value.reshape(-1, value.shape[-1])


def is_matrix(value: ir.Value) -> bool:
    """Return whether a value is a weight matrix."""
    tensor = weight(value)
    return tensor is not None and len(tensor.shape) == 2 and tensor.dtype.is_floating_point()


def inputs_of(factor: ir.Value) -> int:
    """Return the input size of a weight: its rows for a MatMul, its columns for a transposed Gemm."""
    is_gemm = any(use.node.op_type == "Gemm" for use in factor.uses())
    return 0 if factor.const_value is None else shape_of(factor.const_value)[1 if is_gemm else 0]


def _text_dependent(graph: ir.Graph) -> dict[ir.Value, None]:
    """Return, in order, the values that depend on a weight matrix.

    All others, such as masks and rope tables, are cheap to recompute.
    """
    values: dict[ir.Value, None] = {}
    for node in graph:
        if any(value is not None and (value in values or is_matrix(value)) for value in node.inputs):
            values |= dict.fromkeys(value for value in node.outputs if value.uses())
    return values


def _affordable(windows: Sequence[Tokens], route: _Route) -> Sequence[Tokens]:
    """Return as many windows as fit: a layer's inputs and one more value of that size."""
    left = _MAX_BYTES // (2 * 4 * max(map(inputs_of, (w for group in route.weights.values() for w in group))))
    for index, tokens in enumerate(windows):
        left -= len(tokens)
        if left < 0:
            return windows[: max(1, index)]
    return windows


def _floats(tensor: ir.TensorProtocol | None, name: str) -> Floats:
    if tensor is None:
        raise GraphError(f"initializer {name} has no content")
    return np.asarray(tensor.numpy(), np.float32)
