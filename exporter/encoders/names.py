"""Which checkpoints are text encoders, and of what kind, told by config.json."""

from __future__ import annotations

import pkgutil

from ..config import RawConfig
from . import families

CLASSIFIER, TOKEN_CLASSIFIER = "ForSequenceClassification", "ForTokenClassification"
# Model types of decoders, whose checkpoints are encoders with ``use_bidirectional_attention``.
_DECODERS_TOO = ("gemma3-text",)


def encoder_families() -> list[str]:
    """Return every ``model_type`` of an encoder that can be exported, sorted."""
    return sorted(_name(module.name) for module in pkgutil.iter_modules(families.__path__))


def is_encoder(raw: RawConfig) -> bool:
    """Return whether a config.json describes an encoder that can be exported."""
    name = known_name(raw)
    if name in _DECODERS_TOO and not raw.get("use_bidirectional_attention"):
        return False
    return name in encoder_families()


def is_classifier(raw: RawConfig) -> bool:
    """Return whether a config.json describes a model for sequence classification."""
    return _ends_with(raw, CLASSIFIER)


def classifies_tokens(raw: RawConfig) -> bool:
    """Return whether a config.json describes a model for token classification."""
    return _ends_with(raw, TOKEN_CLASSIFIER)


def known_name(raw: RawConfig) -> str:
    """Return the name of a family, as in ``encoder_families``."""
    return _name(str(raw["model_type"]))


def _name(model_type: str) -> str:
    return model_type.replace("_", "-")


def _ends_with(raw: RawConfig, head: str) -> bool:
    return any(str(name).endswith(head) for name in raw.get("architectures") or [])
