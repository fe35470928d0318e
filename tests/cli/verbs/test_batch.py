"""``carryall batch run``: files in, files out, and what the exit code says."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from carryall import LLM, SamplingParams
from carryall.cli import carryall

LINES = [
    {
        "custom_id": "é",
        "method": "POST",
        "url": "/v1/completions",
        "body": {"prompt": "def f(x):", "max_tokens": 4},
    },
    {"prompt": "class Stack:"},
]


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CARRYALL_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write(tmp_path / "in.jsonl", LINES)


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out.jsonl"


def write(path: Path, records: Sequence[Any]) -> Path:
    path.write_text(
        "".join(r if isinstance(r, str) else json.dumps(r) + "\n" for r in records), encoding="utf-8"
    )
    return path


def batch(*arguments: object, provider: str = "null", stdin: str | None = None) -> Result:
    words = [
        "batch",
        "run",
        *map(str, arguments),
        "--model",
        "demo",
        "--provider",
        provider,
        "--max-tokens",
        "6",
    ]
    return CliRunner().invoke(carryall, [*words, "--temperature", "0"], input=stdin)


def results(path: Path) -> dict[str, Any]:
    records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return {record["custom_id"]: record for record in records}


def test_a_file_is_answered(source: Path, out: Path) -> None:
    result = batch(source, "-o", out)
    assert (result.exit_code, result.stdout) == (0, "")
    assert "2 completed, 0 failed, 0 skipped" in result.stderr
    usage = {name: r["response"]["body"]["usage"]["completion_tokens"] for name, r in results(out).items()}
    assert usage == {"é": 4, "line-2": 6}  # the line's own limit, and the one of the command line


def test_failed_lines_show_in_the_exit_code(tmp_path: Path, out: Path) -> None:
    source = write(tmp_path / "bad.jsonl", [LINES[0], "{oops\n", {"prompt": 5}])
    result = batch(source, "-o", out, "--json")
    assert result.exit_code == 1
    facts = json.loads(result.stdout)
    assert (facts["completed"], facts["failed"], facts["completion_tokens"]) == (1, 2, 4)
    assert facts["errors"] == {"invalid_line": 1, "invalid_request": 1}
    assert len(out.read_text().splitlines()) == 3


def test_standard_streams() -> None:
    result = batch("-", "-o", "-", "-q", stdin='{"prompt": "a"}\n')
    assert (result.exit_code, result.stderr) == (0, "")
    assert json.loads(result.stdout)["custom_id"] == "line-1"


def test_results_are_never_overwritten_unasked(source: Path, out: Path) -> None:
    out.write_text("precious")
    result = batch(source, "-o", out)
    assert (result.exit_code, out.read_text()) == (2, "precious")
    assert "--overwrite replaces it" in result.stderr
    assert batch(source, "-o", out, "--overwrite").exit_code == 0
    assert len(results(out)) == 2


def test_resume_does_what_is_missing(tmp_path: Path, source: Path, out: Path) -> None:
    assert batch(source, "-o", out).exit_code == 0
    first = results(out)
    whole = out.read_text(encoding="utf-8").splitlines(keepends=True)
    out.unlink()
    partial = out.with_name("out.jsonl.partial")
    partial.write_text(whole[0] + whole[1][:30], encoding="utf-8")
    assert batch(source, "-o", out).exit_code == 2
    result = batch(source, "-o", out, "--resume")
    assert result.exit_code == 0
    assert "1 completed, 0 failed, 1 skipped" in result.stderr
    assert not partial.exists()
    texts = [
        {k: r["response"]["body"]["choices"][0]["text"] for k, r in x.items()} for x in (first, results(out))
    ]
    assert texts[0] == texts[1]


def test_a_model_that_cannot_be_loaded_leaves_nothing(source: Path, out: Path) -> None:
    assert batch(source, "-o", out, provider="nonsense").exit_code == 2
    assert list(out.parent.iterdir()) == [source]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-o", "-", "--json"], "need a file as OUT"),
        (["-o", "-", "--resume"], "need a file as OUT"),
        (["-o", "OUT", "--resume", "--overwrite"], "exclude each other"),
        (["-o", "IN", "--overwrite"], "is the input"),
        ([], "Missing option '-o'"),
    ],
)
def test_wrong_use(source: Path, out: Path, arguments: list[str], message: str) -> None:
    before = source.read_text()
    paths = {"IN": source, "OUT": out}
    result = batch(source, *(paths.get(word, word) for word in arguments))
    assert (result.exit_code, message in result.stderr) == (2, True), result.stderr
    assert source.read_text() == before


def test_a_missing_file_is_named(out: Path) -> None:
    result = batch("nowhere.jsonl", "-o", out)
    assert (result.exit_code, "nowhere.jsonl" in result.stderr) == (2, True)


def test_the_embedded_model_on_the_cpu_gives_what_llm_gives(source: Path, out: Path) -> None:
    assert batch(source, "-o", out, provider="cpu").exit_code == 0
    with LLM("demo", max_slots=2) as llm:
        params = [SamplingParams(temperature=0, max_tokens=tokens) for tokens in (4, 6)]
        expected = [output.outputs[0].text for output in llm.generate(["def f(x):", "class Stack:"], params)]
    found = results(out)
    texts = [found[name]["response"]["body"]["choices"][0]["text"] for name in ("é", "line-2")]
    assert texts == expected
