"""Read and atomically replace files: local or remote, plain or compressed."""

from __future__ import annotations

import bz2
import contextlib
import functools
import glob
import gzip
import io
import lzma
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, cast

from ....errors import MissingExtraError, UsageError
from ....storage.paths import check_name, check_target
from ....storage.writing import hiding_scratch, publish, writing

STREAM = "-"
_COMPRESSIONS = (".gz", ".bz2", ".xz", ".zst")


def is_remote(name: str) -> bool:
    """Return whether a name is a URL of a remote filesystem, such as ``s3://bucket/key``."""
    return "://" in name


def plain_suffix(name: str) -> str:
    """Return the suffix in lower case, without a compression suffix: ``.jsonl`` for ``a.jsonl.gz``."""
    path = Path(name.rstrip("/").rpartition("/")[2])
    if path.suffix.lower() in _COMPRESSIONS:
        path = Path(path.stem)
    return path.suffix.lower()


def with_infix(name: str, infix: str, suffix: str | None = None) -> str:
    """Return ``results.INFIX.jsonl.gz`` for ``results.jsonl.gz``; ``suffix`` replaces ``.jsonl.gz``."""
    folder, slash, last = name.rpartition("/")
    stem, dot, rest = last.partition(".")
    own = f"{dot}{rest}" if suffix is None else suffix
    return f"{folder}{slash}{stem}.{infix}{own}"


def expand(names: Sequence[str]) -> list[str]:
    """Return all files that names and globs match; the files of one glob are sorted.

    Raises:
        UsageError: a file does not exist, a glob matches none, or stdin is one of several.
        MissingExtraError: a name is remote, and fsspec is not installed.
    """
    paths: list[str] = []
    for name in names:
        if not is_remote(name):
            check_name(Path(name))
        paths += _expand_remote(name) if is_remote(name) else _expand_local(name)
    if STREAM in paths and len(paths) > 1:
        raise UsageError("'-' (stdin) cannot be one of several inputs")
    if len(set(paths)) < len(paths):
        twice = next(name for name in paths if paths.count(name) > 1)
        raise UsageError(f"input {twice} is given twice")
    return paths


def _expand_local(name: str) -> list[str]:
    if name == STREAM or Path(name).is_file():
        return [name]
    matches = sorted(path for path in glob.glob(name, recursive=True) if Path(path).is_file())
    if not matches:
        raise UsageError(f"there is no input file {name}")
    return matches


def _expand_remote(name: str) -> list[str]:
    system, path = filesystem(name)
    if not glob.has_magic(path):
        if not system.exists(path):
            raise UsageError(f"there is no input file {name}")
        return [name]
    matches = sorted(str(system.unstrip_protocol(match)) for match in system.glob(path))
    if not matches:
        raise UsageError(f"no input file matches {name}")
    return matches


def filesystem(name: str) -> tuple[Any, str]:
    """Return the fsspec filesystem of a URL, and the path in it.

    Raises:
        MissingExtraError: fsspec is not installed.
        UsageError: fsspec does not know this kind of filesystem, or a package that it needs is not installed.
    """
    try:
        import fsspec
    except ModuleNotFoundError as error:
        raise MissingExtraError(f"reading {name}", "fsspec", "batch") from error
    try:
        system, path = fsspec.core.url_to_fs(name)
    except ImportError as error:
        raise UsageError(f"{name}: {error}") from error
    except ValueError as error:
        raise UsageError(f"{name}: {error}") from error
    return system, str(path)


@contextmanager
def open_input(name: str) -> Iterator[BinaryIO]:
    """Open a file or stdin for reading; the suffix selects the decompression.

    Raises:
        OSError: the file cannot be read.
    """
    with contextlib.ExitStack() as stack:
        if name == STREAM:
            yield sys.stdin.buffer
            return
        if is_remote(name):
            system, path = filesystem(name)
            raw = stack.enter_context(system.open(path, "rb"))
        else:
            raw = stack.enter_context(Path(name).open("rb"))
        yield stack.enter_context(_decompressed(name, raw))


def _decompressed(name: str, raw: Any) -> contextlib.AbstractContextManager[BinaryIO]:
    openers: dict[str, Callable[[], Any]] = {
        ".gz": lambda: gzip.GzipFile(fileobj=raw, mode="rb"),
        ".bz2": functools.partial(bz2.BZ2File, raw, "rb"),
        ".xz": lambda: lzma.LZMAFile(raw, "rb"),  # noqa: SIM115 -- closed by the caller
        ".zst": lambda: io.BufferedReader(arrow(name).CompressedInputStream(raw, "zstd")),
    }
    opener: Callable[[], Any] = openers.get(
        Path(name).suffix.lower(), functools.partial(contextlib.nullcontext, raw)
    )
    return cast("contextlib.AbstractContextManager[BinaryIO]", opener())


def _compressed(name: str, raw: Any) -> contextlib.AbstractContextManager[BinaryIO]:
    openers: dict[str, Callable[[], Any]] = {
        # No name and no time, so that equal content gives equal files.
        ".gz": lambda: gzip.GzipFile(filename="", fileobj=raw, mode="wb", mtime=0),
        ".bz2": functools.partial(bz2.BZ2File, raw, "wb"),
        ".xz": lambda: lzma.LZMAFile(raw, "wb"),  # noqa: SIM115 -- closed by the caller
        ".zst": lambda: arrow(name).CompressedOutputStream(raw, "zstd"),
    }
    opener: Callable[[], Any] = openers.get(
        Path(name).suffix.lower(), functools.partial(contextlib.nullcontext, raw)
    )
    return cast("contextlib.AbstractContextManager[BinaryIO]", opener())


def arrow(what: str) -> Any:
    """Import and return pyarrow.

    Raises:
        MissingExtraError: pyarrow is not installed.
    """
    try:
        import pyarrow as pa
        import pyarrow.parquet  # makes `pa.parquet` known
    except ModuleNotFoundError as error:
        raise MissingExtraError(what, "pyarrow", "batch") from error
    return pa


def exists(name: str) -> bool:
    """Return whether a file exists."""
    if is_remote(name):
        system, path = filesystem(name)
        return bool(system.exists(path))
    return Path(name).exists()


def remove(name: str) -> None:
    """Delete a file if it exists."""
    if is_remote(name):
        system, path = filesystem(name)
        if system.exists(path):
            system.rm_file(path)
    else:
        Path(name).unlink(missing_ok=True)


def check_folder(name: str) -> None:
    """Check that a file of this name can be created.

    Raises:
        UsageError: its folder does not exist or is not writable, or it is a folder, a device or a pipe.
    """
    if is_remote(name):
        filesystem(name)
        return
    check_target(Path(name))
    folder = Path(name).absolute().parent
    if not folder.is_dir():
        raise UsageError(f"the folder {folder} of the output does not exist; create it first")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise UsageError(f"the folder {folder} is not writable; choose another output")


@contextmanager
def replacing(name: str) -> Iterator[BinaryIO]:
    """Open a file for writing. It appears under its name only when the block ends without an error."""
    if is_remote(name):
        system, path = filesystem(name)
        # Within a transaction, fsspec publishes a file at the end and discards it after an error.
        with system.transaction, system.open(path, "wb") as raw, _compressed(name, raw) as stream:
            yield stream
        return
    target = Path(name)
    scratch = target.with_name(f".{target.name}.partial")  # a fixed name: killed runs leave at most one file
    try:
        with hiding_scratch(scratch, target), writing(target):
            with scratch.open("wb") as raw, _compressed(name, raw) as stream:
                yield stream
            publish(scratch, target)
    finally:
        scratch.unlink(missing_ok=True)
