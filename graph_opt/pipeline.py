"""Run a pipeline, which is a plain list of onnx_ir passes, and report on it."""

from __future__ import annotations

import importlib
import time
from collections import Counter
from collections.abc import Collection, Iterator, Sequence

import onnx_ir as ir
from onnx_ir.passes import common

from ..runtime.errors import CarryallError, GraphError, UsageError
from .passes.base import GraphPass, Refusal, pass_name
from .report import PassReport, Report, count_operators


def run(
    model: ir.Model,
    passes: Sequence[ir.passes.PassBase],
    *,
    disable: Collection[str] = (),
    debug: bool = False,
) -> tuple[ir.Model, Report]:
    """Run ``passes`` in order.

    Args:
        model: changed in place unless a pass says otherwise; use the returned one.
        passes: onnx_ir passes; those made for carryall also count and explain.
        disable: names of passes to leave out.
        debug: check the model after every pass.

    Returns:
        The model, and what each pass did.

    Raises:
        UsageError: ``disable`` names a pass that is not in the list.
        GraphError: a pass failed; or, in debug mode, left an invalid model.
    """
    _check_names(disable, passes)
    counts = count_operators(model)
    report = Report(before=counts, disabled=sorted(disable))
    for pass_ in passes:
        if pass_name(pass_) in disable:
            continue
        start = time.perf_counter()
        result = _call(pass_, model)
        seconds = time.perf_counter() - start
        model, old = result.model, counts
        counts = count_operators(model)
        report.passes.append(_describe(pass_, seconds, result.modified, old, counts))
        if debug:
            _check(model, pass_name(pass_))
    report.after = counts
    return model, report


def load_pass(spec: str) -> ir.passes.PassBase:
    """Make a pass from ``package.module:Class``, so that anyone can add one without touching carryall.

    Raises:
        UsageError: the text has another form, the module does not import, or the class is no onnx_ir pass.
    """
    module_name, colon, class_name = spec.partition(":")
    if not colon or not module_name or not class_name:
        raise UsageError(f"a pass is given as 'package.module:Class', not '{spec}'")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise UsageError(f"pass '{spec}': module '{module_name}' cannot be imported: {error}") from error
    made = getattr(module, class_name, None)
    if not isinstance(made, type) or not issubclass(made, ir.passes.PassBase):
        raise UsageError(
            f"pass '{spec}': '{class_name}' in {module_name} is no onnx_ir.passes.PassBase class"
        )
    try:
        return made()
    except TypeError as error:
        raise UsageError(f"pass '{spec}' must be constructible without arguments: {error}") from error


def _check_names(disable: Collection[str], passes: Sequence[ir.passes.PassBase]) -> None:
    names = {pass_name(pass_) for pass_ in passes}
    unknown = sorted(set(disable) - names)
    if unknown:
        raise UsageError(f"no pass is called {unknown[0]}; the passes are: {', '.join(sorted(names))}")


def _call(pass_: ir.passes.PassBase, model: ir.Model) -> ir.passes.PassResult:
    try:
        return pass_(model)
    except CarryallError:
        raise
    except Exception as error:
        message = f"pass {pass_name(pass_)} failed: {type(error).__name__}: {error}"
        raise GraphError(message) from error


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


def _check(model: ir.Model, name: str) -> None:
    """Check the structure; operators of other domains are skipped by the checker."""
    try:
        common.CheckerPass()(model)
    except Exception as error:
        raise GraphError(f"pass {name} left an invalid model: {error}") from error
