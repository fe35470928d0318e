"""The vision tower of a GGUF model, which is a file of its own (mmproj), as a checkpoint holds it.

Names: https://github.com/ggml-org/llama.cpp/blob/master/gguf-py/gguf/constants.py; what they mean:
tools/mtmd/clip.cpp there.
"""

from __future__ import annotations

import dataclasses
import importlib
import pkgutil
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import field
from pathlib import Path
from typing import Any, Protocol, cast

from ...errors import CheckpointError, UnsupportedModelError
from ...records import dataclass
from ...storage.stored_tensor import StoredTensor
from . import projectors as modules
from .architecture import TOWER, Join, Tensors
from .blocks import LAYOUTS
from .file import FLOATS, GgufTensor, join, read_file
from .header import TensorInfo, damaged
from .keys import check_keys
from .text_table import PackedTexts, TextTable

Json = dict[str, Any]
_BLOCK = re.compile(r"v\.blk\.(\d{1,9})\.(\w+)\.(weight|bias)")
# Metadata that all files state, without ``clip.vision.``.
_SIZES = ("image_size", "patch_size", "embedding_length", "projection_dim")
_COUNTS = (*_SIZES, "block_count", "attention.head_count")
_STATED = (
    *(*_COUNTS, "feed_forward_length", "attention.layer_norm_epsilon"),
    *("image_mean", "image_std"),
)
_ACTIVATIONS = ("use_gelu", "use_silu")
_KINDS = ("has_vision_encoder", "has_audio_encoder", "has_text_encoder")
_EARLY_KINDS = ("has_llava_projector", "has_qwen2vl_merger")  # for which there is the type now
_OF_ALL = ("projector_type", *_KINDS, *_EARLY_KINDS, *_ACTIVATIONS)
SIGLIP = {
    "ln1": "layer_norm1",
    "ln2": "layer_norm2",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_out": "self_attn.out_proj",
    "ffn_up": "mlp.fc1",
    "ffn_down": "mlp.fc2",
}  # names of a layer's modules


@dataclass(frozen=True, slots=True, kw_only=True)
class Projector:
    """What the files of one projector type hold, and where a checkpoint of its family has it.

    Args:
        model_type: the family, a module of ``exporter/vision`` and of ``exporter/models``.
        decoders: architectures of the GGUF files of its decoders.
        text: the prefix of the decoder's tensors in a checkpoint, without ``model.``.
        layers: the prefix of the tower's layers.
        inner: names of a layer's modules.
        outer: names of modules outside of layers, or of parameters with their suffix.
        unused: stored names of tensors that early files have, and nothing reads.
        offsets: by the stored name, what a weight includes and a checkpoint adds when it computes.
        joined: by the end of a name, how it is made of several stored tensors.
        activation: the key that is true in its files: ``use_gelu``, ``use_silu``, or none.
        keys: metadata beside those of all types, without ``clip.vision.``.
        tokens: keys of config.json that name tokens, and these tokens.
        config: returns ``vision_config`` and other keys of config.json from the metadata, without
            ``clip.vision.``, the tensors under a checkpoint's names, and the decoder's part.
        preprocessor: returns the keys of preprocessor_config.json but mean and deviation.
    """

    model_type: str
    decoders: tuple[str, ...]
    text: str = ""
    layers: str
    inner: Mapping[str, str]
    outer: Mapping[str, str]
    unused: tuple[str, ...] = ()
    offsets: Mapping[str, float] = field(default_factory=dict)
    joined: Mapping[str, Join] = field(default_factory=dict)
    activation: str = ""
    keys: tuple[str, ...] = ()
    tokens: Mapping[str, str]
    config: Callable[[Json, Tensors, Json], Json]
    preprocessor: Callable[[Json], Json]

    def name(self, stored: str) -> str | None:
        """Return a checkpoint's name of a tensor; None if it has no such tensor."""
        if stored in self.outer:
            return self.outer[stored]
        if (block := _BLOCK.fullmatch(stored)) is not None:
            inner = self.inner.get(block[2])
            return None if inner is None else f"{self.layers}.{block[1]}.{inner}.{block[3]}"
        stem, _, suffix = stored.rpartition(".")
        return f"{self.outer[stem]}.{suffix}" if stem in self.outer else None

    def weights(self, layers: int) -> Iterator[str]:
        """Yield the stored names of the weights that a file must hold."""
        for stem in self.outer:
            yield stem if ".weight" in stem else f"{stem}.weight"
        for layer in range(layers):
            yield from (f"v.blk.{layer}.{name}.weight" for name in self.inner)


class TowerFile:
    """A vision tower in GGUF: its tensors under the names of a checkpoint, and what config.json says of it.

    Raises:
        CheckpointError: the file is damaged, or a tensor or a key is missing.
        UnsupportedModelError: its projector type, a key or the type of a tensor is not supported.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._data, header = read_file(path)
        self._metadata = header.metadata
        if self._metadata.get("general.architecture") != TOWER:
            raise CheckpointError(f"{path} is named as a vision tower (mmproj), and is none; rename it")
        self.type = str(self._metadata.get("clip.vision.projector_type", self._of_all("projector_type")))
        self.projector = projector(path, self.type)
        check_keys(self._metadata, TOWER, frozenset(self._keys()))
        self.vision = self._vision()
        used = (info for info in header.tensors if info.name not in self.projector.unused)
        stored = {info.name: info for info in self._named(list(used))}
        for name in self.projector.weights(self.vision["block_count"]):
            if name not in stored:
                raise damaged(path, f"it has no tensor '{name}'")
        self.tensors: dict[str, StoredTensor] = {}
        for info in stored.values():
            self._add(info)
        join(self.tensors, self.projector.joined, path)

    def check(self, decoder: Mapping[str, Any]) -> None:
        """Check that this is the tower of a decoder.

        Args:
            decoder: the metadata of the decoder's file.

        Raises:
            CheckpointError: it is of another model.
            UnsupportedModelError: the decoder's vocabulary has no token for a row of a picture.
        """
        name = decoder.get("general.architecture")
        width, rows = decoder.get(f"{name}.embedding_length"), self.vision["projection_dim"]
        if name not in self.projector.decoders or rows != width:
            raise CheckpointError(
                f"{self.path} is the vision tower of another model than the one beside it: it writes rows of "
                f"{rows} values for a decoder '{', '.join(self.projector.decoders)}', and this one is "
                f"'{name}' of {width}; move one of the files into another folder"
            )
        self._token_ids(decoder)

    def config(self, text: Json, decoder: Mapping[str, Any]) -> Json:
        """Return the config.json of the model that sees.

        Args:
            text: the config.json of its decoder.
            decoder: the metadata of the decoder's file.

        Raises:
            CheckpointError: a key has the wrong type.
            UnsupportedModelError: as ``check``.
        """
        return {
            "model_type": self.projector.model_type,
            "text_config": text,
            **self._token_ids(decoder),
            **self.projector.config(self.vision, self.tensors, text),
        }

    def preprocessor(self) -> Json:
        """Return the content of preprocessor_config.json."""
        levels = {name: self.vision[name] for name in ("image_mean", "image_std")}
        return {**levels, **self.projector.preprocessor(self.vision)}

    def _token_ids(self, decoder: Mapping[str, Any]) -> dict[str, int]:
        stated, found = decoder.get("tokenizer.ggml.tokens"), dict[str, int]()
        if not isinstance(stated, PackedTexts):
            raise CheckpointError(
                "the GGUF file of the decoder has no 'tokenizer.ggml.tokens', a list of texts"
            )
        tokens = TextTable.of(stated)
        for key, text in self.projector.tokens.items():
            number = tokens.number_of(text)
            if number is None:
                raise UnsupportedModelError(
                    f"the vocabulary of the decoder beside {self.path} has no token '{text}', which stands "
                    "for a row of a picture; take a file of another conversion"
                )
            found[key] = number
        return found

    def _of_all(self, key: str) -> Any:
        return self._metadata.get(f"{TOWER}.{key}")

    def _keys(self) -> Iterator[str]:
        yield from _OF_ALL
        yield from (f"vision.{key}" for key in ("projector_type", *_STATED, *self.projector.keys))

    def _vision(self) -> Json:
        """Return the metadata of the tower."""
        prefix = f"{TOWER}.vision."
        vision = {
            key.removeprefix(prefix): value for key, value in self._metadata.items() if key.startswith(prefix)
        }
        for key in _STATED:
            if key not in vision:
                raise damaged(self.path, f"it does not state '{prefix}{key}'")
        for key in _COUNTS:
            count(vision, key)
        activation = next((key for key in _ACTIVATIONS if self._of_all(key)), "")
        if activation != self.projector.activation:
            raise UnsupportedModelError(
                f"{self.path} has the activation '{activation or 'none'}', and towers of the projector type "
                f"'{self.type}' that are supported have '{self.projector.activation or 'none'}'"
            )
        return vision

    def _named(self, infos: Sequence[TensorInfo]) -> Iterator[TensorInfo]:
        """Yield the tensors under their names of now.

        Files of early converters call the two layers of a feed-forward network the other way around;
        llama.cpp tells these by their shapes too.
        """
        size = self.vision["embedding_length"]
        first = next((info.shape for info in infos if info.name == "v.blk.0.ffn_down.weight"), ())
        swapped = "ffn_gate" not in self.projector.inner and len(first) == 2 and first[1] == size != first[0]
        other = {"ffn_up": "ffn_down", "ffn_down": "ffn_up"} if swapped else {}
        for info in infos:
            block = _BLOCK.fullmatch(info.name)
            if block is not None and block[2] in other:
                yield dataclasses.replace(info, name=f"v.blk.{block[1]}.{other[block[2]]}.{block[3]}")
            else:
                yield info

    def _add(self, info: TensorInfo) -> None:
        name = self.projector.name(info.name)
        if name is None:
            raise UnsupportedModelError(
                f"{self.path} has the tensor '{info.name}', which towers of the projector type '{self.type}' "
                "that are supported do not have"
            )
        if info.type_name not in FLOATS and info.type_name not in LAYOUTS:
            known = ", ".join([*FLOATS, *LAYOUTS])
            raise UnsupportedModelError(
                f"{self.path}: tensor '{info.name}' has type {info.type_name}; supported: {known}"
            )
        self.tensors[name] = GgufTensor(self._data, info, None, self.projector.offsets.get(info.name, 0.0))


class _Module(Protocol):
    NAME: str
    PROJECTOR: Projector


def projectors() -> dict[str, Projector]:
    """Return all projector types that are read, by name, sorted."""
    names = sorted(each.name for each in pkgutil.iter_modules(modules.__path__))
    every = [cast(_Module, importlib.import_module(f"{modules.__name__}.{name}")) for name in names]
    return {module.NAME: module.PROJECTOR for module in every}


def projector(path: Path, name: str) -> Projector:
    """Return the projector type of a file.

    Raises:
        UnsupportedModelError: it is not supported.
    """
    known = projectors()
    if name not in known:
        raise UnsupportedModelError(
            f"{path}: vision towers of the projector type '{name}' are not supported; these are: "
            f"{', '.join(known)}. The model's safetensors checkpoint may see"
        )
    return known[name]


def count(vision: Json, key: str, default: int | None = None) -> int:
    """Return a positive integer of the metadata.

    Raises:
        CheckpointError: it is none.
    """
    value = vision.get(key, default)
    if type(value) is not int or value < 1:
        raise CheckpointError(f"the GGUF file's 'clip.vision.{key}' is {value!r}, no positive integer")
    return value


def siglip_config(vision: Json) -> Json:
    """Return ``vision_config`` of a SigLIP tower."""
    names = {
        "embedding_length": "hidden_size",
        "feed_forward_length": "intermediate_size",
        "block_count": "num_hidden_layers",
        "attention.head_count": "num_attention_heads",
        "attention.layer_norm_epsilon": "layer_norm_eps",
        "image_size": "image_size",
        "patch_size": "patch_size",
    }
    sizes = {name: vision[key] for key, name in names.items()}
    return {**sizes, "num_channels": 3, "hidden_act": "gelu_pytorch_tanh"}
