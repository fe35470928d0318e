"""The models on this disk: those downloaded from the hub, and what carryall prepared of any model."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import field
from pathlib import Path

from ...errors import ModelNotFoundError
from ...exporter.hub import DownloadedFiles, downloaded_models, remove_downloaded
from ...records import dataclass
from ...storage.cache_entries import CacheEntry, cache_entries, remove_entries


@dataclass(slots=True)
class StoredModel:
    """A model, by the name that MODEL takes.

    Args:
        name: a hub id, or the path of a file or folder.
        downloaded: its files in huggingface_hub's cache; None for a model of the user's own folders.
        prepared: its entries in carryall's cache.
    """

    name: str
    downloaded: DownloadedFiles | None = None
    prepared: list[CacheEntry] = field(default_factory=list)

    @property
    def downloaded_bytes(self) -> int:
        """The size of the downloaded files."""
        return 0 if self.downloaded is None else self.downloaded.size

    @property
    def prepared_bytes(self) -> int:
        """The size of the entries in carryall's cache."""
        return sum(entry.size for entry in self.prepared)

    @property
    def used(self) -> float:
        """When it was last used, in seconds since 1970."""
        times = [entry.used for entry in self.prepared]
        return max([*times, *([] if self.downloaded is None else [self.downloaded.used])])


def stored_models() -> list[StoredModel]:
    """Return the downloaded and the prepared models, the most recently used first.

    Raises:
        UsageError: the cache is not a folder, or cannot be read.
    """
    models = {files.name: StoredModel(files.name, files) for files in downloaded_models()}
    for entry in cache_entries():
        name = entry.about.get("model")
        if isinstance(name, str):
            name = _downloaded_name(name, models) or name
            models.setdefault(name, StoredModel(name)).prepared.append(entry)
    return sorted(models.values(), key=lambda model: model.used, reverse=True)


def _downloaded_name(name: str, models: dict[str, StoredModel]) -> str | None:
    """Return the downloaded model that an entry was made of, by its hub id or by the path of its files."""
    for known, model in models.items():
        if model.downloaded is not None and (
            name in (known, *model.downloaded.names) or _is_inside(Path(name), model.downloaded)
        ):
            return known
    return None


def _is_inside(path: Path, files: DownloadedFiles) -> bool:
    with contextlib.suppress(OSError, ValueError):
        return any(path == file or path in file.parents for file in files.paths)
    return False


def remove_model(name: str) -> StoredModel:
    """Delete the downloaded files and the prepared forms of a model; files of the user's own stay.

    Args:
        name: as ``stored_models`` names it; ``org/name`` stands for all files of that repository.

    Returns:
        The model that was deleted.

    Raises:
        ModelNotFoundError: nothing is stored under this name.
        OSError: a file cannot be deleted.
    """
    models = list(_named(name, stored_models()))
    if not models:
        raise ModelNotFoundError(f"nothing is stored of '{name}'; `carryall list` shows the names")
    whole = StoredModel(name)
    for model in models:
        whole.prepared += model.prepared
        if model.downloaded is not None:
            before = whole.downloaded
            whole.downloaded = model.downloaded if before is None else before.joined(model.downloaded)
    if whole.downloaded is not None:
        remove_downloaded(whole.downloaded)
    remove_entries(whole.prepared)
    return whole


def _named(name: str, models: list[StoredModel]) -> Iterator[StoredModel]:
    for model in models:
        names = () if model.downloaded is None else (model.downloaded.repository, *model.downloaded.names)
        if name in (model.name, *names):
            yield model
