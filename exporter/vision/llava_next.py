"""``vision.onnx`` of LLaVA-NeXT (LLaVA 1.6): that of LLaVA 1.5, with a row for the ends of rows of tiles."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from ...errors import UnsupportedModelError
from ..config import RawConfig
from ..image_processor import check_processor
from .llava import Processor as Processor
from .llava import processor_of
from .llava import vision_model as vision_model

_RESOLUTIONS = [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]]


_Kind = TypeVar("_Kind", bound=Processor)


def image_processor(content: Mapping[str, Any], folder: Path, raw: RawConfig) -> Processor:
    """Return the processor of a checkpoint; see ``exporter.image_processor.image_processor``."""
    return processor_of_tiles(content, folder, raw, "llava_next", kind=Processor)


def processor_of_tiles(
    content: Mapping[str, Any],
    folder: Path,
    raw: RawConfig,
    family: str,
    *,
    kind: type[_Kind],
    **options: Any,
) -> _Kind:
    """Return the processor of a checkpoint of LLaVA-NeXT's kind; see ``llava.processor_of``."""
    check_processor(content, ("LlavaNextImageProcessor",), ("do_resize", "do_rescale", "do_normalize"))
    given = content.get("image_grid_pinpoints", _RESOLUTIONS)
    if given != raw.get("image_grid_pinpoints", _RESOLUTIONS):
        raise UnsupportedModelError("'image_grid_pinpoints' differ from those of config.json")
    resolutions = tuple(tuple(size) for size in given)
    return processor_of(content, folder, raw, family, kind=kind, resolutions=resolutions, **options)
