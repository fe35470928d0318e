"""Calibration samples: ``.npz`` files, images, or random tensors if none are given."""

from __future__ import annotations

import warnings
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from ....errors import CarryallWarning, UsageError
from ....records import dataclass
from ....storage.paths import check_name
from ...compare.input_facts import input_facts
from ...graph.lazy import Array
from .images import IMAGE_SUFFIXES, ImageOptions, read_image

Feed = Mapping[str, Array]
MAX_SAMPLES = 128
_GENERATED = 8
_INTEGERS = 100  # exclusive upper bound of generated integers
_OPEN_SIZE = 64  # size of a dynamic axis of unknown meaning
_IMAGE_SIZE = 224


class GeneratedSamplesWarning(CarryallWarning):
    """A model was calibrated on random tensors."""


@dataclass(frozen=True, slots=True)
class Samples:
    """Inputs of a model for calibration.

    Attributes:
        feeds: one mapping per sample, from input name to tensor.
        origin: description for reports, such as "12 .npz files of calib/".
        generated: whether they are random.
    """

    feeds: Sequence[Feed]
    origin: str
    generated: bool = False


def read_samples(
    graph: ir.Graph, source: Path, *, images: ImageOptions | None = None, limit: int = MAX_SAMPLES
) -> Samples:
    """Read calibration samples for a graph's inputs.

    Args:
        graph: the graph.
        source: an ``.npz`` file whose keys are the input names, an image, or a folder of either.
        images: how pixels are converted; None for the defaults.
        limit: maximum number of samples, the first by name.

    Raises:
        UsageError: the file does not exist, the folder holds no samples, or a sample does not match the
            inputs.
        MissingExtraError: Pillow is not installed, and the samples are images.
    """
    check_name(source)
    if not source.exists():
        raise UsageError(f"the calibration file or folder {source} does not exist")
    files = sorted(source.iterdir()) if source.is_dir() else [source]
    arrays = [path for path in files if path.suffix == ".npz"][:limit]
    pictures = [path for path in files if path.suffix.lower() in IMAGE_SUFFIXES][:limit]
    if arrays and pictures:
        raise UsageError(f"{source} holds .npz files and images; use one kind of file")
    if not arrays and not pictures:
        kinds = ", ".join((".npz", *sorted(IMAGE_SUFFIXES)))
        raise UsageError(f"{source} holds no calibration samples; supported file types: {kinds}")
    if pictures:
        options = images or ImageOptions()
        value = _image_input(graph, source)
        feeds: list[Feed] = [{str(value.name): read_image(path, value, options)} for path in pictures]
        origin = f"{_count(pictures, 'image')} of {source.name} ({options.describe(value)})"
    else:
        feeds = [_read_npz(graph, path) for path in arrays]
        origin = f"{_count(arrays, '.npz file')} of {source.name}"
    return Samples(feeds, origin)


def checked_samples(graph: ir.Graph, feeds: Sequence[Feed], origin: str = "given tensors") -> Samples:
    """Return samples from tensors in memory.

    Raises:
        UsageError: ``feeds`` is empty, or a sample does not match the inputs.
    """
    if not feeds:
        raise UsageError("calibration needs at least one sample, found none")
    return Samples([_checked(graph, feed, f"sample {i}") for i, feed in enumerate(feeds)], origin)


def generated_samples(graph: ir.Graph, *, count: int = _GENERATED, seed: int = 0) -> Samples:
    """Generate random samples, with a warning that ranges will be those of noise.

    Images, which are 4-D tensors with 1, 3 or 4 channels, are smooth noise between 0 and 1. Other floats are
    normally distributed, integers are below 100 and the rows of the table that they index, masks 0 or 1, and
    booleans True.

    Raises:
        UsageError: an input is not a numeric tensor with a known rank.
    """
    warnings.warn(
        "no calibration samples were given: the ranges of activations come from random tensors, and real "
        "inputs may be clipped. Give a folder of .npz files or images",
        GeneratedSamplesWarning,
        stacklevel=2,
    )
    rng = np.random.default_rng(seed)
    facts = input_facts(graph)

    def feed() -> Feed:
        shapes = {one.name: _plausible_shape(one.value.shape or ir.Shape(())) for one in facts}
        return {one.name: _random_tensor(one.value, rng, one.limit(shapes)) for one in facts}

    feeds = [feed() for _ in range(count)]
    return Samples(feeds, f"{count} random samples", generated=True)


def _needed(graph: ir.Graph) -> Iterator[ir.Value]:
    yield from (value for value in graph.inputs if not value.is_initializer())


def _read_npz(graph: ir.Graph, path: Path) -> Feed:
    try:
        with path.open("rb") as file, np.load(file) as archive:
            feed = {name: archive[name] for name in archive.files}
    except (ValueError, OSError, TypeError, AttributeError, EOFError, zipfile.BadZipFile) as error:
        raise UsageError(f"{path} cannot be read as an .npz file: {error}") from error
    return _checked(graph, feed, str(path))


def _checked(graph: ir.Graph, feed: Feed, place: str) -> Feed:
    """Return the graph's inputs from ``feed``, converted to the graph's types."""
    arrays: dict[str, Array] = {}
    for value in _needed(graph):
        name = str(value.name)
        if name not in feed:
            raise UsageError(f"{place}: input {name} is missing; it has: {', '.join(feed) or 'nothing'}")
        content = np.asarray(feed[name])
        _check_shape(value, content, place)
        if value.dtype is not None:
            kind = value.dtype.numpy()
            if content.dtype != kind and not np.can_cast(content.dtype, kind, "same_kind"):
                raise UsageError(f"{place}: input {name} has type {content.dtype}, the model needs {kind}")
            with np.errstate(over="ignore"):  # infinities are reported below
                content = content.astype(kind, copy=False)
        if content.dtype.kind == "f" and not np.isfinite(content).all():
            raise UsageError(f"{place}: input {name} holds NaN or infinity")
        arrays[name] = content
    return arrays


def _check_shape(value: ir.Value, content: Array, place: str) -> None:
    if value.shape is None:
        return
    sizes = list(value.shape)
    fits = len(sizes) == content.ndim and all(
        not isinstance(size, int) or size in (found, -1)
        for size, found in zip(sizes, content.shape, strict=True)
    )
    if not fits:
        wanted = [size if isinstance(size, int) else str(size.value or "?") for size in sizes]
        raise UsageError(
            f"{place}: input {value.name} has shape {list(content.shape)}, the model needs {wanted}"
        )


def _image_input(graph: ir.Graph, source: Path) -> ir.Value:
    inputs = list(_needed(graph))
    if len(inputs) != 1 or inputs[0].shape is None or len(inputs[0].shape) != 4:
        names = ", ".join(f"{value.name}{value.shape}" for value in inputs)
        raise UsageError(
            f"{source} holds images, but the model's inputs are not one image: {names}. Use .npz files"
        )
    return inputs[0]


def _random_tensor(value: ir.Value, rng: np.random.Generator, limit: int | None) -> Array:
    kind = value.dtype
    if not isinstance(value.type, ir.TensorType) or kind in (None, ir.DataType.STRING) or value.shape is None:
        raise UsageError(
            f"no random tensor can be generated for input {value.name} of type {value.type}; give samples"
        )
    if kind is None:
        raise UsageError(f"input {value.name} has no type; give samples")
    shape = _plausible_shape(value.shape)
    if kind == ir.DataType.BOOL:
        return np.ones(shape, bool)
    if kind.is_integer() or limit is not None:
        high = 2 if "mask" in str(value.name) else _INTEGERS
        return rng.integers(0, min(high, max(limit or high, 1)), shape).astype(kind.numpy())
    if len(shape) == 4 and (shape[1] in (1, 3, 4) or shape[3] in (1, 3, 4)):
        return _smooth_image(shape, rng).astype(kind.numpy())
    return rng.standard_normal(shape).astype(kind.numpy())


def _plausible_shape(shape: ir.Shape) -> list[int]:
    """Return sizes for all axes. Dynamic axes: the first is 1, those of images are 224, others 64."""
    sizes: list[Any] = [size if isinstance(size, int) and size >= 0 else None for size in shape]
    is_image = len(sizes) == 4
    for index, size in enumerate(sizes):
        if size is None:
            rest = _IMAGE_SIZE if is_image and index else _OPEN_SIZE
            sizes[index] = 1 if index == 0 else rest
    if is_image and shape[1] not in (1, 3, 4) and not isinstance(shape[3], int):
        sizes[1] = 3 if not isinstance(shape[1], int) else sizes[1]
    return sizes


def _smooth_image(shape: Sequence[int], rng: np.random.Generator) -> Array:
    """Return noise of several scales between 0 and 1, with a spectrum similar to natural images."""
    total = np.zeros(shape)
    spatial = (2, 3) if shape[1] in (1, 3, 4) else (1, 2)
    for step in (1, 4, 16, 64):
        coarse = [-(-size // step) if axis in spatial else size for axis, size in enumerate(shape)]
        noise = rng.random(coarse)
        for axis in spatial:
            noise = np.repeat(noise, step, axis=axis)
        total += step**0.5 * noise[tuple(slice(size) for size in shape)]
    result: Array = (total - total.min()) / max(float(np.ptp(total)), 1e-6)
    return result


def _count(files: Sequence[Path], what: str) -> str:
    return f"{len(files)} {what}{'' if len(files) == 1 else 's'}"
