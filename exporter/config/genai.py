"""Read genai_config.json, the configuration of onnxruntime-genai, as the files of a checkpoint.

Its keys: https://onnxruntime.ai/docs/genai/reference/config.html
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...errors import CheckpointError
from ...storage.paths import stays_inside

GENAI_FILE = "genai_config.json"
_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
_SEARCH = ("do_sample", "temperature", "top_k", "top_p", "repetition_penalty")


def checkpoint_config(content: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Return the keys of config.json that genai_config.json states.

    Raises:
        CheckpointError: ``model.type`` or ``model.context_length`` is missing.
    """
    model = _object(content, "model", path)
    if not isinstance(model.get("type"), str):
        raise CheckpointError(f"{path} has no 'model.type'")
    sizes = {"max_position_embeddings": model.get("context_length"), "vocab_size": model.get("vocab_size")}
    decoder = _object(model, "decoder", path) if "decoder" in model else {}
    sizes["head_dim"] = decoder.get("head_size")
    tokens = {name: model.get(name) for name in _TOKENS}
    found = {"model_type": model["type"], **sizes, **tokens}
    return {name: value for name, value in found.items() if value is not None}


def generation_config(content: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Return the keys of generation_config.json that genai_config.json states.

    Raises:
        CheckpointError: ``model`` or ``search`` is not an object.
    """
    model = _object(content, "model", path)
    search = _object(content, "search", path) if "search" in content else {}
    found = {**{name: model.get(name) for name in _TOKENS}, **{name: search.get(name) for name in _SEARCH}}
    return {name: value for name, value in found.items() if value is not None}


def graph_name(content: Mapping[str, Any], path: Path) -> str:
    """Return the file name of the decoder's graph.

    Raises:
        CheckpointError: there is none, or it is outside of the folder.
    """
    decoder = _object(_object(content, "model", path), "decoder", path)
    name = decoder.get("filename")
    if not stays_inside(name):
        raise CheckpointError(
            f"{path}: 'model.decoder.filename' must name a file of its folder, found {name!r}"
        )
    return str(name)


def _object(content: Mapping[str, Any], key: str, path: Path) -> Mapping[str, Any]:
    value = content.get(key)
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: '{key}' must be an object, found {value!r}")
    return value
