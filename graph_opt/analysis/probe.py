"""Find out what a part of a graph computes by evaluating it on probe inputs, not by matching patterns.

Exporters write masks and rope tables in many ways, but their values on probe inputs are the same.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from ...contract import ATTENTION_MASK, CACHE, IMAGE_AHEAD, INPUT_IDS, POSITION_IDS, ROPE_POSITIONS
from ...errors import GraphError
from ...records import dataclass
from ..graph.edit import hold_in_memory, static_size
from ..graph.lazy import Array
from .constant_evaluation import content_of, is_known

if TYPE_CHECKING:
    from onnx.reference import ReferenceEvaluator

_BLOCKED = -1e4  # a mask entry at or below this hides its key
_BIAS = "the mask adds a bias to visible keys"
_PRODUCTS = frozenset({"Attention", "Gemm", "GroupQueryAttention", "MatMul"})
_SEED = 0
_ANGLES: dict[str, Callable[[Array], Array]] = {"Cos": np.cos, "Sin": np.sin}


class Probe:
    """The part of a graph that computes one value from the graph's inputs, ready to be evaluated.

    Args:
        graph: the graph.
        value: the value.
        known: values that are fed like inputs, and not computed.

    Raises:
        GraphError: it has operators that are not standard.
    """

    def __init__(self, graph: ir.Graph, value: ir.Value, known: Collection[ir.Value] = ()) -> None:
        self.name, self.inputs = value.name, inputs_of(value, known)
        self._graph, self._value = graph, value
        self._nodes = _upstream(value, self.inputs)
        self._evaluator: ReferenceEvaluator | None = None
        if not all(is_known(node) or (node.op_type in _ANGLES and not node.domain) for node in self._nodes):
            self._evaluator = self._reference()

    def _reference(self) -> ReferenceEvaluator:
        from onnx.reference import ReferenceEvaluator  # 50 ms, which masks and tables of decoders do without

        part = ir.convenience.extract(self._graph, self.inputs, [self._value])
        hold_in_memory(part)
        try:
            return ReferenceEvaluator(ir.to_proto(ir.Model(part, ir_version=11)))
        except NotImplementedError as error:  # an operator that is no standard one
            raise GraphError(f"'{self.name}' cannot be evaluated: {error}") from error

    @property
    def input_names(self) -> set[str]:
        """Names of the graph inputs that the value depends on."""
        return {str(value.name) for value in self.inputs}

    def __call__(self, feed: Mapping[str, Array]) -> Array:
        """Evaluate on ``feed``, which may hold more inputs than needed.

        Raises:
            GraphError: the evaluation fails on these inputs.
        """
        needed = {name: feed[name] for name in self.input_names}
        if self._evaluator is None:
            found = self._computed(needed)
            if found is not None:
                return found
            self._evaluator = self._reference()  # it says what is wrong, or knows what NumPy does otherwise
        try:
            with np.errstate(all="ignore"):  # such as the logarithm of a distance of 0, which is not chosen
                return np.asarray(self._evaluator.run(None, needed)[0])  # type: ignore[index]
        except Exception as error:
            raise GraphError(f"'{self.name}' cannot be evaluated on probe inputs: {error}") from error

    def _computed(self, feed: Mapping[str, Array]) -> Array | None:
        """Compute the value with NumPy, as the reference evaluator does; None where that is not certain."""
        held: dict[ir.Value | None, Array | None] = {None: None}
        held |= {value: feed[str(value.name)] for value in self.inputs}
        for value in {self._value, *(value for node in self._nodes for value in node.inputs)} - held.keys():
            if value is not None and value.is_initializer() and value.const_value is not None:
                held[value] = value.const_value.numpy()
        for node in self._nodes:
            operands = [held[value] for value in node.inputs]
            shapes = [() if operand is None else operand.shape for operand in operands]
            if node.op_type in _ANGLES:
                held[node.outputs[0]] = None if operands[0] is None else _ANGLES[node.op_type](operands[0])
            else:
                held[node.outputs[0]] = content_of(node, operands, shapes, limit=sys.maxsize)
            if held[node.outputs[0]] is None:
                return None
        return held[self._value]


_FEW = 64  # positions that show what an angle depends on


def contract_feed(inputs: Sequence[ir.Value], *, past: int, new: int) -> dict[str, Array]:
    """Return arrays of two rows for those of ``inputs`` that the contract names; caches are zeros."""
    fed = _Case([0, 0], past, new).feed(inputs)
    return {str(value.name): fed[str(value.name)] for value in inputs if value.name in fed}


def inputs_of(value: ir.Value, known: Collection[ir.Value] = ()) -> list[ir.Value]:
    """Return the graph inputs upstream of ``value``; ``known`` values stand for what is upstream of them."""
    values: dict[ir.Value, None] = {}
    seen: set[ir.Node] = set()
    stack = [value]
    while stack:
        current = stack.pop()
        node = current.producer()
        if node is None or current in known:
            if current.is_graph_input() or current in known:
                values[current] = None
        elif node not in seen:
            seen.add(node)
            stack.extend(operand for operand in node.inputs if operand is not None)
    return list(values)


def _upstream(value: ir.Value, inputs: Collection[ir.Value]) -> list[ir.Node]:
    """Return the nodes that compute ``value`` from ``inputs``, each behind those that it reads."""
    ends = set(inputs)

    def producers(values: Iterable[ir.Value | None]) -> list[ir.Node]:
        read = (each.producer() for each in values if each is not None and each not in ends)
        return [node for node in read if node is not None]

    order, waiting = dict[ir.Node, None](), producers([value])
    while waiting:
        node = waiting[-1]
        missing = [] if node in order else [each for each in producers(node.inputs) if each not in order]
        if missing:
            waiting += missing
        else:
            order.setdefault(waiting.pop())
    return list(order)


def turns_with_axes(angle: ir.Value | None) -> bool:
    """Whether a cos or sin value depends on positions in time, height and width."""
    return angle is not None and any(value.name == ROPE_POSITIONS for value in inputs_of(angle))


def rope_table(graph: ir.Graph, value: ir.Value, context_length: int) -> npt.NDArray[np.float32]:
    """Evaluate a cos or sin value at positions 0..context_length-1.

    Returns:
        Shape [context_length, rotary_dim / 2].

    Raises:
        GraphError: the value depends on more than ``position_ids``.
    """
    probe = Probe(graph, value)
    if probe.input_names - {POSITION_IDS}:
        raise GraphError(
            f"rope table '{value.name}' depends on {sorted(probe.input_names)}; it may depend on "
            f"{POSITION_IDS} only"
        )
    positions = np.arange(context_length, dtype=np.int64)[None]
    try:
        table = probe({POSITION_IDS: positions}).astype(np.float32)
    except GraphError as error:
        raise GraphError(
            f"rope table '{value.name}' cannot be computed for {context_length} positions; if the model "
            f"stores a shorter table, choose a context length within it ({error})"
        ) from error
    if table.ndim == 3 and table.shape[:2] == (1, context_length):
        return table.reshape(table.shape[1:])
    raise GraphError(f"rope table '{value.name}' has shape {table.shape} for {context_length} positions")


def turns_alone(graph: ir.Graph, value: ir.Value, context_length: int) -> bool:
    """Whether the cos or sin of a token depends on its position only, not on the last one as in longrope."""
    probe = Probe(graph, value)
    if probe.input_names != {POSITION_IDS}:
        return False
    few = np.arange(min(_FEW, context_length), dtype=np.int64)[None]
    try:
        alone = probe({POSITION_IDS: few})
        beside = probe({POSITION_IDS: np.append(few, [[context_length - 1]], axis=1)})
    except GraphError:  # such as a stored table that is shorter
        return False
    return alone.shape[:2] == few.shape and np.array_equal(alone, beside[:, :-1])


@dataclass(frozen=True, slots=True)
class MaskMeaning:
    """A causal mask.

    Args:
        window: a token sees at most so many of the last tokens, itself included; None is no limit.
        slopes: what the score of a key loses for each token between it and the query, by head (ALiBi,
            https://arxiv.org/abs/2108.12409); empty is nothing.
        ahead: whether a token sees those behind it too that ``image_ahead`` counts.
    """

    window: int | None = None
    slopes: tuple[float, ...] = ()
    ahead: bool = False


@dataclass(frozen=True, slots=True)
class _Case:
    """One probe: left padding per row, number of cached tokens, number of new tokens.

    New tokens are pictures of ``picture`` tokens each, the last of which may be shorter; 1 is text.
    """

    padding: Sequence[int]
    past: int
    new: int
    picture: int = 1

    def unpadded(self) -> _Case:
        """Return the same case without padding."""
        return replace(self, padding=[0] * len(self.padding))

    def feed(self, inputs: Sequence[ir.Value]) -> dict[str, Array]:
        batch, total = len(self.padding), self.past + self.new
        mask = (np.arange(total) >= np.array(self.padding)[:, None]).astype(np.int64)
        positions = np.maximum(mask.cumsum(1) - 1, 0)[:, self.past :]
        feed: dict[str, Array] = {ATTENTION_MASK: mask, POSITION_IDS: positions}
        feed[INPUT_IDS] = np.ones((batch, self.new), np.int64)
        feed[IMAGE_AHEAD] = np.broadcast_to(self._ahead(), (batch, self.new))
        for value in inputs:
            if CACHE.fullmatch(str(value.name)):
                shape = (batch, static_size(value, 1) or 1, self.past, static_size(value, 3) or 1)
                feed[str(value.name)] = np.broadcast_to(np.zeros((), np.float32), shape)
        return feed

    def _ahead(self) -> npt.NDArray[np.int32]:
        token = np.arange(self.new)
        last = token // self.picture * self.picture + self.picture - 1
        return (np.minimum(last, self.new - 1) - token).astype(np.int32)

    def visible(self, window: int | None) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
        """Return which keys each query should see, [batch, new, total], and which queries are not padding."""
        query = self.past + np.arange(self.new)[:, None]
        key = np.arange(self.past + self.new)[None]
        last = query + self._ahead()[:, None]
        near = (key <= last) & (key > query - (window or self.past + self.new + 1))
        start = np.array(self.padding)[:, None, None]
        return near & (key >= start), (query >= start)[..., 0]


def mask_meaning(
    graph: ir.Graph,
    mask: ir.Value,
    context_length: int,
    *,
    padded: bool = True,
    heads: int = 1,
    ahead: bool = False,
) -> MaskMeaning | str:
    """Return the meaning of an additive mask [batch, 1 or heads, new, total], or why it is unknown.

    Window and slopes are read from the last row of the longest context. Then every entry of several probes
    with random left padding must be as these predict. A graph without caches is probed without past
    tokens, and one with a fixed number of new tokens with that number.

    Args:
        graph: a decoder graph.
        mask: the mask, a value of the graph.
        context_length: maximum number of tokens of a probe.
        padded: whether the mask must hide padding.
        heads: how many there are, if heads may have slopes.
        ahead: whether the mask may depend on ``image_ahead``.
    """
    if _depends_on_activations(mask):
        return "the mask depends on activations, or on their shapes"
    probe = Probe(graph, mask)
    known = _KNOWN_INPUTS | {IMAGE_AHEAD} if ahead else _KNOWN_INPUTS
    unknown = {n for n in probe.input_names if n not in known and not CACHE.fullmatch(n)}
    if unknown:
        return f"the mask depends on {sorted(unknown)}"
    cached, fixed = has_caches(graph), fixed_tokens(graph)
    new = fixed or (1 if cached else context_length)
    values = _values(probe, _Case([0], context_length - new if cached else 0, new), heads)
    if isinstance(values, str):
        return values
    # The last row of the longest context sees the whole window, and the differences between its entries are
    # the slope of ALiBi. That proposes a meaning; the cases below decide whether it is right.
    last = values[0, :, -1]
    visible = last[0] > _BLOCKED
    count = int(visible.sum())
    window, slopes = None if count == len(visible) else count, np.zeros(heads)
    if heads > 1 and count > 1 and visible[-count:].all():
        slopes = (last[:, -1] - last[:, -count]) / (count - 1)
    cases, ahead = _cases(window, context_length, cached, fixed), IMAGE_AHEAD in probe.input_names
    if ahead:
        cases += [replace(case, picture=size) for case in cases for size in (2, 3, context_length)]
    for case in cases if padded else map(_Case.unpadded, cases):
        values = _values(probe, case, heads)
        reason = values if isinstance(values, str) else _misfit(values, case, window, slopes)
        if reason is not None:
            return reason
    return MaskMeaning(window, tuple(slopes.tolist()) if slopes.any() else (), ahead)


def _misfit(
    values: npt.NDArray[np.float64], case: _Case, window: int | None, slopes: npt.NDArray[np.float64]
) -> str | None:
    """Return why a mask [batch, heads, new, total] is not that of a window and slopes, None if it is."""
    expected, real = case.visible(window)
    seen = values > _BLOCKED
    if (seen != expected[:, None]).transpose(0, 2, 1, 3)[real].any():
        return f"the mask is neither causal nor a sliding window (past {case.past}, new {case.new})"
    values = np.where(seen, values, 0.0)
    size = np.abs(values).max(initial=0.0)
    if slopes.any():
        own = case.past + np.arange(case.new)
        # The softmax does not change if all scores of a query do.
        values = values - np.take_along_axis(values, own[None, None, :, None], axis=-1)
        values = values + slopes[:, None, None] * (own[:, None] - np.arange(values.shape[-1]))
        seen = seen & real[:, None, :, None]
    return _BIAS if (np.abs(values[seen]) > 1e-5 * size).any() else None


def _depends_on_activations(mask: ir.Value) -> bool:
    seen: set[ir.Node] = set()
    waiting = [mask.producer()]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        if node.op_type in _PRODUCTS:
            return True
        seen.add(node)
        waiting += [value.producer() for value in node.inputs if value is not None]
    return False


def never_holds(graph: ir.Graph, condition: ir.Value) -> bool:
    """Return whether a condition on the rows of a mask is false for every token that is not padding."""
    probe = Probe(graph, condition)
    if {name for name in probe.input_names if name not in _KNOWN_INPUTS and not CACHE.fullmatch(name)}:
        return False
    cases = _cases(None, 16, has_caches(graph), fixed_tokens(graph))
    padded = any(value.name == ATTENTION_MASK for value in graph.inputs)
    for case in cases if padded else map(_Case.unpadded, cases):
        holds = probe(case.feed(probe.inputs))
        _, real = case.visible(None)
        axes = [axis for axis in range(1, holds.ndim) if holds.shape[axis] == case.new != 1]
        if axes:
            shape = [case.new if axis == axes[0] else 1 for axis in range(1, holds.ndim)]
            if len(holds) not in (1, len(real)):
                return False  # its first axis is not the batch
            holds = holds & real.reshape(len(real), *shape)
        if holds.any():
            return False
    return True


_KNOWN_INPUTS = frozenset({ATTENTION_MASK, POSITION_IDS, INPUT_IDS})


def has_caches(graph: ir.Graph) -> bool:
    """Return whether a decoder has KV cache inputs."""
    return any(CACHE.fullmatch(str(value.name)) for value in graph.inputs)


def fixed_tokens(graph: ir.Graph) -> int | None:
    """Return the fixed number of new tokens that a graph accepts, None if it is dynamic."""
    return next((static_size(value, 1) for value in graph.inputs if value.name == INPUT_IDS), None)


def sample_lengths(graph: ir.Graph) -> tuple[int, int]:
    """Return numbers of cached and new tokens that a decoder accepts, 7 in total."""
    new = fixed_tokens(graph) or (3 if has_caches(graph) else 7)
    return (7 - new if has_caches(graph) else 0), new


def _cases(window: int | None, context_length: int, cached: bool, fixed: int | None) -> list[_Case]:
    rng = random.Random(_SEED)  # noqa: S311 -- numpy.random takes 10 ms to import
    edge = window or 8
    shapes = [(0, 7), (5, 1), (6, 4), (edge - 1, 3), (edge, 2), (edge + 1, 1)]
    if not cached:
        shapes = [(0, past + new) for past, new in shapes]
    if fixed is not None:
        shapes = [(past, fixed) for past, _ in shapes]
    fitting = {(min(past, context_length - 1), min(new, context_length - past)) for past, new in shapes}
    return [
        _Case([rng.randrange(past // 2 + 2) for _ in range(3)], past, new)
        for past, new in sorted(fitting)
        if new > 0
    ]


def _values(probe: Probe, case: _Case, heads: int) -> npt.NDArray[np.float64] | str:
    """Evaluate one case and return the mask [batch, heads, new, total], or why it is unknown."""
    values = probe(case.feed(probe.inputs))
    if values.dtype == np.bool_:
        values = np.where(values, 0.0, 2 * _BLOCKED)
    shape = (len(case.padding), heads, case.new, case.past + case.new)
    try:
        return np.broadcast_to(values.astype(np.float64), shape)
    except ValueError:
        one = " (one mask for all heads)" if heads == 1 else ""
        return f"the mask has shape {values.shape} instead of {shape}{one}"
