"""Which requests belong together, so that one replica serves them and finds their KV in its prefix cache."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

from ...records import dataclass

SESSION_HEADER = "x-session-id"
CHUNK_CHARACTERS = 256
_MOST_CHARACTERS = 512 * CHUNK_CHARACTERS
_PROMPT_CHARACTERS = 512
_PROMPTS = ("messages", "input", "prompt", "inputs")
_HEAD = ("model", "cache_salt", "tools", "instructions", "system")  # what is in front of the messages


@dataclass(frozen=True, slots=True)
class Affinity:
    """What a request has in common with others.

    Args:
        key: what requests of one session or of one conversation share; empty if there is none.
        chunks: hashes of the beginnings of the prompt, each ``CHUNK_CHARACTERS`` longer than the one before;
            empty if the client named a session.
    """

    key: str = ""
    chunks: tuple[bytes, ...] = ()


def affinity_of(headers: Mapping[str, str], body: bytes) -> Affinity:
    """Return the affinity of a request.

    The key is, in this order: the header ``x-session-id``; the field ``prompt_cache_key``; a hash of the
    beginning of the prompt. The beginning of a conversation are its messages up to the first of the user,
    which do not change while it grows. The beginning of a text are its first 512 characters.

    Args:
        headers: the headers of the request, with lower-case names.
        body: the body of the request; need not be JSON.
    """
    if session := headers.get(SESSION_HEADER):
        return Affinity(session)
    try:
        fields = json.loads(body) if body else None
    except (ValueError, RecursionError):
        return Affinity()  # the replica answers with the error
    if not isinstance(fields, dict):
        return Affinity()
    if isinstance(key := fields.get("prompt_cache_key"), str) and key:
        return Affinity(key)
    beginning = _beginning(fields)
    if beginning is None:
        return Affinity()
    text = json.dumps([fields.get("model"), beginning], sort_keys=True)
    return Affinity(hashlib.sha256(text.encode()).hexdigest(), tuple(_chunks(_text(fields))))


def _chunks(text: str) -> Iterator[bytes]:
    """Yield the hash of each beginning of a text that is a multiple of the chunk long."""
    known = b""
    for end in range(CHUNK_CHARACTERS, min(len(text), _MOST_CHARACTERS) + 1, CHUNK_CHARACTERS):
        part = text[end - CHUNK_CHARACTERS : end].encode(errors="surrogatepass")
        known = hashlib.blake2b(known + part, digest_size=8).digest()
        yield known


def _text(fields: Mapping[str, Any]) -> str:
    """Return a text that begins equally for prompts that begin equally, and grows with a conversation."""
    prompt = next((value for name in _PROMPTS if (value := fields.get(name))), "")
    parts = prompt if isinstance(prompt, list) else [prompt]
    head = json.dumps([fields.get(name) for name in _HEAD], sort_keys=True)
    return head + ",".join(
        part if isinstance(part, str) else json.dumps(part, sort_keys=True) for part in parts
    )


def _beginning(fields: Mapping[str, Any]) -> Any:
    """Return the part of a prompt that later requests of the same conversation repeat."""
    rules = [fields.get("instructions"), fields.get("system")]
    for name in _PROMPTS:
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
