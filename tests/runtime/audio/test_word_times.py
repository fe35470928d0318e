"""Times of words: tokens of whole windows end where transformers says, and become words."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_whisper import write_whisper
from whisper_golden import SEED, TIMES_PATH, sounds

from carryall.errors import GraphError, PackageError
from carryall.exporter.export import export_package
from carryall.runtime.api.llm import LLM
from carryall.runtime.audio import transcription
from carryall.runtime.audio.word_times import token_ends, warped, words_of

ALWAYS: dict[str, Any] = {"compression_ratio": 1e9, "mean_logprob": -1e9, "no_speech": 1.0, "language": "en"}
SECONDS = 0.02  # of a row of the encoder


@pytest.mark.long
@pytest.mark.parametrize("form", ["folder", "package", "int8-fast", "openvino"])
def test_tokens_end_where_transformers_says(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("openvino" if form == "openvino" else "onnxruntime")
    folder, golden = write_whisper(tmp_path / "checkpoint", SEED), np.load(TIMES_PATH)
    aligned: list[tuple[list[int], Any]] = []
    with LLM(
        export_package(folder, tmp_path / "package").path if form == "package" else folder,
        provider="openvino" if form == "openvino" else "cpu",
        quantize=form if form == "int8-fast" else None,
    ) as llm:
        transcriber = llm.requests.hearing.transcriber
        align = transcriber._align
        assert align is not None

        def kept(tokens: list[int], rows: Any) -> Any:
            aligned.append((tokens, rows))
            return align(tokens, rows)

        monkeypatch.setattr(transcriber, "_align", kept)
        for number, sound in enumerate(sounds()):
            aligned.clear()
            found = llm.transcribe(sound, words=True, **ALWAYS)
            assert all(word.start <= word.end for segment in found.segments for word in segment.words)
            if form == "int8-fast":
                continue  # other tokens
            times = list[Any]()
            for tokens, rows in aligned:
                # transformers leaves out the last token, whose weights it did not compute, and does not cut
                # the rows at the end of the sound.
                prompt = 3
                ends = token_ends(align(tokens[:-1], rows)[:, prompt:]) * SECONDS
                times.append(ends)
            wanted = np.split(golden[f"times{number}"], np.flatnonzero(_begins(golden, number))[1:])
            assert len(wanted) == len(times) == 2
            for expected, ends in zip(wanted, times, strict=True):
                np.testing.assert_allclose(ends[: len(expected)], expected, atol=1e-6)


def _begins(golden: Any, number: int) -> Any:
    """Where windows begin: times fall there, and only there."""
    times = golden[f"times{number}"]
    return np.r_[True, np.diff(times) < 0]


def test_a_path_costs_least_of_all() -> None:
    costs = np.random.default_rng(5).standard_normal((4, 6))
    best, cheapest = None, np.inf
    for cuts in itertools.product(range(6), repeat=3):
        # A token goes on to the row at which the next one begins, or to the one before it.
        for shares in itertools.product((0, 1), repeat=3):
            starts = [0, *cuts]
            ends = [cut - (not share) for cut, share in zip(cuts, shares, strict=True)] + [5]
            if any(end < start for start, end in zip(starts, ends, strict=True)):
                continue
            cost = sum(
                costs[token, start : end + 1].sum()
                for token, (start, end) in enumerate(zip(starts, ends, strict=True))
            )
            if cost < cheapest:
                best, cheapest = starts, cost
    assert warped(costs).tolist() == best


TEXTS = {1: " It", 2: "'s", 3: " (", 4: "late", 5: ")", 6: ".", 7: " Go", 8: "\ufffd", 9: "\ufffd", 10: "語"}


def decode(tokens: list[int]) -> str:
    if tokens == [8, 9]:
        return "é"
    return "".join(TEXTS[token] for token in tokens).replace("\ufffd\ufffd", "é")


@pytest.mark.parametrize(
    ("tokens", "language", "expected"),
    [
        ([1, 2, 3, 4, 5, 6, 7], "en", [(" It's", 0, 2), (" (late).", 2, 6), (" Go", 6, 7)]),
        ([7, 8, 9, 6], "de", [(" Goé.", 0, 4)]),
        ([10, 8, 9, 10], "ja", [("語", 0, 1), ("é", 1, 3), ("語", 3, 4)]),
        ([], "en", []),
    ],
)
def test_tokens_are_joined_to_words(tokens: list[int], language: str, expected: list[Any]) -> None:
    times = [(float(n), float(n + 1)) for n in range(len(tokens))]
    words = words_of(tokens, times, decode, language)
    assert [(word.text, word.start, word.end) for word in words] == expected


@pytest.mark.long
@pytest.mark.parametrize(
    ("heads", "error", "message"),
    [
        ([[0, 9]], GraphError, "no heads .9. in layer 0"),
        ([[7, 0]], GraphError, "no heads .0. in layer 7"),
        ("all", PackageError, "'alignment_heads' of generation_config.json must be a list"),
    ],
)
def test_wrong_heads_are_refused_when_words_are_asked_for(
    heads: Any, error: type[Exception], message: str, tmp_path: Path
) -> None:
    folder = write_whisper(tmp_path, SEED)
    path = folder / "generation_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "alignment_heads": heads}))
    with LLM(folder) as llm:
        assert llm.transcribe(sounds()[0], **ALWAYS).segments
        with pytest.raises(error, match=message):
            llm.transcribe(sounds()[0], words=True, **ALWAYS)


def test_without_stated_heads_those_of_the_last_layers_count(tmp_path: Path) -> None:
    folder = write_whisper(tmp_path, SEED)
    path = folder / "generation_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "alignment_heads": []}))
    with LLM(folder) as llm:
        align = llm.requests.hearing.transcriber._align
        assert align is not None
        weights = align([293, 78, 320], np.ones((5, 32), np.float32))
    assert weights.shape == (4, 3, 5)
    np.testing.assert_allclose(weights.sum(axis=2), 1, atol=1e-5)


def test_one_window_is_one_segment_with_words(tmp_path: Path) -> None:
    with LLM(write_whisper(tmp_path, SEED)) as llm:
        found = llm.transcribe(sounds()[1], words=True, timestamps=False, **ALWAYS)
    (segment,) = found.segments
    assert "".join(word.text for word in segment.words) == segment.text
    assert isinstance(segment, transcription.Segment)
    assert segment.words[0].start == segment.start
    assert segment.words[-1].end <= segment.end
