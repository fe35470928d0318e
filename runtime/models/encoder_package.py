"""Export a text encoder: the part of ``carryall.export`` for models that generate no text."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import onnx_ir as ir

from ...contract import CONTEXT_LENGTH
from ...errors import UsageError
from ...exporter.config import LENGTH_KEYS
from ...exporter.encoders.export import export_encoder
from ...exporter.encoders.modules import side_files
from ...exporter.package import Package, fingerprint
from ...exporter.package_writing import check_paths, check_tokenizer, write_package
from ...progress import Progress, phase


def check_encoder_options(model_type: str, options: Mapping[str, bool]) -> None:
    """Refuse options that only decoders have.

    Args:
        model_type: of the encoder.
        options: by option, whether it was given.

    Raises:
        UsageError: one was given.
    """
    found = [name for name, was_given in options.items() if was_given]
    if found:
        raise UsageError(
            f"'{model_type}' is a text encoder, for which export has no {found[0]}; to quantize it, export "
            "it and run carryall quantize DST/model.onnx OUT.onnx --method int8-dynamic"
        )


def export_encoder_package(
    folder: Path, out: Path, options: Mapping[str, bool], progress: Progress | None
) -> tuple[Package, ir.Model]:
    """Write the package of an encoder.

    Args:
        folder: its checkpoint.
        out: the package, a new folder.
        options: see ``check_encoder_options``.
        progress: called for every tensor, in bytes.

    Raises:
        UsageError: an option is given that only decoders have.
        UnsupportedModelError: see ``export_encoder``.
        CheckpointError: see ``export_encoder``.
        OSError: a file cannot be written.
    """
    config = check_paths(folder, out)  # before any work
    check_tokenizer(folder)
    check_encoder_options(config["model_type"], options)
    others = side_files(folder)
    model = export_encoder(folder, config)
    length = {LENGTH_KEYS[0]: int(model.metadata_props[CONTEXT_LENGTH])}
    package = write_package(
        model,
        folder,
        out,
        content=fingerprint(folder),
        config={**config, **length},
        others=others,
        progress=phase(progress, "export"),
    )
    return package, model
