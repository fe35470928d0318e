"""Generate inputs with plausible shapes and values for a graph, so that it can run without data."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import onnx_ir as ir

from ...errors import GraphError, UsageError
from ...records import dataclass
from ..graph.lazy import Array
from .input_facts import InputFacts, input_facts
from .tree_inputs import MOST_RUNS, ROWS, has_trees, near_thresholds, thresholds

Feed = dict[str, Any]  # arrays, and lists of arrays for sequences
Run = Callable[[Mapping[str, Array]], Mapping[str, Array]]

# Sizes of dynamic axes, (image axes, other axes), tried in order until the reference runs.
_SIZES = (
    (64, 8),
    (48, 16),
    (32, 32),
    (96, 64),
    (128, 128),
    (224, 256),
    (320, 512),
    (416, 1024),
    (512, 4096),
    (640, 16384),
)
_BATCHES = (2, 1)
_TEXT_LENGTHS = (512, 256, 128, 64, 32)
_LIMITS = (10, 2, 1)  # exclusive upper bounds of integers of unknown meaning, tried in order
_SAMPLE_RATE = 16000
_SEQUENCE = 2  # tensors of a sequence
_LENGTH_NAME = re.compile("seq|len|token|time|frame|width|height|past", re.IGNORECASE)
_WORDS = np.array(["the", "quick", "brown", "fox", "7", "3.14", "a", "no"], object)
# The distribution of floats per run: normalised data, pixels, saturating values, small signals.
_STYLES: tuple[Callable[[np.random.Generator, Sequence[int]], Array], ...] = (
    lambda rng, shape: rng.standard_normal(shape),
    lambda rng, shape: rng.random(shape),
    lambda rng, shape: 4 * rng.standard_normal(shape),
    lambda rng, shape: 0.1 * rng.standard_normal(shape),
)


@dataclass(frozen=True, slots=True)
class AxisSizes:
    """Sizes of a graph's dynamic axes.

    Attributes:
        batch: size of first axes.
        image: height and width of images.
        other: size of all other axes.
        limit: exclusive upper bound of integers of unknown meaning.
    """

    batch: int
    image: int
    other: int
    limit: int = _LIMITS[0]


@dataclass(frozen=True, slots=True)
class SampleInputs:
    """Inputs of one run.

    Attributes:
        text: their description in reports.
        feed: arrays by input name.
        expected: the reference's outputs, if it has already run on them.
    """

    text: str
    feed: Feed
    expected: Mapping[str, Array] | None = None


def sample_inputs(
    graph: ir.Graph,
    run: Run,
    *,
    seed: int = 0,
    rows: Mapping[str, Sequence[int]] | None = None,
    longest: int = _TEXT_LENGTHS[0],
) -> list[SampleInputs]:
    """Generate inputs for several runs that the reference accepts, the first two with equal shapes.

    The runs differ in the distribution of values, in padding if there is a mask, and, if axes are dynamic,
    the last ones in sizes. Axes with the same name get the same size. States start at zero and continue with
    the reference's outputs.

    Args:
        graph: the graph, whose inputs state their types.
        run: runs the reference; raises GraphError if it refuses its inputs.
        seed: seed of the random numbers.
        rows: values to include in inputs, such as rows of tables that differ.
        longest: maximum tokens of a text.

    Raises:
        UsageError: an input is not a tensor with a known rank.
        GraphError: the reference runs with none of the tried sizes.
    """
    facts = [replace(fact, preferred=tuple((rows or {}).get(fact.name, ()))) for fact in input_facts(graph)]
    for fact in facts:
        kind = fact.value.type
        kind = kind.elem_type if isinstance(kind, ir.SequenceType | ir.OptionalType) else kind
        if not isinstance(kind, ir.TensorType) or fact.value.dtype is None or fact.value.shape is None:
            raise UsageError(
                f"no input can be generated for {fact.name} of type {fact.value.type}; give --inputs"
            )
    sizes, samples = _first_samples(facts, run, seed)
    if any(not isinstance(size, int) or size < 0 for fact in facts for size in fact.value.shape or ()):
        samples += _other_sizes(facts, sizes, run, seed, longest)
    if has_trees(graph):
        samples += _tree_rows(facts, sizes, run, seed)
    return samples


def _tree_rows(facts: Sequence[InputFacts], sizes: AxisSizes, run: Run, seed: int) -> list[SampleInputs]:
    """Return samples of many rows, in one run if the graph accepts them."""
    many = replace(sizes, batch=ROWS)
    grows = _shapes(facts, many) != _shapes(facts, sizes)
    rng, samples = np.random.default_rng([seed, ROWS]), []
    splits = {one.name: thresholds(one.value) for one in facts}
    for number in range(len(_STYLES) if grows else MOST_RUNS):
        feed = _feed(facts, many if grows else sizes, number, seed + 3)
        for name, found in splits.items():
            if found and feed[name].ndim == 2 and feed[name].dtype.kind == "f":
                feed[name] = near_thresholds(feed[name], found, rng)
        samples.append(SampleInputs(_text(feed), feed, run(feed)))
    return samples


def _first_samples(facts: Sequence[InputFacts], run: Run, seed: int) -> tuple[AxisSizes, list[SampleInputs]]:
    """Return samples of the first sizes with which the reference runs and returns non-empty outputs."""
    refusal, empty = "", None
    tried: set[str] = set()  # resulting shapes, to try each once
    for sizes in _tried():
        key = repr((_shapes(facts, sizes), sizes.limit))
        if key in tried:
            continue
        tried.add(key)
        try:
            samples = _chain(facts, [sizes] * len(_STYLES), run, seed)
        except GraphError as error:
            refusal = refusal or str(error)
            continue
        if any(array.size for array in (samples[0].expected or {}).values()):
            return sizes, samples
        empty = empty or (sizes, samples)
    if empty is not None:
        return empty
    names = ", ".join(one.name for one in facts)
    raise GraphError(
        f"the reference refuses all {len(tried)} generated inputs for {names}; give --inputs. {refusal}"
    )


def _tried() -> list[AxisSizes]:
    """Return the sizes to try."""
    return [
        AxisSizes(batch, image, other, limit)
        for limit in _LIMITS
        for image, other in _SIZES
        for batch in _BATCHES
    ]


def _other_sizes(
    facts: Sequence[InputFacts], sizes: AxisSizes, run: Run, seed: int, longest: int
) -> list[SampleInputs]:
    """Generate samples with other sizes, two of each, if the reference accepts any."""
    image, other = sizes.image, sizes.other
    grown = [(image + 32, other + 3), (2 * image, 2 * other), (image, other)]
    tried = [(batch, *one) for batch, one in itertools.product((sizes.batch + 1, sizes.batch), grown)]
    samples = _first_that_runs(facts, sizes, tried, run, seed + 1)
    if any(one.is_index for one in facts):  # tokens: use lengths of real texts
        longer = [(1, sizes.image, length) for length in _TEXT_LENGTHS if sizes.other < length <= longest]
        samples += _first_that_runs(facts, sizes, longer, run, seed + 2)
    return samples


def _first_that_runs(
    facts: Sequence[InputFacts], sizes: AxisSizes, tried: Iterable[tuple[int, int, int]], run: Run, seed: int
) -> list[SampleInputs]:
    for batch, image, other in tried:
        changed = replace(sizes, batch=batch, image=image, other=other)
        if _shapes(facts, changed) == _shapes(facts, sizes):
            continue
        try:
            return _chain(facts, [changed, changed], run, seed)
        except GraphError:
            continue
    return []


def _chain(
    facts: Sequence[InputFacts], sizes: Sequence[AxisSizes], run: Run, seed: int
) -> list[SampleInputs]:
    """Generate samples in order; the states of each are the reference's outputs on the previous one."""
    samples: list[SampleInputs] = []
    results: Mapping[str, Array] = {}
    for number, one in enumerate(sizes):
        feed = _feed(facts, one, number, seed)
        for known in facts:
            state = results.get(known.fed_by or "")
            if state is not None and state.shape == feed[known.name].shape and np.isfinite(state).all():
                feed[known.name] = state.astype(feed[known.name].dtype)
        results = run(feed)
        samples.append(SampleInputs(_text(feed), feed, results))
    return samples


def _text(feed: Feed) -> str:
    return "generated " + ", ".join(f"{name} {_described(content)}" for name, content in feed.items())


def _described(content: Any) -> str:
    if isinstance(content, list):
        return f"{len(content)} times {_described(content[0])}"
    return f"{content.dtype}{list(content.shape)}"


def _feed(facts: Sequence[InputFacts], sizes: AxisSizes, number: int, seed: int) -> Feed:
    rng = np.random.default_rng([seed, number])
    shapes = _shapes(facts, sizes)
    feed: Feed = {}
    for one in facts:
        count = _SEQUENCE if isinstance(one.value.type, ir.SequenceType) else 1
        drawn = [_sample(one, shapes, sizes, number, rng) for _ in range(count)]
        feed[one.name] = drawn[0] if count == 1 else drawn
    return feed


def _shapes(facts: Sequence[InputFacts], sizes: AxisSizes) -> dict[str, list[int]]:
    kinds = _name_kinds(facts)
    return {one.name: [_size(one, axis, kinds, sizes) for axis in _axes(one)] for one in facts}


def _axes(facts: InputFacts) -> range:
    return range(len(facts.value.shape or ()))


def _name_kinds(facts: Sequence[InputFacts]) -> dict[str, str]:
    """Return the kind of the axes of each name; a name of a first axis is a batch by default."""
    kinds: dict[str, str] = {}
    for fact in facts:
        for axis in _axes(fact):
            name = _axis_name(fact, axis)
            if name is not None and kinds.get(name) != "batch":
                kinds[name] = "other" if axis == 0 and _LENGTH_NAME.search(name) else _place_kind(fact, axis)
    return kinds


def _size(facts: InputFacts, axis: int, kinds: Mapping[str, str], sizes: AxisSizes) -> int:
    size = facts.value.shape[axis] if facts.value.shape is not None else 0
    if isinstance(size, int) and size >= 0:
        return size
    name = _axis_name(facts, axis)
    if name is None:
        return int(getattr(sizes, _place_kind(facts, axis)))
    symbols = frozenset() if isinstance(size, int) else _symbols(size)
    if not isinstance(size, int) and len(symbols) > 1:  # such as "past + sequence"
        found = size.evaluate({one: getattr(sizes, kinds.get(one, "other")) for one in symbols})
        return found if isinstance(found, int) else sizes.other
    return int(getattr(sizes, kinds[name]))


def _axis_name(facts: InputFacts, axis: int) -> str | None:
    size = facts.value.shape[axis] if facts.value.shape is not None else 0
    return None if isinstance(size, int) or size.value in (None, "", "?") else str(size.value)


def _symbols(size: ir.SymbolicDim) -> frozenset[str]:
    """Return the symbols of an axis name that is an expression, else an empty set."""
    try:
        return frozenset(size.free_symbols())
    except (ValueError, SyntaxError):
        return frozenset()


def _place_kind(facts: InputFacts, axis: int) -> str:
    """Return the kind of an axis by its index: ``batch``, ``image`` or ``other``."""
    name = _axis_name(facts, axis)
    if (
        axis == 0
        or (name is not None and "batch" in name.lower())
        or (name is None and facts.role == "state")
    ):
        return "batch"
    return "image" if facts.role == "image" and axis >= 2 else "other"


def _sample(
    facts: InputFacts,
    shapes: Mapping[str, list[int]],
    sizes: AxisSizes,
    number: int,
    rng: np.random.Generator,
) -> Array:
    dtype, shape = facts.value.dtype, shapes[facts.name]
    assert dtype is not None  # noqa: S101 -- checked by sample_inputs
    # Of rank 0, NumPy's generators return scalars, which onnxruntime does not take.
    if dtype == ir.DataType.STRING:
        return np.asarray(rng.choice(_WORDS, shape), object)
    if facts.role == "mask":
        return np.asarray(_mask(shape, number, rng), dtype.numpy())
    if facts.role == "state":
        return np.zeros(shape, dtype.numpy())
    if dtype == ir.DataType.BOOL:
        return np.asarray(rng.random(shape) < 0.5)
    if dtype.is_integer() or facts.is_index:
        return np.asarray(_integers(facts, shape, shapes, sizes, number, rng)).astype(dtype.numpy())
    return np.asarray(_STYLES[number % len(_STYLES)](rng, shape)).astype(dtype.numpy())


def _mask(shape: Sequence[int], number: int, rng: np.random.Generator) -> Array:
    """Mask nothing in run 0, ends of rows in run 1, starts in run 2, and both in run 3."""
    width = shape[-1]
    starts, ends = np.zeros(shape[:-1], int), np.full(shape[:-1], width)
    if number in (1, 3):
        ends = rng.integers((width + 1) // 2, width + 1, shape[:-1])
        ends.flat[0] = max(width - 2, 1)
    if number in (2, 3):
        starts = rng.integers(0, width // 3 + 1, shape[:-1])
        starts.flat[-1] = min(1, width - 1)
    places = np.arange(width)
    return (places >= starts[..., None]) & (places < ends[..., None])


def _integers(
    facts: InputFacts,
    shape: list[int],
    shapes: Mapping[str, list[int]],
    sizes: AxisSizes,
    number: int,
    rng: np.random.Generator,
) -> Array:
    limit = facts.limit(shapes)
    if facts.choices and facts.role != "mask" and limit is None:
        choices = [*facts.choices[::-1]]
        return np.full(shape, choices[number % len(choices)]) if not shape else rng.choice(choices, shape)
    named = _integers_of_role(facts.role, shape, shapes, number, rng)
    if limit is None:
        unknown = 256 if facts.value.dtype == ir.DataType.UINT8 else sizes.limit
        return rng.integers(0, unknown, shape) if named is None else named
    if named is None:
        return _indices(facts, shape, max(limit, 1), rng)
    return named % max(limit, 1) if facts.role == "positions" else np.minimum(named, max(limit - 1, 0))


def _integers_of_role(
    role: str, shape: list[int], shapes: Mapping[str, list[int]], number: int, rng: np.random.Generator
) -> Array | None:
    """Return what inputs of this role usually hold, None for an unknown role."""
    if role == "rate":
        return np.full(shape, _SAMPLE_RATE)
    if role == "positions" and shape:
        return np.broadcast_to(np.arange(shape[-1]), shape)
    if role == "lengths":
        longest = max([size for other in shapes.values() for size in other[1:2]], default=1)
        if number % 2 == 0:
            return np.full(shape, longest)
        return rng.integers(longest // 2 + 1, longest + 1, shape)
    if role == "segments":
        return np.broadcast_to((np.arange(shape[-1]) >= shape[-1] // 2) & (number > 0), shape).astype(int)
    return None


def _indices(facts: InputFacts, shape: Sequence[int], limit: int, rng: np.random.Generator) -> Array:
    """Draw integers below a limit, with as few repetitions as possible, preferred ones first."""
    count = int(np.prod(shape))
    places = rng.permutation(count)
    values = np.concatenate([rng.permutation(limit) for _ in range(-(-count // limit))])[:count]
    preferred = rng.permutation(np.array(facts.preferred, np.int64))[: (count + 1) // 2]
    values[: len(preferred)] = preferred
    return values[places].reshape(shape)
