"""Read a checkpoint folder's config.json and generation_config.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ...errors import CheckpointError, ModelNotFoundError
from ...storage.texts import read_text
from .genai import GENAI_FILE, checkpoint_config, generation_config
from .values import RawConfig, mapping

CONFIG_FILE, GENERATION_FILE = "config.json", "generation_config.json"


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object.

    Raises:
        CheckpointError: the file is not a JSON object.
    """
    if path.exists() and not path.is_file():  # reading a pipe would block
        raise CheckpointError(f"cannot read {path}: it is not a regular file")
    try:
        content = json.loads(read_text(path, CheckpointError))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"cannot read {path}: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} does not hold a JSON object")
    return content


def read_config(folder: Path) -> dict[str, Any]:
    """Read a checkpoint folder's config.json; without one, the same facts from genai_config.json.

    Raises:
        ModelNotFoundError: the folder or its config.json does not exist.
        CheckpointError: the file is not a JSON object, or has no ``model_type``.
    """
    path, genai = folder / CONFIG_FILE, folder / GENAI_FILE
    if not path.is_file() and genai.is_file():
        return checkpoint_config(read_json(genai), genai)
    if not path.is_file():
        raise ModelNotFoundError(f"{folder} is not a Hugging Face checkpoint: it holds no config.json")
    raw = read_json(path)
    if not isinstance(raw.get("model_type"), str):
        raise CheckpointError(f"{path} has no 'model_type'")
    return raw


def read_generation_config(folder: Path) -> dict[str, Any]:
    """Read generation_config.json; without one, the same facts from genai_config.json; else {}.

    Raises:
        CheckpointError: the file is not a JSON object.
    """
    path, genai = folder / GENERATION_FILE, folder / GENAI_FILE
    if not path.is_file() and genai.is_file():
        return generation_config(read_json(genai), genai)
    return read_json(path) if path.is_file() else {}


def stated_token(raw: RawConfig, generation: RawConfig, name: str) -> Any:
    """Return a value of generation_config.json, else of config.json, else of its part on texts; else None.

    Args:
        raw: the content of config.json.
        generation: that of generation_config.json.
        name: such as ``eos_token_id``.

    Raises:
        CheckpointError: the part on texts is not an object.
    """
    parts = (generation, raw, mapping(raw, "decoder", "text_config"))
    return next((part[name] for part in parts if part.get(name) is not None), None)
