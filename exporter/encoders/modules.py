"""The files of sentence-transformers beside a checkpoint: the modules, pooling and lengths of an encoder.

Layout: https://www.sbert.net/docs/sentence_transformer/usage/custom_models.html.
"""

from __future__ import annotations

import json
from pathlib import Path

from ...errors import PackageError, UnsupportedModelError
from ...storage.paths import stays_inside
from ..config import read_json

MODULES_FILE, LENGTH_FILE = "modules.json", "sentence_bert_config.json"
_SIDE_FILES = (MODULES_FILE, LENGTH_FILE, "config_sentence_transformers.json")
_KNOWN = {"Transformer", "Pooling", "Normalize"}
# As the configuration of a Pooling module names them.
_MODES = {"cls_token": "cls", "mean_tokens": "mean", "max_tokens": "max", "lasttoken": "last"}
_PREFIX = "pooling_mode"


def read_modules(folder: Path) -> dict[str, str]:
    """Return the folders of an encoder's modules by their kind; empty without ``modules.json``.

    Raises:
        PackageError: the file is damaged.
        UnsupportedModelError: a module is not supported.
    """
    path = folder / MODULES_FILE
    try:
        listed = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else []
        found = {str(one["type"]).rpartition(".")[2]: str(one.get("path", "")) for one in listed}
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise PackageError(f"{path} is no list of modules, each with a type: {error!r}") from error
    unknown = found.keys() - _KNOWN
    if unknown:
        raise UnsupportedModelError(f"{folder}: modules {', '.join(sorted(unknown))} are not supported")
    outside = [name for name in found.values() if name and not stays_inside(name)]
    if outside:
        raise PackageError(f"{path} names the folder {outside[0]!r}, which lies outside")
    return found


def read_pooling(folder: Path) -> str | None:
    """Return how the encoder pools its states: cls, mean, max or last; None if the folder does not say.

    Raises:
        CheckpointError: the configuration is damaged.
        PackageError: see ``read_modules``.
        UnsupportedModelError: it pools in another way.
    """
    modules = read_modules(folder)
    path = folder / modules.get("Pooling", "") / "config.json"
    if "Pooling" not in modules:
        return None
    config = read_json(path) if path.is_file() else {}
    names = [key for key, value in config.items() if key.startswith(_PREFIX) and value]
    if len(names) != 1 or names[0].removeprefix(f"{_PREFIX}_") not in _MODES:
        raise UnsupportedModelError(f"{folder}: pooling by {', '.join(names) or 'nothing'} is not supported")
    return _MODES[names[0].removeprefix(f"{_PREFIX}_")]


def side_files(folder: Path) -> list[str]:
    """Return the names of the existing files of sentence-transformers, relative to ``folder``.

    Raises:
        PackageError: see ``read_modules``.
        UnsupportedModelError: see ``read_modules``.
    """
    names = [*_SIDE_FILES, *(f"{name}/config.json" for name in read_modules(folder).values() if name)]
    return [name for name in names if (folder / name).is_file()]
