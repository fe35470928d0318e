"""The document of ``carryall run --json``."""

from __future__ import annotations

import dataclasses
from typing import Any

from ...runtime.types.outputs import CompletionOutput, RequestOutput
from .. import generation


def document(model: str, prompt: str, output: RequestOutput) -> dict[str, Any]:
    """Return the document that ``--json`` prints."""
    first, metrics = output.outputs[0], output.metrics
    return {
        "model": model,
        "prompt": prompt,
        "prompt_tokens": len(output.prompt_token_ids),
        "text": first.text,
        "token_ids": first.token_ids,
        "tokens": len(first.token_ids),
        "finish_reason": first.finish_reason,
        "choices": [_choice(completion) for completion in output.outputs],
        **{name: round(value, 4) for name, value in generation.speed(output).items()},
        "cached_tokens": metrics.cached_tokens if metrics else 0,
        "proposed_tokens": metrics.proposed_tokens if metrics else 0,
        "accepted_tokens": metrics.accepted_tokens if metrics else 0,
    }


def _choice(completion: CompletionOutput) -> dict[str, Any]:
    return {
        "index": completion.index,
        "text": completion.text,
        "reasoning_content": completion.reasoning_content,
        "tool_calls": [dataclasses.asdict(call) for call in completion.tool_calls],
        "token_ids": completion.token_ids,
        "finish_reason": completion.finish_reason,
        "stop_reason": completion.stop_reason,
        "cumulative_logprob": completion.cumulative_logprob,
        "logprobs": None
        if completion.logprobs is None
        else [[dataclasses.asdict(one) for one in token.values()] for token in completion.logprobs],
    }
