"""Files beside a job: read into its lines, covered by their digests, and never outside of the folder."""

from __future__ import annotations

import base64
import csv
import json
import os
from pathlib import Path
from typing import Any

import pytest

from carryall.errors import UsageError
from carryall.runtime.batch.inputs.lines import BadLine, BatchLine, parse_row
from carryall.runtime.batch.inputs.sources import Source, SourceRow
from carryall.runtime.batch.inputs.templates import PromptTemplate
from carryall.runtime.batch.spec import BatchSpec

CONTENT = b"\x89PNG content"


def line(address: object, name: str = "url") -> dict[str, Any]:
    part = {"type": "image_url", "image_url": {name: address}}
    return {"messages": [{"role": "user", "content": [part, {"type": "text", "text": "file:a.png"}]}]}


def rows(folder: Path, *records: object, attachments: bool = True) -> list[SourceRow]:
    path = folder / "in.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return list(Source([str(path)], attachments=attachments))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "job" / "scans").mkdir(parents=True)
    (tmp_path / "job" / "scans" / "a.png").write_bytes(CONTENT)
    (tmp_path / "secret.png").write_bytes(b"secret")
    return tmp_path / "job"


def parsed(row: SourceRow) -> BatchLine | BadLine:
    return parse_row(row, PromptTemplate())


def test_a_line_whose_file_is_missing_keeps_its_id(folder: Path) -> None:
    body = line("file:scans/none.png")
    (row,) = rows(folder, {"custom_id": "form 7", "url": "/v1/chat/completions", "body": body})
    refused = parsed(row)
    assert isinstance(refused, BadLine)
    assert refused.custom_id == "form 7"
    assert "none.png" in refused.message


@pytest.mark.parametrize(
    "record",
    [
        line("file:scans/a.png"),
        line("FILE:scans/a.png"),
        {"custom_id": "a", "url": "/v1/chat/completions", "body": line("file:scans/a.png")},
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "file:scans/a.png"}]}]},
        {
            "messages": [
                {"role": "user", "content": [{"type": "file", "file": {"file_data": "file:scans/a.png"}}]}
            ]
        },
    ],
    ids=str,
)
def test_the_content_of_a_file_is_in_the_body(folder: Path, record: dict[str, Any]) -> None:
    (row,) = rows(folder, record)
    found = parsed(row)
    assert isinstance(found, BatchLine)
    text = json.dumps(found.body)
    assert f"data:application/octet-stream;base64,{base64.b64encode(CONTENT).decode()}" in text
    assert "scans" not in text
    assert text.count("file:a.png") == json.dumps(record).count("file:a.png")


def test_the_digest_of_a_line_covers_its_files(folder: Path) -> None:
    first, text = rows(folder, line("file:scans/a.png"), {"prompt": "file:scans/a.png"})
    (folder / "scans" / "a.png").write_bytes(CONTENT + b"!")
    other, same = rows(folder, line("file:scans/a.png"), {"prompt": "file:scans/a.png"})
    assert first.digest != other.digest
    assert text.digest == same.digest
    assert text.data == b'{"prompt": "file:scans/a.png"}\n'


@pytest.mark.parametrize(
    ("address", "why"),
    [
        ("file:../secret.png", "not in the folder"),
        ("file:scans/../../secret.png", "not in the folder"),
        ("file:///etc/passwd", "not in the folder"),
        ("file:/etc/passwd", "not in the folder"),
        ("file:C:\\secret.png", "not in the folder"),
        ("file:\\secret.png", "not in the folder"),
        ("file:link.png", "not in the folder"),
        ("file:linked/secret.png", "not in the folder"),
        ("file:", "not in the folder"),
        ("file:a\0b.png", "not in the folder"),
        ("file:scans", "names no file"),
        ("file:pipe", "names no file"),
        ("file:nowhere.png", "names no file"),
    ],
)
def test_a_file_that_is_not_there_or_outside_is_a_fault_of_its_line(
    folder: Path, address: str, why: str
) -> None:
    (folder / "link.png").symlink_to(folder.parent / "secret.png")
    (folder / "linked").symlink_to(folder.parent, target_is_directory=True)
    os.mkfifo(folder / "pipe")
    bad, good = rows(folder, line(address), line("file:scans/a.png"))
    found = parsed(bad)
    assert isinstance(found, BadLine)
    assert why in found.message
    assert isinstance(parsed(good), BatchLine)


ADDRESS = f"data:application/octet-stream;base64,{base64.b64encode(CONTENT).decode()}"
TEMPLATE = PromptTemplate("{{ text }}", "chat", picture_columns=("scan", "more"))


def table(folder: Path, name: str, *records: dict[str, Any]) -> list[SourceRow]:
    """Write records to a file and read them with their pictures."""
    path = folder / name
    if path.suffix == ".parquet":
        pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
        pq.write_table(pa.Table.from_pylist(list(records)), path)
    elif path.suffix == ".csv":
        with path.open("w", newline="", encoding="utf-8") as stream:
            writer = csv.DictWriter(stream, list(records[0]))
            writer.writeheader()
            writer.writerows(records)
    else:
        path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return list(Source([str(path)], picture_columns=TEMPLATE.picture_columns))


@pytest.mark.parametrize(
    ("name", "scan", "count"),
    [
        ("in.csv", "scans/a.png", 1),
        ("in.csv", "file:scans/a.png", 1),
        ("in.csv", ADDRESS, 1),
        ("in.csv", "", 0),
        ("in.jsonl", ["scans/a.png", "scans/a.png"], 2),
        ("in.jsonl", None, 0),
        ("in.parquet", "scans/a.png", 1),
        ("in.parquet", ["scans/a.png", "scans/a.png"], 2),
        ("in.parquet", CONTENT, 1),
        ("in.parquet", {"bytes": CONTENT, "path": "elsewhere.png"}, 1),
        ("in.parquet", [{"bytes": None, "path": "scans/a.png"}], 1),
    ],
)
def test_pictures_in_columns_come_before_the_text(folder: Path, name: str, scan: Any, count: int) -> None:
    (row,) = table(folder, name, {"text": "Read.", "scan": scan})
    found = parse_row(row, TEMPLATE)
    assert isinstance(found, BatchLine), found
    (message,) = found.body["messages"]
    picture = {"type": "image_url", "image_url": {"url": ADDRESS}}
    wanted = [*[picture] * count, {"type": "text", "text": "Read."}] if count else "Read."
    assert message == {"role": "user", "content": wanted}


def test_the_digest_of_a_record_covers_its_pictures(folder: Path) -> None:
    record = {"text": "Read.", "scan": "scans/a.png"}
    (first,) = table(folder, "in.csv", record)
    (folder / "scans" / "a.png").write_bytes(CONTENT + b"!")
    (second,) = table(folder, "in.csv", record)
    assert first.data == second.data
    assert first.digest != second.digest


@pytest.mark.parametrize(
    ("scan", "why"),
    [
        ("../secret.png", "not in the folder"),
        ("/etc/passwd", "not in the folder"),
        ("nowhere.png", "names no file"),
        ("https://example.org/a.png", "not fetched from addresses"),
        ("FILE:../secret.png", "not in the folder"),
        (5, "must hold paths or contents"),
        ({"path": None}, "must hold paths or contents"),
    ],
)
def test_a_column_that_names_no_picture_is_a_fault_of_its_record(folder: Path, scan: Any, why: str) -> None:
    bad, good = table(folder, "in.jsonl", {"text": "a", "scan": scan}, {"text": "b", "scan": "scans/a.png"})
    found = parse_row(bad, TEMPLATE)
    assert isinstance(found, BadLine)
    assert why in found.message
    assert isinstance(parse_row(good, TEMPLATE), BatchLine)


def test_columns_of_pictures_are_checked_before_work_starts() -> None:
    with pytest.raises(UsageError, match="--image-column names the column 'scan', which the input lacks"):
        TEMPLATE.check(["text", "more"])
    job: dict[str, Any] = {"inputs": ["in.csv"], "output": "o", "model": "demo", "template": "{{ text }}"}
    for kind in ("prompt", "embedding"):
        with pytest.raises(UsageError, match="columns of images need the kind chat"):
            BatchSpec(**job, kind=kind, image_columns=["scan"])


def test_a_service_reads_no_files_of_an_uploaded_job(folder: Path) -> None:
    (row,) = rows(folder, line("file:scans/a.png"), attachments=False)
    found = parsed(row)
    assert isinstance(found, BatchLine)
    assert "file:scans/a.png" in json.dumps(found.body)


def test_other_lines_stay_as_they_are(folder: Path) -> None:
    path = folder / "in.jsonl"
    lines = [
        b'{"messages": "file:" broken\n',
        b'{"a": "file:",  "b":1}\n',
        *(b"[" * depth + b'{"url": "file:"}' + b"]" * depth + b"\n" for depth in (400, 900, 100_000)),
    ]
    path.write_bytes(b"".join(lines))
    assert [row.data for row in Source([str(path)], attachments=True)] == lines
