"""image_processor.json: how pictures become the inputs of ``vision.onnx``, with every value written out.

The files of a checkpoint leave values to the defaults of a library, and its versions change them. A package
holds the resolved values, so that the pixels of a picture never depend on an installed library.
"""

from __future__ import annotations

import json
import pkgutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from ..errors import CheckpointError, PackageError, UnsupportedModelError
from ..storage.writing import writing
from .config import RawConfig, integer, mapping, read_json

IMAGE_PROCESSOR_FILE = "image_processor.json"
PREPROCESSOR_FILE, PROCESSOR_FILE = "preprocessor_config.json", "processor_config.json"
# The checkpoint's own files; a package keeps them, so that transformers opens it too.
SIDE_FILES = (PREPROCESSOR_FILE, PROCESSOR_FILE, "video_preprocessor_config.json")

_VERSION = 1
_MOST_PIXELS = 2**14  # of an edge; a damaged file must not cause huge allocations
_IDEFICS3 = ("Idefics3ImageProcessor", "SmolVLMImageProcessor")


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageProcessor:
    """The content of image_processor.json, for pictures cut into tiles as in Idefics3 and SmolVLM.

    Args:
        family: the geometry, ``idefics3``.
        longest_edge: pixels of the longest edge that a picture is resized to, before it is cut.
        tile: pixels of an edge of a tile, all of which are square.
        splits: whether a picture is cut into tiles; False resizes it to one.
        resample: the filter, in the numbers of Pillow: 0 nearest, 1 Lanczos, 2 bilinear, 3 bicubic.
        rescale: what the values 0 to 255 are multiplied by.
        mean: per channel, subtracted after that.
        std: per channel, divided by after that.
        patch: pixels of an edge of a patch.
        merge: patches along an edge that become one token.
        positions: entries along an edge of the tower's table of positions.
        image_token_id: stands for a token of a picture in the prompt.
        texts: what a prompt has around pictures: ``image``, ``around`` and ``whole`` are tokens.
    """

    version: int = _VERSION
    family: str
    longest_edge: int
    tile: int
    splits: bool
    resample: int
    rescale: float
    mean: tuple[float, ...]
    std: tuple[float, ...]
    patch: int
    merge: int
    positions: int
    image_token_id: int
    texts: Mapping[str, str]

    @property
    def tile_tokens(self) -> int:
        """Tokens of a tile."""
        return (self.tile // self.patch // self.merge) ** 2

    def write(self, folder: Path) -> None:
        """Write image_processor.json.

        Raises:
            OSError: the file cannot be written.
        """
        path = folder / IMAGE_PROCESSOR_FILE
        with writing(path):
            path.write_text(json.dumps(asdict(self), indent=2) + "\n", encoding="utf-8")


def has_tower(raw: RawConfig) -> bool:
    """Return whether a config.json describes a model whose pictures can be exported, in ``vision/``."""
    known = [module.name for module in pkgutil.iter_modules([str(Path(__file__).parent / "vision")])]
    return raw.get("model_type") in known and bool(raw.get("vision_config"))


def read_image_processor(path: Path) -> ImageProcessor:
    """Read image_processor.json.

    Raises:
        PackageError: the file is damaged, or of another version.
    """
    try:
        content = read_json(path)
    except CheckpointError as error:
        raise PackageError(str(error)) from error
    names = {field.name for field in fields(ImageProcessor)}
    if content.get("version") != _VERSION or content.keys() != names:
        raise PackageError(
            f"{path} has version {content.get('version')!r} or other keys than version {_VERSION}; "
            "export the model again"
        )
    try:
        content["mean"], content["std"] = tuple(content["mean"]), tuple(content["std"])
        processor = ImageProcessor(**content)
        _check(processor)
    except (TypeError, ValueError, CheckpointError) as error:
        raise PackageError(f"{path} is damaged: {error}; export the model again") from error
    return processor


def image_processor(folder: Path, raw: RawConfig) -> ImageProcessor:
    """Return the processor of a checkpoint of the Idefics3 architecture, with all values resolved.

    Args:
        folder: the checkpoint, with ``preprocessor_config.json``.
        raw: the content of its config.json.

    Raises:
        CheckpointError: the file is missing or damaged.
        UnsupportedModelError: its processor, or an option of it, is not supported.
    """
    path = folder / PREPROCESSOR_FILE
    if not path.is_file():
        raise CheckpointError(
            f"{folder} holds no {PREPROCESSOR_FILE}, which says how pictures are prepared; take the "
            "checkpoint's, or export with --text-only"
        )
    given = read_json(path)
    name = str(given.get("image_processor_type", "")).removesuffix("Fast").removesuffix("Pil")
    if name not in _IDEFICS3:
        raise UnsupportedModelError(
            f"{path}: the processor '{name}' is not supported; supported: {', '.join(_IDEFICS3)}"
        )
    for step in ("do_resize", "do_rescale", "do_normalize", "do_convert_rgb"):
        if given.get(step, True) is not True:
            raise UnsupportedModelError(
                f"{path}: '{step}': {given[step]!r} is not supported; supported: true"
            )
    vision = mapping(raw, "vision_config")
    edge, patch = integer(vision, "image_size", 224), integer(vision, "patch_size", 32)
    half = [0.5, 0.5, 0.5]  # transformers' IMAGENET_STANDARD_MEAN and _STD
    try:
        processor = ImageProcessor(
            family="idefics3",
            longest_edge=_edge(given.get("size", {"longest_edge": 4 * 364}), "size"),
            tile=_edge(given.get("max_image_size", {"longest_edge": 364}), "max_image_size"),
            splits=bool(given.get("do_image_splitting", True)),
            resample=int(given.get("resample", 1)),
            rescale=float(given.get("rescale_factor", 1 / 255)),
            mean=tuple(map(float, given.get("image_mean", half))),
            std=tuple(map(float, given.get("image_std", half))),
            patch=patch,
            merge=integer(raw, "scale_factor", 2),
            positions=edge // max(1, patch),
            image_token_id=integer(raw, "image_token_id", 128257),
            texts=_texts(folder),
        )
        _check(processor)
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{path} does not describe a processor of pictures: {error}") from error
    return processor


def _edge(size: Any, key: str) -> int:
    if (
        not isinstance(size, dict)
        or size.keys() - {"longest_edge"}
        or not isinstance(size.get("longest_edge"), int)
    ):
        raise UnsupportedModelError(
            f"'{key}' {size!r} is not supported; supported: an integer 'longest_edge'"
        )
    return int(size["longest_edge"])


def _texts(folder: Path) -> dict[str, str]:
    """Return the texts of the tokens around pictures, which the tokenizer may name."""
    path = folder / "tokenizer_config.json"
    config = read_json(path) if path.is_file() else {}
    names = {
        "image": ("image_token", "<image>"),
        "around": ("fake_image_token", "<fake_token_around_image>"),
        "whole": ("global_image_token", "<global-img>"),
    }
    extra = config.get("extra_special_tokens")
    given = {**(extra if isinstance(extra, dict) else {}), **config}
    return {
        key: given[name] if isinstance(given.get(name), str) and given[name] else default
        for key, (name, default) in names.items()
    }


def _check(processor: ImageProcessor) -> None:
    """Check the ranges of the values.

    Raises:
        ValueError: a value is out of its range.
    """
    edges = {
        name: getattr(processor, name) for name in ("longest_edge", "tile", "patch", "merge", "positions")
    }
    for name, value in edges.items():
        if type(value) is not int or not 1 <= value <= _MOST_PIXELS:
            raise ValueError(f"'{name}' must be an integer in [1, {_MOST_PIXELS}], found {value!r}")
    if processor.tile % (processor.patch * processor.merge):
        raise ValueError(
            f"tiles of {processor.tile} pixels do not hold whole tokens of {processor.merge} patches of "
            f"{processor.patch} pixels along an edge"
        )
    if processor.resample not in range(4):
        raise ValueError(f"'resample' must be 0, 1, 2 or 3, found {processor.resample!r}")
    if len(processor.mean) != 3 or len(processor.std) != 3 or 0.0 in processor.std:
        raise ValueError("'mean' and 'std' need 3 numbers, and no 'std' may be 0")
    if not all(isinstance(processor.texts.get(key), str) for key in ("image", "around", "whole")):
        raise ValueError("'texts' must hold 'image', 'around' and 'whole'")
