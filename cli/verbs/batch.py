"""``carryall batch``."""

from __future__ import annotations

from typing import Any

import click

from ...runtime.batch.inputs.files import STREAM
from ...runtime.batch.inputs.lines import URLS
from ...runtime.batch.spec import BatchSpec
from ..batch_run import run_job, run_to_stdout, sampling_fields
from ..load_options import Chosen, chosen_fields, config_options
from ..options import quiet_option, text_or_file
from ..sections import SectionedCommand
from .batch_jobs import cancel, merge, report, retry_failed, status


@click.group("batch", invoke_without_command=True)
@click.pass_context
def command(ctx: click.Context) -> None:
    """Answer files of requests: resumable, every line exactly once."""
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


@command.command("run", cls=SectionedCommand)
@config_options(
    model="--model", without=("max_queue", "max_queued_tokens", "max_step_slowdown", "logits_processors")
)
@click.argument("sources", metavar="IN...", nargs=-1, required=True)
@click.option("-o", "--output", metavar="OUT", required=True,
              help="Results, as JSON lines or .parquet: a file, a URL, or '-' (stdout).")  # fmt: skip
@click.option("--errors", metavar="FILE", help="File for failed lines; by default OUT with '.errors'.")
@click.option("--job", metavar="DIR", help="Folder of the job's journal; OUT.job by default.")
@click.option("--restart", is_flag=True, help="Delete all answers and OUT, and start again.")
@click.option("--worker", "providers", metavar="PROVIDER", multiple=True,
              help="Run a worker process on PROVIDER, in place of --provider. May be repeated.")  # fmt: skip
@click.option("--ray", metavar="ADDRESS", help="Run workers on a Ray cluster; 'local' starts one.")
@click.option("--ray-workers", type=click.IntRange(1), default=1, show_default=True,
              help="Number of Ray workers; each is an actor that holds the model.")  # fmt: skip
@click.option("--endpoint", type=click.Choice(URLS), help="Refuse lines with another url.")
@click.option("--template", metavar="TEXT|@FILE",
              help="Jinja template for the prompt of a record: 'Summarize: {{ text }}'.")  # fmt: skip
@click.option("--as", "kind", type=click.Choice(["prompt", "chat", "embedding"]), default="prompt",
              show_default=True, help="How the template's text is used.")  # fmt: skip
@click.option("--system", metavar="TEXT|@FILE", help="System message for --as chat; also a template.")
@click.option("--id-column", metavar="NAME", help="Column with the custom_id.")
@click.option("--keep", metavar="NAME", multiple=True, help="Column to copy to the output. May be repeated.")
@click.option("--image-column", "image_columns", metavar="NAME", multiple=True,
              help="Column of pictures for --as chat: paths beside IN, or contents. May be repeated."
              )  # fmt: skip
@click.option("--max-tokens", type=click.IntRange(1), help="Default for lines without max_tokens.")
@click.option(
    "--temperature", type=click.FloatRange(0), help="Default for lines without temperature; 0 is greedy."
)
@click.option("--json-schema", metavar="TEXT|@FILE", help="JSON schema of all answers.")
@click.option("--choice", metavar="TEXT", multiple=True, help="A possible answer. May be repeated.")
@click.option("--seed", type=int, default=0, show_default=True,
              help="Seed from which lines without one derive theirs.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True,
              help="Print events as lines of JSON, the last one with the totals.")  # fmt: skip
@quiet_option
def run(
    sources: tuple[str, ...],
    output: str,
    restart: bool,
    as_json: bool,
    quiet: bool,
    chosen: Chosen,
    max_tokens: int | None,
    temperature: float | None,
    json_schema: str | None,
    choice: tuple[str, ...],
    **options: Any,
) -> int:
    """Answer every line of IN, one line of OUT each, in the order of the input.

    IN is JSON lines, CSV or Parquet: files, globs, URLs (s3://...), or '-' for stdin; .gz, .bz2, .xz and .zst
    are decompressed. JSON lines are OpenAI's batch lines (custom_id, method, url, body), or just the body:
    {"prompt": "..."}, {"messages": [...]}, {"input": "..."}. Records of tables need --template.

    Answers are stored in OUT.job until OUT is written at the end. After any interruption, run the same
    command again: answered lines are kept. A changed input, model or option is refused; --restart deletes
    the answers instead. Failed lines go to a separate file, and the exit code is then 1.

    \b
    Examples:
        carryall batch run requests.jsonl -o results.jsonl --model ./qwen3 --quantize int4
        carryall batch run 'in/*.csv' -o out.parquet --model ./qwen3 --as chat --template @prompt.txt
        echo '{"prompt": "def f(x):"}' | carryall batch run - -o - --model demo
    """
    options["sampling"] = sampling_fields(max_tokens, temperature, json_schema, choice)
    for name in ("template", "system"):
        options[name] = text_or_file(options[name])
    spec = BatchSpec(inputs=list(sources), output=output, **chosen_fields(chosen), **options)
    if output == STREAM:
        return run_to_stdout(spec, restart=restart, as_json=as_json, quiet=quiet)
    return run_job(spec, restart=restart, as_json=as_json, quiet=quiet)


for verb in (status, cancel, merge, report, retry_failed):
    command.add_command(verb)
