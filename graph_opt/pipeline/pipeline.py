"""Run a pipeline, which is a list of onnx_ir passes, and report what each pass did."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence

import onnx_ir as ir

from ...errors import CarryallError, GraphError, UsageError, is_debugging
from ..graph.checker import complaint
from ..graph.graph_facts import count_operators, describe_tensor, initializers, weights_by_type
from ..graph.lazy import map_weights
from ..graph.load import check_model
from ..graph.weight_errors import weight_errors
from ..passes.base import GraphPass, Refusal, pass_name
from .report import PassReport, PipelineReport

_LARGEST = 12


def run(
    model: ir.Model,
    passes: Sequence[ir.passes.PassBase],
    *,
    disable: Collection[str] = (),
    debug: bool = False,
    counted: bool = True,
    originals: Mapping[str, ir.TensorProtocol] | None = None,
) -> tuple[ir.Model, PipelineReport]:
    """Run ``passes`` in order.

    Args:
        model: usually changed in place; use the returned model.
        passes: onnx_ir passes; a ``GraphPass`` also reports its rewrites and refusals.
        disable: names of passes to skip.
        debug: check the model after every pass, also with ONNX's checker if that accepts the original model.
            The environment variable ``CARRYALL_DEBUG`` has the same effect.
        counted: whether the report holds counts of operators and weights, which take a sixth of the time of
            lowering a decoder; only debugging counts anyway.
        originals: float weights by name; if given, the report holds the error of each quantized weight.

    Returns:
        The model, and the report.

    Raises:
        UsageError: ``disable`` names a pass that is not in the list.
        GraphError: a pass failed, or produced an invalid model in debug mode.
    """
    _check_names(disable, passes)
    map_weights(model)
    debug = debug or is_debugging()
    counted = counted or debug
    counts = count_operators(model) if counted else {}
    report = PipelineReport(before=counts, disabled=sorted(disable))
    if counted:
        report.weights_before = weights_by_type(model)
    _measure_errors(report, model, originals)
    strict = debug and complaint(model) is None  # runtimes accept operators that the checker refuses
    for pass_ in passes:
        if pass_name(pass_) in disable:
            continue
        start = time.perf_counter()
        result = _call(pass_, model, report)
        seconds = time.perf_counter() - start
        model, old = result.model, counts
        if debug or (result.modified and counted):  # it takes as long as most passes that find nothing
            counts = count_operators(model)
        report.passes.append(_describe(pass_, seconds, result.modified, old, counts))
        if result.modified:
            _measure_errors(report, model, originals)
        if debug:
            _check(model, pass_name(pass_), strict=strict)
    if counted:
        report.after, report.weights_after = counts, weights_by_type(model)
        report.largest = [describe_tensor(tensor) for tensor in initializers(model)[:_LARGEST]]
    return model, report


def _check(model: ir.Model, name: str, *, strict: bool) -> None:
    """Check the model after a pass, also with ONNX's checker if ``strict``.

    Raises:
        GraphError: the model is invalid.
    """
    try:
        check_model(model, "the graph")
    except GraphError as error:
        raise GraphError(f"pass {name} produced an invalid model: {error}") from error
    reason = complaint(model) if strict else None
    if reason is not None:
        raise GraphError(f"pass {name} produced an invalid model: {reason}")


def _check_names(disable: Collection[str], passes: Sequence[ir.passes.PassBase]) -> None:
    names = {pass_name(pass_) for pass_ in passes}
    unknown = sorted(set(disable) - names)
    if unknown:
        raise UsageError(f"no pass is named {unknown[0]}; the passes are: {', '.join(sorted(names))}")


def _measure_errors(
    report: PipelineReport, model: ir.Model, originals: Mapping[str, ir.TensorProtocol] | None
) -> None:
    """Measure newly quantized weights before a lowering merges and renames them."""
    if originals is not None:
        new = {name: tensor for name, tensor in originals.items() if name not in report.weight_errors}
        report.weight_errors |= weight_errors(model.graph, new)


def _call(pass_: ir.passes.PassBase, model: ir.Model, report: PipelineReport) -> ir.passes.PassResult:
    try:
        return pass_(model)
    except CarryallError as error:
        raise _with_reason(error, report) from error.__cause__
    except Exception as error:
        cause = error.__cause__  # onnx_ir wraps errors of passes inside a Sequential
        if isinstance(cause, CarryallError):
            raise _with_reason(cause, report) from error
        for failed in (error, cause):
            if isinstance(failed, OSError):  # a weight could not be read: the pass is not to blame
                raise failed from None
        message = f"pass {pass_name(pass_)} failed: {type(error).__name__}: {error}"
        raise GraphError(message) from error


def _with_reason(error: CarryallError, report: PipelineReport) -> CarryallError:
    """Add to an error the reason why an earlier pass refused the node that it names."""
    words = str(error).split()
    reasons = [f"{name}: {refusal.reason}" for name, refusal in report.refusals if refusal.node in words]
    return type(error)(f"{error}. An earlier pass refused this node: {reasons[-1]}") if reasons else error


def _leaves(pass_: ir.passes.PassBase) -> Iterator[ir.passes.PassBase]:
    if isinstance(pass_, ir.passes.Sequential):
        for inner in pass_.passes:
            yield from _leaves(inner)
    else:
        yield pass_


def _describe(
    pass_: ir.passes.PassBase, seconds: float, modified: bool, old: dict[str, int], new: dict[str, int]
) -> PassReport:
    counting = [leaf for leaf in _leaves(pass_) if isinstance(leaf, GraphPass)]
    refusals: list[Refusal] = [refusal for leaf in counting for refusal in leaf.refusals]
    return PassReport(
        name=pass_name(pass_),
        seconds=seconds,
        modified=modified,
        fired=sum(leaf.fired for leaf in counting) if counting else None,
        nodes=sum(new.values()),
        added=dict(Counter(new) - Counter(old)),
        removed=dict(Counter(old) - Counter(new)),
        refusals=refusals,
    )
