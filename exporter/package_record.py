"""carryall.json: the record of how a package was made and of the files it holds."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from ..errors import CheckpointError, PackageError
from ..records import dataclass
from ..storage.manifest import FileFacts, read_manifest
from ..storage.writing import writing
from .config import MAX_POSITIONS, read_json

FORMAT_VERSION = 2
_READ_VERSIONS = (1, FORMAT_VERSION)
RECORD_FILE = "carryall.json"
_OWN_HASH = "record_sha256"


@dataclass(frozen=True, slots=True, kw_only=True)
class PackageRecord:
    """The content of carryall.json.

    Args:
        context_length: maximum tokens of a sequence.
        default_context_length: maximum tokens unless the user asks for more; smaller than
            ``context_length`` for rotary embeddings that depend on the length.
        bos_token_id: the token that begins a text, None if the model has none.
        eos_token_ids: the tokens that end a text.
        quantization: how the weights were quantized, None if they were not.
        passes: names of the passes applied, in order.
        source: ``fingerprint`` of the checkpoint.
        versions: versions of the libraries that wrote the package.
        files: size and sha256 of every other file of the package. Format 1 has the sha256 of the graph and
            its weights only.
    """

    format_version: int = FORMAT_VERSION
    model_type: str
    context_length: int
    default_context_length: int
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    quantization: dict[str, Any] | None
    passes: tuple[str, ...]
    source: str
    versions: dict[str, str]
    files: dict[str, FileFacts]

    @property
    def is_complete(self) -> bool:
        """Whether ``files`` lists every file of the package and the record holds its own hash."""
        return self.format_version > 1

    def sha256(self) -> str:
        """Return the hash of the record, and so of all files in ``files``."""
        content = json.loads(json.dumps(asdict(self)))  # numeric keys become strings, as in the file
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

    def write(self, folder: Path) -> None:
        """Write carryall.json with its own hash, which detects damage to it.

        Raises:
            OSError: the file cannot be written.
        """
        content = {**asdict(self), _OWN_HASH: self.sha256()}
        with writing(folder / RECORD_FILE):
            (folder / RECORD_FILE).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def read_record(path: Path) -> PackageRecord:
    """Read carryall.json.

    Raises:
        PackageError: the file is damaged, or its format version is not supported.
    """
    try:
        content = read_json(path)
        _check_fields(content)
        if content["format_version"] == 1:
            content["files"] = _with_sizes(content["files"], path.parent)
        content["files"] = read_manifest(content["files"])
    except (CheckpointError, ValueError) as error:
        if isinstance(error.__cause__, OSError):
            raise PackageError(str(error)) from error
        raise PackageError(f"{path} is damaged: {error}; export the model again") from error
    content["eos_token_ids"], content["passes"] = tuple(content["eos_token_ids"]), tuple(content["passes"])
    record = PackageRecord(**{field.name: content[field.name] for field in fields(PackageRecord)})
    if record.is_complete and content.get(_OWN_HASH) != record.sha256():
        raise PackageError(
            f"{path} is damaged: its content does not match {_OWN_HASH}; export the model again"
        )
    return record


def _with_sizes(files: object, folder: Path) -> dict[str, dict[str, Any]]:
    """Add the current size of each file to the list of format 1, which has hashes only."""
    if not isinstance(files, dict):
        raise ValueError(f"'files' must be an object, found {files!r}")
    paths = {name: folder / name for name in files}
    sizes = {name: path.stat().st_size if path.is_file() else 0 for name, path in paths.items()}
    return {name: {"size": sizes[name], "sha256": sha256} for name, sha256 in files.items()}


def _check_fields(content: Mapping[str, Any]) -> None:
    version = content.get("format_version")
    if isinstance(version, bool) or version not in _READ_VERSIONS:
        known = " and ".join(map(str, _READ_VERSIONS))
        raise ValueError(f"it has format version {version!r}; this carryall reads {known}")
    missing = {field.name for field in fields(PackageRecord)} - content.keys()
    if missing:
        raise ValueError(f"it lacks {', '.join(sorted(missing))}")
    for name, is_valid in _VALID.items():
        if not is_valid(content[name]):
            raise ValueError(f"'{name}' has the invalid value {content[name]!r}")


def is_token(value: object) -> bool:
    """Return whether a value of a JSON file can be a token id."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**31


def _is_length(value: object) -> bool:
    return is_token(value) and isinstance(value, int) and 1 <= value <= MAX_POSITIONS


def _all(kind: Callable[[object], bool]) -> Callable[[object], bool]:
    return lambda values: isinstance(values, list) and all(map(kind, values))


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _is_texts(value: object) -> bool:
    return isinstance(value, dict) and all(map(_is_text, value.values()))


_VALID: Mapping[str, Callable[[Any], bool]] = {
    "model_type": _is_text,
    "context_length": _is_length,
    "default_context_length": _is_length,
    "bos_token_id": lambda value: value is None or is_token(value),
    "eos_token_ids": _all(is_token),
    "quantization": lambda value: value is None or isinstance(value, dict),
    "passes": _all(_is_text),
    "source": _is_text,
    "versions": _is_texts,
}
