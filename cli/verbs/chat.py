"""``carryall chat``."""

from __future__ import annotations

from typing import Any

import click

from ...runtime.api.llm import LLM
from .. import generation
from ..conversation import ConsoleChat, check_chat
from ..load_options import Chosen, config_options
from ..options import quiet_option
from ..pictures import PictureFile, VideoFile, image_option, video_option
from ..sampling import sampling_options, sampling_params
from ..sections import SectionedCommand


@click.command("chat", cls=SectionedCommand)
@config_options(
    without=(
        "max_queue",
        "max_queued_tokens",
    ),
    max_slots=1,
)
@sampling_options(without=("n", "best_of", "logprobs"))
@click.option("--system", help="System message with instructions for the model.")
@image_option()
@video_option()
@quiet_option
def command(
    chosen: Chosen,
    system: str | None,
    images: tuple[PictureFile, ...],
    videos: tuple[VideoFile, ...],
    quiet: bool,
    **sampling: Any,
) -> None:
    """Chat with a model.

    Each line is a message, and the answer is printed while it is generated. Ctrl-C stops an answer, /reset
    starts a new conversation, /exit or Ctrl-D ends the program. Messages may also be piped in, one per line.
    The files of --image and --video belong to the first message. If the model has no chat template, give one
    with --chat-template; to continue plain text, use 'carryall run --raw'.

    \b
    Examples:
        carryall chat qwen3 --system "Answer in one sentence."
        echo "Why is the sky blue?" | carryall chat qwen3
        carryall chat qwen3 --provider cuda:1 --provider-option compute=bf16
    """
    lora = generation.only_lora(chosen.model)
    loaded = generation.open_model(chosen.model, max_slots=chosen.engine.max_slots, quiet=quiet)
    params = sampling_params(loaded, sampling)
    opening = [{"role": "system", "content": system}] if system else []
    with LLM(loaded, engine_config=chosen.engine) as llm:
        check_chat(llm, opening)
        ConsoleChat(llm, params, opening, lora, (*images, *videos)).talk()
