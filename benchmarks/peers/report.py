"""Write the figures of a comparison as a Markdown table, a chart of ratios and JSON."""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from measures import Figure

sys.path.append(str(Path(__file__).resolve().parents[1] / "decoders"))
from charts import bars

_LESS_IS_BETTER = {"s", "MB", "nats"}


def rows(figures: Sequence[Figure], reference: str) -> list[dict[str, Any]]:
    """Return a row per measure and engine: median, spread, and how many times better the reference is."""
    values: dict[tuple[str, str], list[Figure]] = {}
    for figure in figures:
        values.setdefault((figure.measure, figure.engine), []).append(figure)
    found = []
    for (measure, engine), mine in values.items():
        middle, unit = statistics.median(figure.value for figure in mine), mine[0].unit
        spread = (max(f.value for f in mine) - min(f.value for f in mine)) / middle
        row = {"measure": measure, "engine": engine, "unit": unit, "median": middle, "spread": spread}
        own = values.get((measure, reference))
        if own:
            ratio = statistics.median(figure.value for figure in own) / middle
            row["ratio"] = 1 / ratio if unit in _LESS_IS_BETTER else ratio
        found.append(row)
    return found


def table(found: Sequence[Mapping[str, Any]], reference: str) -> str:
    """Return the rows as a Markdown table."""
    lines = [
        f"| measure | engine | median | spread | {reference} is better by |",
        "| --- | --- | ---: | ---: | ---: |",
    ]
    for row in found:
        ratio = f"{row['ratio']:.2f}x" if "ratio" in row else ""
        value = f"{row['median']:.4g} {row['unit']} | {row['spread']:.0%}"
        lines.append(f"| {row['measure']} | {row['engine']} | {value} | {ratio} |")
    return "\n".join(lines)


def write(
    folder: Path,
    model: str,
    figures: Sequence[Figure],
    versions: Mapping[str, str],
    machine: Mapping[str, Any],
) -> None:
    """Write ``MODEL.json``, ``MODEL.md`` and ``MODEL.svg``."""
    reference = next(iter(versions))
    found = rows(figures, reference)
    text = table(found, reference)
    engines = "\n".join(f"- {name}: {version}" for name, version in versions.items())
    facts = ", ".join(f"{name} {value}" for name, value in machine.items())
    page = f"# {model}\n\n{facts}\n\n{engines}\n\n{text}\n"
    (folder / f"{model}.md").write_text(page, encoding="utf-8")
    record = {"model": model, "machine": dict(machine), "engines": dict(versions), "summary": found}
    record["figures"] = [asdict(figure) for figure in figures]
    (folder / f"{model}.json").write_text(json.dumps(record, indent=1), encoding="utf-8")
    groups: dict[str, dict[str, float]] = {}
    for row in found:
        if "ratio" in row and row["engine"] != reference:
            groups.setdefault(row["measure"], {})[row["engine"]] = round(row["ratio"], 2)
    if groups:
        chart = bars(
            f"{reference} beside other engines, {model}",
            groups,
            unit=f"how many times better {reference} is; above 1 it is faster or smaller",
            notes={},
        )
        (folder / f"{model}.svg").write_text(chart, encoding="utf-8")
