"""Write strict JSON, without the NaN and Infinity that Python's ``json`` writes."""

from __future__ import annotations

import json
import math
import re
from typing import Any

_HALF = re.compile("[\ud800-\udfff]")
_STRICT = json.JSONEncoder(ensure_ascii=False, allow_nan=False)


def plain_json(document: Any) -> str:
    """Return a document as one line of JSON; numbers that are not finite become null."""
    try:
        return _STRICT.encode(document)
    except ValueError:
        return _STRICT.encode(_finite(document))


def json_bytes(document: Any) -> bytes:
    """Return ``plain_json`` in UTF-8; see ``utf8``."""
    return utf8(plain_json(document))


def utf8(json_text: str) -> bytes:
    """Return JSON in UTF-8; half of a surrogate pair, which UTF-8 does not have, becomes an escape."""
    try:
        return json_text.encode()
    except UnicodeEncodeError:
        return _HALF.sub(lambda half: f"\\u{ord(half[0]):04x}", json_text).encode()


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
