"""Manifests: the recorded size and sha256 of each file of a folder, and a check against them."""

from __future__ import annotations

import stat
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from ..records import dataclass
from .hashes import LARGE_BYTES, FolderHashes
from .paths import stays_inside


@dataclass(frozen=True, slots=True)
class FileFacts:
    """The recorded facts of a file.

    Args:
        size: in bytes.
        sha256: of its content, in hexadecimal; or ``SUMS`` and that of the sums of its pages, see
            ``FolderHashes``.
    """

    size: int
    sha256: str


Manifest = Mapping[str, FileFacts]
SUMS = "sums:"
MISSING = "is missing"
UNREADABLE = "cannot be read"


def make_manifest(folder: Path, names: Iterable[str], *, sums: bool = False) -> dict[str, FileFacts]:
    """Return the size and sha256 of each file.

    Args:
        folder: the folder of the files.
        names: the files, relative to the folder.
        sums: know large files by the sums of their pages, which takes a tenth of the time.

    Raises:
        OSError: a file cannot be read.
    """
    facts = {}
    with FolderHashes(folder) as hashes:
        for name in names:
            size = (folder / name).stat().st_size
            large = sums and size > LARGE_BYTES
            facts[name] = FileFacts(size, SUMS + hashes.sums(name) if large else hashes.sha256(name))
    return facts


def read_manifest(content: object) -> dict[str, FileFacts]:
    """Read a manifest from JSON content, written by ``dataclasses.asdict`` of each entry.

    Raises:
        ValueError: the content is not a manifest; the message says why.
    """
    if not isinstance(content, dict):
        raise ValueError(f"'files' must be an object, found {content!r}")
    files = {}
    for name, facts in content.items():
        size, sha256 = (facts.get("size"), facts.get("sha256")) if isinstance(facts, dict) else (None, None)
        if not isinstance(size, int) or isinstance(size, bool) or not isinstance(sha256, str):
            raise ValueError(f"the entry of file {name!r} must hold 'size' and 'sha256', found {facts!r}")
        if not stays_inside(name):
            raise ValueError(f"the file name {name!r} leads out of the folder")
        files[name] = FileFacts(size, sha256)
    return files


def find_damage(folder: Path, manifest: Manifest, *, reread: bool = False) -> Iterator[tuple[str, str]]:
    """Yield each file that differs from the manifest, and how: all sizes first, then contents.

    Args:
        folder: the folder of the files.
        manifest: the expected sizes and hashes.
        reread: hash every file again, even if its cached hash is valid.

    Yields:
        A file's name and the predicate of a sentence, such as ``is missing``.
    """
    whole = []
    for name, facts in manifest.items():
        wrong = _wrong_size(folder / name, facts.size)
        if wrong:
            yield name, wrong
        else:
            whole.append(name)
    with FolderHashes(folder) as hashes:
        for name in whole:
            wrong = _wrong_content(hashes, name, manifest[name].sha256, reread=reread)
            if wrong:
                yield name, wrong


def _wrong_size(path: Path, expected: int) -> str:
    try:
        size = path.stat()
    except FileNotFoundError:
        return MISSING
    except OSError as error:
        return f"{UNREADABLE}: {error.strerror}"
    if not stat.S_ISREG(size.st_mode):
        return "is not a regular file"
    return "" if size.st_size == expected else f"has {size.st_size} bytes instead of {expected}"


def _wrong_content(hashes: FolderHashes, name: str, expected: str, *, reread: bool) -> str:
    digest = hashes.sums if expected.startswith(SUMS) else hashes.sha256
    expected = expected.removeprefix(SUMS)
    try:
        # A cached hash may itself be damaged: only a fresh hash of the content counts as a difference.
        same = digest(name, reread=reread) == expected or digest(name, reread=True) == expected
    except OSError as error:
        return f"{UNREADABLE}: {error.strerror}"
    return "" if same else "differs from the recorded sha256"
