"""Progress of a batch job: a bar, a line every 10 s, or JSON events."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Any

import click
import rich.progress as bars
from rich.console import Console

from ..runtime.batch.execute import Outcome
from ..runtime.batch.jobs.journal import Totals
from ..runtime.batch.spec import BatchSpec
from .options import print_json
from .progress import duration

_LINE_SECONDS = 10.0


class Pace:
    """Rates of the current run, without earlier runs of the job."""

    def __init__(self) -> None:
        self.rows: int | None = None
        self.before = Totals()
        self._begin = time.monotonic()

    def begin(self, rows: int | None, before: Totals) -> None:
        """Start the clock."""
        self.rows, self.before, self._begin = rows, before, time.monotonic()

    def facts(self, totals: Totals) -> dict[str, Any]:
        """Return the current figures, in lines, tokens and seconds."""
        seconds = max(time.monotonic() - self._begin, 1e-9)
        rate = (totals.answered - self.before.answered) / seconds
        left = None if self.rows is None or not rate else (self.rows - totals.answered) / rate
        generated = totals.completion_tokens - self.before.completion_tokens
        return {
            "lines": self.rows,
            **asdict(totals),
            "seconds": round(seconds, 3),
            "lines_per_second": round(rate, 2),
            "tokens_per_second": round(generated / seconds, 1),
            "seconds_left": None if left is None else round(left),
        }


class BatchProgress:
    """Shows the events of a job; any thread may call ``tell``.

    Args:
        as_json: print each event as a line of JSON on stdout.
        quiet: print only when the job is paused.
    """

    def __init__(self, *, as_json: bool, quiet: bool) -> None:
        self.pace = Pace()
        self._as_json = as_json
        self._quiet = quiet or as_json
        self._console = Console(stderr=True)
        self._bar: bars.Progress | None = None
        self._task: bars.TaskID | None = None
        self._next_line = time.monotonic() + _LINE_SECONDS

    def tell(self, event: str, facts: dict[str, Any]) -> None:
        """Show an event; see ``execute``."""
        if event == "start":
            self.pace.begin(facts["rows"], facts["totals"])
            facts = {"lines": facts["rows"], "answered": facts["totals"].answered, "job": facts["folder"]}
            if not self._quiet and facts["answered"]:
                click.echo(f"{facts['answered']} lines are already answered", err=True)
        elif event == "loaded":
            self.pace.begin(self.pace.rows, self.pace.before)
        elif event == "progress":
            facts = self.pace.facts(facts["totals"])
            self._show(facts)
        elif event == "paused" and not self._as_json:
            click.echo(f"paused: {facts['reason']}", err=True)
        elif event == "resumed" and not self._quiet:
            click.echo("there is disk space again: the job continues", err=True)
        if self._as_json:
            print_json({"event": event, **facts})

    def close(self) -> None:
        """Stop the bar."""
        if self._bar is not None:
            self._bar.stop()

    def _show(self, facts: dict[str, Any]) -> None:
        if self._quiet:
            return
        if self._console.is_terminal:
            self._show_bar(facts)
        elif time.monotonic() >= self._next_line:
            self._next_line = time.monotonic() + _LINE_SECONDS
            of = "" if facts["lines"] is None else f" of {facts['lines']}"
            click.echo(f"{facts['completed'] + facts['failed']}{of} lines; {_details(facts)}", err=True)

    def _show_bar(self, facts: dict[str, Any]) -> None:
        if self._bar is None or self._task is None:
            columns = (
                bars.BarColumn(bar_width=30),
                bars.MofNCompleteColumn(),
                bars.TextColumn("{task.fields[details]}"),
            )
            self._bar = bars.Progress(*columns, console=self._console)
            self._task = self._bar.add_task("batch", total=facts["lines"], details="")
            self._bar.start()
        done = facts["completed"] + facts["failed"]
        self._bar.update(self._task, completed=done, details=_details(facts))


def _details(facts: dict[str, Any]) -> str:
    words = [f"{facts['lines_per_second']:.1f} lines/s", f"{facts['tokens_per_second']:.0f} tokens/s"]
    if facts["seconds_left"] is not None:
        words.append(f"{duration(facts['seconds_left'])} left")
    if facts["failed"]:
        words.append(f"{facts['failed']} failed")
    if facts["cached_tokens"]:
        words.append(
            f"{100 * facts['cached_tokens'] / max(1, facts['prompt_tokens']):.0f} % of prompts cached"
        )
    return ", ".join(words)


def show_outcome(
    spec: BatchSpec, outcome: Outcome, display: BatchProgress, *, as_json: bool, quiet: bool
) -> None:
    """Print how a run of a job ended."""
    facts = display.pace.facts(outcome.totals)
    state = "finished" if outcome.finished else "stopped"
    if as_json:
        print_json({"event": state, **facts, "job": str(outcome.folder), "output": spec.output})
        return
    totals = outcome.totals
    if not outcome.finished:
        click.echo(
            f"stopped: {totals.answered} lines are answered; run the same command to continue, or "
            f"'carryall batch merge {outcome.folder} -o FILE' to write these answers",
            err=True,
        )
    elif not quiet:
        reasons = ", ".join(f"{count} {code}" for code, count in sorted(totals.errors.items()))
        lines = f"{totals.completed} completed, {totals.failed} failed" + (f" ({reasons})" if reasons else "")
        if outcome.answered_before == totals.answered:
            click.echo(f"{spec.output} was already finished: {lines}", err=True)
        else:
            seconds, rate = facts["seconds"], facts["tokens_per_second"]
            click.echo(f"{lines}; {seconds:.1f} s, {rate:.0f} tokens/s", err=True)
    if totals.failed:  # also when quiet: it is why the exit code is 1
        click.echo(f"failed lines are in {spec.paths.errors}", err=True)
