"""Download checkpoints from the Hugging Face hub."""

from __future__ import annotations

import re
from pathlib import Path

from ..errors import MissingExtraError, ModelNotFoundError

_HUB_ID = re.compile(r"(?P<repo>[\w.-]+/[\w.-]+)(@(?P<revision>[\w./-]+))?")
# Many repositories also hold other copies of the weights (consolidated, original, GGUF).
_FILES = ["*.json", "model*.safetensors", "*.jinja"]


def is_hub_id(name: str) -> bool:
    """Return whether ``name`` has the form ``org/name`` or ``org/name@revision``."""
    return _HUB_ID.fullmatch(name) is not None


def download(hub_id: str) -> Path:
    """Download a checkpoint into huggingface_hub's cache, unless it is cached, and return its folder.

    Raises:
        MissingExtraError: huggingface_hub is not installed.
        ModelNotFoundError: the id is malformed, the model does not exist, or the hub cannot be reached.
    """
    match = _HUB_ID.fullmatch(hub_id)
    if match is None:
        raise ModelNotFoundError(f"'{hub_id}' is not a hub id; use org/name or org/name@revision")
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HFValidationError
    except ImportError as error:
        raise MissingExtraError(f"the hub model '{hub_id}'", "huggingface_hub", "hub") from error
    try:
        folder = snapshot_download(match["repo"], revision=match["revision"], allow_patterns=_FILES)
    except (OSError, HFValidationError) as error:  # all of huggingface_hub's network errors are OSErrors
        reason = str(error).strip().splitlines()[0]
        raise ModelNotFoundError(f"cannot download '{hub_id}' from the Hugging Face hub: {reason}") from error
    return Path(folder)
