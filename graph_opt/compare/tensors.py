"""Compare two graphs on named tensors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from ...errors import GraphError, UsageError
from ...progress import Progress
from ...storage.scratch import scratch_folder
from ..graph.lazy import Array
from ..graph.session import open_session, running
from .bars import Bars
from .evaluator import evaluated
from .report import VerifyReport
from .rounding import output_magnitudes, rounded_feed, write_rounded
from .sample_inputs import SampleInputs
from .tally import KEYS, MAX_ROUNDED, OutputResult, Tally

# The noise of a slice of one element is a single draw of its rounding error: one time in 16 it is less than a
# tenth of another draw; the largest of 8 is so once in 5 million times.
_MOST_NOISES = 8
_MOST_TIMES = 100  # an error larger than this multiple of the largest noise is none of rounding


class Side:
    """One of the two graphs, with its session.

    Args:
        model: the ONNX file.
        name: its name in messages.
        defaults: run it with onnxruntime's default optimizations instead of as written.
    """

    def __init__(self, model: Path, name: str, *, defaults: bool = False) -> None:
        self.model, self.name = model, name
        self.session = open_session(model, name, defaults=defaults)
        self._inputs = [str(value.name) for value in self.session.get_inputs()]
        self.inputs = self._inputs
        self.outputs = [str(value.name) for value in self.session.get_outputs()]

    def interface(self, kind: str) -> dict[str, tuple[str, list[int | str | None]]]:
        """Return the type and shape of each of the file's ``inputs`` or ``outputs`` by name, in order."""
        values = self.session.get_inputs() if kind == "inputs" else self.session.get_outputs()
        return {str(value.name): (str(value.type), list(value.shape or ())) for value in values}

    def run(self, feed: Mapping[str, Array]) -> dict[str, Array]:
        """Run on the inputs of the graph.

        Returns:
            The output tensors by name; elements of sequences and maps are ``name[index]`` and ``name[key]``.

        Raises:
            UsageError: ``feed`` lacks an input.
            GraphError: the run failed.
        """
        missing = [name for name in self.inputs if name not in feed]
        if missing:
            raise UsageError(f"{self.name} needs input {missing[0]}; the given inputs are: {', '.join(feed)}")
        with running(self.name):
            own = zip(self._inputs, self.inputs, strict=True)
            results = self.session.run(None, {mine: feed[name] for mine, name in own})
        return dict(_tensors(zip(self.outputs, results, strict=True)))


def compare_tensors(
    reference: Side,
    candidate: Side,
    samples: Sequence[SampleInputs],
    bars: Bars,
    *,
    rounded: bool = False,
    progress: Progress | None = None,
) -> VerifyReport:
    """Run both on each sample and judge their outputs.

    Both are run as written. If they agree, the candidate is also run as its users do, with onnxruntime's
    default optimizations: their errors must not exceed those that they cause in the reference. Small float
    graphs must also agree in ONNX's evaluator, where that agrees with onnxruntime on the reference.

    Args:
        reference: the reference.
        candidate: the graph to judge.
        samples: inputs of each run.
        bars: the tolerances.
        rounded: whether one of them rounds its activations.
        progress: called with the number of finished and of all runs.

    Raises:
        UsageError: an input is missing, or there are no common outputs.
        GraphError: a run failed.
    """
    interface = _interface_changes(reference, candidate)
    _pair_renamed(reference, candidate)
    report = VerifyReport(reference=reference.name, candidate=candidate.name, bars=bars, interface=interface)
    tallies: dict[str, Tally] = {}
    absent: dict[str, str] = {}
    for number, sample in enumerate(samples):
        # The first run is repeated: random operators with equal seeds must not agree by running in step.
        expected = reference.run(sample.feed) if number == 0 else _expected(reference, sample)
        try:
            outputs = candidate.run(sample.feed)
        except (GraphError, UsageError):
            if interface:  # which says why it cannot run on the reference's inputs
                return report
            raise
        _add_run(tallies, absent, expected, outputs)
        if progress is not None:
            progress(number + 1, len(samples), "")
    if not tallies and not interface:
        raise UsageError(
            f"{reference.name} and {candidate.name} have no output in common: "
            f"{', '.join(reference.outputs)}; {', '.join(candidate.outputs)}"
        )
    results, notes = _results(tallies, absent, bars, reference, samples, rounded=rounded), []
    if not interface and all(outcome.reason is None for outcome in results.values()):
        # Rounding to integers depends on the values; other optimizations do on the shapes, which come last.
        some = samples if rounded else [*samples[:1], *samples[1:][-1:]]
        results |= _failures_of_defaults(reference, candidate, some, bars)
        results |= _failures_in_evaluator(reference, candidate, samples[0], bars)
    if any(outcome.reason is not None for outcome in results.values()) and _is_random(reference, samples[0]):
        notes.append(f"{reference.name} gives different results at each run on the same inputs")
    if len(samples) == 1:
        notes.append("only one run: the dependence of outputs on the inputs was not compared")
    return replace(report, outputs=results, inputs=_described(samples), notes=tuple(notes))


def _is_random(side: Side, sample: SampleInputs) -> bool:
    """Return whether a graph gives different results for the same inputs, as with random operators."""
    first, again = side.run(sample.feed), side.run(sample.feed)
    return set(first) != set(again) or any(
        first[name].tobytes() != again[name].tobytes() for name in first if first[name].dtype != object
    )


def _described(samples: Sequence[SampleInputs]) -> tuple[str, ...]:
    """Return descriptions of the samples, equal ones with a count."""
    counts = Counter(sample.text for sample in samples)
    return tuple(text if count == 1 else f"{count} times {text}" for text, count in counts.items())


def _interface_changes(reference: Side, candidate: Side) -> tuple[str, ...]:
    """Return what a caller of the reference would miss in the candidate: names, their order, types, ranks."""
    changes: list[str] = []
    for kind in ("inputs", "outputs"):
        expected, actual = reference.interface(kind), candidate.interface(kind)
        missing = [name for name in expected if name not in actual]
        new = [name for name in actual if name not in expected]
        changes += [f"has no {kind[:-1]} {name}" for name in missing]
        changes += [f"has a new {kind[:-1]} {name}" for name in new]
        if not missing and not new and list(expected) != list(actual):
            changes.append(f"has its {kind} in another order: {', '.join(actual)}")
        for name in expected.keys() & actual.keys():
            (dtype, shape), (other, other_shape) = expected[name], actual[name]
            if dtype != other:
                changes.append(f"has {kind[:-1]} {name} of type {other} instead of {dtype}")
            elif kind == "inputs" and not _may_be_equal(shape, other_shape):
                changes.append(f"has input {name} of shape {other_shape} instead of {shape}")
    return tuple(changes)


def _may_be_equal(shape: Sequence[int | str | None], other: Sequence[int | str | None]) -> bool:
    """Return whether some tensor has both shapes; a shape without axes may also be an unknown one."""
    if not shape or not other:
        return True
    pairs = zip(shape, other, strict=False)
    return len(shape) == len(other) and all(
        a == b for a, b in pairs if isinstance(a, int) and isinstance(b, int)
    )


def _pair_renamed(reference: Side, candidate: Side) -> None:
    """Map the candidate's input and output names to the reference's, in order, if their numbers are equal.

    So the report of a changed interface also says whether the numbers are right.
    """
    for kind in ("inputs", "outputs"):
        expected, actual = getattr(reference, kind), getattr(candidate, kind)
        left = [name for name in expected if name not in actual]
        other = [name for name in actual if name not in expected]
        if left and len(left) == len(other) and len(expected) == len(actual):
            names = dict(zip(other, left, strict=True))
            setattr(candidate, kind, [names.get(name, name) for name in actual])


def _add_run(
    tallies: dict[str, Tally], absent: dict[str, str], left: Mapping[str, Array], right: Mapping[str, Array]
) -> None:
    for name, array in left.items():
        if name in right:
            tallies.setdefault(name, Tally()).add(array, right[name])
        else:
            absent[name] = "is missing"
    absent |= {
        name: "is not an output of the reference" for name in right if name not in left and "[" in name
    }


def _results(
    tallies: Mapping[str, Tally],
    absent: Mapping[str, str],
    bars: Bars,
    reference: Side,
    samples: Sequence[SampleInputs],
    *,
    rounded: bool,
    baseline: Mapping[str, Tally] | None = None,
) -> dict[str, OutputResult]:
    noises = dict(baseline or {})
    most = float("inf") if baseline is not None else MAX_ROUNDED if rounded else 0.0
    results = {name: tally.result(bars, noises.get(name), most=most) for name, tally in tallies.items()}
    magnitudes: Mapping[str, float] | None = None
    for seed in range(_MOST_NOISES):
        if not any(
            _may_be_rounding(one, noises.get(name) if seed else None) for name, one in results.items()
        ):
            break
        _add_noises(noises, reference, samples, seed)
        magnitudes = output_magnitudes(reference.model) if magnitudes is None else magnitudes
        results = {
            name: tally.result(bars, noises.get(name), most=most, magnitude=magnitudes.get(name, 0.0))
            for name, tally in tallies.items()
        }
    nothing = OutputResult(kind="exact", max_abs=0.0, max_rel=float("inf"), bar=0.0, elements=0)
    return results | {name: replace(nothing, reason=reason) for name, reason in absent.items()}


def _failures_of_defaults(
    reference: Side, candidate: Side, samples: Sequence[SampleInputs], bars: Bars
) -> dict[str, OutputResult]:
    """Return the outputs that onnxruntime's default optimizations move further than the reference's."""
    optimized = Side(candidate.model, candidate.name, defaults=True)
    tallies: dict[str, Tally] = {}
    absent: dict[str, str] = {}
    for sample in samples:
        _add_run(tallies, absent, _expected(reference, sample), optimized.run(sample.feed))
    if all(tally.result(bars).reason is None for tally in tallies.values()):
        return {}
    usual, baseline = Side(reference.model, reference.name, defaults=True), dict[str, Tally]()
    for sample in samples:
        _add_run(baseline, {}, _expected(reference, sample), usual.run(sample.feed))
    results = _results(tallies, absent, bars, reference, samples, rounded=False, baseline=baseline)
    return {
        f"{name}, under onnxruntime's defaults,": one
        for name, one in results.items()
        if one.reason is not None
    }


def _failures_in_evaluator(
    reference: Side, candidate: Side, sample: SampleInputs, bars: Bars
) -> dict[str, OutputResult]:
    """Return the outputs that differ between candidate and reference in ONNX's evaluator."""
    exact = evaluated(reference.model, reference.inputs, sample.feed)
    outputs = None if exact is None else evaluated(candidate.model, candidate.inputs, sample.feed)
    if exact is None or outputs is None or not _agree(_expected(reference, sample), exact, bars):
        return {}
    tallies: dict[str, Tally] = {}
    absent: dict[str, str] = {}
    _add_run(tallies, absent, exact, outputs)
    results = _results(tallies, absent, bars, reference, [sample], rounded=False)
    return {f"{name}, in ONNX's evaluator,": one for name, one in results.items() if one.reason is not None}


def _agree(left: Mapping[str, Array], right: Mapping[str, Array], bars: Bars) -> bool:
    tallies: dict[str, Tally] = {}
    absent: dict[str, str] = {}
    _add_run(tallies, absent, left, right)
    return not absent and all(tally.result(bars).reason is None for tally in tallies.values())


def _expected(reference: Side, sample: SampleInputs) -> Mapping[str, Array]:
    return reference.run(sample.feed) if sample.expected is None else sample.expected


def _may_be_rounding(result: OutputResult, noise: Tally | None) -> bool:
    if result.kind != "float" or result.reason is None or not np.isfinite(result.max_rel):
        return False
    return noise is None or result.max_abs <= _MOST_TIMES * noise.max_abs


def _add_noises(
    noises: dict[str, Tally], reference: Side, samples: Sequence[SampleInputs], seed: int
) -> None:
    """Compare the reference with itself after rounding each weight and input."""
    with scratch_folder() as folder:
        copy = folder / "rounded.onnx"
        write_rounded(reference.model, copy, seed=seed)
        rounded = Side(copy, reference.name)
        for number, sample in enumerate(samples):
            try:
                moved = rounded.run(rounded_feed(sample.feed, seed=seed * len(samples) + number))
            except GraphError:
                continue  # for example a negative square root; then this run allows no rounding error
            _add_run(noises, {}, _expected(reference, sample), moved)


def _table(result: Any) -> tuple[Array, Array] | None:
    """Return keys and values [rows, keys] of a map or a sequence of maps, which classifiers return.

    None for what is none, and for maps of several key sets or of tensors.
    """
    rows = [result] if isinstance(result, dict) else result
    if not isinstance(rows, list) or not rows or not all(isinstance(row, dict) for row in rows):
        return None
    keys = list(rows[0])
    scalar = all(list(row) == keys and not any(np.ndim(one) for one in row.values()) for row in rows)
    if not scalar:
        return None
    kept = np.array(keys, object) if any(isinstance(key, str) for key in keys) else np.array(keys)
    return kept, np.array([list(row.values()) for row in rows], _map_type(rows[0]))


def _map_type(row: Mapping[Any, Any]) -> Any:
    """Return float32 for maps of floats, which Python reads as 64 bits; None for others."""
    return np.float32 if any(isinstance(one, float) for one in row.values()) else None


def _tensors(results: Iterable[tuple[str, Any]]) -> Iterable[tuple[str, Array]]:
    """Yield the output tensors by name, including those of sequences and maps; skip absent optionals."""
    for name, result in results:
        table = _table(result)
        if table is not None:
            yield name + KEYS, table[0]
            yield name, table[1]
        elif isinstance(result, list):
            yield from _tensors((f"{name}[{number}]", one) for number, one in enumerate(result))
        elif isinstance(result, dict):
            yield from _tensors((f"{name}[{key!r}]", one) for key, one in result.items())
        elif result is not None:
            yield name, np.asarray(result)
