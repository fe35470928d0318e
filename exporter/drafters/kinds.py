"""Which kind of drafter a folder holds, found without what builds graphs, which draft models do not need."""

from __future__ import annotations

from pathlib import Path

from ..config import CONFIG_FILE, RawConfig
from ..config.files import read_json

EAGLE3, GEMMA4_ASSISTANT, MEDUSA = "EAGLE-3", "assistant of Gemma 4", "Medusa"
MEDUSA_FILE = "medusa_lm_head.safetensors"
_ASSISTANTS = ("gemma4_assistant", "gemma4_unified_assistant")


def drafter_kind(folder: Path) -> str | None:
    """Return the kind of drafter in a folder; None if there is another model.

    Raises:
        CheckpointError: its config.json is damaged.
    """
    if (folder / MEDUSA_FILE).is_file():
        return MEDUSA
    if not (folder / CONFIG_FILE).is_file():
        return None
    raw: RawConfig = read_json(folder / CONFIG_FILE)
    named = any("Eagle3" in str(name) for name in raw.get("architectures") or ())
    if "draft_vocab_size" in raw or named:
        return EAGLE3
    return GEMMA4_ASSISTANT if raw.get("model_type") in _ASSISTANTS else None
