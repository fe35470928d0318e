"""``--image`` of ``carryall run`` for a model that writes down lines of text, and lines of a batch job."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result
from PIL import Image
from tiny_florence import write_florence
from tiny_trocr import write_trocr
from tiny_whisper import write_whisper
from trocr_golden import PROMPTED_PATH, SEED, golden_path, pictures

from carryall.cli import carryall
from carryall.runtime.text.tokenizer import Tokenizer

NEW = 8
GREEDY = ("--temperature", 0, "--max-tokens", NEW)


def run(*args: object) -> Result:
    return CliRunner().invoke(carryall, [str(arg) for arg in args])


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_trocr(tmp_path_factory.mktemp("trocr"), "deit", SEED)


@pytest.fixture(scope="module")
def answer(checkpoint: Path) -> str:
    """What transformers writes of the second picture."""
    return Tokenizer(checkpoint).decode(np.load(golden_path("deit"))["tokens"][1, 1 : 1 + NEW].tolist())


def png() -> bytes:
    out = io.BytesIO()
    Image.fromarray(pictures()[1]).save(out, "PNG")
    return out.getvalue()


@pytest.fixture(scope="module")
def line(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("lines") / "line.png"
    path.write_bytes(png())
    return path


@pytest.mark.long
def test_a_picture_alone_is_written_down(checkpoint: Path, line: Path, answer: str) -> None:
    result = run("run", checkpoint, "--image", line, *GREEDY)
    assert result.exit_code == 0, result.output
    assert result.stdout == f"{answer}\n"
    result = run("run", checkpoint, "--image", line, *GREEDY, "--json")
    assert json.loads(result.stdout)["text"] == answer


@pytest.mark.long
def test_fields_of_a_page_are_json(tmp_path: Path, line: Path) -> None:
    donut, recorded = write_trocr(tmp_path, "donut", SEED), json.loads(PROMPTED_PATH.read_text())[1]
    result = run("run", donut, recorded["text"], "--image", line, *GREEDY, "--json-object")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout) == recorded["json"]


@pytest.mark.long
def test_places_of_objects_are_json(tmp_path: Path, line: Path) -> None:
    result = run("run", write_florence(tmp_path, 3), "<OD>", "--image", line, *GREEDY, "--json-object")
    assert result.exit_code == 0, result.output
    assert set(json.loads(result.stdout)["<OD>"]) == {"bboxes", "labels"}


@pytest.mark.parametrize("verb", [("chat",), ("run",)])
def test_a_model_that_hears_has_no_conversation(tmp_path: Path, verb: tuple[str, ...]) -> None:
    result = run(*verb, write_whisper(tmp_path, 0))
    assert result.exit_code == 2
    assert "writes down recordings, and reads neither texts nor images" in result.output


def test_a_question_beside_a_picture_is_refused(checkpoint: Path, line: Path) -> None:
    result = run("run", checkpoint, "What is written here?", "--image", line, *GREEDY)
    assert result.exit_code == 2
    assert "reads no text" in result.output


def test_several_pictures_are_refused(checkpoint: Path, line: Path) -> None:
    result = run("run", checkpoint, "--image", line, "--image", line, *GREEDY)
    assert result.exit_code == 2
    assert "one picture, not 2" in result.output


@pytest.mark.long
def test_other_models_need_a_prompt_beside_a_picture(line: Path) -> None:
    result = run("run", "demo", "--image", line, "--json")
    assert result.exit_code == 2
    assert "--json need a prompt" in result.output


@pytest.mark.long
def test_lines_of_a_job_hold_a_picture_each(checkpoint: Path, answer: str, tmp_path: Path) -> None:
    part = {
        "type": "image_url",
        "image_url": {"url": f"data:image/png;base64,{base64.b64encode(png()).decode()}"},
    }
    asked = [[part], [part, {"type": "text", "text": "What?"}]]
    body = {"temperature": 0, "max_tokens": NEW}
    lines = [
        {
            "custom_id": str(number),
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": {**body, "messages": [{"role": "user", "content": content}]},
        }
        for number, content in enumerate(asked)
    ]
    (tmp_path / "in.jsonl").write_text("".join(f"{json.dumps(each)}\n" for each in lines))
    result = run("batch", "run", tmp_path / "in.jsonl", "-o", tmp_path / "out.jsonl", "--model", checkpoint)
    answers = [
        json.loads(each)
        for path in tmp_path.glob("out*.jsonl")
        for each in path.read_text(encoding="utf-8").splitlines()
    ]
    assert len(answers) == 2, result.output
    first, second = sorted(answers, key=lambda each: str(each["custom_id"]))
    assert first["response"]["body"]["choices"][0]["message"]["content"] == answer
    assert "reads no text" in second["error"]["message"]
