"""Batches of recordings of a service: transcripts as the model writes them, and lines that fail alone."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import time
import wave
from pathlib import Path
from typing import Any

import pytest
from http_serving import http_serving
from tiny_whisper import sound, write_whisper
from whisper_golden import SEED

from carryall import LLM, AsyncLLM
from carryall.runtime.batch.online.routes import BatchService
from carryall.runtime.service.http.openai.transcriptions import transcript_json

URL, ENGLISH = "/v1/audio/transcriptions", "/v1/audio/translations"

pytest.importorskip("av")


def recording() -> bytes:
    out = io.BytesIO()
    with wave.open(out, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(16_000)
        file.writeframes((sound(2.0, 4) * 32_767).astype("<i2").tobytes())
    return out.getvalue()


@pytest.mark.long
def test_lines_hold_recordings(tmp_path: Path) -> None:
    checkpoint = write_whisper(tmp_path / "whisper", SEED)
    (tmp_path / "secret.wav").write_bytes(recording())
    with LLM(checkpoint) as llm:
        heard = llm.transcribe(recording(), language="en", temperature=0.0)
        english = llm.transcribe(recording(), task="translate", temperature=0.0)
    address = f"data:audio/wav;base64,{base64.b64encode(recording()).decode()}"
    usual = {"model": "toy", "file": address, "language": "en", "temperature": 0}
    bodies: list[dict[str, Any]] = [
        usual,
        {**usual, "response_format": "verbose_json"},
        {**usual, "file": f"file:{tmp_path}/secret.wav"},
        {**usual, "response_format": "srt"},
    ]

    async def answered(client: Any, url: str, *asked: dict[str, Any]) -> tuple[list[Any], list[Any]]:
        lines = [
            json.dumps({"custom_id": str(number), "method": "POST", "url": url, "body": body})
            for number, body in enumerate(asked)
        ]
        data = "".join(f"{line}\n" for line in lines).encode()
        file = await client.files.create(file=("in.jsonl", data), purpose="batch")
        made = await client.batches.create(input_file_id=file.id, endpoint=url, completion_window="24h")
        end = time.monotonic() + 60
        while (batch := await client.batches.retrieve(made.id)).status != "completed":
            assert time.monotonic() < end, batch
            await asyncio.sleep(0.02)
        found = []
        for name in (batch.output_file_id, batch.error_file_id):
            text = (await client.files.content(name)).text if name else ""
            found.append([json.loads(line) for line in text.splitlines()])
        return found[0], found[1]

    async def scenario() -> None:
        parts: Any = [lambda models, settings: BatchService(tmp_path / "batches", settings)]
        llm = AsyncLLM(checkpoint, max_slots=2)
        try:
            async with http_serving(llm, parts=parts) as served:
                client = served.openai()
                done, wrong = await answered(client, URL, *bodies)
                plain, whole = (each["response"]["body"] for each in done)
                assert {**plain, "model": ""} == {**transcript_json(heard, "json"), "model": ""}
                assert whole["segments"] == transcript_json(heard, "verbose_json")["segments"]
                messages = [each["error"]["message"] for each in wrong]
                assert [message.split(",")[0] for message in messages] == [
                    "'file' must be a recording beside the job",
                    "answers in files have the 'response_format' json or verbose_json",
                ]
                usual.pop("language")
                done, wrong = await answered(client, ENGLISH, usual)
                assert (done[0]["response"]["body"]["text"], wrong) == (english.text, [])
        finally:
            llm.shutdown()

    asyncio.run(scenario())
