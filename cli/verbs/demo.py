"""``carryall demo``."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
from rich.columns import Columns
from rich.console import Console
from rich.padding import Padding
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from ...runtime.api.llm import LLM
from ...runtime.images.opening import open_picture
from ...runtime.models.loading import check_available
from ...runtime.tasks.export import export
from ...runtime.types.outputs import RequestOutput
from ...runtime.types.sampling_params import SamplingParams
from ...storage.scratch import scratch_folder
from ..demo_form import FORM, READER, dots, read_form
from ..demo_steps import DemoStep, run_steps
from ..generation import open_model, speed, stream_text
from ..options import human_bytes, json_option, print_json

OPERATORS_SHOWN = 9


def show_steps(console: Console, steps: Sequence[DemoStep]) -> None:
    """Print each step, and the operators before and after."""
    table = Table(
        "step", "result", "nodes", "weights", "seconds", box=None, pad_edge=False, header_style="dim"
    )
    for step in steps:
        size = human_bytes(step.weight_bytes)
        table.add_row(step.name, step.result, str(step.nodes), size, f"{step.seconds:.1f}")
    console.print(Padding(table, (1, 0)))
    before, after = steps[0], steps[-1]
    graphs = [
        _operators(before, f"before: {before.nodes} nodes"),
        _operators(after, f"after: {after.nodes} nodes"),
    ]
    console.print(Padding(Columns(graphs, padding=(0, 4)), (0, 0, 1, 0)))


def _operators(step: DemoStep, title: str) -> Table:
    """Return the most frequent operators as bars."""
    table = Table(
        title=title, title_justify="left", title_style="bold", box=None, show_header=False, pad_edge=False
    )
    top = list(step.operators.items())[:OPERATORS_SHOWN]
    for name, count in top:
        table.add_row(name.split("::")[-1], Text("█" * max(1, round(count / 6)) + f" {count}", style="cyan"))
    rest = step.nodes - sum(count for _, count in top)
    table.add_row(f"{len(step.operators) - len(top)} others", Text(f"{rest}", style="dim"))
    return table


def document(
    steps: Sequence[DemoStep], prompt: str, output: RequestOutput, form: dict[str, Any] | None
) -> dict[str, Any]:
    """Return the document that ``--json`` prints."""
    return {
        "prompt": prompt,
        "text": output.outputs[0].text,
        "tokens": len(output.outputs[0].token_ids),
        **{name: round(value, 4) for name, value in speed(output).items()},
        "nodes_before": steps[0].nodes,
        "nodes_after": steps[-1].nodes,
        "operators_before": steps[0].operators,
        "operators_after": steps[-1].operators,
        "weight_bytes_before": steps[0].weight_bytes,
        "weight_bytes_after": steps[-1].weight_bytes,
        "seconds": {step.name: round(step.seconds, 3) for step in steps},
        "form": form,
    }


PROMPT = "import os\nimport sys\n\n\ndef main("
PARAMS = SamplingParams(max_tokens=100, temperature=0, repetition_penalty=1.15)


@click.command("demo")
@click.option("--prompt", default=PROMPT, help="The prompt; the model was trained on Python.")
@json_option
def command(prompt: str, as_json: bool) -> None:
    """Export the embedded model, quantize it to int4-fast, optimize it for the CPU, and generate.

    Then a second one reads a picture of a form to JSON, where Pillow is installed. It takes a few seconds,
    needs no network, and works in a temporary folder that is deleted afterwards. For your own checkpoint, use
    'carryall export', 'quantize', 'optimize' and 'run'.

    \b
    Example:
        carryall demo
    """
    check_available("cpu")
    console = Console(highlight=False, quiet=as_json)
    with scratch_folder() as folder:
        steps = run_steps(folder, quiet=as_json)
        show_steps(console, steps)
        loaded = open_model(str(steps[-1].package), quiet=True)
        with LLM(loaded) as llm:
            output = _write(console, llm, prompt)
        form = _read(console, folder)
    if as_json:
        print_json(document(steps, prompt, output, form))


def _write(console: Console, llm: LLM, prompt: str) -> RequestOutput:
    """Print the text while it is generated, then the speed."""
    llm.generate(prompt, SamplingParams(max_tokens=8))  # warm-up: the first run of a process is slower
    console.print(Rule("generated text"))
    console.print(Text(prompt, style="bold"), end="")
    for piece, state in stream_text(llm, prompt, PARAMS):
        console.out(piece, end="")
        output = state
    facts, count = speed(output), len(output.outputs[0].token_ids)
    console.print("\n", Rule(), sep="")
    wait = f"first token after {1e3 * facts['time_to_first_token']:.0f} ms"
    console.print(
        f"[bold green]{facts['tokens_per_second']:,.0f} tokens/s[/], {count} tokens, {wait}, on the CPU"
    )
    return output


def _read(console: Console, folder: Path) -> dict[str, Any] | None:
    """Read the form to JSON and print both; None without Pillow, which the text then names."""
    console.print()
    if importlib.util.find_spec("PIL") is None:
        console.print(Text("Pictures need Pillow: pip install 'carryall[images]'"))
        return None
    export(READER, folder / READER)
    with LLM(open_model(str(folder / READER), quiet=True)) as llm:
        form = read_form(llm)
    console.print(Rule("a form, and what is read of it"))
    for line in dots(open_picture(FORM).min(-1), console.width):
        console.print(line)
    for name, value in form["read"].items():
        text = Text(f"{name}: ", style="dim").append(value, style="bold green")
        if value != (written := form["written"][name]):
            text = Text(f"{name}: ", style="dim").append(value, style="bold red").append(f" is {written}")
        console.print(text)
    console.print(Rule())
    return form
