"""Writes a changed graph: as a package where there is a tokenizer, else as plain ONNX."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import onnx_ir as ir

from ...errors import OutputExistsError, UsageError
from ...exporter.package import TOKENIZER_FILE, Package, check_paths, write_package
from ...graph_opt.graph import graph_facts
from ...graph_opt.graph.map_types import restore_map_types
from ...progress import Progress
from ...storage.paths import check_name
from ...storage.writing import hide_scratch, writing


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
    check_output(source, out)
    if out.suffix == ".onnx":
        _write_file(model, out)
    else:
        source = _folder(source)
        record = Package.open(source).record if Package.is_package(source) else None
        write_package(
            model,
            source,
            out,
            quantization=quantization or (record.quantization if record else None),
            passes=(*(record.passes if record else ()), *passes),
            progress=progress,
        )


def check_output(source: Path, out: Path) -> None:
    """Refuse what ``write_graph`` would refuse, before any work.

    Raises:
        OutputExistsError: ``out`` exists.
        UsageError: ``source`` is an ONNX file and ``out`` is none, or its folder does not exist.
    """
    check_name(out)
    if out.suffix == ".onnx":
        for path in (out, _data_file(out)):
            if path.exists():
                raise OutputExistsError(f"{path} exists; choose another name or delete it")
        if not out.absolute().parent.is_dir():
            raise UsageError(f"there is no folder {out.parent} to write {out.name} to")
    elif _folder(source).is_file():
        raise UsageError(f"{source} is an ONNX file, so the result is one too: call it {out}.onnx")
    else:
        check_paths(_folder(source), out)


def _folder(source: Path) -> Path:
    """Return the folder of an ONNX file that has configuration and tokenizer beside it, else ``source``."""
    folder = source.parent
    whole = source.is_file() and all((folder / name).is_file() for name in ("config.json", TOKENIZER_FILE))
    return folder if whole else source


def _data_file(out: Path) -> Path:
    return out.with_name(f"{out.name}.data")


def _write_file(model: ir.Model, out: Path) -> None:
    """Write the two files under a temporary name beside ``out``, the weights' file first in place."""
    data = _data_file(out)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}.") as folder:
        try:
            with writing(Path(folder, data.name)):
                ir.save(model, Path(folder, out.name), external_data=data.name)
                restore_map_types(model, Path(folder, out.name))
            if Path(folder, data.name).exists():
                Path(folder, data.name).rename(data)
            Path(folder, out.name).rename(out)
        except OSError as error:
            data.unlink(missing_ok=True)  # which was not there before, see check_output
            hide_scratch(error, Path(folder), out.parent)
            raise


_LARGEST_FILE = 1 << 30  # bytes of weights in the model's own file; protobuf ends at 2 GB


def write_single_file(model: ir.Model, out: Path, *, at_most: int) -> int:
    """Write a graph as one file, weights beside it only where they are many; nothing is left if that fails.

    Args:
        model: the graph.
        out: the file, which must not exist.
        at_most: bytes that the result may have.

    Returns:
        Bytes written.

    Raises:
        UsageError: the result is larger.
    """
    stored = sum(tensor.nbytes for tensor in graph_facts.initializers(model))
    data = _data_file(out).name if stored > _LARGEST_FILE else None
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}.") as folder:
        try:
            with writing(Path(folder, out.name)):
                ir.save(model, Path(folder, out.name), external_data=data)
        except OSError as error:
            hide_scratch(error, Path(folder), out.parent)
            raise
        files = sorted(Path(folder).iterdir(), reverse=True)  # the weights' file first
        size = sum(file.stat().st_size for file in files)
        if size > at_most:
            raise UsageError(
                f"the result would be larger than the source, {size} bytes instead of {at_most}: too little "
                "of the model can be quantized in this way; try another --method"
            )
        for file in files:
            file.rename(out.with_name(file.name))
    return size
