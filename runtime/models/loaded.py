"""A loaded model: its runner, tokenizer, chat template and defaults."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import field
from pathlib import Path
from typing import Any, NoReturn

from ...errors import RequestError
from ...providers.base import DeviceMemory, Runner
from ...providers.placement import Placement
from ...records import dataclass
from ..audio.encoding import AudioEncoder
from ..audio.word_times import Alignment
from ..engine.adapters import AdapterSet
from ..engine.speculation.proposer import Proposer
from ..images.encoding import ImageEncoder
from ..text.chat_template import ChatTemplate
from ..text.tokenizer import Tokenizer
from .fastest import FastestProvider
from .generation_defaults import GenerationDefaults
from .layer_places import PlacedLayers
from .model_source import ModelSummary


def reads_text() -> ImageEncoder:
    """Refuse pictures, for a model that reads text only.

    Raises:
        RequestError: always.
    """
    raise RequestError("this model reads text only, not images; leave them out")


def hears_nothing() -> NoReturn:
    """Refuse sound.

    Raises:
        RequestError: always.
    """
    raise RequestError("this model writes down no sound; choose one that does, such as Whisper")


@dataclass(slots=True)
class LoadedModel:
    """A model that is open on a provider.

    Args:
        name: the user's name of the model.
        runner: holds the model; an engine made from it closes it.
        tokenizer: None if the model has none; prompts must then be token ids.
        chat_template: the checkpoint's own, or the one given in its place.
        defaults: end tokens and sampling options.
        identity: a hash of the model's content and its lowering; empty if unknown.
        open_encoder: opens another runner of the model that returns hidden states instead of logits.
        open_sight: opens what turns pictures into rows of the model's input; raises RequestError if the model
            reads text only.
        open_hearing: opens what turns sound into rows of the model's encoder; raises RequestError if it hears
            nothing.
        proposer: proposes tokens for speculative decoding; the engine closes it.
        provider: the provider that runs the model.
        choice: the measurements, if the provider was ``auto``.
        placed: which layers run where, if places were named or chosen.
        fallbacks: the placement of each session that runs some nodes on the CPU by ``allow_fallback``.
        graphs: the lowered graph that runs; for a split model, one per part.
        adapters: the LoRA adapters that requests can name.
        device_memory: returns the memory of its devices; see ``split.device_memory``.
        summary: returns what a list of models tells of it; None if its files are not known.
    """

    name: str
    runner: Runner
    tokenizer: Tokenizer | None = None
    chat_template: ChatTemplate = field(default_factory=lambda: ChatTemplate({}, {}))
    defaults: GenerationDefaults = field(default_factory=GenerationDefaults)
    identity: str = ""
    proposer: Proposer | None = None
    open_sight: Callable[[], ImageEncoder] = reads_text
    open_hearing: Callable[[], tuple[AudioEncoder, Mapping[str, Any], Alignment]] = hears_nothing
    open_encoder: Callable[[], Runner] | None = None
    provider: str = ""
    choice: FastestProvider | None = None
    placed: PlacedLayers | None = None
    fallbacks: list[Placement] = field(default_factory=list)
    graphs: Sequence[Path] = ()
    adapters: AdapterSet = field(default_factory=AdapterSet)
    device_memory: Callable[[], list[DeviceMemory]] = list
    summary: Callable[[], ModelSummary | None] = lambda: None

    @property
    def hears(self) -> bool:
        """Whether it writes down sound."""
        return self.open_hearing is not hears_nothing

    @property
    def reads_images(self) -> bool:
        """Whether it takes pictures as it was loaded, in its prompt or by its encoder."""
        info = self.runner.info
        return info.image_width > 0 or (info.encoder_width > 0 and self.open_sight is not reads_text)

    def close(self) -> None:
        """Close the runner and the proposer; not needed if an engine closes them."""
        self.runner.close()
        if self.proposer is not None:
            self.proposer.close()
