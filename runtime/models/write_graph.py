"""Write a changed graph as a package or as an ONNX file."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import onnx_ir as ir

from ...contract import CONTEXT_LENGTH
from ...errors import OutputExistsError, UsageError
from ...exporter.config import read_config
from ...exporter.draft_heads import draft_head_model
from ...exporter.export import opened, sight
from ...exporter.package import DRAFT_HEAD_FILE, TOKENIZER_FILE, Package
from ...exporter.package_writing import check_paths, write_package
from ...graph_opt.graph import graph_facts
from ...graph_opt.graph.half_scales import narrowed_scales
from ...graph_opt.graph.load import load_model, read_model
from ...graph_opt.graph.map_types import restore_map_types
from ...graph_opt.graph.saving import save_checked
from ...progress import Progress
from ...storage.paths import check_place
from ...storage.scratch import folder_beside
from ...storage.writing import publish, writing
from .context import optional_config
from .find import side_folder


def write_graph(
    model: ir.Model,
    source: Path,
    out: Path,
    *,
    passes: tuple[str, ...] = (),
    quantization: dict[str, Any] | None = None,
    unchanged: bool = False,
    change_head: Callable[[ir.Model], ir.Model] | None = None,
    progress: Progress | None = None,
) -> None:
    """Write a graph; partial files are deleted if that fails.

    A package gets what the source sees, hears and predicts further tokens with.

    Args:
        model: the graph.
        source: the model that it was made from: a package, a checkpoint folder, or an ONNX file.
        out: a new folder, or a new ONNX file if it ends in ``.onnx``. Its weights are in a second file,
            unless the source is one file and small.
        passes: names of the applied passes, for a package's record.
        quantization: the record of the quantization; None keeps that of ``source``.
        unchanged: whether ``model`` is the source's graph, so that a source of one file is copied.
        change_head: applied to the graph of the source's draft head, such as a quantizer.
        progress: called for every tensor written into a package.

    Raises:
        OutputExistsError: ``out`` exists.
        CheckpointError: a weight or a processor of a checkpoint, which the graph has not, is damaged.
        UsageError: ``source`` is an ONNX file, but ``out`` does not end in ``.onnx``.
    """
    check_output(source, out)
    if out.suffix == ".onnx":
        whole = source.is_file() and _holds_its_weights(source)
        if whole and unchanged:
            with folder_beside(out, out.parent) as folder:
                with writing(folder / out.name):
                    shutil.copyfile(source, folder / out.name)
                _publish_all(folder, out)
            return
        one_file = whole and _is_small(source, model)
        _write_files(model, out, None if one_file else _data_file(out).name)
    else:
        folder = _folder(source)
        record = Package.open(folder).record if Package.is_package(folder) else None
        sees, head = _beside(source)
        write_package(
            model,
            folder,
            out,
            context_length=_stated_length(model),
            quantization=quantization or (record.quantization if record else None),
            passes=(*(record.passes if record else ()), *passes),
            progress=progress,
            sight=sees,
            head=head if head is None or change_head is None else change_head(head),
        )


def _beside(source: Path) -> tuple[Callable[[Path], None] | None, ir.Model | None]:
    """Return what writes the files that a model sees or hears with, and its draft head, None for none.

    The former is None for packages, whose files are copied.
    """
    if Package.is_package(source):
        head = source / DRAFT_HEAD_FILE
        return None, load_model(head) if head.is_file() else None
    if not source.is_dir():
        return None, None
    with opened(source) as (folder, tensors, _):  # a checkpoint folder, which nothing is written to
        config = read_config(folder)
        return sight(folder, config, tensors), draft_head_model(folder, config, tensors)


def _stated_length(model: ir.Model) -> int | None:
    text = model.metadata_props.get(CONTEXT_LENGTH, "")
    return int(text) if text.isdecimal() else None


def check_output(source: Path, out: Path) -> None:
    """Check the arguments of ``write_graph`` before any work.

    Raises:
        OutputExistsError: ``out`` exists.
        UsageError: ``source`` is an ONNX file, but ``out`` does not end in ``.onnx``; or the folder of
            ``out`` does not exist.
        OSError: ``out`` cannot be created.
    """
    check_place(out)
    if out.suffix == ".onnx":
        _check_missing([out, _data_file(out)])
        if not out.absolute().parent.is_dir():
            raise UsageError(f"there is no folder {out.parent} to write {out.name} to")
    elif _folder(source).is_file():
        raise UsageError(f"{source} is an ONNX file, so the output must be one too: name it {out}.onnx")
    else:
        check_paths(_folder(source), out)


def _check_missing(paths: Iterable[Path]) -> None:
    for path in paths:
        if path.exists():
            raise OutputExistsError(f"{path} exists; choose another name or delete it")


def _folder(source: Path) -> Path:
    """Return the folder of an ONNX file's configuration and tokenizer; ``source`` if it lacks one of them."""
    folder = side_folder(source)
    whole = bool(optional_config(folder)) and (folder / TOKENIZER_FILE).is_file()
    return folder if whole else source


def _data_file(out: Path) -> Path:
    return out.with_name(f"{out.name}.data")


def _holds_its_weights(file: Path) -> bool:
    tensors = graph_facts.initializers(read_model(file))
    return not any(isinstance(tensor, ir.ExternalTensor) for tensor in tensors)


def _is_small(source: Path, model: ir.Model) -> bool:
    stored = sum(tensor.nbytes for tensor in graph_facts.initializers(model))
    return max(source.stat().st_size, stored) <= _SMALL_BYTES


def _write_files(model: ir.Model, out: Path, data: str | None, *, at_most: int | None = None) -> int:
    """Write a graph to a temporary folder beside ``out``, then move the weights, then the graph.

    Args:
        model: the graph.
        out: its file.
        data: the name of the file of its weights; None for those in the graph's file.
        at_most: maximum size of the files in bytes; None for any.

    Returns:
        The size of the files in bytes.

    Raises:
        UsageError: they are larger than ``at_most``.
    """
    with folder_beside(out, out.parent) as folder:
        with writing(folder / (data or out.name)), narrowed_scales(model):
            save_checked(model, folder / out.name, external_data=data)
            restore_map_types(model, folder / out.name)
        size = sum(file.stat().st_size for file in folder.iterdir())
        if at_most is not None and size > at_most:
            raise UsageError(
                f"the result would be larger than the source, {size} bytes instead of {at_most}: this method "
                "quantizes too few weights; try another --method"
            )
        _publish_all(folder, out)
    return size


def _publish_all(folder: Path, out: Path) -> None:
    """Move the files of a temporary folder beside ``out``: the weights, then the graph; all or none."""
    files = sorted(folder.iterdir(), reverse=True)  # the weights' file first
    _check_missing(out.with_name(file.name) for file in files)  # another process may have written them
    try:
        for file in files:
            publish(file, out.with_name(file.name))
    except OSError:
        for file in files:
            out.with_name(file.name).unlink(missing_ok=True)  # none existed before, see check_output
        raise


_SMALL_BYTES = 64 << 20  # of a file whose weights are held in memory twice while it is written
_MAX_INLINE_BYTES = 1 << 30  # of weights in the ONNX file itself; protobuf's limit is 2 GB


def write_single_file(model: ir.Model, out: Path, *, at_most: int) -> int:
    """Write a graph as one file; weights above 1 GiB go to a second one. Partial files are deleted on errors.

    Args:
        model: the graph.
        out: the file, which must not exist.
        at_most: maximum size of the result in bytes.

    Returns:
        The size of all files in bytes.

    Raises:
        UsageError: the result is larger than ``at_most``.
    """
    stored = sum(tensor.nbytes for tensor in graph_facts.initializers(model))
    data = _data_file(out).name if stored > _MAX_INLINE_BYTES else None
    return _write_files(model, out, data, at_most=at_most)
