"""Compaction items: what is asked for, what is answered, and what is read again."""

from __future__ import annotations

import pytest

from carryall.errors import RequestError, RequestFailedError
from carryall.runtime.service.http.openai.compaction import compacted, summary_body, summary_messages


def response(*texts: str) -> dict[str, object]:
    reasoning = {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "hm"}]}
    messages = [{"type": "message", "content": [{"type": "output_text", "text": text}]} for text in texts]
    return {"id": "resp_1", "output": [reasoning, *messages], "usage": {"input_tokens": 1}}


def test_a_summary_goes_out_and_comes_back() -> None:
    answer = compacted(response("Ä ", "b"))
    assert (answer["object"], answer["usage"]) == ("response.compaction", {"input_tokens": 1})
    question, said = summary_messages(answer["output"][0])
    assert list(question.turns()) == [summary_body({"model": "m", "input": "Hi"})["input"][-1]]
    assert list(said.turns()) == [{"role": "assistant", "content": "Ä b"}]


@pytest.mark.parametrize("texts", [(), ("", " \n")])
def test_an_empty_summary_is_an_error(texts: tuple[str, ...]) -> None:
    with pytest.raises(RequestFailedError, match="the model wrote no summary"):
        compacted(response(*texts))


@pytest.mark.parametrize("sealed", [None, 3, "not base64", "/w=="])
def test_an_item_of_another_service_is_refused(sealed: object) -> None:
    with pytest.raises(RequestError, match="is not what the service made"):
        summary_messages({"type": "compaction", "encrypted_content": sealed})


def test_the_conversation_is_neither_changed_nor_stored() -> None:
    items = [{"role": "user", "content": "a"}]
    body = summary_body({"model": "m", "input": items, "instructions": "S"})
    assert (len(items), len(body["input"]), body["store"], body["instructions"]) == (1, 2, False, "S")
