"""Recordings beside a job: transcripts as the service writes them, and lines that fail alone."""

from __future__ import annotations

import json
import wave
from pathlib import Path
from typing import Any

import pytest
from tiny_whisper import sound, write_whisper
from whisper_golden import SEED

import carryall
from carryall import LLM
from carryall.runtime.service.http.openai.transcriptions import transcript_json

pytest.importorskip("av")

Json = dict[str, Any]


def write_wav(path: Path, seconds: float, seed: int) -> None:
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(16_000)
        file.writeframes((sound(seconds, seed) * 32_767).astype("<i2").tobytes())


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_whisper(tmp_path_factory.mktemp("whisper"), SEED)


def job(folder: Path, model: str | Path, lines: list[Json]) -> list[Json]:
    """Run a job over lines; return its answers in order of the lines."""
    numbered = [{"custom_id": str(number), **line} for number, line in enumerate(lines)]
    (folder / "lines.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in numbered))
    carryall.batch.run(folder / "lines.jsonl", folder / "done.jsonl", model=str(model)).wait(300)
    answers = list[Json]()
    for path in folder.glob("done*.jsonl"):
        answers += [json.loads(line) for line in path.read_text().splitlines()]
    return sorted(answers, key=_number)


def _number(answer: Json) -> int:
    """Return the number of the line; those whose file cannot be read have no id of their own."""
    name: str = answer["custom_id"]
    return int(name.removeprefix("line-")) - name.startswith("line-")


@pytest.mark.long
def test_lines_name_recordings_beside_them(tmp_path: Path, checkpoint: Path) -> None:
    for number in range(3):
        write_wav(tmp_path / f"{number}.wav", 1.0 + number, number)
    with LLM(checkpoint) as llm:
        heard = [llm.transcribe(tmp_path / f"{number}.wav", language="en") for number in range(3)]
        english = llm.transcribe(tmp_path / "1.wav", task="translate", temperature=0.0)
    url = "/v1/audio/transcriptions"
    lines: list[Json] = [
        *({"url": url, "body": {"file": f"file:{n}.wav", "language": "en"}} for n in range(3)),
        {"url": url, "body": {"file": "file:1.wav", "language": "en", "response_format": "verbose_json"}},
        {"url": "/v1/audio/translations", "body": {"file": "file:1.wav", "temperature": 0}},
        {"url": url, "body": {"file": "file:nowhere.wav"}},
        {"url": url, "body": {"file": "data:audio/wav;base64,aGVsbG8="}},
        {"url": url, "body": {"file": "file:1.wav", "language": "klingon"}},
        {"url": url, "body": {"file": "file:1.wav", "response_format": "srt"}},
        {"url": url, "body": {"file": "file:1.wav", "stream": True}},
        {"url": url, "body": {"language": "en"}},
        {"url": "/v1/completions", "body": {"prompt": "hello"}},
    ]
    answers = job(tmp_path, checkpoint, lines)
    bodies = [answer["response"]["body"] for answer in answers[:5]]
    for found, expected in zip(bodies[:3], heard, strict=True):
        assert {**found, "model": ""} == {**transcript_json(expected, "json"), "model": ""}
    assert bodies[3]["segments"] == transcript_json(heard[1], "verbose_json")["segments"]
    assert bodies[4]["text"] == english.text
    errors = [answer["error"]["message"] for answer in answers[5:]]
    for error, message in zip(
        errors,
        [
            "names no file",
            "damaged or of no supported format",
            "'klingon' is unknown",
            "json or verbose_json",
            "json or verbose_json",
            "'file' must be a recording beside the job",
            "lines have the url /v1/audio/transcriptions",
        ],
        strict=True,
    ):
        assert message in error


@pytest.mark.long
def test_a_language_model_answers_no_recordings(tmp_path: Path) -> None:
    write_wav(tmp_path / "0.wav", 0.5, 0)
    (answer,) = job(tmp_path, "demo", [{"url": "/v1/audio/transcriptions", "body": {"file": "file:0.wav"}}])
    assert "is a language model; it cannot answer /v1/audio/transcriptions" in answer["error"]["message"]
