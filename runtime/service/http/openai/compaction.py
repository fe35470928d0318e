"""``/v1/responses/compact``: a conversation as one item with a summary, which later requests send back."""

from __future__ import annotations

import base64
import time
import uuid
from collections.abc import Mapping
from typing import Any

from .....errors import RequestError, RequestFailedError
from ...core.chat import Message, Text
from .reading import Json

KNOWN = frozenset({"model", "input", "previous_response_id", "instructions", "prompt_cache_key", "user",
                   "service_tier", "safety_identifier", "timeout", "cache_salt", "priority"})  # fmt: skip
_SUMMARIZE = (
    "Summarize our conversation so far, so that it can be continued from the summary alone. Keep names, "
    "facts, decisions, results of tools and open tasks. Write only the summary."
)
_MOST_TOKENS = 1024


def summary_body(body: Mapping[str, Any]) -> Json:
    """Return the body of the response that writes the summary.

    Raises:
        RequestError: no model is named, or ``input`` is neither a text nor a list.
    """
    if not isinstance(body.get("model"), str):
        raise RequestError("'model' must name a model")
    items = body.get("input") or []
    items = [{"role": "user", "content": items}] if isinstance(items, str) else items
    if not isinstance(items, list):
        raise RequestError("'input' must be a string or a list of items")
    if not items and not body.get("previous_response_id"):
        raise RequestError("there is no conversation: give 'input' or 'previous_response_id'")
    last = {"role": "user", "content": _SUMMARIZE}
    return {**body, "input": [*items, last], "max_output_tokens": _MOST_TOKENS, "store": False}


def compacted(response: Json) -> Json:
    """Return the answer that holds the summary which a response wrote.

    Raises:
        RequestFailedError: it wrote no text.
    """
    messages = [item for item in response["output"] if item["type"] == "message"]
    text = "".join(part["text"] for item in messages for part in item["content"])
    if not text.strip():
        raise RequestFailedError("the model wrote no summary; repeat the request, or send the whole input")
    # The standard's name; clients must not read it, but the service has no key to encrypt it with.
    sealed = base64.b64encode(text.encode()).decode()
    item = {"type": "compaction", "id": f"cmp_{uuid.uuid4().hex}", "encrypted_content": sealed}
    return {"id": response["id"], "object": "response.compaction", "created_at": int(time.time()),
            "output": [item], "usage": response["usage"]}  # fmt: skip


def summary_messages(item: Json) -> list[Message]:
    """Return a compaction item as the messages that made it, so that roles go on to alternate.

    Raises:
        RequestError: the service did not make this item.
    """
    try:
        text = base64.b64decode(item["encrypted_content"], validate=True).decode()
    except (KeyError, TypeError, ValueError) as error:
        raise RequestError("'encrypted_content' of a compaction item is not what the service made") from error
    return [Message("user", (Text(_SUMMARIZE),)), Message("assistant", (Text(text),))]
