"""Watermarks are found in texts that carry them, and not in others; short texts are told as such."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

import carryall
from carryall import LLM, SamplingParams, Watermark
from carryall.cli import carryall as command_line
from carryall.errors import UsageError
from carryall.runtime.tasks.detect import _tail, detect_in_tokens

GREEN: dict[str, Any] = {"kind": "green"}
SYNTHID: dict[str, Any] = {"kind": "synthid", "keys": [654, 400, 836, 123, 340, 443, 597, 160, 57]}


@pytest.fixture(scope="module")
def texts() -> dict[str, str]:
    """What the draft model writes with each watermark, and without one."""
    params: dict[str, Any] = {"max_tokens": 200, "temperature": 1.0, "seed": 3, "ignore_eos": True}
    with LLM("draft") as llm:
        prompts = ["def f(x):", "class Stack:", "import os\n"]
        marks: dict[str, Any] = {"green": GREEN, "synthid": SYNTHID, "none": None}
        return {
            name: "".join(
                output.outputs[0].text
                for output in llm.generate(prompts, SamplingParams(**params, watermark=mark))
            )
            for name, mark in marks.items()
        }


RECORDED: Any = json.loads(
    (Path(__file__).parents[1] / "engine/sampling/watermarks.json").read_text(encoding="utf-8")
)


@pytest.mark.parametrize("case", RECORDED["detection"], ids=lambda case: f"{case[0]}-{case[1]}-{case[5]}")
def test_z_scores_of_green_lists_are_those_of_transformers(case: list[Any]) -> None:
    """Of random tokens, and of tokens of which a part was drawn from the green lists."""
    vocab_size, ratio, key, tokens, scored, green, z = case
    report = detect_in_tokens(tokens, Watermark(ratio=ratio, key=key), vocab_size)
    assert (report.scored, report.signals) == (scored, green)
    assert report.z == pytest.approx(z, rel=1e-9)
    assert report.marked is (z > 5)


@pytest.mark.long
@pytest.mark.parametrize("mark", [GREEN, SYNTHID], ids=["green", "synthid"])
def test_a_watermark_is_found_where_it_is(texts: dict[str, str], mark: dict[str, Any]) -> None:
    found = {name: carryall.detect("draft", text, watermark=mark) for name, text in texts.items()}
    assert {name: report.marked for name, report in found.items()} == {
        name: name == mark["kind"] for name in texts
    }
    assert found[mark["kind"]].z > 8
    assert all(abs(found[name].z) < 4 for name in texts if name != mark["kind"])
    other = {**mark, "key": 7} if mark is GREEN else {**mark, "keys": [1, 2, 3]}
    assert not carryall.detect("draft", texts[mark["kind"]], watermark=other).marked


@pytest.mark.long
@pytest.mark.parametrize("mark", [GREEN, SYNTHID], ids=["green", "synthid"])
def test_a_watermark_survives_an_edit(texts: dict[str, str], mark: dict[str, Any]) -> None:
    text = texts[mark["kind"]]
    third = len(text) // 3
    edited = text[:third] + " something else entirely " + text[third + 40 :]
    assert carryall.detect("draft", edited, watermark=mark).marked


@pytest.mark.long
def test_a_text_that_is_too_short_is_told(texts: dict[str, str]) -> None:
    report = carryall.detect("draft", texts["green"][:40])
    assert report.verdict == "too short"
    assert "could not be told" in str(report)
    assert carryall.detect("draft", "").verdict == "too short"


@pytest.mark.long
@pytest.mark.parametrize("mark", [GREEN, SYNTHID], ids=["green", "synthid"])
def test_batches_and_speculation_change_no_token(mark: dict[str, Any]) -> None:
    prompts = ["def f(x):\n    return f(x)\n" * 3, "class A:\n    pass\n" * 4]
    params = SamplingParams(max_tokens=48, temperature=0.8, seed=5, watermark=Watermark(**mark), top_k=20)
    written = []
    doors: list[dict[str, Any]] = [{}, {"max_slots": 1}]
    doors.append({"speculative": "prompt-lookup", "adaptive_speculation": False})
    for options in doors:
        with LLM("draft", **options) as llm:
            written.append([output.outputs[0].token_ids for output in llm.generate(prompts, params)])
    assert written[0] == written[1] == written[2]


@given(st.integers(1, 300), st.floats(0.05, 0.95), st.data())
@settings(max_examples=50)
def test_p_values_are_the_tail_of_the_binomial_distribution(count: int, share: float, data: Any) -> None:
    signals = data.draw(st.integers(0, count))
    exact = math.fsum(
        math.comb(count, k) * share**k * (1 - share) ** (count - k) for k in range(signals, count + 1)
    )
    assert _tail(signals, count, share) == pytest.approx(exact, rel=1e-9, abs=1e-300)


@pytest.mark.long
@pytest.mark.parametrize("mark", [Watermark(), Watermark(**SYNTHID)], ids=["green", "synthid"])
def test_random_texts_are_marked_as_seldom_as_the_p_value_says(mark: Watermark) -> None:
    source = np.random.default_rng(0)
    values = [detect_in_tokens(source.integers(0, 500, 120).tolist(), mark, 500).p_value for _ in range(200)]
    assert sum(value < 0.05 for value in values) <= 20  # 10 are expected
    assert sum(value < 0.5 for value in values) >= 70
    assert min(values) > 1e-6


def test_repeated_text_adds_nothing() -> None:
    tokens = np.random.default_rng(0).integers(0, 500, 60).tolist()
    once, often = (detect_in_tokens(tokens * times, Watermark(), 500) for times in (1, 20))
    assert often.scored <= once.scored + 1
    assert often.p_value == pytest.approx(once.p_value, rel=1.0)


def test_long_texts_take_the_normal_distribution() -> None:
    exact, near = _tail(10_400, 20_000, 0.5), _tail(10_401, 20_001, 0.5)
    assert near == pytest.approx(exact, rel=0.05)


@pytest.mark.long
def test_the_verb_tells_by_its_exit_code(texts: dict[str, str], tmp_path: Path) -> None:
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    mark = json.dumps(SYNTHID)
    for name, option, code in (
        ("green", [], 0),
        ("none", [], 1),
        ("synthid", ["--watermark", mark], 0),
        ("green", ["--watermark", mark], 1),
        ("green", ["--watermark", "{"], 2),
        ("green", ["--watermark", '{"kind": "red"}'], 2),
        ("missing", [], 2),
    ):
        arguments = ["detect", "draft", str(tmp_path / name), *option]
        assert CliRunner().invoke(command_line, arguments).exit_code == code, arguments
    done = CliRunner().invoke(command_line, ["detect", "draft", str(tmp_path / "green"), "--json"])
    assert json.loads(done.output)["verdict"] == "marked"


def test_a_wrong_watermark_is_an_error() -> None:
    for wrong in ({"kind": "red"}, {"keys": [1]}, {"kind": "synthid"}, {"ratio": 1}, {"colour": 1}, 5, False):
        with pytest.raises(UsageError):
            carryall.detect("draft", "text", watermark=wrong)  # type: ignore[arg-type]
