"""The embedded reader reads drawn forms, and quantized parts of it read them as well."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from carryall import LLM, SamplingParams, StructuredOutput
from carryall.cli.demo_form import QUESTION, form_schema
from carryall.errors import ChatTemplateError

FORMS = Path(__file__).resolve().parents[3] / "examples" / "forms"
WRITTEN: dict[str, dict[str, str]] = json.loads((FORMS / "written.json").read_text(encoding="utf-8"))


def edits(wanted: str, given: str) -> int:
    """How many characters to insert, delete or replace to make one text of another."""
    row = list(range(len(given) + 1))
    for i, a in enumerate(wanted, 1):
        before, row[0] = row[0], i
        for j, b in enumerate(given, 1):
            before, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, before + (a != b))
    return row[-1]


def inked(path: Path, ink: tuple[int, int, int]) -> Any:
    """A page of dark text on white, uint8 [height, width, 3], with text of another colour."""
    light = np.asarray(Image.open(path).convert("L"), np.float32)[..., None] / 255
    return np.round(255 * light + (1 - light) * np.array(ink)).astype(np.uint8)


def wrong(ink: tuple[int, int, int] | None = None, **options: Any) -> float:
    """The share of wrong characters in the fields of all forms, as they are or in ink of another colour."""
    fields = next(iter(WRITTEN.values()))
    form = StructuredOutput(json_schema=form_schema(fields))
    params = SamplingParams(temperature=0, max_tokens=200, structured_output=form)
    talks = [
        [
            {
                "role": "user",
                "content": [
                    {"type": "image", "image": FORMS / name if ink is None else inked(FORMS / name, ink)},
                    {"type": "text", "text": QUESTION},
                ],
            }
        ]
        for name in WRITTEN
    ]
    with LLM("reader", provider="cpu", **options) as llm:
        answers = [json.loads(output.outputs[0].text) for output in llm.chat(talks, params)]
    pairs = [
        (value, answer[name])
        for written, answer in zip(WRITTEN.values(), answers, strict=True)
        for name, value in written.items()
    ]
    return sum(edits(*pair) for pair in pairs) / sum(len(value) for value, _ in pairs)


def test_a_video_is_said_to_be_none_of_its_inputs() -> None:
    video = {"type": "video", "video": [np.zeros((64, 64, 3), np.uint8)] * 4, "fps": 2.0}
    with (
        LLM("reader", provider="cpu") as llm,
        pytest.raises(ChatTemplateError, match="the model reads pictures, not videos"),
    ):
        llm.chat([{"role": "user", "content": [video, {"type": "text", "text": "What is shown?"}]}])


@pytest.mark.long
def test_less_than_a_fiftieth_of_the_characters_of_forms_is_wrong() -> None:
    """Of 24 forms with words that were not trained on; it was 0.5 % where the model was trained."""
    assert wrong() < 0.02


@pytest.mark.long
@pytest.mark.parametrize("ink", [(255, 0, 0), (0, 0, 255)])
def test_red_and_blue_text_is_read_as_black_text(ink: tuple[int, int, int]) -> None:
    assert wrong(ink) < 0.02


@pytest.mark.long
@pytest.mark.parametrize(
    "options",
    [{"provider_options": {"tower": "int8"}}, {"quantize": "int8-fast"}, {"quantize": "int4-fast"}],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:carryall's CPU kernels")
def test_quantized_parts_read_as_well(options: dict[str, Any]) -> None:
    assert wrong(**options) < 0.025
