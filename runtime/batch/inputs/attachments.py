"""Pictures, PDF files and recordings of a job: beside it, or in columns of its tables.

``file:`` addresses in JSON lines and paths in columns are relative to the input's file. Their files become
``data:`` addresses, so the digest of a row covers their content, and workers read none.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ....errors import RequestError
from ....options import shown
from ....storage.paths import link_stays_inside, stays_inside
from ...images.data_url import is_data_url
from ...images.opening import read_picture

_SCHEME = "file:"
_FIELDS = frozenset({"url", "image_url", "image", "file_data", "file_url", "file"})  # which hold addresses


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


def record_pictures(record: Mapping[str, Any], columns: Sequence[str], folder: Path | None) -> list[str]:
    """Return the pictures in some columns of a record, as ``data:`` addresses in order.

    Args:
        record: its values may be None, a path, a ``data:`` address, bytes, an object with ``bytes`` or
            ``path`` as Hugging Face's datasets write it, or lists of these.
        columns: that hold pictures; a column that the record lacks holds none.
        folder: of the input's file; None if that is no local file.

    Raises:
        RequestError: a value is of another kind, or its file cannot be read, is too large, or is not in the
            folder.
    """
    return [address for column in columns for address in _addresses(record.get(column), column, folder)]


def _addresses(value: Any, column: str, folder: Path | None) -> Iterator[str]:
    match value:
        case None | "":
            return
        case list():
            for each in value:
                yield from _addresses(each, column, folder)
        case bytes():
            yield _data_url(value)
        case {"bytes": bytes(data)}:
            yield _data_url(data)
        case {"path": str(path)}:
            yield from _addresses(path, column, folder)
        case str() if is_data_url(value):
            yield value
        case str() if "://" in value and not _is_address(value):
            raise RequestError(f"column '{column}': pictures are not fetched from addresses, such as {value}")
        case str():
            yield _content(value if _is_address(value) else _SCHEME + value, folder)
        case _:
            raise RequestError(
                f"column '{column}' must hold paths or contents of pictures, not {shown(value)}"
            )


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
    return _data_url(read_picture(path))


def _data_url(data: bytes) -> str:
    return f"data:application/octet-stream;base64,{base64.b64encode(data).decode()}"
