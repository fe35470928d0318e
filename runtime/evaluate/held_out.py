"""Find the held-out text in a model's folder, which the model was not trained on."""

from __future__ import annotations

from pathlib import Path

from ..models.find import side_folder
from ..models.model_source import locate_model

HELD_OUT = "heldout.txt"


def held_out_text(*models: str | None) -> Path | None:
    """Return the held-out text of the first model that has one (the demo does), None if none has."""
    for name in models:
        path = None if name is None else side_folder(locate_model(name)) / HELD_OUT
        if path is not None and path.is_file():
            return path
    return None
