"""A batch as clients see it: its record, and the checks of the request that makes one."""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Iterable, Mapping
from dataclasses import field
from typing import Any

from ....errors import RequestError
from ....records import dataclass
from ..inputs.lines import CHAT, COMPLETIONS, EMBEDDINGS, RESPONSES, TRANSCRIPTIONS, TRANSLATIONS
from .files import expiry_seconds
from .records import Record

Json = dict[str, Any]

ENDPOINTS = (RESPONSES, CHAT, EMBEDDINGS, COMPLETIONS, TRANSCRIPTIONS, TRANSLATIONS)
KNOWN = {"input_file_id", "endpoint", "completion_window", "metadata", "output_expires_after"}
_WINDOW = re.compile(r"(\d{1,4})(m|h|d)")
_UNIT_SECONDS = {"m": 60, "h": 3600, "d": 86400}
_MOST_METADATA, _MOST_KEY, _MOST_VALUE = 16, 64, 512
_OPEN = ("validating", "in_progress", "finalizing", "cancelling")


@dataclass(slots=True, kw_only=True)
class Batch(Record):
    """A batch; see https://platform.openai.com/docs/api-reference/batch/object.

    Args:
        models: the models that its owner may use; empty allows all.
        output_expires_after: seconds from the end until the output is deleted; None keeps it.
        times: Unix times of status changes by name, such as ``completed_at``.
    """

    input_file_id: str
    endpoint: str
    completion_window: str
    expires_at: int
    models: list[str] = field(default_factory=list)
    metadata: dict[str, str] | None = None
    output_expires_after: int | None = None
    status: str = "validating"
    errors: list[Json] = field(default_factory=list)
    output_file_id: str | None = None
    error_file_id: str | None = None
    model: str | None = None
    created_at: int = 0
    times: dict[str, int] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=lambda: {"total": 0, "completed": 0, "failed": 0})
    tokens: list[int] = field(default_factory=lambda: [0, 0, 0])  # prompt, cached and generated tokens

    @property
    def open(self) -> bool:
        """Return whether the batch is not finished."""
        return self.status in _OPEN

    def to_json(self) -> Json:
        """Return OpenAI's batch object."""
        prompt, cached, generated = self.tokens
        names = ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")
        return {
            "id": self.id,
            "object": "batch",
            "endpoint": self.endpoint,
            "model": self.model,
            "errors": {"object": "list", "data": self.errors} if self.errors else None,
            "input_file_id": self.input_file_id,
            "completion_window": self.completion_window,
            "status": self.status,
            "output_file_id": self.output_file_id,
            "error_file_id": self.error_file_id,
            "created_at": self.created_at,
            "expires_at": self.expires_at,
            **{f"{name}_at": self.times.get(f"{name}_at") for name in names},
            "request_counts": self.counts,
            "usage": {
                "input_tokens": prompt,
                "input_tokens_details": {"cached_tokens": cached},
                "output_tokens": generated,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": prompt + generated,
            },
            "metadata": self.metadata,
        }


def read_batch(body: Mapping[str, Any], owner: str | None, *, created: int, models: Iterable[str]) -> Batch:
    """Return the batch that the body of a request describes.

    Args:
        body: the body of the request.
        owner: the name of the caller's API key; None without API keys.
        created: see ``Record``.
        models: the models that the owner may use; empty allows all.

    Raises:
        RequestError: a field of the body is invalid.
    """
    endpoint, name = body.get("endpoint"), body.get("input_file_id")
    if endpoint not in ENDPOINTS:
        raise RequestError(f"'endpoint' must be one of {', '.join(ENDPOINTS)}, not {endpoint!r}")
    if not isinstance(name, str):
        raise RequestError(f"'input_file_id' must be the id of an uploaded file, not {name!r}")
    window, now = body.get("completion_window", "24h"), int(time.time())
    return Batch(
        id=f"batch_{secrets.token_hex(12)}",
        owner=owner,
        made=created,
        input_file_id=name,
        endpoint=endpoint,
        completion_window=window,
        expires_at=now + _window_seconds(window),
        models=list(models),
        metadata=_metadata(body.get("metadata")),
        output_expires_after=expiry_seconds("output_expires_after", body.get("output_expires_after")),
        created_at=now,
    )


def _window_seconds(window: Any) -> int:
    match = _WINDOW.fullmatch(window) if isinstance(window, str) else None
    if match is None or not int(match[1]):
        raise RequestError(
            f"'completion_window' must be a duration such as '24h', '90m' or '7d', not {window!r}"
        )
    return int(match[1]) * _UNIT_SECONDS[match[2]]


def _metadata(metadata: Any) -> dict[str, str] | None:
    if metadata is None:
        return None
    if (
        not isinstance(metadata, dict)
        or len(metadata) > _MOST_METADATA
        or not all(isinstance(value, str) and len(value) <= _MOST_VALUE for value in metadata.values())
        or any(len(key) > _MOST_KEY for key in metadata)
    ):
        raise RequestError(
            f"'metadata' must be an object of at most {_MOST_METADATA} strings of at most {_MOST_VALUE} "
            f"characters, with keys of at most {_MOST_KEY} characters"
        )
    return metadata
