"""A watermark is an option of each API, and the text is the engine's own with it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from http_serving import http_serving
from null_llm import null_llm

from carryall.runtime.tasks.detect import detect_in_tokens
from carryall.runtime.types.watermark import Watermark

SYNTHID = {"kind": "synthid", "keys": [1, 2, 3, 4, 5, 6, 7, 8]}
COUNT = 90


@pytest.mark.long
@pytest.mark.parametrize("mark", [True, SYNTHID], ids=["green", "synthid"])
def test_each_api_writes_it(mark: Any) -> None:
    turns = [{"role": "user", "content": "x"}]
    doors: list[tuple[str, dict[str, Any], Any]] = [
        ("/v1/completions", {"prompt": "x", "max_tokens": COUNT}, lambda a: a["choices"][0]["text"]),
        (
            "/v1/chat/completions",
            {"messages": turns, "max_tokens": COUNT},
            lambda a: a["choices"][0]["message"]["content"],
        ),
        (
            "/v1/responses",
            {"input": "x", "max_output_tokens": COUNT},
            lambda a: a["output"][0]["content"][0]["text"],
        ),
        ("/v1/messages", {"messages": turns, "max_tokens": COUNT}, lambda a: a["content"][0]["text"]),
        (
            "/api/chat",
            {"messages": turns, "stream": False, "options": {"num_predict": COUNT, "watermark": mark}},
            lambda a: a["message"]["content"],
        ),
        (
            "/generate",
            {"inputs": "x", "parameters": {"max_new_tokens": COUNT, "do_sample": True, "watermark": mark}},
            lambda a: a["generated_text"],
        ),
    ]

    async def scenario() -> None:
        async with null_llm() as llm, http_serving(llm) as served:
            vocab_size = llm.tokenizer.vocab_size
            for path, body, text_of in doors:
                own = {} if path in ("/api/chat", "/generate") else {"watermark": mark, "temperature": 1.0}
                answer = await served.post(path, **body, **own)
                assert answer.status_code == 200, answer.text
                assert "watermark" not in answer.headers.get("X-Carryall-Ignored-Fields", "")
                tokens = llm.encode(text_of(answer.json()), add_special_tokens=False)
                watermark = Watermark.of(mark)
                assert watermark is not None
                report = detect_in_tokens(tokens, watermark, vocab_size)
                assert report.z > 2, (path, report)  # tokens of random text do not survive all as such
            wrong = await served.post("/v1/completions", prompt="x", watermark={"kind": "red"})
            assert (wrong.status_code, "green or synthid" in wrong.text) == (400, True)

    asyncio.run(scenario())
