"""Short names of models on the Hugging Face hub, such as ``qwen3.5-4b``."""

from __future__ import annotations

import functools
from collections.abc import Mapping

from ..records import dataclass


@dataclass(frozen=True, slots=True)
class NamedModel:
    """A model that has a short name.

    Args:
        hub: its hub id, ``org/name[:part]``.
        size: GB to download at most, 1e9 bytes.
        licence: as its publisher states it.
    """

    hub: str
    size: float
    licence: str


@functools.cache
def named_models() -> Mapping[str, NamedModel]:
    """Return the models of ``model_names.toml`` by their names."""
    import tomllib  # 3 ms of each start with a file in place of a name
    from importlib import resources

    text = (resources.files(__package__) / "model_names.toml").read_text(encoding="utf-8")
    return {name: NamedModel(**fields) for name, fields in tomllib.loads(text).items()}


def named_model(name: str) -> NamedModel | None:
    """Return the model of a name, in any case; None if there is none."""
    return named_models().get(name.lower())


def similar_names(name: str) -> list[str]:
    """Return at most three names that look alike, the most similar first."""
    import difflib

    return difflib.get_close_matches(name.lower(), named_models(), 3, 0.7)
