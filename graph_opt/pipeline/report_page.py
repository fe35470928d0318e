"""Write a report as one self-contained HTML page, without scripts, fonts or network access."""

from __future__ import annotations

import importlib.resources
import re
from collections.abc import Iterable, Mapping
from typing import Any

import jinja2

from ...reports import human_bytes
from .report import PassReport, PipelineReport

_TEMPLATE = "report_page.html"
_NUMBER = re.compile(r"\d+")


def to_html(report: PipelineReport) -> str:
    """Return the report as an HTML page."""
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    environment.filters |= {"bytes": human_bytes, "number": _number, "seconds": _seconds}
    source = importlib.resources.files(__package__).joinpath(_TEMPLATE).read_text(encoding="utf-8")
    return environment.from_string(source).render(
        report=report,
        title=_title(report),
        nodes=(sum(report.before.values()), sum(report.after.values())),
        bytes=tuple(_total(weights) for weights in (report.weights_before, report.weights_after)),
        waterfall=_waterfall(report),
        idle=[one for one in report.passes if not one.did_anything],
        operators=_pairs(report.before, report.after),
        weights=_pairs(_sizes(report.weights_before), _sizes(report.weights_after)),
        largest=_largest(report),
        errors=_errors(report.weight_errors),
        output_errors=_errors(report.facts.get("layer_errors", {})),
        fidelity=report.facts.get("fidelity"),
        speeds=_speeds(report.facts.get("speed")),
        verification=report.facts.get("verification"),
    )


def _number(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:.3g}"


def _seconds(value: float) -> str:
    return f"{value:.2f} s" if value >= 1 else f"{value * 1e3:.1f} ms"


def _title(report: PipelineReport) -> str:
    known = [str(report.facts[name]) for name in ("source", "target") if name in report.facts]
    return " → ".join(known) or "Pipeline report"


def _total(weights: dict[str, dict[str, int]]) -> int:
    return sum(_sizes(weights).values())


def _sizes(weights: dict[str, dict[str, int]]) -> dict[str, int]:
    return {dtype: entry["bytes"] for dtype, entry in weights.items()}


def _percent(part: float, whole: float) -> float:
    return round(100 * part / whole, 3) if whole else 0.0


def _waterfall(report: PipelineReport) -> list[dict[str, Any]]:
    """Return a row per pass that did something: its time span, and the nodes that it changed."""
    rows: list[dict[str, Any]] = []
    start, nodes = 0.0, sum(report.before.values())
    most = max([nodes, *(step.nodes for step in report.passes)], default=0)
    for step in report.passes:
        if step.did_anything:
            times = {
                "left": _percent(start, report.seconds),
                "width": _percent(step.seconds, report.seconds),
            }
            rows.append(_pass_row(step, nodes, most) | times)
        start, nodes = start + step.seconds, step.nodes
    return rows


def _pass_row(report: PassReport, nodes: int, most: int) -> dict[str, Any]:
    changes = [f"+{count}\u00a0{op}" for op, count in report.added.items()]
    changes += [f"\u2212{count}\u00a0{op}" for op, count in report.removed.items()]
    return {
        "name": report.name,
        "seconds": report.seconds,
        "nodes": (nodes, report.nodes),
        "nodes_width": _percent(report.nodes, most),
        "fired": report.fired,
        "refused": len(report.refusals),
        "changes": ", ".join(changes),
    }


def _pairs(before: dict[str, int], after: dict[str, int]) -> list[dict[str, Any]]:
    """Return a row per name with its numbers before and after, largest first."""
    names = sorted({*before, *after}, key=lambda name: (-max(before.get(name, 0), after.get(name, 0)), name))
    most = max([*before.values(), *after.values()], default=0)
    both = [(name, before.get(name, 0), after.get(name, 0)) for name in names]
    return [
        {"name": name, "before": old, "after": new, "widths": (_percent(old, most), _percent(new, most))}
        for name, old, new in both
    ]


def _largest(report: PipelineReport) -> list[dict[str, Any]]:
    most = max((tensor["bytes"] for tensor in report.largest), default=0)
    return [
        {**tensor, "shape": " x ".join(map(str, tensor["shape"])), "width": _percent(tensor["bytes"], most)}
        for tensor in report.largest
    ]


def _speeds(speed: dict[str, Any] | None) -> list[dict[str, Any]]:
    """Return one row for decoding and one for prefill, with bars for the medians."""
    if speed is None:
        return []
    rows = []
    for what, label in (("decode", "decoding"), ("prefill", "prefill")):
        both = [speed["before"][what], speed["after"][what]]
        most = max(one["median"] for one in both)
        widths = tuple(_percent(one["median"], most) for one in both)
        rows.append({"name": label, "both": both, "widths": widths})
    return rows


def _errors(errors: Mapping[str, float]) -> list[dict[str, Any]]:
    """Return a row per kind of weight, with the errors of all layers."""
    kinds: dict[str, list[tuple[str, float]]] = {}
    for name, error in sorted(errors.items(), key=lambda item: _natural(item[0])):
        kinds.setdefault(_NUMBER.sub("N", name), []).append((name, error))
    most = max(errors.values(), default=0.0)
    return [_error_row(kind, members, most) for kind, members in kinds.items()]


def _error_row(kind: str, members: list[tuple[str, float]], most: float) -> dict[str, Any]:
    errors = [error for _, error in members]
    bars = [{"name": name, "error": error, "height": _percent(error, most)} for name, error in members]
    worst = max(members, key=lambda member: member[1])
    label = members[0][0] if len(members) == 1 else kind
    return {"name": label, "bars": bars, "mean": _mean(errors), "worst": worst[1], "worst_name": worst[0]}


def _mean(values: Iterable[float]) -> float:
    all_values = list(values)
    return sum(all_values) / len(all_values)


def _natural(name: str) -> list[tuple[int, str]]:
    """Return a sort key that orders layer 2 before layer 10."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]
