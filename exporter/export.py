"""Hugging Face checkpoint -> portable graph -> package."""

from __future__ import annotations

import importlib
import pkgutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol, cast

import onnx_ir as ir

from ..contract import CONTEXT_LENGTH
from ..errors import CheckpointError, UnsupportedModelError
from ..progress import Progress
from . import models
from .config import DecoderConfig, RawConfig, context_lengths, read_config
from .config_checks import check_config, check_layer_count
from .decoder import Decoder
from .package import Package, check_paths, check_tokenizer, write_package
from .weights import Checkpoint, WeightWarning


class Family(Protocol):
    """What a module in ``models/`` exports."""

    def config(self, raw: RawConfig) -> DecoderConfig:
        """Normalise config.json."""

    def build(self, net: Decoder) -> ir.Value:
        """Write the decoder and return its logits."""


def families() -> list[str]:
    """Every ``model_type`` that can be exported."""
    return sorted(module.name for module in pkgutil.iter_modules(models.__path__))


def family(model_type: str) -> Family:
    """The module of one family.

    Raises:
        UnsupportedModelError: there is none.
    """
    if model_type not in families():
        raise UnsupportedModelError(
            f"no exporter for model_type '{model_type}'; there is one for: {', '.join(families())}. "
            "Other models can be traced: carryall export SRC DST --via optimum"
        )
    return cast(Family, importlib.import_module(f"{models.__name__}.{model_type}"))


def export_model(source: Path, config: RawConfig | None = None) -> ir.Model:
    """Write the portable graph of a checkpoint folder, whose weights are read when they are asked for.

    Args:
        source: the folder.
        config: its config.json, where that was read already.

    Raises:
        UnsupportedModelError: no exporter knows the model, or something it is configured to do.
        CheckpointError: a weight is missing or not as the configuration says.
    """
    raw = read_config(source) if config is None else config
    module = family(raw["model_type"])
    normalised, context_length = _config(module, raw), context_lengths(raw)[1]
    checkpoint = Checkpoint(source)
    check_layer_count(normalised, checkpoint)
    net = Decoder(normalised, checkpoint)
    model = net.finish(module.build(net))
    model.metadata_props[CONTEXT_LENGTH] = str(context_length)
    unused = net.checkpoint.unused()
    if unused:
        shown = ", ".join(unused[:5]) + (", ..." if len(unused) > 5 else "")
        warnings.warn(
            f"{len(unused)} tensors have no place in a {raw['model_type']}: {shown}", WeightWarning, 2
        )
    return model


def _config(module: Family, raw: RawConfig) -> DecoderConfig:
    try:
        config = module.config(raw)
    except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
        # A family reads the file's values as they come; one of another type is the file's fault.
        raise CheckpointError(f"config.json does not describe a {raw['model_type']}: {error}") from error
    check_config(config)
    return config


def export_package(
    source: Path,
    out: Path,
    *,
    transform: Callable[[ir.Model], ir.Model] | None = None,
    quantization: dict[str, Any] | None = None,
    passes: tuple[str, ...] = (),
    progress: Progress | None = None,
) -> Package:
    """Export a checkpoint folder into a package.

    Args:
        source: a Hugging Face checkpoint folder.
        out: where the package goes: a folder that is empty or does not exist.
        transform: applied to the graph before it is written, such as a quantizer; its lazy initializers are
            evaluated by the threads that write them.
        quantization: what ``transform`` does to the weights, for the package's record.
        passes: the names of the passes in ``transform``, for the package's record.
        progress: told about every tensor written.

    Raises:
        OutputExistsError: ``out`` holds something.
        UnsupportedModelError: see ``export_model``.
        CheckpointError: see ``export_model``, or the tokenizer is missing or damaged.
        OSError: the disk is full, or the like; nothing is left behind.
    """
    config = check_paths(source, out)  # before any work of the transformation
    check_tokenizer(source)
    model = export_model(source, config)
    if transform is not None:
        model = transform(model)
    return write_package(
        model, source, out, quantization=quantization, passes=passes, progress=progress, config=config
    )
