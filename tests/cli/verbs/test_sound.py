"""``--audio`` of ``carryall run``."""

from __future__ import annotations

import io
import json
import wave
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from tiny_whisper import sound, write_whisper
from whisper_golden import SEED

from carryall import LLM
from carryall.cli import carryall

pytest.importorskip("av")


def run(*args: object, code: int = 0) -> Result:
    result = CliRunner().invoke(carryall, [str(arg) for arg in args])
    assert result.exit_code == code, result.output
    return result


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_whisper(tmp_path_factory.mktemp("whisper"), SEED)


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = io.BytesIO()
    with wave.open(out, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(16_000)
        file.writeframes((sound(3.0, 4) * 32_767).astype("<i2").tobytes())
    path = tmp_path_factory.mktemp("sounds") / "talk.wav"
    path.write_bytes(out.getvalue())
    return path


@pytest.mark.long
def test_a_recording_is_written_down(checkpoint: Path, recording: Path) -> None:
    with LLM(checkpoint) as llm:
        expected = llm.transcribe(recording, language="en")
        english = llm.transcribe(recording, language="de", task="translate", prompt="one")
    options = ("--audio", recording, "--language", "en")
    assert run("run", checkpoint, *options).output.strip() == expected.text
    several = [
        json.loads(line)
        for line in run("run", checkpoint, *options, *options[:2], "--json").output.splitlines()
    ]
    assert [each["text"] for each in several] == [expected.text] * 2
    assert [each["start"] for each in several[0]["segments"]] == [each.start for each in expected.segments]
    assert several[0]["file"] == str(recording)
    assert not any(each["words"] for each in several[0]["segments"])
    timed = json.loads(run("run", checkpoint, *options, "--words", "--json").output)
    assert ["".join(word["text"] for word in each["words"]) for each in timed["segments"]] == [
        each["text"] for each in timed["segments"]
    ]
    translated = run("run", checkpoint, "one", "--audio", recording, "--language", "German", "--translate")
    assert translated.output.strip() == english.text


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--audio", "nowhere.wav"), "nowhere.wav"),
        (("--language", "de"), "--language, --num-beams, --translate and --words need a recording"),
        (("--num-beams", "2"), "--language, --num-beams, --translate and --words need a recording"),
        (("--translate",), "--language, --num-beams, --translate and --words need a recording"),
        (("--words", "--json"), "--language, --num-beams, --translate and --words need a recording"),
    ],
)
def test_options_that_do_not_fit(checkpoint: Path, args: tuple[str, ...], message: str) -> None:
    assert message in run("run", checkpoint, "x", *args, code=2).output


def test_options_of_conversations_exclude_recordings(checkpoint: Path, recording: Path) -> None:
    assert "--audio excludes --raw" in run("run", checkpoint, "--audio", recording, "--raw", code=2).output
    plain = run("run", checkpoint, "--audio", recording, "--words", code=2).output
    assert "the times of --words are part of --json" in plain


def test_models_and_files_that_do_not_fit(checkpoint: Path, tmp_path: Path, recording: Path) -> None:
    assert "writes down no sound" in run("run", "demo", "--audio", recording, code=2).output
    broken = tmp_path / "broken.wav"
    broken.write_bytes(b"no sound")
    assert "damaged or of no supported format" in run("run", checkpoint, "--audio", broken, code=2).output
    assert "a prompt alone is not enough" in run("run", checkpoint, "hello", code=2).output
