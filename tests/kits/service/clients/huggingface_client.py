"""python huggingface_client.py URL: InferenceClient, as for text-generation-inference."""

from __future__ import annotations

import sys
from typing import Any

from checks import check, main
from huggingface_hub import InferenceClient

URL = sys.argv[1]
CHAT = InferenceClient(base_url=f"{URL}/v1")
TEXT = InferenceClient(URL)
TURNS: Any = [{"role": "user", "content": "Hi"}]


@check
def chat_completion() -> None:
    answer = CHAT.chat_completion(TURNS, model="toy", max_tokens=4)
    assert answer.usage.completion_tokens <= 4


@check
def chat_completion_stream() -> None:
    chunks = list(CHAT.chat_completion(TURNS, model="toy", max_tokens=4, stream=True))
    assert chunks[-1].choices[0].finish_reason in ("stop", "length")


@check
def text_generation() -> None:
    whole = TEXT.text_generation("def f", max_new_tokens=6, do_sample=False)
    parts = list(TEXT.text_generation("def f", max_new_tokens=6, do_sample=False, stream=True))
    assert "".join(parts) == whole


@check
def text_generation_details() -> None:
    answer = TEXT.text_generation("def f", max_new_tokens=3, details=True)
    assert answer.details.generated_tokens == len(answer.details.tokens)


main()
