"""python langchain_client.py URL: LangChain's classes for OpenAI."""

from __future__ import annotations

import sys
from typing import Any

from checks import check, main
from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings
from pydantic import BaseModel, SecretStr

URL = f"{sys.argv[1]}/v1"
KEY = SecretStr("none")


class Weather(BaseModel):
    """The weather of a city."""

    city: str


def chat(**options: Any) -> ChatOpenAI:
    return ChatOpenAI(model="toy", base_url=URL, api_key=KEY, max_retries=0, temperature=0, **options)


@check
def invoke_and_stream() -> None:
    answer = chat(max_tokens=4).invoke("Hi")
    assert "".join(str(chunk.content) for chunk in chat(max_tokens=4).stream("Hi")) == answer.content
    assert answer.usage_metadata
    assert answer.usage_metadata["output_tokens"] <= 4


@check
def bind_tools() -> None:
    bound = chat(max_tokens=300).bind_tools([Weather], tool_choice="Weather")
    message: Any = bound.invoke("Hi")
    calls = message.tool_calls + message.invalid_tool_calls  # a random model may not end its text
    assert calls[0]["name"] == "Weather"


@check
def completion() -> None:
    model = OpenAI(model="toy", base_url=URL, api_key=KEY, max_retries=0, max_tokens=4)
    assert isinstance(model.invoke("def f"), str)


@check
def embeddings() -> None:
    model = OpenAIEmbeddings(model="vectors", base_url=URL, api_key=KEY, check_embedding_ctx_length=False)
    assert len(model.embed_documents(["a", "b"])) == 2


@check
def responses() -> None:
    assert chat(max_tokens=16, use_responses_api=True).invoke("Hi").content is not None


main()
