"""Write the parts that OpenAI's responses share."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from typing import Any

from ....types.outputs import Logprob
from ...core.messages import Generation, Usage, by_rank
from .reading import Json


def response(prefix: str, kind: str, result: Generation, model: str, choices: list[Json]) -> Json:
    """Return the JSON of a complete response."""
    body: Json = {
        "id": f"{prefix}-{result.request_id}",
        "object": kind,
        "created": int(time.time()),
        "model": model,
        "choices": choices,
        "usage": usage_json(result.usage),
    }
    if result.prompt_logprobs:
        body["prompt_logprobs"] = [
            None if entry is None else {str(token): _prompt_entry(one) for token, one in entry.items()}
            for entry in result.prompt_logprobs
        ]
    return body


def usage_json(usage: Usage) -> Json:
    """Return the token counts as JSON."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": prompt_details(usage),
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
    }


def prompt_details(usage: Usage) -> Json:
    """Return the kinds of tokens of a prompt; with pictures, the size in which the model sees each."""
    details: Json = {"cached_tokens": usage.cached_tokens}
    if usage.pictures:
        details["image_tokens"] = sum(picture.tokens for picture in usage.pictures)
        details["images"] = [dataclasses.asdict(picture) for picture in usage.pictures]
    return details


def chat_logprobs(
    token_ids: Sequence[int], logprobs: Sequence[Mapping[int, Logprob]], wanted: int | None
) -> Json | None:
    """Return log-probabilities in the format of chat completions, or None if ``wanted`` is None."""
    if wanted is None:
        return None
    return {
        "content": [
            {**_entry(candidates[token]), "top_logprobs": [_entry(e) for e in by_rank(candidates, wanted)]}
            for token, candidates in zip(token_ids, logprobs, strict=True)
        ]
    }


def _entry(entry: Logprob) -> Json:
    return {"token": entry.text, "logprob": entry.logprob, "bytes": list(entry.token_bytes)}


def _prompt_entry(entry: Logprob) -> Json:
    """Return one log-probability of a prompt token, in vLLM's format."""
    return {"logprob": entry.logprob, "rank": entry.rank, "decoded_token": entry.text}


def completion_logprobs(
    token_ids: Sequence[int],
    logprobs: Sequence[Mapping[int, Logprob] | None],
    first: str = "",
    offset: int = 0,
) -> Json:
    """Return log-probabilities in the format of completions.

    Args:
        token_ids: the tokens of the continuation, preceded by those of the prompt with ``echo``.
        logprobs: one entry per token that includes the token itself; None for the first prompt token.
        first: the text of the first prompt token.
        offset: the number of characters before the first token.
    """
    tokens: list[str] = []
    chosen: list[float | None] = []
    top: list[Any] = []
    offsets: list[int] = []
    for token, candidates in zip(token_ids, logprobs, strict=True):
        entry = candidates[token] if candidates else None
        tokens.append(_token_text(entry) if entry else first)
        chosen.append(entry.logprob if entry else None)
        top.append(_by_text(candidates) if candidates else None)
        offsets.append(offset)
        offset += len(entry.text if entry else first)
    return {"tokens": tokens, "token_logprobs": chosen, "top_logprobs": top, "text_offset": offsets}


def _by_text(candidates: Mapping[int, Logprob]) -> dict[str, float]:
    """Return log-probabilities by text, likeliest first.

    Several tokens may have one text (``A`` and the byte token ``<0x41>``): the likeliest keeps it, and the
    others are named by their ids, as vLLM names tokens, so that none is lost.
    """
    named: dict[str, float] = {}
    for entry in by_rank(candidates):
        text = _token_text(entry)
        named[f"token_id:{entry.token_id}" if text in named else text] = entry.logprob
    return named


def _token_text(entry: Logprob) -> str:
    """Return a token's text; that of a part of a character has OpenAI's form, which tells the parts apart."""
    if entry.partial is None:
        return entry.text
    return "bytes:" + "".join(f"\\x{byte:02x}" for byte in entry.partial)
