"""Pictures and PDF files beside a job: ``file:`` addresses in its JSON lines, relative to their file.

They become ``data:`` addresses, so the digest of a line covers the content of its files, and workers read
none.
"""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

from ....errors import RequestError
from ....storage.paths import link_stays_inside, stays_inside
from ...images.opening import read_picture

_SCHEME = "file:"
_FIELDS = frozenset({"url", "image_url", "image", "file_data", "file_url"})  # of parts, which hold addresses


def with_attachments(line: bytes, folder: Path | None) -> bytes:
    """Return a JSON line with the content of the files that it names.

    Args:
        line: a line; one that is no JSON, or names no file, is returned as it is.
        folder: of the file with the lines; None if that is no local file.

    Raises:
        RequestError: a file cannot be read, is too large, or is not in the folder.
    """
    if _SCHEME.encode() not in line:
        return line
    try:
        record = json.loads(line)
        changed = _attached(record, folder)
        return line if changed == record else json.dumps(changed).encode()
    except (ValueError, RecursionError):
        return line  # the parser of lines tells what is wrong


def _attached(value: Any, folder: Path | None) -> Any:
    if isinstance(value, list):
        return [_attached(each, folder) for each in value]
    if not isinstance(value, dict):
        return value
    return {
        name: _content(each, folder) if name in _FIELDS and _is_address(each) else _attached(each, folder)
        for name, each in value.items()
    }


def _is_address(value: object) -> bool:
    return isinstance(value, str) and value[: len(_SCHEME)].lower() == _SCHEME


def _content(address: str, folder: Path | None) -> str:
    """Return the ``data:`` address of a file beside the job."""
    name = address[len(_SCHEME) :]
    if folder is None:
        raise RequestError(f"'{address}' needs an input that is a local file, beside which it lies")
    path = folder / name
    if not stays_inside(name) or not link_stays_inside(path, folder):
        raise RequestError(f"'{address}' is not in the folder of the job's input; give a path relative to it")
    if not path.is_file():
        raise RequestError(f"'{address}' names no file in {folder}")
    data = base64.b64encode(read_picture(path)).decode()
    return f"data:application/octet-stream;base64,{data}"
