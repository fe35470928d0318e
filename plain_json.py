"""Write strict JSON, without the NaN and Infinity that Python's ``json`` writes."""

from __future__ import annotations

import json
import math
from typing import Any

_STRICT = json.JSONEncoder(ensure_ascii=False, allow_nan=False)


def plain_json(document: Any) -> str:
    """Return a document as one line of JSON; numbers that are not finite become null."""
    try:
        return _STRICT.encode(document)
    except ValueError:
        return _STRICT.encode(_finite(document))


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
