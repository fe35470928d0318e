"""Whole files of requests from strangers: every line is a request or a reason, or the file is refused."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import pytest
from batch_kit import toy_worker
from fuzzing import damaged, fuzz, seeds
from hostile_json import changed
from hypothesis import strategies as st

from carryall.errors import RequestError, UsageError
from carryall.runtime.batch.inputs.lines import BatchLine, CustomIds, parse_row, refuse_duplicate
from carryall.runtime.batch.inputs.sources import Source
from carryall.runtime.batch.inputs.templates import PromptTemplate
from carryall.runtime.batch.workers.offline import OfflineEngine

pytest.importorskip("pyarrow", reason="reads CSV")
SEEDS = seeds("batch_lines")
LINES = [line for path in SEEDS if path.suffix == ".jsonl" for line in path.read_text("utf-8").splitlines()]
RECORDS = [json.loads(line) for line in LINES if line]
PIECES = ["a", '"', '""', ",", "\n", "\r\n", "\0", "é", "prompt", " ", "1", "'", ";", "\t", "{{"]
TABLES = st.lists(st.sampled_from(PIECES), max_size=30).map(lambda pieces: "".join(pieces).encode())
FILES = st.one_of(
    st.sampled_from(SEEDS).flatmap(lambda path: st.tuples(st.just(path.suffix), damaged(path.read_bytes()))),
    st.lists(st.sampled_from(RECORDS).flatmap(changed), max_size=3).map(
        lambda records: (".jsonl", "\n".join(map(json.dumps, records)).encode())
    ),
    st.tuples(st.sampled_from([".csv", ".tsv"]), TABLES),
)


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> OfflineEngine:
    return toy_worker(tmp_path_factory.mktemp("toy"))


def check(suffix: str, content: bytes, folder: Path, worker: OfflineEngine) -> None:
    """Read a file twice, once for its size and once for its requests; prepare the requests."""
    path = folder / f"in{suffix}"
    path.write_bytes(content)
    source = Source([str(path)])
    template = PromptTemplate(text="{{ prompt }}") if source.is_table else PromptTemplate()
    try:
        if source.is_table:
            template.check(source.columns())
        stated = source.content()
        rows = list(source)
    except UsageError as error:
        assert "\n" not in str(error)  # noqa: PT017
        return
    assert len(rows) == stated.rows
    ids = CustomIds()
    for row in rows:
        line = parse_row(row, template)
        if isinstance(line, BatchLine):
            line = refuse_duplicate(line, row, ids)
        if not isinstance(line, BatchLine):
            assert line.message
            continue
        with contextlib.suppress(RequestError):  # anything else fails the test
            worker._preparer.prepare(line)
    ids.close()


@pytest.mark.parametrize("seed", SEEDS, ids=lambda path: path.name)
def test_kept_files(seed: Path, tmp_path: Path, worker: OfflineEngine) -> None:
    check(seed.suffix, seed.read_bytes(), tmp_path, worker)


@pytest.mark.parametrize("examples", [60, pytest.param(None, marks=pytest.mark.slow)])
def test_any_file_holds_requests_or_reasons(
    examples: int | None, tmp_path: Path, worker: OfflineEngine
) -> None:
    fuzz(FILES, lambda file: check(file[0], file[1], tmp_path, worker), examples)
