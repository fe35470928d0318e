"""Which checkpoints are text encoders, told by config.json."""

from __future__ import annotations

import pkgutil

from ..config import RawConfig
from . import families

CLASSIFIER = "ForSequenceClassification"


def encoder_families() -> list[str]:
    """Return every ``model_type`` of an encoder that can be exported, sorted."""
    return sorted(module.name.replace("_", "-") for module in pkgutil.iter_modules(families.__path__))


def is_encoder(raw: RawConfig) -> bool:
    """Return whether a config.json describes an encoder that can be exported."""
    return known_name(raw) in encoder_families()


def is_classifier(raw: RawConfig) -> bool:
    """Return whether a config.json describes a model for sequence classification."""
    return any(str(name).endswith(CLASSIFIER) for name in raw.get("architectures") or [])


def known_name(raw: RawConfig) -> str:
    """Return the name of a family, as in ``encoder_families``."""
    return str(raw["model_type"]).replace("_", "-")
