"""Places in answers become pixels as transformers' ``Florence2Processor`` reads them, on recorded texts."""

from __future__ import annotations

import json

import pytest
from florence_golden import LOCATIONS, RULES

from carryall.runtime.text.parsers.base import ParsedMessage
from carryall.runtime.text.parsers.locations import LocationParser, Places

RECORDED = json.loads(LOCATIONS.read_text(encoding="utf-8"))
BANNED = RULES["phrase_grounding"]["banned_grounding_tokens"]
LEAST = RULES["ocr"]["AREA_THRESHOLD"]


@pytest.mark.parametrize("task", sorted({each["task"] for each in RECORDED}))
def test_answers_are_read_as_transformers_reads_them(task: str) -> None:
    recorded = [each for each in RECORDED if each["task"] == task]
    assert len(recorded) == 16
    for each in recorded:
        places = Places(task, each["size"][0], each["size"][1], banned=BANNED, least_area=LEAST)
        assert places.read(each["text"]) == each["answer"], each["text"]


def test_an_answer_becomes_json_when_it_ends() -> None:
    parser = LocationParser(ParsedMessage(), Places("<OD>", 200, 100))
    for piece in ("ca", "r<loc_0><loc_", "500><loc_999><loc_999>"):
        parser.push(piece)
        assert parser.message.content.text == ""
    parser.end()
    assert json.loads(parser.message.content.text) == {
        "<OD>": {"bboxes": [[0, 50, 199, 99]], "labels": ["car"]}
    }
