"""Files within texts: ``data:`` addresses (RFC 2397) and base64, read as browsers read them.

Tools break base64 into lines, and some leave its padding out. Sources: https://fetch.spec.whatwg.org/#data-urls,
https://infra.spec.whatwg.org/#forgiving-base64-decode.
"""

from __future__ import annotations

import base64
import urllib.parse

from ...errors import RequestError
from ...options import shown

_SCHEME = "data:"
_WHITESPACE = b"\t\n\f\r "


def is_data_url(text: str) -> bool:
    """Return whether a text is an address that holds its content."""
    return text[: len(_SCHEME)].lower() == _SCHEME


def read_data_url(url: str) -> tuple[str, bytes]:
    """Return the media type of an address, without parameters and perhaps empty, and its content.

    Raises:
        RequestError: it is an address of another kind, or its content is not base64.
    """
    if not is_data_url(url):
        bare = "" if ":" in url else f"{shown(url, 40)} does not begin with data:, and "
        beside = ", or of a file beside a batch job file:PATH" if bare else ""
        raise RequestError(
            f"{bare}pictures are not fetched from addresses; "
            f"send the content as data:image/png;base64,...{beside}"
        )
    head, comma, data = url[len(_SCHEME) :].partition(",")
    media_type, *parameters = (part.strip() for part in head.split(";"))
    if not comma or not parameters or parameters[-1].lower() != "base64":
        raise RequestError("the data of an image must be base64: data:image/png;base64,...")
    return media_type, read_base64(urllib.parse.unquote(data) if "%" in data else data)


def read_base64(text: str) -> bytes:
    """Return what a text of base64 holds; whitespace does not count, and padding may be missing.

    Raises:
        RequestError: it has other characters, or no whole number of bytes.
    """
    try:
        data = text.encode("ascii").translate(None, _WHITESPACE)
        padding = b"" if data.endswith(b"=") else b"=" * (-len(data) % 4)
        return base64.b64decode(data + padding, validate=True)
    except ValueError as error:  # binascii's and that of other characters than ASCII
        raise RequestError(f"the data of an image is not base64: {error}") from error
