"""Format the results of ``league.py`` as text, as a Markdown table and as charts."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import dataclass

from charts import bars

YARDSTICKS = ("(products)", "(again)")  # graphs that are timed for comparison


@dataclass(frozen=True, slots=True)
class Row:
    """The result of one optimizer on one trace."""

    exporter: str
    trace: str
    optimizer: str
    nodes: int = 0
    layers: int = 0
    attention: int = 0
    norms: int = 0
    rotary: int = 0
    tokens_equal: bool | None = None
    error: float | None = None
    seconds: float = 0.0
    step_ms: float | None = None
    ratio: float | None = None
    ratio_low: float | None = None
    ratio_high: float | None = None
    won: float | None = None
    failure: str = ""


def show(row: Row) -> str:
    """Return a row as one line of text."""
    name = f"{row.exporter + '/' + row.trace:34} {row.optimizer:17}"
    if row.failure:
        return f"{name} {row.failure}"
    step = "" if row.step_ms is None else f"{row.step_ms:8.3f} ms"
    if row.ratio is not None:
        step += f"{row.ratio:7.3f} [{row.ratio_low:.3f}, {row.ratio_high:.3f}]"
        step += "" if row.won is None else f", won by ours: {row.won:.0%} of rounds"
    if row.optimizer in YARDSTICKS:
        return f"{name} {step}"
    tokens = "equal" if row.tokens_equal else f"WRONG by {row.error:.1e}"
    fused = f"{row.attention:3} of {row.layers}"
    return (
        f"{name} {row.nodes:6} {fused:>8} {row.norms:6} {row.rotary:7} {row.seconds:8.2f}  {tokens:16}{step}"
    )


def summary(rows: list[Row]) -> str:
    """Return one Markdown line for each exporter and optimizer, medians over the traces."""
    steps = any(row.step_ms is not None for row in rows)
    columns = ["exporter", "optimizer", "nodes left", "attention fused", "tokens equal", "seconds"]
    columns += (
        ["step ms", "times ours (least, most)", "rounds ours won (least)", "faster cases"] if steps else []
    )
    made = ["| " + " | ".join(columns) + " |", "| --- | --- |" + " ---: |" * (len(columns) - 2)]
    for exporter, optimizer, chosen in _grouped(rows):
        done = [row for row in chosen if not row.failure]
        if not done:
            reason = chosen[0].failure
            made.append(f"| {exporter} | {optimizer} | failed: {reason} |" + " |" * (len(columns) - 3))
            continue
        cells = ["", "", "", ""] if optimizer in YARDSTICKS else _graph_cells(done, len(chosen))
        cells += _step_cells(done) if steps else []
        made.append(f"| {exporter} | {optimizer} | " + " | ".join(cells) + " |")
    return "\n".join(made) + "\n"


def _graph_cells(rows: list[Row], cases: int) -> list[str]:
    return [
        f"{statistics.median(row.nodes for row in rows):g}",
        f"{sum(row.attention for row in rows)} of {sum(row.layers for row in rows)}",
        f"{sum(bool(row.tokens_equal) for row in rows)} of {cases}",
        f"{statistics.median(row.seconds for row in rows):.2f}",
    ]


def _step_cells(rows: list[Row]) -> list[str]:
    """Return the median step, its ratio to the reference's, the rounds the reference won, the faster cases.

    Ratios and rounds are medians over the cases with their range. A case counts as faster than the reference
    if it is faster in three quarters of the rounds.
    """
    times = [row.step_ms for row in rows if row.step_ms is not None]
    ratios = [row.ratio for row in rows if row.ratio is not None]
    if not times or not ratios:
        return ["", "", "", ""]
    step = f"{statistics.median(times):.2f}"
    if set(ratios) == {1.0}:
        return [step, "1", "", ""]
    won = [row.won for row in rows if row.won is not None]
    rounds = f"{statistics.median(won):.0%} ({min(won):.0%})" if won else ""
    faster = sum(row.ratio_high is not None and row.ratio_high < 1 for row in rows)
    spread = f"{statistics.median(ratios):.3f} ({min(ratios):.3f}, {max(ratios):.3f})"
    return [step, spread, rounds, "" if rows[0].optimizer in YARDSTICKS else str(faster)]


def chart(rows: list[Row]) -> str:
    """Return a bar chart of the nodes left by each optimizer, with the number of fused attentions."""
    groups: dict[str, dict[str, float]] = {}
    notes: dict[str, str] = {}
    for exporter, optimizer, chosen in _grouped(rows):
        done = [row for row in chosen if not row.failure]
        if not done or optimizer in YARDSTICKS:
            continue
        groups.setdefault(exporter, {})[optimizer] = statistics.median(row.nodes for row in done)
        attention, layers = sum(row.attention for row in done), sum(row.layers for row in done)
        equal = sum(bool(row.tokens_equal) for row in done)
        notes[f"{exporter}/{optimizer}"] = f"(attention {attention}/{layers}, equal {equal}/{len(chosen)})"
    return bars("Nodes left in two-layer decoders", groups, unit="median over the families", notes=notes)


def speed_chart(rows: list[Row]) -> str:
    """Return a bar chart of each optimizer's decode step time as a multiple of the reference's."""
    groups: dict[str, dict[str, float]] = {}
    notes: dict[str, str] = {}
    for exporter, optimizer, chosen in _grouped(rows):
        ratios = [row.ratio for row in chosen if row.ratio is not None]
        if ratios:
            groups.setdefault(exporter, {})[optimizer] = round(statistics.median(ratios), 3)
            notes[f"{exporter}/{optimizer}"] = f"({min(ratios):.2f} to {max(ratios):.2f})"
    return bars(
        "Time of a decode step",
        groups,
        unit="multiple of carryall's for the CPU, median of the families, range",
        notes=notes,
    )


def _grouped(rows: list[Row]) -> Iterator[tuple[str, str, list[Row]]]:
    for exporter, optimizer in dict.fromkeys((row.exporter, row.optimizer) for row in rows):
        chosen = [row for row in rows if (row.exporter, row.optimizer) == (exporter, optimizer)]
        yield exporter, optimizer, chosen
