"""Read the options ``stream`` and ``stream_options``."""

from __future__ import annotations

from .....errors import RequestError
from .....options import shown
from .....records import dataclass
from .reading import Json, bool_field


@dataclass(frozen=True, slots=True)
class StreamOptions:
    """The options ``stream`` and ``stream_options``.

    Args:
        stream: whether to stream the response.
        include_usage: whether to end with a chunk that has the token counts and no choices.
        continuous_usage: whether each chunk has the token counts so far, as in vLLM.
    """

    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False


def take_stream_options(options: Json) -> StreamOptions:
    """Return the stream options and remove them from ``options``.

    Raises:
        RequestError: a value has the wrong type.
    """
    stream = bool_field("stream", options.pop("stream", False))
    fields = options.pop("stream_options", None) or {}
    if not isinstance(fields, dict):
        raise RequestError(f"'stream_options' must be an object, not {shown(fields)}")
    parsed = {
        name: bool_field(f"stream_options.{name}", fields.get(name) or False)
        for name in ("include_usage", "continuous_usage_stats")
    }
    return StreamOptions(stream, parsed["include_usage"], parsed["continuous_usage_stats"])
