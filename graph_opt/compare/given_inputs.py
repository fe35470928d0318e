"""Read inputs given by the user: arrays, an .npz file, or a folder of .npz files."""

from __future__ import annotations

import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from ...contract import ATTENTION_MASK, INPUT_IDS
from ...errors import UsageError
from ...storage.paths import check_name
from ..graph.lazy import Array
from .sample_inputs import Feed, SampleInputs


def given_samples(inputs: Mapping[str, Array] | Sequence[Mapping[str, Array]] | Path) -> list[SampleInputs]:
    """Return one sample per mapping or file.

    Raises:
        UsageError: there are no inputs, or a file is not an .npz file of arrays.
    """
    if isinstance(inputs, Path):
        return [SampleInputs(f"{path.name}: {_shapes(feed)}", feed) for path, feed in _read(inputs)]
    feeds = [inputs] if isinstance(inputs, Mapping) else list(inputs)
    if not feeds or not all(feeds):
        raise UsageError("the inputs hold no arrays")
    return [SampleInputs(_shapes(feed), dict(feed)) for feed in feeds]


def token_rows(feed: Mapping[str, Array]) -> list[list[int]]:
    """Return the token ids of a batch without their padding.

    Raises:
        UsageError: the mask does not have the shape of the tokens, or hides a whole row.
    """
    ids = np.atleast_2d(feed[INPUT_IDS])
    real = np.atleast_2d(feed.get(ATTENTION_MASK, np.ones_like(ids))) != 0
    if real.shape != ids.shape or not real.size or not real.any(axis=1).all():
        raise UsageError("attention_mask must have the shape of input_ids and at least one token per row")
    return [row[kept].tolist() for row, kept in zip(ids, real, strict=True)]


def _read(path: Path) -> list[tuple[Path, Feed]]:
    check_name(path)
    if not path.exists():
        raise UsageError(f"{path} does not exist")
    files = sorted(path.glob("*.npz")) if path.is_dir() else [path]
    if not files:
        raise UsageError(f"{path} holds no .npz file")
    return [(file, _read_file(file)) for file in files]


def _read_file(path: Path) -> Feed:
    if not path.stat().st_size:
        raise UsageError(f"{path} is an empty file, not an .npz file of tensors")
    try:
        with np.load(path, allow_pickle=False) as archive:
            feed = {name: archive[name] for name in archive.files}
    except (ValueError, AttributeError, EOFError, OSError, zipfile.BadZipFile) as error:
        raise UsageError(f"{path} cannot be read as an .npz file: {error}") from error
    if not feed:
        raise UsageError(f"{path} holds no tensors")
    return feed


def _shapes(feed: Mapping[str, Array]) -> str:
    return ", ".join(f"{name} {array.dtype}{list(array.shape)}" for name, array in feed.items())
