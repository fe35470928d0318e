"""A model that is open on a provider, with all that its folder says of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ...providers.base import Runner
from ...providers.placement import Placement
from ..engine.speculation.proposer import Proposer
from ..text.chat_template import ChatTemplate
from ..text.tokenizer import Tokenizer
from .fastest import Choice
from .generation_defaults import GenerationDefaults


@dataclass(slots=True)
class LoadedModel:
    """A runner, and what turns text into its tokens and back.

    Args:
        name: as the user called the model.
        runner: holds the model; whoever makes an engine of it closes it.
        tokenizer: None where the model came without; prompts must be token ids then.
        chat_template: the checkpoint's own, or the one that was given in its place.
        defaults: end tokens and sampling options.
        identity: changes whenever the model or its lowering does; empty if unknown.
        open_encoder: opens another runner of the same model, with hidden states in place of logits.
        proposer: proposes tokens for the model to check several at a time; the engine closes it too.
        provider: where it runs.
        choice: why there, if the provider was to be chosen.
        fallbacks: where the nodes of each session lie that was allowed, and had, to fall back to the CPU.
        graphs: the lowered graph that runs; of a split model, one a part.
    """

    name: str
    runner: Runner
    tokenizer: Tokenizer | None = None
    chat_template: ChatTemplate = field(default_factory=lambda: ChatTemplate({}, {}))
    defaults: GenerationDefaults = field(default_factory=GenerationDefaults)
    identity: str = ""
    proposer: Proposer | None = None
    open_encoder: Callable[[], Runner] | None = None
    provider: str = ""
    choice: Choice | None = None
    fallbacks: list[Placement] = field(default_factory=list)
    graphs: Sequence[Path] = ()

    def close(self) -> None:
        """Free the model, where no engine does."""
        self.runner.close()
        if self.proposer is not None:
            self.proposer.close()
