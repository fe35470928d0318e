"""The report of a job: its numbers match the answers, and no answer can break the page."""

from __future__ import annotations

import re
import statistics
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
from batch_kit import run, spec, write_lines

from carryall.errors import UsageError
from carryall.runtime.batch.jobs.journal import Journal, LineResult
from carryall.runtime.batch.jobs.report import _distribution, to_html, write_report


def test_quantiles_and_buckets_are_those_of_the_numbers(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    values = [(n * 7919) % 101 for n in range(1, 102)]
    journal.commit(
        [
            LineResult(number=n, digest=b"", record=b"{}", completion_tokens=value)
            for n, value in enumerate(values)
        ]
    )
    found = _distribution(journal, "length", "tokens", "completion_tokens")
    assert found is not None
    assert found.quantiles == {
        "least": 0.0,
        "median": statistics.median(values),
        "90 %": 90.0,
        "99 %": 99.0,
        "greatest": 100.0,
    }
    assert sum(found.counts) == 101
    assert max(found.counts) <= 5


def test_a_page_says_what_happened_and_escapes_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CARRYALL_CACHE", str(tmp_path / "cache"))
    lines = [{"prompt": f"p{n}", "max_tokens": 1 + n} for n in range(30)]
    bad = {"prompt": "x", "custom_id": "<script>alert(1)</script>", "max_tokens": -3}
    source = write_lines(tmp_path / "in.jsonl", [*lines, bad, "{broken"])
    out = tmp_path / "out.jsonl"
    run(spec(source, out))
    page = tmp_path / "report.html"
    write_report(str(out), page)
    text = page.read_text(encoding="utf-8")
    assert "<script>" not in text
    assert "&lt;script&gt;alert(1)" in text
    for part in ("32 of 32", "invalid_line", "invalid_request", "465", "length"):
        assert part in text
    assert re.search(r"\bline-\d+\b", text)  # which lines were slowest depends on the machine
    body = text[text.index("<body>") : text.index("</html>")]
    ET.fromstring(body)  # noqa: S314 -- our own; every tag is closed


def test_a_job_without_answers_has_a_page(tmp_path: Path) -> None:
    folder = tmp_path / "x.job"
    folder.mkdir()
    journal = Journal(folder)
    journal.state_facts({"details": {"inputs": ["x.jsonl"], "output": "x", "model": "demo"}})
    journal.close()
    assert "interrupted" in to_html(str(folder))


def test_a_folder_that_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="does not exist; create it first"):
        write_report(str(tmp_path), tmp_path / "none" / "report.html")
