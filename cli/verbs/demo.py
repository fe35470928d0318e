"""``carryall demo``."""

from __future__ import annotations

import click
from rich.console import Console
from rich.rule import Rule
from rich.text import Text

from ...runtime.api.llm import LLM
from ...runtime.models.loading import check_available
from ...runtime.types.outputs import RequestOutput
from ...runtime.types.sampling_params import SamplingParams
from ...storage.scratch import scratch_folder
from ..demo_steps import run_steps
from ..generation import open_model, speed, stream_text
from ..options import json_option, print_json
from ..printing.demo import document, show_steps

PROMPT = "import os\nimport sys\n\n\ndef main("
PARAMS = SamplingParams(max_tokens=100, temperature=0, repetition_penalty=1.15)


@click.command("demo")
@click.option("--prompt", default=PROMPT, help="The prompt; the model was trained on Python.")
@json_option
def command(prompt: str, as_json: bool) -> None:
    """Export the embedded model, quantize it to int4-fast, optimize it for the CPU, and generate.

    It takes a few seconds, needs no network, and works in a temporary folder that is deleted afterwards. For
    your own checkpoint, use 'carryall export', 'quantize', 'optimize' and 'run'.

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
    if as_json:
        print_json(document(steps, prompt, output))


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
