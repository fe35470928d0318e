"""A picture in a chat, alone or with the beginning of its answer, for a model that writes it down."""

from __future__ import annotations

import asyncio
import base64
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from http_serving import http_serving
from PIL import Image
from tiny_trocr import write_trocr
from trocr_golden import PROMPTED_PATH, SEED, golden_path, pictures

from carryall.runtime.service.core.served_model import load_served_model
from carryall.runtime.text.tokenizer import Tokenizer

NEW = 8
Json = dict[str, Any]


@pytest.mark.long
def test_fields_of_a_page_are_json(tmp_path: Path) -> None:
    folder, out = write_trocr(tmp_path, "donut", SEED), io.BytesIO()
    Image.fromarray(pictures()[1]).save(out, "PNG")
    recorded = json.loads(PROMPTED_PATH.read_text(encoding="utf-8"))[1]
    url = f"data:image/png;base64,{base64.b64encode(out.getvalue()).decode()}"
    parts: list[Json] = [
        {"type": "image_url", "image_url": {"url": url}},
        {"type": "text", "text": recorded["text"]},
    ]
    body: Json = {
        "model": "toy",
        "temperature": 0,
        "max_tokens": len(recorded["tokens"]),
        "ignore_eos": True,
        "messages": [{"role": "user", "content": parts}],
        "response_format": {"type": "json_object"},
    }
    served = load_served_model(str(folder), warm_up=True, max_slots=2)
    message = {"role": "user", "content": [{"type": "image", "image": pictures()[1]}]}
    rows = len(served.llm.requests.sight.encoded([message], lambda text: []).output.states)

    async def ask() -> list[Any]:
        async with http_serving(served.llm) as service:
            schema = {"type": "json_schema", "json_schema": {"name": "form", "schema": {"type": "object"}}}
            bodies = [body, {**body, "response_format": schema}]
            return [await service.client.post("/v1/chat/completions", json=each) for each in bodies]

    try:
        response, refused = asyncio.run(ask())
    finally:
        served.llm.shutdown()
    assert response.status_code == 200, response.text
    answer = response.json()
    assert json.loads(answer["choices"][0]["message"]["content"]) == recorded["json"]
    assert answer["usage"]["prompt_tokens"] == rows + len(recorded["prompt"])
    assert refused.status_code == 400
    assert "writes tags and places" in refused.json()["error"]["message"]


@pytest.mark.long
def test_a_chat_of_one_picture_is_answered(tmp_path: Path) -> None:
    folder, out = write_trocr(tmp_path, "deit", SEED), io.BytesIO()
    Image.fromarray(pictures()[1]).save(out, "PNG")
    url = f"data:image/png;base64,{base64.b64encode(out.getvalue()).decode()}"
    part: Json = {"type": "image_url", "image_url": {"url": url}}
    served = load_served_model(str(folder), warm_up=True, max_slots=2)
    assert served.info.reads_images
    body: Json = {"model": "toy", "temperature": 0, "max_tokens": NEW}

    def asked(*parts: Json) -> Json:
        return {**body, "messages": [{"role": "user", "content": list(parts)}]}

    async def ask() -> list[Any]:
        async with http_serving(served.llm) as service:
            images: Json = {
                "model": "toy",
                "stream": False,
                "options": {"temperature": 0, "num_predict": NEW},
            }
            images["messages"] = [{"role": "user", "content": "", "images": [url.partition(",")[2]]}]
            bodies = [asked(part), asked(part, {"type": "text", "text": "What?"}), asked(part, part)]
            answers = [await service.client.post("/v1/chat/completions", json=each) for each in bodies]
            return [*answers, await service.client.post("/api/chat", json=images)]

    try:
        response, refused, several, ollama = asyncio.run(ask())
    finally:
        served.llm.shutdown()
    expected = Tokenizer(folder).decode(np.load(golden_path("deit"))["tokens"][1, 1 : 1 + NEW].tolist())
    assert response.status_code == 200, response.text
    assert response.json()["choices"][0]["message"]["content"] == expected
    assert ollama.json()["message"]["content"] == expected
    for answer, message in ((refused, "reads no text"), (several, "one picture, not 2")):
        assert answer.status_code == 400
        assert message in answer.json()["error"]["message"]
