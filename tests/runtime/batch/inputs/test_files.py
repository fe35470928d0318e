"""Inputs and outputs of every kind: tables, templates, globs, compressions, remote filesystems."""

from __future__ import annotations

import bz2
import csv
import gzip
import json
import lzma
import re
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from batch_kit import GREEDY, Record, read_lines, run, spec, write_lines

from carryall.errors import MissingExtraError, RequestError, UsageError
from carryall.runtime.batch.inputs import sources as sources_module
from carryall.runtime.batch.inputs.files import plain_suffix, with_infix
from carryall.runtime.batch.inputs.sources import Source
from carryall.runtime.batch.inputs.templates import PromptTemplate

ROWS: list[Record] = [{"id": n, "text": f"text {n}, ünï", "weight": n / 4} for n in range(6)]


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CARRYALL_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1700000000")


def csv_file(path: Path, rows: list[Record] = ROWS, **options: Any) -> Path:
    with path.open("w", newline="", encoding="utf-8") as stream:
        writer = csv.DictWriter(stream, list(rows[0]), **options)
        writer.writeheader()
        writer.writerows(rows)
    return path


def texts(path: Path) -> list[str]:
    return [record["response"]["body"]["choices"][0]["text"] for record in read_lines(path)]


def expected_texts(tmp_path: Path, prompts: list[str]) -> list[str]:
    source = write_lines(tmp_path / "expected.jsonl", [{"prompt": prompt} for prompt in prompts])
    run(spec(source, tmp_path / "expected.out.jsonl"))
    return texts(tmp_path / "expected.out.jsonl")


@pytest.mark.parametrize("suffix", [".csv", ".tsv", ".parquet", ".jsonl"])
def test_a_template_makes_prompts_of_records(tmp_path: Path, suffix: str) -> None:
    source, out = tmp_path / f"in{suffix}", tmp_path / "out.jsonl"
    if suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(ROWS), source)
    elif suffix == ".jsonl":
        write_lines(source, ROWS)
    else:
        csv_file(source, delimiter="\t" if suffix == ".tsv" else ",")
    run(spec(source, out, template="<{{ text | upper }}>", id_column="id", keep=["weight"]))
    assert texts(out) == expected_texts(tmp_path, [f"<{row['text'].upper()}>" for row in ROWS])
    records = read_lines(out)
    assert [record["custom_id"] for record in records] == [str(n) for n in range(6)]
    kept = [record["columns"]["weight"] for record in records]
    assert kept == [str(n / 4) if suffix in (".csv", ".tsv") else n / 4 for n in range(6)]


def test_a_template_makes_chats_with_a_system_message(tmp_path: Path) -> None:
    template = PromptTemplate("{{ text }}!", "chat", "You are {{ who }}.")
    assert template.body({"text": "Hi", "who": "kind", "custom_id": 7}) == {
        "messages": [
            {"role": "system", "content": "You are kind."},
            {"role": "user", "content": "Hi!"},
        ],
        "custom_id": "7",
    }
    assert PromptTemplate("{{ text }}", "embedding").body({"text": "Hi"}) == {"input": "Hi"}


def test_columns_that_are_requests_need_no_template(tmp_path: Path) -> None:
    source, out = tmp_path / "in.parquet", tmp_path / "out.jsonl"
    messages = [{"role": "user", "content": "Hi"}]
    pq.write_table(pa.Table.from_pylist([{"messages": messages, "prompt": None}, {"prompt": "x"}]), source)
    run(spec(source, out))
    assert [r["response"]["body"]["object"] for r in read_lines(out)] == [
        "chat.completion",
        "text_completion",
    ]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"template": "{{ txt }}"},
            "the template names the column 'txt', which the input lacks; it has: id, text, weight",
        ),
        ({"template": "{{ text }}", "id_column": "key"}, "--id-column names the column 'key'"),
        ({"template": "{{ text }}", "keep": ["x"]}, "--keep names the column 'x'"),
        ({}, "none of which is a prompt; give a template"),
    ],
)
def test_a_missing_column_is_refused_before_work_starts(
    tmp_path: Path, options: Record, message: str
) -> None:
    source = csv_file(tmp_path / "in.csv")
    with pytest.raises(UsageError, match=message):
        run(spec(source, tmp_path / "out.jsonl", **options))
    assert list(tmp_path.iterdir()) == [source]


def test_a_missing_column_of_a_json_line_fails_the_line(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", [{"text": "a"}, {"txt": "b"}])
    outcome = run(spec(source, tmp_path / "out.jsonl", template="{{ text }}"))
    assert (outcome.totals.completed, outcome.totals.errors) == (1, {"invalid_request": 1})
    (error,) = read_lines(tmp_path / "out.errors.jsonl")
    assert "'text' is undefined" in error["error"]["message"]


def test_templates_run_in_a_sandbox() -> None:
    with pytest.raises(RequestError, match=r"the template fails|lacks a column"):
        PromptTemplate("{{ text.__class__.__mro__ }}").body({"text": "x"})


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "has no header line"),
        (b"a,a\n1,2\n", "must name every column once"),
        (b'a,b\n1,"2\n3,4\n', "unexpected end of data"),
    ],
)
def test_a_damaged_table_is_refused_before_work_starts(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "in.csv").write_bytes(content)
    with pytest.raises(UsageError, match=message):
        run(spec(tmp_path / "in.csv", tmp_path / "out.jsonl", template="{{ a }}"))
    (tmp_path / "in.parquet").write_bytes(content)
    with pytest.raises(UsageError, match="is not a Parquet file"):
        run(spec(tmp_path / "in.parquet", tmp_path / "out.jsonl", template="{{ a }}"))


def test_a_record_of_another_encoding_or_length_fails_alone(tmp_path: Path) -> None:
    (tmp_path / "in.csv").write_bytes(b"text\nplain\n\xe9t\xe9\na,b\nnul\0byte\n")
    outcome = run(spec(tmp_path / "in.csv", tmp_path / "out.jsonl", template="{{ text }}"))
    assert (outcome.totals.completed, outcome.totals.errors) == (2, {"invalid_line": 2})
    messages = [each["error"]["message"] for each in read_lines(tmp_path / "out.errors.jsonl")]
    assert "not valid UTF-8" in messages[0]
    assert "has 2 values, the header names 1 columns" in messages[1]
    assert texts(tmp_path / "out.jsonl") == expected_texts(tmp_path, ["plain", "nul\0byte"])


PACKERS: dict[str, Callable[[bytes], bytes]] = {
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
}


@pytest.mark.parametrize("suffix", [*PACKERS, ".zst"])
def test_compression_is_read_and_written_by_suffix(tmp_path: Path, suffix: str) -> None:
    plain = write_lines(tmp_path / "in.jsonl", [{"prompt": f"p{n}"} for n in range(20)])
    packed = tmp_path / f"packed.jsonl{suffix}"
    if suffix == ".zst":
        with pa.CompressedOutputStream(str(packed), "zstd") as stream:
            stream.write(plain.read_bytes())
    else:
        packed.write_bytes(PACKERS[suffix](plain.read_bytes()))
    run(spec(plain, tmp_path / "out.jsonl"))
    out = tmp_path / f"out.jsonl{suffix}"
    run(spec(packed, out))
    with pa.input_stream(str(out), compression=None if suffix == ".xz" else "detect") as stream:
        data = lzma.decompress(out.read_bytes()) if suffix == ".xz" else stream.read()
    assert data == (tmp_path / "out.jsonl").read_bytes()
    assert Source([str(plain)]).content() == Source([str(packed)]).content()


def test_a_file_cut_off_in_its_compression_is_refused(tmp_path: Path) -> None:
    packed = tmp_path / "in.jsonl.gz"
    packed.write_bytes(gzip.compress(b'{"prompt": "x"}\n' * 1000)[:-20])
    with pytest.raises(UsageError, match=r"in\.jsonl\.gz is damaged: .*end-of-stream"):
        run(spec(packed, tmp_path / "out.jsonl"))
    assert list(tmp_path.iterdir()) == [packed]


@pytest.mark.parametrize("suffix", [".gz", ".bz2", ".xz", ".zst"])
@pytest.mark.parametrize("name", ["in.jsonl", "in.csv"])
def test_a_file_that_is_not_compressed_as_its_name_says_is_refused(
    tmp_path: Path, name: str, suffix: str
) -> None:
    packed = tmp_path / f"{name}{suffix}"
    packed.write_bytes(b'{"prompt": "x"}\n')
    with pytest.raises(UsageError, match=f"{re.escape(packed.name)} is damaged: "):
        run(spec(packed, tmp_path / "out.jsonl"))
    assert list(tmp_path.iterdir()) == [packed]


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-be", "utf-32", "utf-32-be"])
@pytest.mark.parametrize(("name", "content"), [("in.jsonl", '{"prompt": "x"}\n'), ("in.csv", "prompt\nx\n")])
def test_a_file_of_another_encoding_is_refused_before_work_starts(
    tmp_path: Path, name: str, content: str, encoding: str
) -> None:
    mark = "\ufeff" if encoding.endswith("be") else ""  # the others write it by themselves
    (tmp_path / name).write_bytes((mark + content).encode(encoding))
    with pytest.raises(UsageError, match=f"{name} is encoded as UTF-{encoding[4:6]}; convert it to UTF-8"):
        run(spec(tmp_path / name, tmp_path / "out.jsonl"))
    assert not (tmp_path / "out.jsonl.job").exists()


def test_several_files_and_globs_are_one_input(tmp_path: Path) -> None:
    for name, count in (("b", 2), ("a", 3)):
        write_lines(tmp_path / f"{name}.jsonl", [*({"prompt": f"{name}{n}"} for n in range(count)), "{torn"])
    source = Source([str(tmp_path / "*.jsonl")])
    assert [Path(name).name for name in source.files] == ["a.jsonl", "b.jsonl"]
    out = tmp_path / "out" / "all.jsonl"
    out.parent.mkdir()
    run(spec(str(tmp_path / "*.jsonl"), out))
    assert [record["custom_id"] for record in read_lines(out)] == [f"line-{n}" for n in (1, 2, 3, 5, 6)]
    errors = [each["error"] for each in read_lines(out.with_name("all.errors.jsonl"))]
    assert [(e["line"], Path(e["file"]).name, e["file_line"]) for e in errors] == [
        (4, "a.jsonl", 4),
        (7, "b.jsonl", 3),
    ]


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["none*.jsonl"], "there is no input file none"),
        (["-", "IN"], "cannot be one of several"),
        (["IN", "IN"], "is given twice"),
        (["memory://none.jsonl"], "there is no input file"),
        (["memory://none*.jsonl"], "no input file matches"),
        (["nonsense://x"], "nonsense"),
        (["IN", "TABLE"], "mixes tables"),
    ],
)
def test_invalid_inputs_are_refused(tmp_path: Path, names: list[str], message: str) -> None:
    paths = {
        "IN": str(write_lines(tmp_path / "in.jsonl", [{"prompt": "x"}])),
        "TABLE": str(csv_file(tmp_path / "in.csv")),
    }
    with pytest.raises(UsageError, match=message):
        run(spec([paths.get(name, name) for name in names], tmp_path / "out.jsonl"))


def test_remote_files_are_read_and_written(tmp_path: Path) -> None:
    memory = fsspec.filesystem("memory")
    memory.pipe("/in/a.jsonl", b'{"prompt": "x"}\n{torn\n')
    memory.pipe("/in/b.jsonl.gz", gzip.compress(b'{"prompt": "y"}\n'))
    job = str(tmp_path / "job")
    outcome = run(spec("memory://in/*", "memory://out/r.jsonl", job=job), tmp_path)
    assert outcome.finished
    found = [json.loads(line) for line in memory.cat("/out/r.jsonl").splitlines()]
    assert [record["custom_id"] for record in found] == ["line-1", "line-3"]
    assert b"invalid_line" in memory.cat("/out/r.errors.jsonl")
    with pytest.raises(UsageError, match="--job DIR"):
        run(spec("memory://in/*", "memory://out/r.jsonl"), tmp_path)


SCHEMA = {
    "type": "object",
    "properties": {"label": {"enum": ["a", "b"]}, "score": {"type": "integer"}},
    "required": ["label", "score"],
    "additionalProperties": False,
}


def test_parquet_holds_a_column_for_each_property_of_the_schema(tmp_path: Path) -> None:
    rows: list[Record] = [{"n": 1, "x": 1.5, "name": "é"}, {"n": 2, "x": 2, "name": None}]
    source, out = write_lines(tmp_path / "in.jsonl", rows), tmp_path / "out.parquet"
    sampling = {**GREEDY, "max_tokens": 60, "structured_output": {"json_schema": SCHEMA}}
    job = {"template": "{{ n }}", "keep": ["n", "x", "name"], "sampling": sampling}
    assert run(spec(source, out, **job)).totals.failed == 0
    table = pq.read_table(out)
    assert table.schema.field("n").type == pa.int64()
    assert table.schema.field("x").type == pa.float64()
    assert table.schema.field("output.score").type == pa.int64()
    found = table.to_pylist()
    assert [(row["line"], row["n"], row["x"], row["name"]) for row in found] == [
        (1, 1, 1.5, "é"),
        (2, 2, 2.0, None),
    ]
    for row in found:
        answer = json.loads(row["text"])
        assert (row["output.label"], row["output.score"]) == (answer["label"], answer["score"])
        assert json.loads(row["response"])["choices"][0]["text"] == row["text"]


def test_a_kept_number_that_is_not_finite_is_null_in_json(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", ['{"prompt": "x", "weight": NaN, "size": Infinity}'])
    run(spec(source, tmp_path / "out.jsonl", template="{{ prompt }}", keep=["weight", "size"]))
    (line,) = (tmp_path / "out.jsonl").read_text().splitlines()
    constants = list[str]()
    columns = json.loads(line, parse_constant=constants.append)["columns"]
    assert (columns, constants) == ({"weight": None, "size": None}, [])


def test_a_kept_number_that_is_not_finite_stays_so_in_a_table(tmp_path: Path) -> None:
    source, out = tmp_path / "in.parquet", tmp_path / "out.parquet"
    numbers = [float("nan"), None, 0.5, float("-inf")]
    pq.write_table(pa.table({"prompt": ["x"] * 4, "weight": numbers}), source)
    run(spec(source, out, template="{{ prompt }}", keep=["weight"]))
    column = pq.read_table(out)["weight"]
    assert (column.type, column.null_count) == (pa.float64(), 1)
    assert [repr(value) for value in column.to_pylist()] == ["nan", "None", "0.5", "-inf"]


def test_a_column_of_texts_and_numbers_has_null_for_what_is_no_json(tmp_path: Path) -> None:
    source = write_lines(
        tmp_path / "in.jsonl", [f'{{"prompt": "x", "mixed": {each}}}' for each in ('"NaN"', "NaN", "0.5")]
    )
    run(spec(source, tmp_path / "out.parquet", template="{{ prompt }}", keep=["mixed"]))
    assert pq.read_table(tmp_path / "out.parquet")["mixed"].to_pylist() == ["NaN", None, "0.5"]


@pytest.mark.parametrize("name", ["", "folder"])
def test_an_output_that_is_no_file_is_refused(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    source = write_lines(tmp_path / "in.jsonl", [{"prompt": "x"}])
    with pytest.raises(UsageError, match="is not a regular file"):
        run(spec(source, name))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder", "in.jsonl"]


def test_a_kept_column_may_not_hide_one_of_the_results(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", [{"text": "x"}])
    with pytest.raises(UsageError, match="'text' is a column of the results"):
        run(spec(source, tmp_path / "out.parquet", template="{{ text }}", keep=["text"]))


def test_a_choice_is_one_of_the_texts(tmp_path: Path) -> None:
    source, out = (
        write_lines(tmp_path / "in.jsonl", [{"prompt": f"{n}"} for n in range(8)]),
        tmp_path / "o.jsonl",
    )
    run(spec(source, out, sampling={"structured_output": {"choice": ["yes", "no"]}, "max_tokens": 9}))
    assert set(texts(out)) <= {"yes", "no"}
    assert len(texts(out)) == 8


def test_a_missing_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(MissingExtraError, match=r"carryall\[batch\]"):
        run(spec(write_lines(tmp_path / "in.parquet", []), tmp_path / "out.jsonl"))
    with pytest.raises(MissingExtraError, match=r"carryall\[batch\]"):
        run(spec(write_lines(tmp_path / "in.jsonl", []), tmp_path / "out.parquet"))


@pytest.mark.parametrize(
    ("name", "suffix", "errors"),
    [
        ("a.jsonl", ".jsonl", "a.errors.jsonl"),
        ("x.y/a.jsonl.gz", ".jsonl", "x.y/a.errors.jsonl.gz"),
        ("s3://b.c/a", "", "s3://b.c/a.errors"),
        ("A.CSV.ZST", ".csv", "A.errors.CSV.ZST"),
    ],
)
def test_names(name: str, suffix: str, errors: str) -> None:
    assert plain_suffix(name) == suffix
    assert with_infix(name, "errors") == errors


@pytest.mark.long
def test_a_line_of_200_mb_is_not_held(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    with path.open("wb") as stream:
        stream.write(b'{"prompt": "')
        for _ in range(200):
            stream.write(b"x" * 2**20)
        stream.write(b'"}\n{"prompt": "small"}\n')
    tracemalloc.start()
    try:
        outcome = run(spec(path, tmp_path / "out.jsonl"))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert (outcome.totals.completed, outcome.totals.errors) == (1, {"invalid_line": 1})
    assert peak < 4 * sources_module.MAX_LINE_BYTES


def test_an_empty_input_gives_an_empty_output(tmp_path: Path) -> None:
    assert run(spec(write_lines(tmp_path / "in.jsonl", []), tmp_path / "out.jsonl")).finished
    assert (tmp_path / "out.jsonl").read_bytes() == b""


def test_a_stream_of_text_is_no_surprise(tmp_path: Path) -> None:
    """CSV with a byte order mark, quoted line breaks, and empty lines."""
    (tmp_path / "in.csv").write_bytes('\ufefftext\r\n"a\nb"\r\n\r\nc\r\n'.encode())
    rows = list(Source([str(tmp_path / "in.csv")]))
    assert [row.data for row in rows] == [{"text": "a\nb"}, {"text": "c"}]
