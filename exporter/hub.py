"""Download models from the Hugging Face hub."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from ..errors import MissingExtraError, ModelNotFoundError
from ..storage.paths import stays_inside
from .config.genai import GENAI_FILE
from .gguf.file import shard_stem

_HUB_ID = re.compile(r"(?P<repo>[\w.-]+/[\w.-]+)(@(?P<revision>[\w./-]+))?(:(?P<part>[\w./ -]+))?")
_SIDE = ("*.json", "*.jinja")


def is_hub_id(name: str) -> bool:
    """Return whether ``name`` has the form ``org/name[@revision][:part]``."""
    return _HUB_ID.fullmatch(name) is not None


def download(hub_id: str) -> Path:
    """Download a model into huggingface_hub's cache, unless it is cached, and return its folder or file.

    Args:
        hub_id: ``org/name[@revision][:part]``; ``part`` is a subfolder, a file, or what tells several files
            apart: ``q4`` for ``onnx/model_q4.onnx``, ``Q4_K_M`` for ``Name-Q4_K_M.gguf``.

    Raises:
        MissingExtraError: huggingface_hub is not installed.
        ModelNotFoundError: the id is malformed, there is no such model, or the hub cannot be reached.
    """
    match = _HUB_ID.fullmatch(hub_id)
    if match is None or not all(stays_inside(match[name] or "x") for name in ("revision", "part")):
        raise ModelNotFoundError(f"'{hub_id}' is not a hub id; use org/name[@revision][:part]")
    try:
        from huggingface_hub import HfApi, snapshot_download
        from huggingface_hub.errors import HFValidationError
    except ImportError as error:
        raise MissingExtraError(f"the hub model '{hub_id}'", "huggingface_hub", "hub") from error

    def fetch(**options: Any) -> Path:
        return Path(snapshot_download(match["repo"], revision=match["revision"], **options))

    def names() -> list[str]:
        try:
            info = HfApi().model_info(match["repo"], revision=match["revision"])
        except Exception as error:  # of requests or httpx, depending on the version of huggingface_hub
            raise ConnectionError(str(error)) from error
        return [file.rfilename for file in info.siblings or []]

    try:
        return _fetched(hub_id, match["part"], names, fetch)
    except (OSError, HFValidationError) as error:  # all of huggingface_hub's network errors are OSErrors
        reason = str(error).strip().splitlines()[0]
        raise ModelNotFoundError(
            f"there is no file or folder '{hub_id}', and the Hugging Face hub cannot provide it: {reason}"
        ) from error


def _fetched(
    hub_id: str, part: str | None, list_names: Callable[[], list[str]], fetch: Callable[..., Path]
) -> Path:
    try:
        names = list_names()
    except OSError as unreachable:
        try:
            folder = fetch(local_files_only=True, allow_patterns=[])  # accepts a part of a repository
        except OSError:
            raise unreachable from None
        names = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]
        return folder / choose(names, part, hub_id)[0]
    place, wanted = choose(names, part, hub_id)
    return fetch(allow_patterns=wanted) / place


def choose(names: Sequence[str], part: str | None, hub_id: str) -> tuple[str, list[str]]:
    """Choose the model of a repository.

    Args:
        names: the files of the repository.
        part: see ``download``.
        hub_id: for messages.

    Returns:
        The subfolder or file of the model, "." for the whole repository; and the files to download. Side
        files of the repository and of the model's folder are included.

    Raises:
        ModelNotFoundError: nothing matches ``part``, or several files do.
    """
    if part is None:
        return _default(names, ".", hub_id)
    part = part.strip("/")
    if any(name.startswith(f"{part}/") for name in names):
        return _default(names, part, hub_id)
    if part in names:
        return part, _with_companions(names, part)
    matching = [name for name in _models(names) if part.lower() in _tags(name)]
    return _one(matching, names, hub_id, f"nothing that matches ':{part}'")


def _default(names: Sequence[str], folder: str, hub_id: str) -> tuple[str, list[str]]:
    inside = [name for name in names if _folder(name) == folder]
    side = [name for name in names if _folder(name) in {folder, "."} and _matches(name, *_SIDE)]
    weights = [name for name in inside if _matches(name, "model*.safetensors", "adapter_model.safetensors")]
    if weights:
        return folder, [*side, *weights]
    if any(PurePosixPath(name).name == GENAI_FILE for name in inside):
        return folder, sorted({*side, *inside})
    onnx = "onnx" if folder == "." else f"{folder}/onnx"
    graphs = [name for name in _models(names) if _folder(name) in (folder, onnx)]
    plain = [name for name in graphs if PurePosixPath(name).name == "model.onnx"]
    if not graphs:
        return folder, [*side, *inside]  # the caller reports what is missing
    return _one(plain[:1] or graphs, names, hub_id, "no model")


def _one(found: Sequence[str], names: Sequence[str], hub_id: str, missing: str) -> tuple[str, list[str]]:
    first: dict[str, str] = {}
    for name in sorted(found):  # the first of several shards
        first.setdefault(shard_stem(PurePosixPath(name).name) or name, name)
    if len(first) == 1:
        (name,) = first.values()
        return name, _with_companions(names, name)
    repo = hub_id.partition(":")[0]
    choices = ", ".join(sorted(first.values()) or sorted(_models(names)))
    held = f"{repo} holds several models" if found else f"{repo} holds {missing}"
    raise ModelNotFoundError(f"{held}; name one as {repo}:FILE" + (f": {choices}" if choices else ""))


def _with_companions(names: Sequence[str], name: str) -> list[str]:
    """Return a file with its external data or its other shards, and the side files."""
    stem, folder = shard_stem(PurePosixPath(name).name), _folder(name)
    own = [
        other
        for other in names
        if other.startswith(name)
        or (stem is not None and _folder(other) == folder and shard_stem(PurePosixPath(other).name) == stem)
    ]
    sides = {folder, ".", _folder(folder)}
    return [*own, *(other for other in names if _folder(other) in sides and _matches(other, *_SIDE))]


def _models(names: Sequence[str]) -> list[str]:
    return [name for name in names if _matches(name, "*.onnx", "*.gguf")]


def _tags(name: str) -> set[str]:
    """Return what ``part`` may be for a file: ``q4`` for model_q4.onnx, ``q4_k_m`` for x-Q4_K_M.gguf."""
    stem = PurePosixPath(name).stem.lower()
    stem = (shard_stem(PurePosixPath(name).name) or stem).lower()
    separators = "_-" if name.endswith(".onnx") else "-."
    return {stem[i + 1 :] for i, letter in enumerate(stem) if letter in separators}


def _folder(name: str) -> str:
    return str(PurePosixPath(name).parent)


def _matches(name: str, *patterns: str) -> bool:
    return any(PurePosixPath(PurePosixPath(name).name).match(pattern) for pattern in patterns)
