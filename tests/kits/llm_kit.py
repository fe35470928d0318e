"""Models for LLM and AsyncLLM: the toy model with a byte tokenizer."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from text_kit import byte_level

from carryall.providers.base import RunnerConfig
from carryall.providers.targets.null import NullOptions, NullRunner
from carryall.runtime.models.generation_defaults import GenerationDefaults
from carryall.runtime.models.loading import LoadedModel
from carryall.runtime.text.chat_template import ChatTemplate

END = 257
TEMPLATE = "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{{ tools or '' }}"


def toy_model(
    folder: Path,
    *,
    max_slots: int = 4,
    context_length: int = 256,
    step_seconds: float = 0.0,
    end_token_ids: Iterable[int] = (END,),
    sampling: dict[str, Any] | None = None,
    tokenizer: bool = True,
) -> LoadedModel:
    """Return the toy model; its tokens are bytes, `<s>` and `</s>`."""
    runner = NullRunner(
        RunnerConfig(max_slots=max_slots, context_length=context_length),
        NullOptions(vocab_size=258, step_seconds=step_seconds),
    )
    return LoadedModel(
        "toy",
        runner,
        byte_level(folder) if tokenizer else None,
        ChatTemplate({"default": TEMPLATE}, {"bos_token": "<s>"}) if tokenizer else ChatTemplate({}, {}),
        GenerationDefaults(frozenset(end_token_ids), sampling or {}),
    )
