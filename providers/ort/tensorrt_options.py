"""Options for building TensorRT engines: ranges of input shapes, and the engine cache."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...contract import ATTENTION_MASK, INPUT_IDS, POSITION_IDS
from ...graph_opt.graph.load import read_model
from ...records import dataclass
from ...storage.hashes import FolderHashes

_log = logging.getLogger(__name__)
_RECORD = "engines.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class ShapeRange:
    """The input shapes that an engine must accept; ``ExplicitRunner`` runs one sequence at a time.

    Args:
        chunk: maximum new tokens of a run.
        context_length: maximum tokens of a sequence.
    """

    chunk: int
    context_length: int

    def profiles(self, inputs: Mapping[str, list[int | str]]) -> tuple[str, str, str]:
        """Return minimum, optimal and maximum shapes as ``name:1x2,...`` strings.

        Args:
            inputs: shapes by name; free dimensions have the names of the portable contract.
        """
        longest = self.context_length
        sizes = (
            {"batch": 1, "sequence": 1, "past": 0, "total": 1},
            {"batch": 1, "sequence": 1, "past": longest // 4, "total": longest // 4 + 1},
            {"batch": 1, "sequence": min(self.chunk, longest), "past": longest - 1, "total": longest},
        )
        smallest, likeliest, largest = (_profile(inputs, known) for known in sizes)
        return smallest, likeliest, largest


def input_shapes(model: Path) -> dict[str, list[int | str]]:
    """Return the input shapes of a portable graph; free dimensions get the names of the contract."""
    names = {INPUT_IDS: ("batch", "sequence"), POSITION_IDS: ("batch", "sequence")}
    names[ATTENTION_MASK] = ("batch", "total")
    shapes: dict[str, list[int | str]] = {}
    for value in read_model(model).graph.inputs:
        axes = names.get(str(value.name), ("batch", "", "past", ""))
        shape = list(value.shape or [])
        shapes[str(value.name)] = [
            size if isinstance(size, int) else axis for size, axis in zip(shape, axes, strict=False)
        ]
    return shapes


def _profile(inputs: Mapping[str, list[int | str]], sizes: Mapping[str, int]) -> str:
    def dimensions(shape: list[int | str]) -> str:
        return "x".join(str(size if isinstance(size, int) else sizes[size]) for size in shape)

    return ",".join(f"{name}:{dimensions(shape)}" for name, shape in inputs.items())


class EngineCache:
    """A folder of engines for one model, one set of options and one set of libraries.

    Args:
        root: the parent of such folders.
        facts: everything that an engine depends on, as JSON values.
    """

    def __init__(self, root: Path, facts: Mapping[str, Any]) -> None:
        text = json.dumps(facts, sort_keys=True, default=str)
        self.folder = root / hashlib.sha256(text.encode()).hexdigest()[:32]
        self.folder.mkdir(parents=True, exist_ok=True)

    def ready(self) -> bool:
        """Whether the folder holds engines that are not damaged; damaged ones are deleted."""
        record = self.folder / _RECORD
        if not record.is_file():
            return False
        try:
            known = json.loads(record.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            known = {}
        if known and known == self._hashes():
            return True
        _log.warning("the TensorRT engines in %s are damaged and are built again", self.folder)
        for path in self.folder.iterdir():
            path.unlink()
        return False

    def record(self) -> None:
        """Record the hashes of the engines, for ``ready``."""
        content = json.dumps(self._hashes(), indent=1, sort_keys=True)
        scratch = self.folder / f".{_RECORD}.{os.getpid()}"
        scratch.write_text(content, encoding="utf-8")
        scratch.replace(self.folder / _RECORD)

    def _hashes(self) -> dict[str, str]:
        files = [path for path in self.folder.iterdir() if path.is_file() and _RECORD not in path.name]
        return {path.name: _sha256(path) for path in sorted(files)}


def model_facts(model: Path) -> dict[str, Any]:
    """Return the hashes of a model's graph and weight files; hashes of unchanged files are cached."""
    with FolderHashes(model.parent) as hashes:
        return {path.name: hashes.sha256(path.name) for path in sorted(model.parent.glob(f"{model.name}*"))}


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
