"""``carryall run``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from ...errors import UsageError
from ...runtime.api.llm import LLM
from ...runtime.api.requests import Prompt
from ...runtime.types.outputs import RequestOutput
from .. import generation
from ..load_options import Chosen, config_options, model_elsewhere
from ..options import json_option, print_json, quiet_option
from ..printing.run import document
from ..sampling import READABLE, sampling_options, sampling_params
from ..sections import SectionedCommand


class RunCommand(SectionedCommand):
    """A command whose only argument is the prompt if a file or a variable names the model."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """See click."""
        rest = super().parse_args(ctx, args)
        elsewhere = model_elsewhere(ctx)
        if ctx.params["prompt"] is None and elsewhere is not None:
            ctx.params["prompt"], ctx.params["model"] = ctx.params["model"], elsewhere
        return rest


@click.command("run", cls=RunCommand)
@config_options(without=("max_queue",), max_slots=1)
@click.argument("prompt", required=False)
@sampling_options()
@click.option("--chat", is_flag=True, help="PROMPT is a message: render it with the model's chat template.")
@click.option(
    "--tools", type=READABLE, help="With --chat: a JSON file with a list of functions the model may call."
)
@json_option
@quiet_option
def command(
    prompt: str | None,
    chosen: Chosen,
    chat: bool,
    tools: Path | None,
    as_json: bool,
    quiet: bool,
    **sampling: Any,
) -> None:
    """Generate text from one prompt.

    The generated text is printed to stdout as it is generated. If PROMPT is "-", it is read from stdin. The
    first run of a model prepares it for the provider and caches the result ($CARRYALL_CACHE, by default the
    user's cache folder).

    \b
    Examples:
        carryall run demo "def fibonacci(n):"
        carryall run qwen3 "Why is the sky blue?" --chat --temperature 0.7
        carryall run qwen3 "A user, please." --chat --json-schema user.json
        cat question.txt | carryall run qwen3 - --json -n 3 --seed 1
        carryall run qwen3 "Hello" --provider openvino --provider-option inference_precision=bf16
        carryall run qwen3 "Hello" --split cpu:0-11,openvino:12-27
    """
    if tools is not None and not chat:
        raise UsageError("--tools needs --chat")
    if prompt is None:
        raise UsageError("no prompt is given: carryall run MODEL PROMPT")
    lora = generation.only_lora(chosen.model)
    loaded = generation.open_model(chosen.model, max_slots=chosen.engine.max_slots, quiet=quiet or as_json)
    params = sampling_params(loaded, sampling)
    text = sys.stdin.read() if prompt == "-" else prompt
    if not text:
        raise UsageError("the prompt is empty")
    written: Prompt = text
    if chat:
        asked = generation.chat_prompt(loaded, text, tools)
        written = asked if as_json else asked.token_ids  # streamed text includes reasoning and calls
    output: RequestOutput | None = None
    with LLM(loaded, engine_config=chosen.engine) as llm:
        streamed = params.n == 1 and params.best_of is None and not as_json
        for piece, state in generation.stream_text(llm, written, params, lora):
            output = state
            if streamed:
                click.echo(piece, nl=False)
    if output is None:
        raise UsageError("the model ended the text before its first token")
    if as_json:
        print_json(document(loaded.name, text, output))
        return
    click.echo("" if streamed else "\n\n".join(f"[{one.index}] {one.text}" for one in output.outputs))
    if not quiet and sys.stderr.isatty():
        click.secho(generation.speed_line(output), dim=True, err=True)
