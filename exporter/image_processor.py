"""image_processor.json: how pictures become the inputs of ``vision.onnx``, with every value written out.

The files of a checkpoint leave values to the defaults of a library, and its versions change them. A package
holds the resolved values, so that the pixels of a picture never depend on an installed library.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Collection, Mapping, Sequence
from dataclasses import field, fields
from pathlib import Path
from typing import Any, ClassVar, Literal, cast

from ..errors import CheckpointError, PackageError, UnsupportedModelError
from ..records import dataclass
from .config import RawConfig, module_name, read_json
from .processor_record import ProcessorRecord

IMAGE_PROCESSOR_FILE = "image_processor.json"
PREPROCESSOR_FILE, PROCESSOR_FILE = "preprocessor_config.json", "processor_config.json"
# The checkpoint's own files; a package keeps them, so that transformers opens it too.
VIDEO_FILE = "video_preprocessor_config.json"
SIDE_FILES = (PREPROCESSOR_FILE, PROCESSOR_FILE, VIDEO_FILE)

MOST_PIXELS = 2**14  # of an edge; a damaged file must not cause huge allocations
LOW_EDGE = 512  # pixels of an edge of the picture that OpenAI's API calls one of low detail
HALF = (0.5, 0.5, 0.5)  # transformers' IMAGENET_STANDARD_MEAN and _STD
CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)  # of the data of CLIP, https://arxiv.org/abs/2103.00020
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)

_VERSION = 2
_VISION = f"{__package__}.vision"
_STEPS = ("do_resize", "do_rescale", "do_normalize", "do_convert_rgb")

# What a model that writes down pictures does with a text beside one: it reads none, the text begins the
# answer in place of the token that begins it otherwise, or the encoder reads it behind the picture.
TextUse = Literal["refused", "begins", "asks"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageProcessor(ProcessorRecord):
    """The content of image_processor.json that all families have; each adds the sizes of its geometry.

    Args:
        family: the geometry, a module of ``vision/`` and of the runtime's ``images/``.
        resample: the filter, in the numbers of Pillow: 0 nearest, 1 Lanczos, 2 bilinear, 3 bicubic.
        rescale: what the values 0 to 255 are multiplied by.
        mean: per channel, subtracted after that.
        std: per channel, divided by after that.
        patch: pixels of an edge of a patch.
        merge: patches along an edge that become one token.
        image_token_id: stands for a token of a picture in the prompt; -1 for a model without such prompts,
            whose ``vision.onnx`` returns a vector for each picture.
        texts: what a prompt has around pictures. ``image`` is the token of a row; ``place``, by default the
            same, is what the chat template writes for a picture, and ``video`` for a video, if the family
            reads any.
        video_token_id: stands for a token of a video in the prompt, and ``video`` is its text; -1 if frames
            have the tokens of pictures.
    """

    version: int = _VERSION
    family: str
    resample: int
    rescale: float
    mean: tuple[float, ...]
    std: tuple[float, ...]
    patch: int
    merge: int
    image_token_id: int = -1
    texts: Mapping[str, str] = field(default_factory=dict)
    video_token_id: int = -1

    FILE: ClassVar[str] = IMAGE_PROCESSOR_FILE
    text_use: ClassVar[TextUse] = "refused"
    whole_units: ClassVar[bool] = True  # whether attention may span a unit, whose patches are limited then

    @property
    def place(self) -> str:
        """What the chat template writes for a picture."""
        return self.texts.get("place", self.texts["image"])

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The tokens that states replace."""
        return tuple(token for token in (self.image_token_id, self.video_token_id) if token != -1)

    @property
    def tokens(self) -> tuple[str, ...]:
        """Their texts."""
        names = [("image", self.image_token_id), ("video", self.video_token_id)]
        return tuple(self.texts[name] for name, token in names if token != -1)

    @property
    def longest(self) -> int:
        """Most tokens of a text that the encoder reads, with those around it."""
        return 0

    @property
    def constants(self) -> int:
        """Number of last rows of every run of ``vision.onnx`` that are the same for all pictures."""
        return 0

    def at_low_detail(self) -> ImageProcessor:
        """Return how pictures become fewer tokens; it is the same where their number is fixed."""
        return self

    def within(self, least: int | None, most: int | None) -> ImageProcessor:
        """Return how pictures become sizes between other numbers of pixels.

        Args:
            least: the fewest pixels of a resized picture; None for those of the checkpoint, or ``most`` if
                that is less.
            most: the most; None for those of the checkpoint.

        Raises:
            ValueError: the family has no such limits, or these contradict each other.
        """
        raise ValueError("this model takes no 'min_pixels' and 'max_pixels', but sizes of its own")

    def check(self) -> None:
        """Check the ranges of the values.

        Raises:
            ValueError: a value is out of its range.
        """
        self.check_sizes("patch", "merge")
        if self.resample not in range(4):
            raise ValueError(f"'resample' must be 0, 1, 2 or 3, found {self.resample!r}")
        if len(self.mean) != 3 or len(self.std) != 3 or 0.0 in self.std:
            raise ValueError("'mean' and 'std' need 3 numbers, and no 'std' may be 0")
        if self.image_token_id != -1:
            self.check_texts("image")
        if self.video_token_id != -1:
            self.check_texts("video")

    def check_tile(self, edge: int) -> None:
        """Check a tile with patches that each stand alone.

        Raises:
            ValueError: it holds no whole patches.
        """
        if type(edge) is not int or not 1 <= edge <= MOST_PIXELS or edge % self.patch or self.merge != 1:
            raise ValueError(f"tiles of {edge!r} pixels must hold whole patches of {self.patch} pixels")

    def check_sizes(self, *names: str, most: int = MOST_PIXELS) -> None:
        """Check that fields are integers in [1, ``most``].

        Raises:
            ValueError: one is not.
        """
        for name in names:
            self.check_range(name, 1, most)

    def check_texts(self, *names: str) -> None:
        """Check that ``texts`` has these, and none is empty.

        Raises:
            ValueError: one is missing.
        """
        if not all(isinstance(self.texts.get(name), str) and self.texts[name] for name in names):
            raise ValueError(f"'texts' must hold {', '.join(map(repr, names))}")


@dataclass(frozen=True, slots=True, kw_only=True)
class TileProcessor(ImageProcessor):
    """One square tile a picture; the family says how it is cut.

    Args:
        tile: pixels of an edge of the tile.
    """

    tile: int

    def check(self) -> None:
        ImageProcessor.check(self)
        self.check_tile(self.tile)


def has_tower(raw: RawConfig) -> bool:
    """Return whether a config.json describes a model whose pictures can be exported, in ``vision/``."""
    return tower_name(raw) in _families() and bool(raw.get("vision_config") or raw.get("encoder"))


def tower_name(raw: RawConfig) -> str:
    """Return the name in ``vision/`` of what a model sees with: that of its encoder, if it names one."""
    encoder = raw.get("encoder")
    return module_name((encoder if isinstance(encoder, dict) else raw).get("model_type"))


def tower_module(raw: RawConfig) -> Any:
    """Return the module that writes ``vision.onnx`` of a model."""
    return importlib.import_module(f"{_VISION}.{tower_name(raw)}")


def read_image_processor(path: Path) -> ImageProcessor:
    """Read image_processor.json.

    Raises:
        PackageError: the file is damaged, or of another version or family.
    """
    try:
        content = read_json(path)
    except CheckpointError as error:
        raise PackageError(str(error)) from error
    kind = _kind(content.get("family"))
    names = set() if kind is None else {each.name for each in fields(kind)}
    if kind is None or content.get("version") != _VERSION or content.keys() != names:
        raise PackageError(
            f"{path} has family {content.get('family')!r}, version {content.get('version')!r} or other keys "
            f"than version {_VERSION} of its family; export the model again"
        )
    try:
        processor = kind(**{name: _tuples(value) for name, value in content.items()})
        processor.check()
    except (TypeError, ValueError, LookupError, CheckpointError) as error:
        raise PackageError(f"{path} is damaged: {error}; export the model again") from error
    return processor


def has_processor(folder: Path) -> bool:
    """Return whether a checkpoint says how pictures are prepared, in any of the files that do.

    Raises:
        CheckpointError: a file is damaged.
    """
    return _preprocessor(folder) is not None


def image_processor(folder: Path, raw: RawConfig) -> ImageProcessor:
    """Return the processor of a checkpoint, with all values resolved.

    Args:
        folder: the checkpoint.
        raw: the content of its config.json.

    Raises:
        CheckpointError: the file that describes it is missing or damaged.
        UnsupportedModelError: its processor, or an option of it, is not supported.
    """
    settings = _preprocessor(folder)
    if settings is None:
        other = "" if raw.get("encoder") else ", or export with --text-only"
        raise CheckpointError(
            f"{folder} holds no {PREPROCESSOR_FILE}, which says how pictures are prepared; take the "
            f"checkpoint's{other}"
        )
    path, stored = settings
    # As in transformers, null stands for a default.
    content = {key: value for key, value in stored.items() if value is not None}
    module = tower_module(raw)
    try:
        processor = cast(ImageProcessor, module.image_processor(content, folder, raw))
        processor.check()
    except UnsupportedModelError as error:
        raise UnsupportedModelError(f"{path}: {error}") from error
    except (TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{path} does not describe a processor of pictures: {error}") from error
    return processor


def _preprocessor(folder: Path) -> tuple[Path, Mapping[str, Any]] | None:
    """Return the file that describes the processor of pictures, and what it says; None if there is none.

    transformers 5 writes it into processor_config.json, beside those of other inputs.
    """
    path = folder / PROCESSOR_FILE
    part = read_json(path).get("image_processor") if path.is_file() else None
    if isinstance(part, dict):
        return path, part
    path = folder / PREPROCESSOR_FILE
    return (path, read_json(path)) if path.is_file() else None


def video_settings(folder: Path) -> Mapping[str, Any]:
    """Return what a checkpoint says on frames of videos, as transformers finds it: perhaps that on pictures.

    Raises:
        CheckpointError: a file is damaged.
    """
    path = folder / VIDEO_FILE
    if path.is_file():
        return read_json(path)
    path = folder / PROCESSOR_FILE
    part = read_json(path).get("video_processor") if path.is_file() else None
    if isinstance(part, dict):
        return part
    settings = _preprocessor(folder)
    return {} if settings is None else settings[1]


def check_processor(
    content: Mapping[str, Any], names: Collection[str], steps: Sequence[str] = _STEPS
) -> None:
    """Check that preprocessor_config.json describes a processor of these names that does all ``steps``.

    Raises:
        UnsupportedModelError: it is another one, or leaves out a step.
    """
    name = processor_name(content)
    if name not in names:
        raise UnsupportedModelError(f"the processor '{name}' is not supported; supported: {', '.join(names)}")
    for step in steps:
        if content.get(step, True) is not True:
            raise UnsupportedModelError(f"'{step}': {content[step]!r} is not supported; supported: true")


def processor_name(content: Mapping[str, Any]) -> str:
    """Return the class that preprocessor_config.json names, whatever library it resizes with."""
    name = content.get("image_processor_type", content.get("feature_extractor_type", ""))
    return str(name).removesuffix("Fast").removesuffix("Pil")


def levels(
    content: Mapping[str, Any], resample: int, mean: Sequence[float], std: Sequence[float]
) -> dict[str, Any]:
    """Return the fields of an ``ImageProcessor`` for the filter and the values, with a family's defaults."""
    return {
        "resample": int(content.get("resample", resample)),
        "rescale": float(content.get("rescale_factor", 1 / 255)),
        "mean": tuple(map(float, content.get("image_mean", mean))),
        "std": tuple(map(float, content.get("image_std", std))),
    }


def named_tokens(folder: Path, names: Mapping[str, tuple[str, str]]) -> dict[str, str]:
    """Return the texts of the tokens around pictures, which the tokenizer may name.

    Args:
        folder: the checkpoint.
        names: by key, the name in tokenizer_config.json, and the default.
    """
    path = folder / "tokenizer_config.json"
    config = read_json(path) if path.is_file() else {}
    extra = config.get("extra_special_tokens")
    given = {**(extra if isinstance(extra, dict) else {}), **config}
    return {
        key: given[name] if isinstance(given.get(name), str) and given[name] else default
        for key, (name, default) in names.items()
    }


def token_text(folder: Path, token_id: int) -> str:
    """Return the text of a token.

    Args:
        folder: the checkpoint, with tokenizer.json.
        token_id: of an added token.

    Raises:
        CheckpointError: the tokenizer has no such added token.
    """
    added = read_json(folder / "tokenizer.json").get("added_tokens", [])
    for token in added if isinstance(added, list) else []:
        if isinstance(token, dict) and token.get("id") == token_id and isinstance(token.get("content"), str):
            return str(token["content"])
    raise CheckpointError(
        f"{folder / 'tokenizer.json'} has no added token {token_id}, which config.json names for pictures"
    )


def _families() -> list[str]:
    return [module.name for module in pkgutil.iter_modules([str(Path(__file__).parent / "vision")])]


def _tuples(value: Any) -> Any:
    """Return a value of JSON with tuples in place of lists."""
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def _kind(family: object) -> type[ImageProcessor] | None:
    """Return the class of a family's record; None for one that is not known."""
    if family not in _families():
        return None
    return cast("type[ImageProcessor]", importlib.import_module(f"{_VISION}.{family}").Processor)
