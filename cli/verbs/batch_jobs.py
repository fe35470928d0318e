"""The verbs of ``carryall batch`` that work on the folder of a job."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import click

from ...runtime.batch.execute import retry_failed as drop_failed
from ...runtime.batch.jobs.merge import merge_jobs
from ...runtime.batch.jobs.report import write_report
from ...runtime.batch.jobs.status import ask_to_cancel, job_status
from ..batch_run import run_job
from ..options import json_option, print_json, quiet_option


def describe(facts: dict[str, Any]) -> str:
    """Return the state of a job as text."""
    counts, usage = facts["request_counts"], facts["usage"]
    answered = counts["completed"] + counts["failed"]
    of = "" if counts["total"] is None else f" of {counts['total']}"
    reasons = ", ".join(f"{count} {code}" for code, count in sorted(facts["errors"].items()))
    lines = [
        f"{facts['status']}: {answered}{of} lines answered, {counts['failed']} failed"
        + (f" ({reasons})" if reasons else ""),
        f"model {facts['model']}, {usage['input_tokens']} prompt tokens "
        f"({usage['input_tokens_details']['cached_tokens']} cached), {usage['output_tokens']} generated",
        f"output {facts['output_file']}",
    ]
    process = facts["process"]
    if process:
        lines.append(f"process {process.get('pid')} on {process.get('host')}")
    if facts["updated_at"]:
        lines.append(f"last answer {time.time() - facts['updated_at']:.0f} s ago")
    return "\n".join(lines)


job_argument = click.argument("job")


@click.command("status")
@job_argument
@json_option
def status(job: str, as_json: bool) -> None:
    """Show the progress of JOB, given as its folder or its output.

    --json prints OpenAI's batch object, with file names in place of file ids.
    """
    job_facts = job_status(job)
    if as_json:
        print_json(job_facts)
        return
    click.echo(describe(job_facts))


@click.command("cancel")
@job_argument
def cancel(job: str) -> None:
    """Ask the process that works on JOB to stop.

    Answers are kept; the command that started the job continues it.
    """
    if not ask_to_cancel(job):
        raise click.ClickException(f"no process works on {job}")
    click.echo(f"{job} will stop", err=True)


@click.command("merge")
@click.argument("jobs", metavar="JOB...", nargs=-1, required=True)
@click.option("-o", "--output", metavar="OUT", required=True, help="The file to write; it must not exist.")
@click.option("--errors", metavar="FILE", help="Write failed lines too.")
def merge(jobs: tuple[str, ...], output: str, errors: str | None) -> None:
    """Write the answers of JOBs, finished or not, to one file, in the order of the JOBs."""
    count = merge_jobs(jobs, output, errors)
    click.echo(f"{output}: {count} results", err=True)


@click.command("report")
@job_argument
@click.option("-o", "--output", type=click.Path(path_type=Path, dir_okay=False), default="report.html",
              show_default=True, help="The page to write.")  # fmt: skip
def report(job: str, output: Path) -> None:
    """Write a report of JOB: lengths, latencies, finish reasons, slowest and failed lines."""
    write_report(job, output)
    click.echo(str(output), err=True)


@click.command("retry-failed")
@job_argument
@click.option("--json", "as_json", is_flag=True, help="Print events as lines of JSON.")
@quiet_option
def retry_failed(job: str, as_json: bool, quiet: bool) -> int:
    """Answer the failed lines of JOB again, and rewrite its output.

    \b
    Example:
        carryall batch retry-failed results.jsonl
    """
    spec, count = drop_failed(job)
    if not quiet and not as_json:
        click.echo(f"{count} failed lines are tried again", err=True)
    return run_job(spec, restart=False, as_json=as_json, quiet=quiet)
