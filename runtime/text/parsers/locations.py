"""Answers with places of Florence-2 (https://arxiv.org/abs/2311.06242), written as JSON in pixels.

``car<loc_10><loc_20><loc_500><loc_600>`` is a box: left, top, right and bottom in thousandths of the picture.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np

from ....records import dataclass
from .base import MessageParser, ParsedMessage

_BINS = 1000
_ENDS = re.compile("<s>|</s>|<pad>")
_PLACE = re.compile(r"<loc_(\d+)>")
_BOX = re.compile(r"<loc_(\d+)>" * 4)
_QUADRANGLE = re.compile(r"(.+?)" + r"<loc_(\d+)>" * 8)
_NAMED_BOXES = re.compile(r"[^<]+(?:<loc_\d+>){4,}")
_BOXES = re.compile(r"(?:<loc_\d+>){4,}")
_MARK = r"(?:<loc_\d+>|<sep>|<poly>|</poly>)"
_NAMED_POLYGONS = re.compile(rf"[^<]+{_MARK}{{4,}}")
_POLYGONS = re.compile(rf"{_MARK}{{4,}}")
_INSTANCE = re.compile(r"<poly>(.*?)</poly>")
_POLYGON = re.compile(r"((?:<loc_\d+>)+)(?:<sep>|$)")
_NAME = re.compile(r"^\s*(.*?)(?=<od>|</od>|<box>|</box>|<bbox>|</bbox>|<loc_|<poly>)")


@dataclass(frozen=True, slots=True)
class Places:
    """How the places of an answer are read.

    Args:
        task: the name of the task, which says what the answer holds.
        width: pixels of the picture.
        height: likewise.
        banned: phrases that are left out of what a caption is searched for.
        least_area: the smallest part of the picture that a text with its place in it covers.
    """

    task: str
    width: int
    height: int
    banned: Collection[str] = ()
    least_area: float = 0.0

    def read(self, text: str) -> dict[str, Any]:
        """Return by the task what an answer says, as transformers' ``post_process_generation`` does."""
        reader = _READERS.get(self.task)
        if reader is None:
            return {self.task: re.sub("<s>|</s>", "", text).strip()}
        return {self.task: reader(self, _ENDS.sub("", text))}

    def pixels(self, bins: Sequence[str]) -> list[int]:
        """Return x, y, x, ... of the middles of bins, in float32 and without fractions."""
        sizes = np.array([self.width, self.height] * (len(bins) // 2), np.float64) / _BINS
        middles = np.array(bins, np.float32) + np.float32(0.5)
        return list(map(int, middles * sizes.astype(np.float32)))

    def quadrangles(self, text: str) -> dict[str, Any]:
        """Return corners of texts, and the texts."""
        kept: list[tuple[list[int], str]] = []
        for content, *bins in _QUADRANGLE.findall(text):
            corners = self.pixels(bins)
            if self.least_area <= 0 or _area(corners) >= self.width * self.height * self.least_area:
                kept.append((corners, content.strip()))
        return {"quad_boxes": [corners for corners, _ in kept], "labels": [name for _, name in kept]}

    def named_boxes(self, text: str) -> dict[str, Any]:
        """Return boxes and their names."""
        return self._boxes(_NAMED_BOXES.findall(text))

    def all_boxes(self, text: str) -> dict[str, Any]:
        """Return boxes, with or without names."""
        return self._boxes(_BOXES.findall(text))

    def phrases(self, text: str) -> dict[str, Any]:
        """Return boxes of phrases that are not banned."""
        return self._boxes(_NAMED_BOXES.findall(text), self.banned)

    def _boxes(self, phrases: Sequence[str], banned: Collection[str] = ()) -> dict[str, Any]:
        boxes: list[list[int]] = []
        names: list[str] = []
        for phrase in phrases:
            name = _name(phrase)
            if name is None or name in banned:
                continue
            of_phrase = [self.pixels(each) for each in _BOX.findall(phrase)]
            boxes += of_phrase
            names += [_ascii(name)] * len(of_phrase)
        return {"bboxes": boxes, "labels": names}

    def polygons(self, text: str) -> dict[str, Any]:
        """Return outlines of the whole answer."""
        return self._outlines(_POLYGONS.findall(text))

    def _outlines(self, phrases: Sequence[str]) -> dict[str, Any]:
        outlines: list[list[list[int]]] = []
        names: list[str] = []
        for phrase in phrases:
            name = _name(_PLACE.sub("", phrase, count=1) if _PLACE.match(phrase) else phrase)
            if name is None:
                continue
            whole = "<poly>" in phrase and "</poly>" in phrase
            for instance in _INSTANCE.findall(phrase) if whole else [phrase]:
                parts = [_PLACE.findall(part) for part in _POLYGON.findall(instance)]
                if parts:
                    outlines.append([self.pixels(part[: len(part) // 2 * 2]) for part in parts])
                    names.append(name)
        return {"polygons": outlines, "labels": names}

    def boxes_or_polygons(self, text: str) -> dict[str, Any]:
        """Return boxes, or outlines where the answer holds any."""
        outlined = "<poly>" in text
        boxes = self._boxes([] if outlined else _NAMED_BOXES.findall(text))
        outlines = self._outlines(_NAMED_POLYGONS.findall(text) if outlined else [])
        return {
            "bboxes": boxes["bboxes"],
            "bboxes_labels": boxes["labels"],
            "polygons": outlines["polygons"],
            "polygons_labels": outlines["labels"],
        }


_READERS: Mapping[str, Callable[[Places, str], dict[str, Any]]] = {
    "<OCR_WITH_REGION>": Places.quadrangles,
    "<OD>": Places.named_boxes,
    "<DENSE_REGION_CAPTION>": Places.named_boxes,
    "<CAPTION_TO_PHRASE_GROUNDING>": Places.phrases,
    "<REFERRING_EXPRESSION_SEGMENTATION>": Places.polygons,
    "<REGION_TO_SEGMENTATION>": Places.polygons,
    "<OPEN_VOCABULARY_DETECTION>": Places.boxes_or_polygons,
    "<REGION_PROPOSAL>": Places.all_boxes,
}


class LocationParser(MessageParser):
    """Writes an answer as one JSON text when it has ended; its content is empty before.

    Args:
        message: receives the text.
        places: how it is read.
    """

    def __init__(self, message: ParsedMessage, places: Places) -> None:
        super().__init__(message)
        self._places = places

    def _advance(self, *, final: bool) -> bool:
        if final:
            value = self._places.read(self._text)
            self.message.content.add(json.dumps(value, ensure_ascii=False))
            self._text = ""
        return False


def _name(phrase: str) -> str | None:
    """Return what is in front of the first place or tag; None if there is neither, or a broken line."""
    found = _NAME.search(phrase)
    return None if found is None else found.group().strip()


def _ascii(text: str) -> str:
    """Return a text without other characters: so are the names of boxes in transformers."""
    return text.encode("ascii", "ignore").decode("ascii")


def _area(corners: Sequence[int]) -> float:
    """Return the area of a quadrangle as transformers computes it: without its last edge."""
    x, y = corners[0::2], corners[1::2]
    return 0.5 * abs(sum(x[i] * y[i + 1] - x[i + 1] * y[i] for i in range(3)))
