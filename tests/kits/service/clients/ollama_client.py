"""python ollama_client.py URL: what users of Ollama's client do."""

from __future__ import annotations

import sys
from typing import Any

import ollama
from checks import check, main

CLIENT = ollama.Client(host=sys.argv[1])
TURNS = [{"role": "user", "content": "Hi"}]
SHORT: Any = {"num_predict": 4, "temperature": 0}


@check
def chat() -> None:
    answer = CLIENT.chat(model="toy", messages=TURNS, options=SHORT)
    assert answer.done
    assert answer.message.role == "assistant"


@check
def chat_stream() -> None:
    parts = list(CLIENT.chat(model="toy", messages=TURNS, options=SHORT, stream=True))
    whole = CLIENT.chat(model="toy", messages=TURNS, options=SHORT).message.content
    assert "".join(part.message.content or "" for part in parts) == whole
    assert parts[-1].done


@check
def generate() -> None:
    answer = CLIENT.generate(model="toy", prompt="def f", options=SHORT, raw=True)
    parts = list(CLIENT.generate(model="toy", prompt="def f", options=SHORT, raw=True, stream=True))
    assert "".join(part.response for part in parts) == answer.response


@check
def structured_output() -> None:
    answer = CLIENT.chat(
        model="toy", messages=TURNS, format={"enum": ["yes", "no"]}, options={"temperature": 0}
    )
    assert answer.message.content in ('"yes"', '"no"')


@check
def embed() -> None:
    assert len(CLIENT.embed(model="vectors", input=["a", "b"]).embeddings) == 2


@check
def tags_and_show() -> None:
    assert {one.model for one in CLIENT.list().models} == {"toy", "vectors"}
    assert CLIENT.show("toy").modelinfo


@check
def errors() -> None:
    try:
        CLIENT.chat(model="none", messages=TURNS)
    except ollama.ResponseError as error:
        if error.status_code == 404:
            return
    raise AssertionError("no ResponseError with status 404")


main()
