"""GGUF models that see: the file of a decoder, and that of its vision tower beside it."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

from ...errors import CarryallError, CarryallWarning, CheckpointError, UnsupportedModelError
from .file import GgufFile, gguf_files, is_projector, read_file, shard_paths
from .tower import TowerFile

_PREFIX = "model."  # of a decoder's tensors that the prefix of a model that sees replaces


class SeeingGgufFile(GgufFile):
    """A decoder and its tower: the tensors and config.json of the checkpoint that holds both.

    Args:
        path: the decoder's file, or a shard of it.
        tower: the tower's file.

    Raises:
        CheckpointError: as ``GgufFile`` and ``TowerFile``, or the tower is of another model.
        UnsupportedModelError: as ``GgufFile`` and ``TowerFile``.
    """

    def __init__(self, path: Path, tower: Path) -> None:
        super().__init__(path)
        self._tower = TowerFile(tower)
        self._tower.check(self.metadata)
        self._text = super().config
        own = self._tower.projector.text
        named = {_named(name, own): tensor for name, tensor in self.tensors.items()}
        self.tensors = {**named, **self._tower.tensors}

    @property
    def config(self) -> dict[str, Any]:
        return self._tower.config(self._text, self.metadata)

    @property
    def preprocessor(self) -> dict[str, Any]:
        return self._tower.preprocessor()


def gguf_file(path: Path, tower: Path | None) -> GgufFile:
    """Return a GGUF model, which sees if it has a tower.

    Raises:
        CarryallError: as ``GgufFile`` and ``SeeingGgufFile``.
    """
    return GgufFile(path) if tower is None else SeeingGgufFile(path, tower)


def towers_beside(path: Path) -> list[Path]:
    """Return the files of vision towers in the folder of a decoder's file, sorted."""
    return [] if is_projector(path.name) else [each for each in gguf_files(path) if is_projector(each.name)]


def tower_of(path: Path) -> Path | None:
    """Return the file of the vision tower of a decoder, which lies beside it; None for a model of text.

    A folder may hold several models: a tower beside more than one is that of a decoder whose architecture
    and width it has.

    Raises:
        CheckpointError: the tower beside the only model is damaged or of another one, or there are several.
    """
    found, errors = list[Path](), list[CarryallError]()
    beside = towers_beside(path)
    decoder = read_file(shard_paths(path)[0])[1].metadata if beside else {}
    for file in beside:
        try:
            TowerFile(file).check(decoder)
            found.append(file)
        except (CheckpointError, UnsupportedModelError) as error:
            errors.append(error)
    if len(found) > 1:
        names = ", ".join(file.name for file in found)
        raise CheckpointError(f"{path.parent} holds several vision towers of {path.name}: {names}; keep one")
    if found:
        return found[0]
    models = {shard_paths(file)[0] for file in gguf_files(path) if not is_projector(file.name)}
    if errors and len(models) == 1:
        if not isinstance(errors[0], UnsupportedModelError):
            raise errors[0]
        warnings.warn(f"{errors[0]}; {path.name} reads text only", CarryallWarning, stacklevel=2)
    return None


def _named(name: str, prefix: str) -> str:
    if not prefix or not name.startswith(_PREFIX):
        return name
    return prefix + name.removeprefix(_PREFIX)
