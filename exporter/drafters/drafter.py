"""Drafters: heads in a folder of their own that read hidden states of the model they were trained for."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path

import onnx_ir as ir

from ...contract import CONTEXT_LENGTH
from ...errors import CheckpointError, UnsupportedModelError
from ...records import dataclass
from ...storage.stored_tensor import StoredTensor
from ..config import DecoderConfig, RawConfig, context_lengths
from ..decoder import Decoder
from ..family import normalised_config
from ..safetensors_files import SafetensorsTensor, safetensors_of
from ..weights import Array, Checkpoint

_EMBEDDING = "embed_tokens.weight"
TARGET = "target."  # in front of the names of the model's tensors, where a drafter uses them


@dataclass(frozen=True)
class Drafter(ABC):
    """A drafter in a folder. Its graph is a decoder with the input ``hidden_states`` and an own KV cache.

    Args:
        folder: its folder.
        raw: the content of its config.json.
    """

    folder: Path
    raw: RawConfig

    @abstractmethod
    def layers(self, target: RawConfig) -> tuple[int, ...]:
        """Return the numbers of the layers whose input states it reads, of a model with this config.json.

        The number behind the last one means the output of the last layer.
        """

    @abstractmethod
    def config(self) -> DecoderConfig:
        """Normalise its config.json."""

    @abstractmethod
    def write(self, net: Decoder, target: RawConfig) -> ir.Value:
        """Write the drafter, for a model with this config.json, and return its logits."""

    def draft_tokens(self) -> Array | None:
        """Return the token of the model that each of its tokens means; None if they are the same."""
        return None

    @cached_property
    def tensors(self) -> Mapping[str, SafetensorsTensor]:
        """Its tensors by name."""
        return safetensors_of(self.folder)

    def model(self, target: RawConfig, tensors: Mapping[str, StoredTensor]) -> ir.Model:
        """Build the graph, with lazily read weights.

        Args:
            target: the config.json of the model.
            tensors: the tensors of the model by name.

        Raises:
            UnsupportedModelError: an option of its configuration is not supported.
            CheckpointError: a weight is missing, unknown, or does not match the configuration.
        """
        prefix = _embedding_prefix(tensors)
        own = {
            TARGET + name.removeprefix(prefix): tensor
            for name, tensor in tensors.items()
            if name.startswith(prefix)
        }
        checkpoint = Checkpoint(self.folder, {**self.tensors, **own})
        net = Decoder(self.config(), checkpoint)
        model = net.finish(self.write(net, target))
        if unused := [name for name in checkpoint.unused() if not name.startswith(TARGET)]:
            raise CheckpointError(
                f"{self.folder} holds the tensor '{unused[0]}', which no drafter of this kind has, so its "
                "proposals would be wrong"
            )
        model.metadata_props[CONTEXT_LENGTH] = str(context_lengths(target)[1])
        return model


def text_config(target: RawConfig) -> RawConfig:
    """Return the part of a model's config.json that describes its decoder."""
    text = target.get("text_config")
    return text if isinstance(text, dict) else target


def num_layers_of(target: RawConfig) -> int:
    """Return how many layers a model with this config.json has, all with attention.

    Raises:
        UnsupportedModelError: a layer has none.
    """
    config = normalised_config(target)
    if not all(config.has_attention(layer) for layer in range(config.num_layers)):
        raise UnsupportedModelError(
            f"a drafter for {target['model_type']} is not supported: its layers without attention have no "
            "numbers in the graph"
        )
    return config.num_layers


def _embedding_prefix(tensors: Mapping[str, StoredTensor]) -> str:
    """Return the prefix of the names of the model's decoder, from that of its embedding."""
    names = [name for name in tensors if name == _EMBEDDING or name.endswith(f".{_EMBEDDING}")]
    if not names:
        raise CheckpointError(f"the model has no tensor '{_EMBEDDING}', which a drafter uses")
    return min(names, key=len).removesuffix(_EMBEDDING)
