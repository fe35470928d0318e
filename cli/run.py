"""``carryall run``."""

from __future__ import annotations

import sys
from typing import Any

import click

from ..runtime.errors import UsageError
from ..runtime.llm import LLM
from ..runtime.loading import LoadedModel
from ..runtime.outputs import RequestOutput
from ..runtime.requests import RequestFactory
from . import generation
from .options import (
    allow_fallback_option,
    ep_library_option,
    json_option,
    model_argument,
    print_json,
    provider_option,
    quiet_option,
)


@click.command("run")
@model_argument
@click.argument("prompt")
@provider_option
@ep_library_option
@allow_fallback_option
@generation.quantize_option
@generation.context_option
@generation.kv_cache_option
@generation.speculative_option
@generation.num_speculative_option
@generation.sampling_options
@click.option("--chat", is_flag=True, help="PROMPT is a message: write it as the model's chat template says.")
@json_option
@quiet_option
def command(
    model: str,
    prompt: str,
    provider: str,
    ep_library: str | None,
    allow_fallback: bool,
    quantize: str | None,
    context_length: int | None,
    kv_cache: str | None,
    speculative: str | None,
    num_speculative_tokens: int | None,
    chat: bool,
    as_json: bool,
    quiet: bool,
    **sampling: Any,
) -> None:
    """Generate text from one prompt.

    The text that follows PROMPT goes to stdout as it is generated. With "-" as PROMPT, it is read from stdin.
    The first run of a model prepares it for the provider and keeps the result in a cache
    ($CARRYALL_CACHE, by default ~/.cache/carryall).

    \b
    Examples:
        carryall run demo "def fibonacci(n):"
        carryall run qwen3 "Why is the sky blue?" --chat --temperature 0.7
        cat question.txt | carryall run qwen3 - --json
    """
    loaded = generation.open_model(
        model,
        provider,
        quantize,
        context_length,
        kv_cache=kv_cache,
        speculative=speculative,
        num_speculative_tokens=num_speculative_tokens,
        ep_library=ep_library,
        allow_fallback=allow_fallback,
        quiet=quiet or as_json,
    )
    params = generation.sampling_params(loaded, sampling)
    text = _prompt(prompt)
    output: RequestOutput | None = None
    with LLM(loaded) as llm:
        for piece, state in generation.stream_text(llm, _written(loaded, text) if chat else text, params):
            output = state
            if not as_json:
                click.echo(piece, nl=False)
    if output is None:
        raise UsageError("the model ended the text before its first token")
    if as_json:
        print_json(_document(model, text, output))
        return
    click.echo()
    if not quiet and sys.stderr.isatty():
        click.secho(generation.speed_line(output), dim=True, err=True)


def _prompt(argument: str) -> str:
    text = sys.stdin.read() if argument == "-" else argument
    if not text:
        raise UsageError("the prompt is empty")
    return text


def _written(loaded: LoadedModel, message: str) -> list[int]:
    return RequestFactory(loaded).chat_prompt([{"role": "user", "content": message}]).token_ids


def _document(model: str, prompt: str, output: RequestOutput) -> dict[str, Any]:
    completion = output.outputs[0]
    return {
        "model": model,
        "prompt": prompt,
        "prompt_tokens": len(output.prompt_token_ids),
        "text": completion.text,
        "token_ids": completion.token_ids,
        "tokens": len(completion.token_ids),
        "finish_reason": completion.finish_reason,
        **{name: round(value, 4) for name, value in generation.speed(output).items()},
    }
