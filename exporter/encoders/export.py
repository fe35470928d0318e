"""Build the portable graph of a text encoder from a checkpoint."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol, cast

import onnx_ir as ir

from ...contract import CONTEXT_LENGTH, LOGITS
from ...errors import CheckpointError, UnsupportedModelError, WeightWarning
from ...storage.stored_tensor import StoredTensor
from ..config import MAX_LAYERS, MAX_POSITIONS, RawConfig, module_name, read_config
from ..weights import Checkpoint
from . import families
from .encoder import EncoderConfig, EncoderWriter
from .heads import Heads, vector_heads
from .names import CLASSIFIER, TOKEN_CLASSIFIER, classifies_tokens, is_classifier, known_name
from .text_form import TextForm

# Architectures whose head is left out, unless the files of sentence-transformers ask for it.
_ENCODERS = ("Model", "ForMaskedLM", "ForPreTraining", "HF_ColBERT")


class EncoderFamily(Protocol):
    """What each module in ``families/`` defines.

    A family also defines the heads that it has: ``classify(net, raw, states, base)`` returns logits [batch,
    labels], ``classify_tokens(net, raw, states)`` [batch, sequence, labels], and
    ``vocabulary(net, raw, states, base)`` [batch, sequence, vocabulary]. ``base`` prefixes the tensors.

    A family whose files do not say how states become vectors defines ``text_form(raw, checkpoint)``.

    Attributes:
        BASE: the prefix of the encoder's tensors in a checkpoint with a head, or several of which it has one.
        UNUSED: parts of the names of tensors that only other tasks need.
    """

    BASE: str | tuple[str, ...]
    UNUSED: tuple[str, ...]

    def config(self, raw: RawConfig, labels: int) -> EncoderConfig:
        """Normalise config.json."""

    def build(self, net: EncoderWriter, raw: RawConfig) -> ir.Value:
        """Write the encoder and return the states of its last layer."""


def encoder_family(model_type: str) -> EncoderFamily:
    """Return the module of a family of ``encoder_families``."""
    return cast(EncoderFamily, importlib.import_module(f"{families.__name__}.{module_name(model_type)}"))


def export_encoder(
    source: Path, config: RawConfig | None = None, tensors: Mapping[str, StoredTensor] | None = None
) -> ir.Model:
    """Build the portable graph of a checkpoint folder of an encoder, with lazily read weights.

    Inputs are ``input_ids``, ``attention_mask`` and, where the model tells texts apart, ``token_type_ids``,
    all int64 [batch, sequence]. Outputs are float32: ``last_hidden_state`` [batch, sequence, hidden];
    ``logits`` [batch, labels] of a model for sequence classification, [batch, sequence, labels] of one for
    token classification; and those of ``vector_heads``.

    Args:
        source: the folder.
        config: the content of its config.json, if already read.
        tensors: the tensors by name, if they are not in the folder's safetensors files.

    Raises:
        UnsupportedModelError: the task, or an option of the configuration, is not supported.
        CheckpointError: a weight is missing or does not match the configuration.
    """
    raw = read_config(source) if config is None else config
    family = encoder_family(known_name(raw))
    normalised = _config(family, raw)
    checkpoint = Checkpoint(source, tensors)
    _check_layers(normalised, checkpoint)
    net = EncoderWriter(normalised, checkpoint)
    bases = (family.BASE,) if isinstance(family.BASE, str) else family.BASE
    base = next((name for name in bases if checkpoint.has_prefix(f"{name}.")), "")
    with net.base(base):
        states = family.build(net, raw)
    model = net.finish(states, _heads(family, net, raw, states, base))
    model.metadata_props[CONTEXT_LENGTH] = str(normalised.max_tokens)
    text_form: Callable[[RawConfig, Checkpoint], TextForm] | None = getattr(family, "text_form", None)
    if text_form is not None:
        model.metadata_props.update(text_form(raw, checkpoint).metadata())
    checkpoint.ignore(*family.UNUSED)
    if unused := checkpoint.unused():
        shown = ", ".join(unused[:5]) + (", ..." if len(unused) > 5 else "")
        text = f"{len(unused)} tensors of {source} are not used by model_type '{raw['model_type']}': {shown}"
        warnings.warn(text, WeightWarning, stacklevel=2)
    return model


def label_names(raw: RawConfig) -> list[str]:
    """Return the names of the labels of a model for sequence classification, in the order of its logits."""
    labels = raw.get("id2label")
    count = len(labels) if isinstance(labels, dict) and labels else raw.get("num_labels", 2)
    if not isinstance(count, int) or isinstance(count, bool) or not 1 <= count <= 2**20:
        raise CheckpointError(f"config.json: 'num_labels' must be a positive integer, found {count!r}")
    names = labels if isinstance(labels, dict) else {}
    return [str(names.get(str(number), f"LABEL_{number}")) for number in range(count)]


def _heads(family: EncoderFamily, net: EncoderWriter, raw: RawConfig, states: ir.Value, base: str) -> Heads:
    """Write the heads behind the states, and return their outputs."""
    labels = net.config.labels
    if labels and is_classifier(raw):
        classify = _head(family, "classify", "sequence classification", raw)
        return {LOGITS: (classify(net, raw, states, base), ("batch", labels))}
    if labels:
        classify = _head(family, "classify_tokens", "token classification", raw)
        return {LOGITS: (classify(net, raw, states), ("batch", "sequence", labels))}
    vocabulary = getattr(family, "vocabulary", None)
    return vector_heads(net, states, vocabulary and (lambda: vocabulary(net, raw, states, base)))


def _head(family: EncoderFamily, name: str, task: str, raw: RawConfig) -> Callable[..., ir.Value]:
    """Return the function of a family that writes a head.

    Raises:
        UnsupportedModelError: the family has no such head.
    """
    head: Callable[..., ir.Value] | None = getattr(family, name, None)
    if head is None:
        raise UnsupportedModelError(
            f"{task} by an encoder of model_type '{raw['model_type']}' is not supported"
        )
    return head


def _labels(raw: RawConfig) -> int:
    """Return the number of labels; 0 for a model without a classification head.

    Raises:
        UnsupportedModelError: the model has another head.
    """
    names = [str(name) for name in raw.get("architectures") or []]
    if is_classifier(raw) or classifies_tokens(raw):
        return len(label_names(raw))
    other = [name for name in names if not name.endswith(_ENCODERS)]
    if other:
        raise UnsupportedModelError(
            f"architecture '{other[0]}' is not supported; supported: *{CLASSIFIER}, *{TOKEN_CLASSIFIER}, "
            + ", ".join(f"*{name}" for name in _ENCODERS)
        )
    return 0


def _config(family: EncoderFamily, raw: RawConfig) -> EncoderConfig:
    if raw.get("quantization_config"):
        raise UnsupportedModelError("quantized checkpoints of encoders are not supported; take the float one")
    labels = _labels(raw)
    try:
        config = family.config(raw, labels)
    except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
        raise CheckpointError(f"config.json does not describe a {raw['model_type']}: {error}") from error
    if not isinstance(config.hidden_act, str):
        raise CheckpointError(f"config.json: 'hidden_act' must be a name, found {config.hidden_act!r}")
    if not 1 <= config.num_heads <= 2**16 or (
        config.head_size is None and config.hidden_size % config.num_heads
    ):
        raise CheckpointError(
            f"config.json: hidden_size {config.hidden_size} must be a multiple of the number of heads "
            f"{config.num_heads}"
        )
    if config.num_heads % (config.kv_heads or config.num_heads):
        raise CheckpointError(
            f"config.json: {config.num_heads} heads of queries are no multiple of {config.kv_heads} of keys"
        )
    if not 1 <= config.num_layers <= MAX_LAYERS or not 1 <= config.max_tokens <= MAX_POSITIONS:
        raise CheckpointError(
            f"config.json: {config.num_layers} layers for {config.max_tokens} tokens are out of range"
        )
    for name in ("windows", "ropes"):
        if len(found := getattr(config, name)) not in (0, config.num_layers):
            raise CheckpointError(f"config.json describes {len(found)} {name} for {config.num_layers} layers")
    if not 0 < config.norm_eps <= 1:
        raise CheckpointError(f"config.json: an epsilon of {config.norm_eps} of the norms is out of (0, 1]")
    return config


def _check_layers(config: EncoderConfig, checkpoint: Checkpoint) -> None:
    counts, expected = checkpoint.layer_counts(), config.stored_layers or config.num_layers
    if expected not in counts.values():
        held = ", ".join(f"{count} of '{prefix}.N'" for prefix, count in sorted(counts.items())) or "none"
        raise CheckpointError(f"config.json says {expected} layers; {checkpoint.source} holds {held}")
