"""Which requests belong together, so that one replica serves them and finds their KV in its prefix cache."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

SESSION_HEADER = "x-session-id"
_PROMPT_CHARACTERS = 512


def affinity_key(headers: Mapping[str, str], body: bytes) -> str:
    """Return a key that requests of one session or of one conversation share; empty if there is none.

    The key is, in this order: the header ``x-session-id``; the field ``prompt_cache_key``; a hash of the
    beginning of the prompt. The beginning of a conversation are its messages up to the first of the user,
    which do not change while it grows. The beginning of a text are its first 512 characters.

    Args:
        headers: the headers of the request, with lower-case names.
        body: the body of the request; need not be JSON.
    """
    if session := headers.get(SESSION_HEADER):
        return session
    try:
        fields = json.loads(body) if body else None
    except (ValueError, RecursionError):
        return ""  # the replica answers with the error
    if not isinstance(fields, dict):
        return ""
    if isinstance(key := fields.get("prompt_cache_key"), str) and key:
        return key
    beginning = _beginning(fields)
    if beginning is None:
        return ""
    text = json.dumps([fields.get("model"), beginning], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _beginning(fields: Mapping[str, Any]) -> Any:
    """Return the part of a prompt that later requests of the same conversation repeat."""
    rules = [fields.get("instructions"), fields.get("system")]
    for name in ("messages", "input", "prompt", "inputs"):
        match fields.get(name):
            case str(text) if text:
                return [rules, text[:_PROMPT_CHARACTERS]]
            case [dict(), *_] as messages:
                roles = [one.get("role") if isinstance(one, dict) else None for one in messages]
                first = roles.index("user") + 1 if "user" in roles else 1
                return [rules, messages[:first]]
            case [_, *_] as tokens:
                return [rules, tokens[:_PROMPT_CHARACTERS]]
    return None
