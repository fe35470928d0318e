"""The drafter in a folder."""

from __future__ import annotations

from pathlib import Path

from ..config import CONFIG_FILE
from ..config.files import read_json
from .drafter import Drafter
from .eagle3 import Eagle3
from .gemma4_assistant import Gemma4Assistant
from .kinds import EAGLE3, GEMMA4_ASSISTANT, drafter_kind

_DRAFTERS: dict[str, type[Drafter]] = {EAGLE3: Eagle3, GEMMA4_ASSISTANT: Gemma4Assistant}


def drafter_of(folder: Path) -> Drafter:
    """Return the drafter in a folder of which ``drafter_kind`` knows the kind.

    Raises:
        CheckpointError: its config.json is damaged.
    """
    return _DRAFTERS[drafter_kind(folder) or ""](folder, read_json(folder / CONFIG_FILE))
