"""Whether and how a request wants its answer streamed."""

from __future__ import annotations

from dataclasses import dataclass

from .....errors import RequestError
from .reading import Json, bool_field


@dataclass(frozen=True, slots=True)
class StreamOptions:
    """What ``stream`` and ``stream_options`` say.

    Args:
        stream: answer in pieces.
        include_usage: end with a piece that has the token counts and no choices.
        continuous_usage: state the token counts so far in every piece, as vLLM does.
    """

    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False


def take_stream_options(options: Json) -> StreamOptions:
    """Read the two options, and remove them.

    Raises:
        RequestError: one of them is wrong.
    """
    stream = bool_field("stream", options.pop("stream", False))
    given = options.pop("stream_options", None) or {}
    if not isinstance(given, dict):
        raise RequestError(f"'stream_options' must be an object, not {given!r}")
    found = {
        name: bool_field(f"stream_options.{name}", given.get(name) or False)
        for name in ("include_usage", "continuous_usage_stats")
    }
    return StreamOptions(stream, found["include_usage"], found["continuous_usage_stats"])
