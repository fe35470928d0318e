"""Read the rows of the input in order: lines of JSONL files, records of CSV and Parquet files."""

from __future__ import annotations

import base64
import codecs
import contextlib
import csv
import datetime as dt
import decimal
import gzip
import hashlib
import io
import json
import lzma
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from ....errors import RequestError, UsageError
from ....records import dataclass
from .attachments import record_pictures, with_attachments
from .files import STREAM, arrow, expand, is_remote, open_input, plain_suffix

MAX_LINE_BYTES = 16 * 2**20
DIGEST_BYTES = 16
_PARQUET_ROWS = 256
_PIECE_BYTES = 2**20
_TABLES = (".csv", ".tsv", ".parquet")
_ARROW_FILES = (".parquet",)
# Byte order marks; that of UTF-32 begins with that of UTF-16.
_MARKS = (
    *((codecs.BOM_UTF32_LE, "UTF-32"), (codecs.BOM_UTF32_BE, "UTF-32")),
    *((codecs.BOM_UTF16_LE, "UTF-16"), (codecs.BOM_UTF16_BE, "UTF-16")),
)
# Errors of decompression.
_DAMAGE = (EOFError, gzip.BadGzipFile, lzma.LZMAError, zlib.error)


@dataclass(frozen=True, slots=True)
class SourceRow:
    """One row that is not empty.

    Args:
        number: the number of the row over all files, from 1.
        data: the bytes of a JSON line, or the record of a table.
        digest: the digest of the content.
        file: the file of the row; None if the input is one file.
        line: the number of the row in its file, from 1.
        fault: why the row cannot be read; ``data`` then only identifies it. None: it was read.
        pictures: in the columns of pictures, as ``data:`` addresses.
    """

    number: int
    data: bytes | dict[str, Any]
    digest: bytes
    line: int
    file: str | None = None
    fault: str | None = None
    pictures: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Content:
    """The number of rows of an input, and the SHA-256 of their numbers and contents."""

    rows: int
    sha256: str


class Source:
    """The rows of one or several files. Every iteration reads the files again, except for stdin.

    Args:
        names: files, globs and URLs; ``-`` is stdin, as JSONL.
        attachments: whether JSON lines may name files beside them; see ``attachments.py``.
        picture_columns: of records, which hold pictures; see ``record_pictures``.

    Raises:
        UsageError: a file does not exist, or its kind of filesystem is unknown.
        MissingExtraError: a file needs a package that is not installed.
    """

    def __init__(
        self, names: Sequence[str], *, attachments: bool = False, picture_columns: Sequence[str] = ()
    ) -> None:
        self.files = expand(names)
        self._attachments, self._picture_columns = attachments, tuple(picture_columns)
        self.rereadable = self.files != [STREAM]
        for name in self.files:
            if plain_suffix(name) in _ARROW_FILES or name.lower().endswith(".zst"):
                arrow(f"reading {name}")

    @property
    def is_table(self) -> bool:
        """Whether the rows are records of tables, not requests."""
        kinds = {plain_suffix(name) in _TABLES for name in self.files}
        if len(kinds) > 1:
            raise UsageError("the input mixes tables (CSV, Parquet) and JSON lines; run them as two jobs")
        return kinds == {True}

    def columns(self) -> list[str]:
        """Return the columns that all tables have, in the order of the first table.

        Raises:
            UsageError: a table has no header, or is damaged.
        """
        common: list[str] | None = None
        for name in self.files:
            own = _columns(name)
            common = own if common is None else [column for column in common if column in own]
        return common or []

    def __iter__(self) -> Iterator[SourceRow]:
        """Yield every row that is not empty, in order.

        Raises:
            OSError: a file cannot be read.
            UsageError: a table is damaged.
        """
        before = 0
        for name in self.files:
            number, folder = 0, _folder(name)
            for number, values, fault in _rows(name):
                data, pictures = values, tuple[str, ...]()
                try:
                    if self._attachments and isinstance(values, bytes) and fault is None:
                        data = with_attachments(values, folder)
                    elif self._picture_columns and values is not None and fault is None:
                        pictures = tuple(record_pictures(_record(values), self._picture_columns, folder))
                except RequestError as error:
                    fault = str(error)
                if data is None:
                    continue
                data = jsonable(data) if isinstance(data, dict) else data
                place = name if len(self.files) > 1 else None
                digest = _digest(data, pictures)
                yield SourceRow(before + number, data, digest, number, place, fault, pictures)
            before += number

    def content(self) -> Content:
        """Read all rows to count and hash them.

        Raises:
            OSError: a file cannot be read.
            UsageError: a table is damaged.
        """
        hasher, rows = hashlib.sha256(), 0
        for row in self:
            rows += 1
            hasher.update(row.number.to_bytes(8, "big") + row.digest)
        return Content(rows, hasher.hexdigest())


def _folder(name: str) -> Path | None:
    """Return the folder of a file; None for those that are not local."""
    return None if name == STREAM or is_remote(name) else Path(name).absolute().parent


def _record(values: bytes | dict[str, Any]) -> Mapping[str, Any]:
    """Return a record, or an empty one for a line that is no JSON object: its parser tells what is wrong."""
    if isinstance(values, dict):
        return values
    try:
        record = json.loads(values)
    except (ValueError, RecursionError):
        return {}
    return record if isinstance(record, dict) else {}


@contextlib.contextmanager
def _reading(name: str) -> Iterator[BinaryIO]:
    """Open an input.

    Raises:
        UsageError: the file is damaged, or not compressed as its name says.
        OSError: it cannot be read.
    """
    try:
        with open_input(name) as stream:
            yield stream
    except _DAMAGE as error:
        raise UsageError(f"{name} is damaged: {_one_line(error)}") from error
    except OSError as error:
        if error.errno is not None:
            raise
        raise UsageError(f"{name} is damaged: {_one_line(error)}") from error  # as decompressors report it


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


def _rows(name: str) -> Iterator[tuple[int, bytes | dict[str, Any] | None, str | None]]:
    """Yield number, content and fault of each row; the content of an empty row is None."""
    suffix = plain_suffix(name)
    with _reading(name) as stream:
        if suffix in _ARROW_FILES:
            yield from _parquet_rows(name, stream)
        elif suffix in _TABLES:
            yield from _csv_rows(name, stream, "\t" if suffix == ".tsv" else ",")
        else:
            yield from _json_lines(name, stream)


def _json_lines(name: str, stream: BinaryIO) -> Iterator[tuple[int, bytes | None, str | None]]:
    number = 0
    while data := stream.readline(MAX_LINE_BYTES + 1):
        number += 1
        if number == 1:
            _refuse_encoding(name, data)
        if len(data) > MAX_LINE_BYTES:
            yield number, _digest_of_rest(stream, data), f"the line is longer than {MAX_LINE_BYTES} bytes"
        else:
            yield number, data if data.strip() else None, None


def _refuse_encoding(name: str, beginning: bytes) -> None:
    """Reject a file that begins with the byte order mark of another encoding than UTF-8."""
    for mark, encoding in _MARKS:
        if beginning.startswith(mark):
            raise UsageError(f"{name} is encoded as {encoding}; convert it to UTF-8")


def _digest_of_rest(stream: BinaryIO, data: bytes) -> bytes:
    """Read the rest of a line without keeping it; return the digest of the line."""
    hasher = hashlib.blake2b(data, digest_size=DIGEST_BYTES)
    while data and not data.endswith(b"\n"):
        data = stream.readline(_PIECE_BYTES)
        hasher.update(data)
    return hasher.digest()


@contextlib.contextmanager
def _csv_reader(name: str, stream: BinaryIO, delimiter: str) -> Iterator[Any]:
    # Bytes that are not UTF-8 become lone surrogates: then only their row is an error, not the file.
    text = io.TextIOWrapper(stream, encoding="utf-8-sig", errors="surrogateescape", newline="")
    if csv.field_size_limit() < MAX_LINE_BYTES:
        csv.field_size_limit(MAX_LINE_BYTES)
    reader = csv.reader(text, delimiter=delimiter, strict=True)
    try:
        yield reader
    except csv.Error as error:
        raise UsageError(f"{name}, line {reader.line_num}: {error}") from error
    finally:
        text.detach()  # the caller closes the stream


def _csv_header(name: str, reader: Any) -> list[str]:
    header = next(reader, None)
    if header:
        _refuse_encoding(name, header[0].encode(errors="surrogateescape"))
    else:
        raise UsageError(f"{name} has no header line with the names of its columns")
    if "" in header or len(set(header)) < len(header):
        raise UsageError(f"{name}: the header must name every column once, but is {header}")
    return [str(column) for column in header]


def _csv_rows(
    name: str, stream: BinaryIO, delimiter: str
) -> Iterator[tuple[int, bytes | dict[str, Any] | None, str | None]]:
    with _csv_reader(name, stream, delimiter) as reader:
        header = _csv_header(name, reader)
        for number, values in enumerate(reader, start=1):
            if not values:
                yield number, None, None
            elif len(values) != len(header):
                fault = f"the record has {len(values)} values, the header names {len(header)} columns"
                yield number, "\0".join(values).encode(errors="surrogateescape"), fault
            else:
                yield number, dict(zip(header, values, strict=True)), None


def _parquet_rows(name: str, stream: BinaryIO) -> Iterator[tuple[int, dict[str, Any], None]]:
    number, file = 0, _parquet(name, stream)
    batches = file.iter_batches(batch_size=_PARQUET_ROWS)
    while (records := _records(name, batches)) is not None:
        for record in records:
            number += 1
            yield number, record, None


def _records(name: str, batches: Iterator[Any]) -> list[dict[str, Any]] | None:
    """Return the next rows of a Parquet file; None at its end."""
    try:
        batch = next(batches, None)
        return None if batch is None else batch.to_pylist()
    except arrow(f"reading {name}").ArrowException as error:
        raise UsageError(f"{name} is damaged: {_one_line(error)}") from error


def _parquet(name: str, stream: BinaryIO) -> Any:
    pyarrow = arrow(f"reading {name}")
    try:
        return pyarrow.parquet.ParquetFile(stream)
    except pyarrow.ArrowException as error:
        raise UsageError(f"{name} is not a Parquet file: {_one_line(error)}") from error


def _columns(name: str) -> list[str]:
    suffix = plain_suffix(name)
    with _reading(name) as stream:
        if suffix in _ARROW_FILES:
            return [str(column) for column in _parquet(name, stream).schema_arrow.names]
        with _csv_reader(name, stream, "\t" if suffix == ".tsv" else ",") as reader:
            return _csv_header(name, reader)


def jsonable(value: Any) -> Any:
    """Convert a Parquet value to a JSON value: bytes to base64, times and decimals to strings."""
    if isinstance(value, dict):
        return {key: jsonable(item) for key, item in value.items()}
    if isinstance(value, list):
        return [jsonable(item) for item in value]
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if isinstance(value, dt.date | dt.time):
        return value.isoformat()
    if isinstance(value, dt.timedelta | decimal.Decimal):
        return str(value)
    return value


def _digest(data: bytes | dict[str, Any], pictures: Sequence[str] = ()) -> bytes:
    if isinstance(data, dict):
        text = json.dumps(data, sort_keys=True, ensure_ascii=False)
        data = text.encode("utf-8", "surrogatepass")
    else:
        data = data.rstrip(b"\r\n")  # the last line may lack its line break
    hasher = hashlib.blake2b(data, digest_size=DIGEST_BYTES)
    for picture in pictures:
        hasher.update(b"\0" + picture.encode())
    return hasher.digest()
