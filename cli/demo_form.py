"""The form that ``carryall demo`` reads with the embedded reader, and the picture of it as text."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import numpy.typing as npt

from ..exporter.demo import demo_path
from ..runtime.api.llm import LLM
from ..runtime.types.sampling_params import SamplingParams
from ..runtime.types.structured_output import StructuredOutput

READER = "reader"
FORM, WRITTEN = (demo_path(READER) / name for name in ("form.jpg", "form.json"))
QUESTION = "Extract as JSON."
_DOTS = np.array([[1, 8], [2, 16], [4, 32], [64, 128]])  # bits of a braille pattern, Unicode 2800 to 28FF


def form_schema(written: dict[str, str]) -> dict[str, Any]:
    """Return the JSON schema of a form with the given fields."""
    fields = {name: {"type": "string", "maxLength": 24} for name in written}
    return {"type": "object", "properties": fields, "required": [*fields], "additionalProperties": False}


def read_form(llm: LLM) -> dict[str, Any]:
    """Return the path of the embedded form's picture, what is written on it, and what a model reads.

    Raises:
        MissingExtraError: Pillow is not installed.
        ProviderRuntimeError: the model failed.
    """
    written = json.loads(WRITTEN.read_text(encoding="utf-8"))
    parts = [{"type": "image", "image": FORM}, {"type": "text", "text": QUESTION}]
    form = StructuredOutput(json_schema=form_schema(written))
    params = SamplingParams(temperature=0, max_tokens=200, structured_output=form)
    (output,) = llm.chat([{"role": "user", "content": parts}], params)
    output.check()
    return {"picture": str(FORM), "written": written, "read": json.loads(output.outputs[0].text)}


def dots(pixels: npt.NDArray[np.uint8], columns: int) -> list[str]:
    """Return the ink of a page as lines of braille patterns, 2 x 4 dots a character; without empty lines.

    Args:
        pixels: gray, dark ink on light paper [height, width].
        columns: the most characters of a line; a wider picture is reduced by a whole factor.
    """
    ink = pixels < (int(pixels.min()) + np.median(pixels)) / 2  # most of a page is paper
    rows, inked = np.flatnonzero(ink.any(1)), np.flatnonzero(ink.any(0))
    if not rows.size:
        return []
    ink = ink[rows[0] : rows[-1] + 1, inked[0] : inked[-1] + 1]
    factor = -(-ink.shape[1] // (2 * columns))
    ink = np.pad(ink, [(0, -ink.shape[0] % (4 * factor)), (0, -ink.shape[1] % (2 * factor))])
    shares = ink.reshape(ink.shape[0] // factor, factor, -1, factor).mean((1, 3))
    bits = (shares > 0.3).reshape(shares.shape[0] // 4, 4, -1, 2) * _DOTS[:, None, :]
    return ["".join(chr(0x2800 + code) for code in row) for row in bits.sum((1, 3)).tolist() if any(row)]
