"""The options of recordings, and what a model writes down of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click

from ..runtime.api.llm import LLM
from ..runtime.audio.transcription import Transcription
from .options import print_json


def sound_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options to a command."""
    for option in (
        click.option("--words", is_flag=True, help="With --json, tell when each word in --audio is said."),
        click.option(
            "--num-beams",
            type=int,
            metavar="N",
            help="Follow the N most likely transcripts of --audio at a time, which takes longer; default 1.",
        ),
        click.option("--translate", is_flag=True, help="Write down --audio in English."),
        click.option(
            "--language",
            metavar="NAME",
            help="The language spoken in --audio, such as de or german; without it, it is heard.",
        ),
        click.option(
            "--audio",
            type=click.Path(path_type=Path, exists=True, dir_okay=False),
            multiple=True,
            metavar="FILE",
            help="A recording to write down, for models that hear; repeat it for several. PROMPT is then "
            "what was said or written before.",
        ),
    ):
        function = option(function)
    return function


def write_down(llm: LLM, name: str, audio: Sequence[Path], options: dict[str, Any], *, as_json: bool) -> None:
    """Print what is said in recordings: a text for each, or a JSON document for each.

    Raises:
        RequestError: the model hears nothing, a file cannot be read, or an option is invalid.
    """
    for path in audio:
        transcript = llm.transcribe(path, **options)
        if as_json:
            print_json(document(name, path, transcript))
        else:
            click.echo(transcript.text)


def document(model: str, path: Path, transcript: Transcription) -> dict[str, Any]:
    """Return what ``--json`` prints for a recording."""
    fields = {**dataclasses.asdict(transcript), "tokens": transcript.num_tokens}
    del fields["num_tokens"]
    return {"model": model, "file": str(path), **fields}
