"""What a folder should hold: sizes and sha256 of its files, and how to find what differs."""

from __future__ import annotations

import stat
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from .hashes import FolderHashes
from .paths import stays_inside


@dataclass(frozen=True, slots=True)
class FileFacts:
    """What is recorded of a file.

    Args:
        size: in bytes.
        sha256: of its content, in hexadecimal.
    """

    size: int
    sha256: str


Manifest = Mapping[str, FileFacts]
MISSING = "is missing"


def make_manifest(folder: Path, names: Iterable[str]) -> dict[str, FileFacts]:
    """Read files and note what they are.

    Raises:
        OSError: one cannot be read.
    """
    with FolderHashes(folder) as hashes:
        return {name: FileFacts((folder / name).stat().st_size, hashes.sha256(name)) for name in names}


def read_manifest(content: object) -> dict[str, FileFacts]:
    """A manifest as it was written into JSON, by ``dataclasses.asdict`` of each entry.

    Raises:
        ValueError: it is none; the message says why.
    """
    if not isinstance(content, dict):
        raise ValueError(f"a list of files is {content!r}")
    files = {}
    for name, facts in content.items():
        size, sha256 = (facts.get("size"), facts.get("sha256")) if isinstance(facts, dict) else (None, None)
        if not isinstance(size, int) or isinstance(size, bool) or not isinstance(sha256, str):
            raise ValueError(f"size and sha256 of {name!r} are {facts!r}")
        if not stays_inside(name):
            raise ValueError(f"the file name {name!r} leads out of the folder")
        files[name] = FileFacts(size, sha256)
    return files


def find_damage(folder: Path, manifest: Manifest, *, reread: bool = False) -> Iterator[tuple[str, str]]:
    """Each file that is not as recorded, and what is wrong with it: first by size, then by content.

    Args:
        folder: holds the files.
        manifest: what they should be.
        reread: hash every file, however sure it is that none changed since it was hashed last.

    Yields:
        A file's name and the end of a sentence, such as ``is missing``.
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
        found = path.stat()
    except FileNotFoundError:
        return MISSING
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    if not stat.S_ISREG(found.st_mode):
        return "is no regular file"
    return "" if found.st_size == expected else f"has {found.st_size} bytes instead of {expected}"


def _wrong_content(hashes: FolderHashes, name: str, expected: str, *, reread: bool) -> str:
    try:
        # A remembered hash may itself be damaged: only the content can convict.
        same = hashes.sha256(name, reread=reread) == expected or hashes.sha256(name, reread=True) == expected
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    return "" if same else "has other content than was recorded (sha256)"
