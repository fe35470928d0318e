"""``carryall run``."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from pathlib import Path
from typing import Any

import click

from ...errors import UsageError
from ...runtime.api.llm import LLM
from ...runtime.api.requests import Prompt
from ...runtime.models.loading import LoadedModel
from ...runtime.process.garbage import collector_paused, lasting_objects
from ...runtime.types.outputs import CompletionOutput, RequestOutput
from ...runtime.types.sampling_params import SamplingParams
from .. import generation
from ..conversation import ConsoleChat, check_chat
from ..lines import stdin_text
from ..load_options import Chosen, config_options, model_elsewhere
from ..options import check_exclusive, json_option, print_json, quiet_option
from ..pictures import PictureFile, Shown, VideoFile, image_option, video_option
from ..sampling import READABLE, sampling_options, sampling_params
from ..sections import SectionedCommand
from ..sound import sound_options, write_down


def document(model: str, prompt: str, output: RequestOutput) -> dict[str, Any]:
    """Return the document that ``--json`` prints."""
    first, metrics = output.outputs[0], output.metrics
    return {
        "model": model,
        "prompt": prompt,
        "prompt_tokens": len(output.prompt_token_ids),
        "text": first.text,
        "token_ids": first.token_ids,
        "tokens": len(first.token_ids),
        "finish_reason": first.finish_reason,
        "choices": [_choice(completion) for completion in output.outputs],
        **{name: round(value, 4) for name, value in generation.speed(output).items()},
        "cached_tokens": metrics.cached_tokens if metrics else 0,
        "proposed_tokens": metrics.proposed_tokens if metrics else 0,
        "accepted_tokens": metrics.accepted_tokens if metrics else 0,
    }


def _choice(completion: CompletionOutput) -> dict[str, Any]:
    return {
        "index": completion.index,
        "text": completion.text,
        "reasoning_content": completion.reasoning_content,
        "tool_calls": [dataclasses.asdict(call) for call in completion.tool_calls],
        "token_ids": completion.token_ids,
        "finish_reason": completion.finish_reason,
        "stop_reason": completion.stop_reason,
        "cumulative_logprob": completion.cumulative_logprob,
        "logprobs": None
        if completion.logprobs is None
        else [[dataclasses.asdict(one) for one in token.values()] for token in completion.logprobs],
    }


class RunCommand(SectionedCommand):
    """A command whose only argument is the prompt if a file or a variable names the model."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        rest = super().parse_args(ctx, args)
        elsewhere = model_elsewhere(ctx)
        typed = ctx.get_parameter_source("model") is click.core.ParameterSource.COMMANDLINE
        if ctx.params["prompt"] is None and elsewhere is not None and typed:
            ctx.params["prompt"], ctx.params["model"] = ctx.params["model"], elsewhere
        return rest


_NO_PROMPT = "--raw, --tools and --json need a prompt: carryall run MODEL PROMPT"


@click.command("run", cls=RunCommand)
@config_options(
    without=(
        "max_queue",
        "max_queued_tokens",
    ),
    max_slots=1,
)
@click.argument("prompt", required=False)
@sampling_options()
@click.option(
    "--raw", is_flag=True, help="Continue PROMPT as it is, also where the model has a chat template."
)
@click.option("--chat", is_flag=True,
              help="PROMPT is a message, as it is for every model with a chat template.")  # fmt: skip
@image_option()
@video_option()
@sound_options
@click.option("--tools", type=READABLE, help="A JSON file with a list of functions the model may call.")
@json_option
@quiet_option
def command(
    prompt: str | None,
    chosen: Chosen,
    raw: bool,
    chat: bool,
    images: tuple[PictureFile, ...],
    videos: tuple[VideoFile, ...],
    audio: tuple[Path, ...],
    language: str | None,
    translate: bool,
    num_beams: int | None,
    words: bool,
    tools: Path | None,
    as_json: bool,
    quiet: bool,
    **sampling: Any,
) -> None:
    """Ask a model one question, or talk to it.

    PROMPT is a message to the model, if it has a chat template; other models, and all with --raw, continue
    the text of PROMPT. The answer is printed to stdout as it is generated. If PROMPT is "-", it is read from
    stdin. Without PROMPT a conversation begins, as with 'carryall chat'. The first run of a model prepares it
    for the provider and caches the result ($CARRYALL_CACHE, by default the user's cache folder).

    \b
    Examples:
        carryall run demo "def fibonacci(n):"
        carryall run qwen3 "Why is the sky blue?" --temperature 0.7
        carryall run qwen3 "A user, please." --json-schema @user.json
        carryall run smolvlm "Read the form." --image form.png
        carryall run whisper-base --audio talk.mp3 --language de
        carryall run ./trocr-base-printed --image line.png
        cat question.txt | carryall run qwen3 - --json -n 3 --seed 1
        carryall run qwen3 "Hello" --provider openvino --provider-option inference_precision=bf16
        carryall run qwen3 "Hello" --split cpu:0-11,openvino:12-27
    """
    check_exclusive({"--raw": raw, "--chat": chat})
    check_exclusive({"--raw": raw, "--tools": tools is not None})
    check_exclusive({"--raw": raw, "--image": bool(images)})
    check_exclusive({"--raw": raw, "--video": bool(videos)})
    others = {"--raw": raw, "--chat": chat, "--image": images, "--video": videos, "--tools": tools}
    for name, value in others.items():
        check_exclusive({"--audio": bool(audio), name: bool(value)})
    if not audio and (translate or words or language is not None or num_beams is not None):
        raise UsageError("--language, --num-beams, --translate and --words need a recording: --audio FILE")
    if words and not as_json:
        raise UsageError("the times of --words are part of --json; give both")
    shown: tuple[Shown, ...] = (*images, *videos)
    if prompt is None and not audio and (raw or tools is not None or (as_json and not images)):
        raise UsageError(_NO_PROMPT)
    lora = generation.only_lora(chosen.model)
    lasting = click.get_current_context().with_resource(contextlib.ExitStack())
    paused = lasting.enter_context(contextlib.ExitStack())
    paused.enter_context(collector_paused())
    # A prepared graph is much to look at: 40 ms after the first token.
    paused.callback(lambda: lasting.enter_context(lasting_objects()))
    loaded = generation.open_model(chosen.model, max_slots=chosen.engine.max_slots, quiet=quiet or as_json)
    if audio:
        paused.close()
        options = {"prompt": prompt, "language": language, "num_beams": num_beams}
        options["temperature"] = sampling.get("temperature")
        given = {name: value for name, value in options.items() if value is not None}
        with LLM(loaded, engine_config=chosen.engine) as llm:
            task = "translate" if translate else "transcribe"
            write_down(llm, loaded.name, audio, {**given, "task": task, "words": words}, as_json=as_json)
        return
    params = sampling_params(loaded, sampling)
    alone = bool(images) and loaded.runner.info.encoder_width > 0  # its pictures are all that it reads
    if prompt is None and not alone:
        if as_json:
            raise UsageError(_NO_PROMPT)
        paused.close()
        _talk(loaded, chosen, params, lora, shown)
        return
    text = stdin_text() if prompt == "-" else prompt or ""
    if not text and not alone:
        raise UsageError("the prompt is empty")
    written: Prompt = text
    output: RequestOutput | None = None
    with LLM(loaded, engine_config=chosen.engine) as llm:
        if not raw and (chat or shown or tools is not None or loaded.chat_template.names):
            asked = generation.chat_prompt(llm, text, tools, shown)
            written = asked if as_json else generation.unparsed(asked)  # streamed text includes all
        streamed = params.n == 1 and params.best_of is None and not as_json
        for piece, state in generation.stream_text(llm, written, params, lora):
            output = state
            if streamed:
                click.echo(piece, nl=False)
            paused.close()
    if output is None:
        raise UsageError("the model ended the text before its first token")
    if as_json:
        print_json(document(loaded.name, text, output))
        return
    click.echo("" if streamed else "\n\n".join(f"[{one.index}] {one.text}" for one in output.outputs))
    if not quiet and not raw and written is text and not alone:
        _tell_continued(loaded.name, output)
    if not quiet and sys.stderr.isatty():
        click.secho(generation.speed_line(output), dim=True, err=True)


def _tell_continued(name: str, output: RequestOutput) -> None:
    """Say on stderr that a text was continued, not answered: at a terminal, and where nothing came of it."""
    ended = all(one.finish_reason == "stop" and not one.text for one in output.outputs)
    if ended or sys.stderr.isatty():
        what = f"{name} has no chat template, so the text was continued, as --raw does"
        click.echo(f"{what}; the model ended it at once" if ended else what, err=True)


def _talk(
    loaded: LoadedModel,
    chosen: Chosen,
    params: SamplingParams,
    lora: str | None,
    shown: tuple[Shown, ...],
) -> None:
    """Hold a conversation: what ``carryall run MODEL`` does without a prompt."""
    if params.n != 1 or params.best_of is not None or params.logprobs is not None:
        raise UsageError("-n, --best-of and --logprobs need a prompt: carryall run MODEL PROMPT")
    if not loaded.chat_template.names and not loaded.runner.info.encoder_width:
        raise UsageError(
            f"{loaded.name} has no chat template, so it needs a prompt to continue: carryall run MODEL PROMPT"
        )
    with LLM(loaded, engine_config=chosen.engine) as llm:
        check_chat(llm, [])
        ConsoleChat(llm, params, [], lora, shown).talk()
