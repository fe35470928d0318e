"""The geometry of Florence-2 (https://arxiv.org/abs/2311.06242): the whole picture in one square, one patch.

The results equal those of transformers' processor on Pillow, bit for bit.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ...errors import RequestError
from ...exporter.vision.florence2 import Processor
from .opening import Pixels
from .siglip import squared
from .units import Prepared, UnitInputs, Values, normalized

# What the model was trained on in place of the names of tasks.
_TASKS = {
    "<OCR>": "What is the text in the image?",
    "<OCR_WITH_REGION>": "What is the text in the image, with regions?",
    "<CAPTION>": "What does the image describe?",
    "<DETAILED_CAPTION>": "Describe in detail what is shown in the image.",
    "<MORE_DETAILED_CAPTION>": "Describe with a paragraph what is shown in the image.",
    "<OD>": "Locate the objects with category name in the image.",
    "<DENSE_REGION_CAPTION>": "Locate the objects in the image, with their descriptions.",
    "<REGION_PROPOSAL>": "Locate the region proposals in the image.",
}
_TASKS_WITH_TEXT = {
    "<CAPTION_TO_PHRASE_GROUNDING>": "Locate the phrases in the caption: {}",
    "<REFERRING_EXPRESSION_SEGMENTATION>": "Locate {} in the image with mask",
    "<REGION_TO_SEGMENTATION>": "What is the polygon mask of region {}",
    "<OPEN_VOCABULARY_DETECTION>": "Locate {} in the image.",
    "<REGION_TO_CATEGORY>": "What is the region {}?",
    "<REGION_TO_DESCRIPTION>": "What does the region {} describe?",
    "<REGION_TO_OCR>": "What text is in the region {}?",
}


def prepare(processor: Processor, pixels: Pixels) -> Prepared:
    """Return a picture as a square, whatever its aspect ratio."""
    return Prepared([squared(pixels, processor.patch, processor.resample)], "")


def inputs(processor: Processor, unit: Values) -> UnitInputs:
    """Return the inputs of ``vision.onnx`` for a square, without those of the text."""
    values = normalized(processor, unit).reshape(1, -1)
    return UnitInputs(np.ascontiguousarray(values, np.float32), np.arange(processor.rows)[:, None], {})


def question(processor: Processor, text: str) -> str:
    """Return what the encoder reads behind a picture: of a task its question, with the tokens around it.

    Raises:
        RequestError: a task that reads no text has one.
    """
    asked = text
    for task, words in _TASKS.items():
        if task in text:
            if text != task:
                raise RequestError(f"the task {task} reads no text beside it; leave out the text")
            asked = words
    for task, words in _TASKS_WITH_TEXT.items():
        if task in asked:
            asked = words.replace("{}", asked.replace(task, "").strip())
    return f"{processor.texts['begin']}{asked}{processor.texts['end']}"


def places(processor: Processor, text: str) -> dict[str, Any]:
    """Return how the answer to a text is read: the task, and the rules for places in a picture."""
    task = next((each for each in (*_TASKS, *_TASKS_WITH_TEXT) if each in text), "")
    return {"task": task, "banned": processor.banned, "least_area": processor.least_area}
