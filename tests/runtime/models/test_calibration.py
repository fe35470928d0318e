"""Reading calibration text."""

from __future__ import annotations

from pathlib import Path

import pytest
from text_kit import byte_level
from tiny_models import write_tokenizer

from carryall.errors import UsageError
from carryall.exporter.demo import CALIBRATION_TEXT, demo_path
from carryall.runtime.models.calibration import calibration_windows
from carryall.runtime.text.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder)
    return Tokenizer(folder)


def test_text_is_cut_into_windows_and_at_the_end(tokenizer: Tokenizer, tmp_path: Path) -> None:
    path = tmp_path / "some.txt"
    path.write_text("x" * 20_000)
    for most, last in ((8_250, 50), (8_192, 92)):
        windows = calibration_windows(tokenizer, path, context_length=100, max_tokens=most)
        assert [len(window) for window in windows] == [100] * (most // 100) + [last]


@pytest.mark.parametrize("context", [100, 4096])
@pytest.mark.parametrize("most", [1, 30, 128, 1000, 4096, 8191])
def test_few_tokens_are_spread_over_the_text(
    tokenizer: Tokenizer, tmp_path: Path, context: int, most: int
) -> None:
    path = tmp_path / "some.txt"
    text = "".join(chr(97 + index // 400) for index in range(8192))  # 21 parts
    path.write_text(text + "x" * 5000)
    windows = calibration_windows(tokenizer, path, context_length=context, max_tokens=most)
    size = min(128, context, most)
    assert max(map(len, windows)) == size
    assert most - 2 * size < sum(map(len, windows)) <= most
    texts = [tokenizer.decode(window.tolist()) for window in windows]
    assert texts[0] == text[: len(texts[0])]
    assert all(each in text for each in texts)
    if most >= 4096:
        assert {letter for each in texts for letter in each} >= set(text) - {text[-1]}


def test_a_short_text_is_used_whole(tokenizer: Tokenizer, tmp_path: Path) -> None:
    path = tmp_path / "some.txt"
    path.write_text("x" * 300)
    windows = calibration_windows(tokenizer, path, context_length=1000, max_tokens=400)
    assert [len(window) for window in windows] == [128, 128, 44]


def test_every_window_begins_as_a_text_does(tmp_path: Path) -> None:
    path = tmp_path / "some.txt"
    path.write_text("x" * 150)
    tokenizer = byte_level(tmp_path / "llama3")
    (x,) = tokenizer.encode("x", add_special_tokens=False)
    windows = calibration_windows(tokenizer, path, context_length=101)
    assert [window.tolist() for window in windows] == [[256, *[x] * 100], [256, *[x] * 50]]


def test_lines_are_samples(tokenizer: Tokenizer, tmp_path: Path) -> None:
    path = tmp_path / "some.jsonl"
    path.write_text('"abc"\n\n{"prompt": "de", "max_tokens": 3}\n{"text": "f"}\n')
    windows = calibration_windows(tokenizer, path, context_length=64)
    assert [tokenizer.decode(window.tolist()) for window in windows] == ["abc", "de", "f"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("empty.txt", b"", "is empty"),
        ("empty.jsonl", b"\n\n", "is empty"),
        ("bad.jsonl", b'"a"\n{"prompt": ', "line 2 is not valid JSON"),
        (
            "other.jsonl",
            b'{"messages": []}',
            "line 1 is neither a string nor an object with 'text' or 'prompt'",
        ),
        ("binary.txt", b"\xff\xfe\x00", "it is not UTF-8 text at byte 0"),
    ],
)
def test_bad_files_are_named(
    tokenizer: Tokenizer, tmp_path: Path, name: str, content: bytes, message: str
) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(UsageError, match=message):
        calibration_windows(tokenizer, path, context_length=64)


def test_a_missing_file_is_named(tokenizer: Tokenizer, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be read: No such file"):
        calibration_windows(tokenizer, tmp_path / "none.txt", context_length=64)


def test_the_text_that_comes_along_is_long_enough_and_not_held_out() -> None:
    tokenizer = Tokenizer(demo_path())
    windows = calibration_windows(tokenizer, None, context_length=1024)
    assert sum(map(len, windows)) == 8192
    held_out = set((demo_path() / "heldout.txt").read_text().splitlines())
    lines = {line for line in CALIBRATION_TEXT.read_text().splitlines() if len(line.strip()) > 40}
    assert len(lines & held_out) <= 0.01 * len(lines)
