"""The families of decoders: one module each in ``models/``."""

from __future__ import annotations

import importlib
import pkgutil
from typing import Protocol, cast

import onnx_ir as ir

from ..errors import CheckpointError, UnsupportedModelError
from . import models
from .config import DecoderConfig, RawConfig, module_name
from .config_checks import check_config, check_options
from .decoder import Decoder


class Family(Protocol):
    """The functions that each module in a folder of ``models/`` defines."""

    def config(self, raw: RawConfig) -> DecoderConfig:
        """Normalise config.json."""

    def build(self, net: Decoder) -> ir.Value:
        """Write the decoder and return its logits."""


def families() -> list[str]:
    """Return every ``model_type`` that can be exported, sorted."""
    return sorted(module.name for module in pkgutil.iter_modules(models.__path__))


def family(model_type: str) -> Family:
    """Return the module of a model family.

    Raises:
        UnsupportedModelError: no module exists for ``model_type``.
    """
    name = module_name(model_type)
    if name not in families():
        raise UnsupportedModelError(
            f"model_type '{model_type}' has no exporter; supported: {', '.join(families())}. "
            "Other models can be traced: carryall export SRC DST --via optimum"
        )
    return cast(Family, importlib.import_module(f"{models.__name__}.{name}"))


def normalised_config(raw: RawConfig) -> DecoderConfig:
    """Return the content of config.json as its family reads it.

    Raises:
        UnsupportedModelError: the model family, or an option of its configuration, is not supported.
        CheckpointError: it is not valid.
    """
    module = family(raw["model_type"])
    check_options(raw)
    try:
        config = module.config(raw)
    except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
        # Families do not check the types of values that they read; a wrong type is an error of the file.
        raise CheckpointError(f"config.json does not describe a {raw['model_type']}: {error}") from error
    check_config(config)
    return config
