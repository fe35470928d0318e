"""What a part of a content says of the size in which the model sees its picture."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ...errors import RequestError
from ...options import shown

if TYPE_CHECKING:
    from ...exporter.image_processor import ImageProcessor

DETAILS = ("low", "high", "auto", "original")  # all but the first are how the model itself sees pictures
_NAMES = ("detail", "min_pixels", "max_pixels")


def stated_sizes(part: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a part of a content says, beside or in its ``image_url``; see ``processor_of``."""
    url = part.get("image_url")
    stated = {**url, **part} if isinstance(url, Mapping) else part
    return {name: stated[name] for name in _NAMES if stated.get(name) is not None}


def processor_of(part: Mapping[str, Any], processor: ImageProcessor) -> ImageProcessor:
    """Return how a picture is prepared, by the part of a content that it is.

    Args:
        part: may have a ``detail`` as in OpenAI's API, and ``min_pixels`` and ``max_pixels`` of the resized
            picture, as in Qwen's tools.
        processor: the model's.

    Raises:
        RequestError: one of them is no value of its kind, or the model has no such limits.
    """
    sizes = stated_sizes(part)
    detail, least, most = (sizes.get(name) for name in _NAMES)
    if detail is not None and detail not in DETAILS:
        raise RequestError(
            f"'detail' must be {', '.join(DETAILS[:-1])} or {DETAILS[-1]}, not {shown(detail)}"
        )
    if detail == "low":
        processor = processor.at_low_detail()
    if least is None and most is None:
        return processor
    for number in (least, most):
        if number is not None and type(number) is not int:
            raise RequestError(f"'min_pixels' and 'max_pixels' must be integers, not {shown(number)}")
    try:
        return processor.within(least, most)
    except ValueError as error:
        raise RequestError(str(error)) from error
