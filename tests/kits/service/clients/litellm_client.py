"""python litellm_client.py URL: LiteLLM with the providers that this service looks like."""

from __future__ import annotations

import sys
from typing import Any

import litellm
from checks import check, main

URL = sys.argv[1]
TURNS: Any = [{"role": "user", "content": "Hi"}]
OPENAI: Any = {"api_base": f"{URL}/v1", "api_key": "none", "max_tokens": 4, "num_retries": 0}


def text(answer: Any) -> str:
    return "".join(chunk.choices[0].delta.content or "" for chunk in answer)


@check
def openai_chat() -> None:
    answer: Any = litellm.completion("openai/toy", TURNS, temperature=0, **OPENAI)
    stream = litellm.completion("openai/toy", TURNS, temperature=0, stream=True, **OPENAI)
    assert text(stream) == answer.choices[0].message.content


@check
def hosted_vllm_chat() -> None:
    answer: Any = litellm.completion("hosted_vllm/toy", TURNS, **OPENAI)
    assert answer.usage.completion_tokens <= 4


@check
def text_completion() -> None:
    answer: Any = litellm.text_completion(model="text-completion-openai/toy", prompt="def f", **OPENAI)
    assert answer.choices[0].text is not None


@check
def anthropic_chat() -> None:
    answer: Any = litellm.completion(
        "anthropic/toy", TURNS, api_base=URL, api_key="none", max_tokens=4, num_retries=0
    )
    assert answer.usage.completion_tokens <= 4


@check
def ollama_chat() -> None:
    answer: Any = litellm.completion("ollama_chat/toy", TURNS, api_base=URL, max_tokens=4, num_retries=0)
    assert answer.choices[0].message.content is not None


@check
def embedding() -> None:
    found: Any = litellm.embedding("openai/vectors", ["a", "b"], api_base=f"{URL}/v1", api_key="none")
    assert len(found.data) == 2


@check
def rerank() -> None:
    found: Any = litellm.rerank(
        model="hosted_vllm/vectors", query="a", documents=["b", "a"], api_base=URL, api_key="none"
    )
    assert found.results[0]["index"] == 1


main()
