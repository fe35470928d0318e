"""Writes a changed graph: as a package where there is a tokenizer, else as plain ONNX."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import onnx_ir as ir

from ..exporter.package import Package, Progress, write_package
from ..runtime.errors import OutputExistsError, UsageError


def write_graph(
    model: ir.Model,
    source: Path,
    out: Path,
    *,
    passes: tuple[str, ...] = (),
    quantization: dict[str, Any] | None = None,
    progress: Progress | None = None,
) -> None:
    """Write a graph; nothing is left behind if that fails.

    Args:
        model: the graph.
        source: what it was made from: a package, a checkpoint folder, or an ONNX file.
        out: a new folder, or a new ONNX file if it ends in ``.onnx``.
        passes: names of the passes applied, for a package's record.
        quantization: how the weights were quantized now; None if they were not.
        progress: told about every tensor written into a package.

    Raises:
        OutputExistsError: ``out`` exists.
        UsageError: ``source`` is an ONNX file and ``out`` is none.
    """
    if out.suffix == ".onnx":
        _write_file(model, out)
    elif source.is_file():
        raise UsageError(f"{source} is an ONNX file, so the result is one too: call it {out}.onnx")
    else:
        record = Package.open(source).record if Package.is_package(source) else None
        write_package(
            model,
            source,
            out,
            quantization=quantization or (record.quantization if record else None),
            passes=(*(record.passes if record else ()), *passes),
            progress=progress,
        )


def _write_file(model: ir.Model, out: Path) -> None:
    """Write the two files under a temporary name beside ``out``, the weights' file first in place."""
    data = f"{out.name}.data"
    for path in (out, out.with_name(data)):
        if path.exists():
            raise OutputExistsError(f"{path} exists; choose another name or delete it")
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}.") as folder:
        ir.save(model, Path(folder, out.name), external_data=data)
        for name in (data, out.name):
            if Path(folder, name).exists():
                Path(folder, name).rename(out.with_name(name))
