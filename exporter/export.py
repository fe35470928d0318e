"""Hugging Face checkpoint -> portable graph -> package."""

from __future__ import annotations

import importlib
import json
import pkgutil
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol, cast

import onnx_ir as ir

from ..contract import CONTEXT_LENGTH
from ..errors import CheckpointError, UnsupportedModelError, UsageError
from ..progress import Progress
from ..storage.stored_tensor import StoredTensor
from . import models
from .config import DecoderConfig, RawConfig, context_lengths, read_config
from .config_checks import check_config, check_layer_count
from .decoder import Decoder
from .gguf.file import GGUF_SUFFIX, GgufFile
from .gguf.tokenizer import tokenizer_files
from .package import Package, check_paths, check_tokenizer, fingerprint, write_package
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


def export_model(
    source: Path, config: RawConfig | None = None, tensors: Mapping[str, StoredTensor] | None = None
) -> ir.Model:
    """Write the portable graph of a checkpoint folder, whose weights are read when they are asked for.

    Args:
        source: the folder.
        config: its config.json, where that was read already.
        tensors: the checkpoint's tensors by name, where they do not lie in the folder.

    Raises:
        UnsupportedModelError: no exporter knows the model, or something it is configured to do.
        CheckpointError: a weight is missing or not as the configuration says.
    """
    raw = read_config(source) if config is None else config
    module = family(raw["model_type"])
    normalised, context_length = _config(module, raw), context_lengths(raw)[1]
    checkpoint = Checkpoint(source, tensors)
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
        source: a Hugging Face checkpoint folder, or a GGUF file.
        out: where the package goes: a folder that is empty or does not exist.
        transform: applied to the graph before it is written, such as a quantizer; its lazy initializers are
            evaluated by the threads that write them.
        quantization: what ``transform`` does to the weights, for the package's record.
        passes: the names of the passes in ``transform``, for the package's record.
        progress: told about every tensor written.

    Raises:
        OutputExistsError: ``out`` holds something.
        UnsupportedModelError: see ``export_model``.
        UsageError: the file is quantized already, and ``quantization`` is given.
        CheckpointError: see ``export_model``, or the tokenizer is missing or damaged.
        OSError: the disk is full, or the like; nothing is left behind.
    """
    with opened(source) as (folder, tensors, stored):
        if quantization is not None:
            check_float(source, stored)
        config = check_paths(folder, out)  # before any work of the transformation
        check_tokenizer(folder)
        model = export_model(folder, config, tensors)
        if transform is not None:
            model = transform(model)
        return write_package(
            model,
            folder,
            out,
            quantization=quantization or stored,
            passes=passes,
            progress=progress,
            config=config,
            content=fingerprint(source),
        )


def check_float(source: Path, stored: dict[str, Any] | None) -> None:
    """Refuse to quantize weights again.

    Args:
        source: the file.
        stored: how its weights are quantized; None for floats.

    Raises:
        UsageError: they are quantized.
    """
    if stored is not None:
        raise UsageError(
            f"{source} is quantized already ({', '.join(stored['types'])}); leave out the quantization, or "
            "take the model's float checkpoint"
        )


@contextmanager
def opened(
    source: Path,
) -> Iterator[tuple[Path, Mapping[str, StoredTensor] | None, dict[str, Any] | None]]:
    """Yield a folder with configuration and tokenizer, the tensors, and how these are quantized.

    For a folder these are the folder itself, None and None. The metadata of a GGUF file is written to a
    temporary folder.

    Raises:
        CheckpointError: the GGUF file is damaged.
        UnsupportedModelError: carryall cannot read what the GGUF file holds.
    """
    if source.suffix.lower() != GGUF_SUFFIX:
        yield source, None, None
        return
    file = GgufFile(source)
    with tempfile.TemporaryDirectory(prefix="carryall-") as name:
        folder = Path(name)
        config = file.config
        for path, content in {
            "config.json": json.dumps(config),
            **tokenizer_files(file.metadata, config["vocab_size"]),
        }.items():
            (folder / path).write_text(content, encoding="utf-8")
        yield folder, file.tensors, file.quantization
