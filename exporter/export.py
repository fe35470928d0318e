"""Export a Hugging Face checkpoint to a portable graph, and write it as a package."""

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
    """The functions that each module in ``models/`` defines."""

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
    if model_type not in families():
        raise UnsupportedModelError(
            f"model_type '{model_type}' has no exporter; supported: {', '.join(families())}. "
            "Other models can be traced: carryall export SRC DST --via optimum"
        )
    return cast(Family, importlib.import_module(f"{models.__name__}.{model_type}"))


def export_model(source: Path, config: RawConfig | None = None) -> ir.Model:
    """Build the portable graph of a checkpoint folder, with lazily read weights.

    Args:
        source: the checkpoint folder.
        config: the content of its config.json, if already read.

    Raises:
        UnsupportedModelError: the model family, or an option of its configuration, is not supported.
        CheckpointError: a weight is missing or does not match the configuration.
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
            f"{len(unused)} tensors of {source} are not used by model_type '{raw['model_type']}': {shown}",
            WeightWarning,
            2,
        )
    return model


def _config(module: Family, raw: RawConfig) -> DecoderConfig:
    try:
        config = module.config(raw)
    except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
        # Families do not check the types of values that they read; a wrong type is an error of the file.
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
        out: the folder of the package; must be empty or not exist.
        transform: applied to the graph before it is written, such as a quantizer. The threads that write the
            weights evaluate its lazy initializers.
        quantization: how ``transform`` quantizes the weights; stored in the package's record.
        passes: the names of the passes in ``transform``; stored in the package's record.
        progress: called after each tensor written.

    Raises:
        OutputExistsError: ``out`` is not empty.
        UnsupportedModelError: see ``export_model``.
        CheckpointError: see ``export_model``, or the tokenizer is missing or damaged.
        OSError: a file cannot be written; the incomplete package is deleted.
    """
    config = check_paths(source, out)  # fail before the slow transformation
    check_tokenizer(source)
    model = export_model(source, config)
    if transform is not None:
        model = transform(model)
    return write_package(
        model, source, out, quantization=quantization, passes=passes, progress=progress, config=config
    )
