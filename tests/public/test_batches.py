"""Public reports of batches: results that are mixed up, lost, or called successes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from batch_kit import GREEDY, read_lines, run, spec, write_lines
from llm_kit import toy_model

from carryall import LLM, SamplingParams


def answer_of(result: dict[str, Any]) -> str:
    return str(result["response"]["body"]["choices"][0]["text"])


@pytest.mark.long
@pytest.mark.parametrize(
    "source",
    [
        # The answer of one key was that of another.
        "googleapis/python-genai#1909",
        # Lines came in another order, and readers joined them by number.
        "edubruell/tidyllm#37",
        "stdapi-ai/stdapi.ai#60",
    ],
)
def test_each_answer_has_the_id_of_its_line(source: str, tmp_path: Path) -> None:
    lines: list[dict[str, Any]] = [
        {"custom_id": f"c{n}", "body": {"prompt": f"p{n}" * (n % 7 + 1)}} for n in range(60)
    ]
    output = tmp_path / "out.jsonl"
    run(spec(write_lines(tmp_path / "in.jsonl", reversed(lines)), output), tmp_path)
    results = {result["custom_id"]: result for result in read_lines(output)}
    assert len(results) == len(lines) == len(read_lines(output)), source
    with LLM(toy_model(tmp_path, context_length=1024)) as llm:
        prompts = [line["body"]["prompt"] for line in lines]
        expected = [each.outputs[0].text for each in llm.generate(prompts, SamplingParams.from_dict(GREEDY))]
    assert [answer_of(results[line["custom_id"]]) for line in lines] == expected


@pytest.mark.parametrize(
    "source",
    [
        # A body that held an error was read as an answer.
        "artefactory/artefactual#332",
        "openai/openai-openapi#302",
        # A job none of whose lines succeeded was told as completed, without a reason.
        "ProjectTech4DevAI/kaapi-backend#723",
    ],
)
def test_a_line_that_fails_has_its_error_and_no_answer(source: str, tmp_path: Path) -> None:
    lines = [{"custom_id": f"c{n}", "body": {"prompt": "a", "max_tokens": -2 - n}} for n in range(1, 4)]
    job = spec(write_lines(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl")
    outcome = run(job, tmp_path)
    assert (outcome.totals.completed, outcome.totals.failed) == (0, 3), source
    errors = read_lines(Path(job.paths.errors))
    assert {error["custom_id"] for error in errors} == {"c1", "c2", "c3"}
    assert all(error["response"] is None and "max_tokens" in error["error"]["message"] for error in errors)


def test_fields_that_nobody_reads_are_refused_by_name(tmp_path: Path) -> None:
    """googleapis/go-genai#513: lists beside the request came back empty."""
    line = {"custom_id": "c1", "prompt": "a", "image_candidates": ["a", "b"]}
    job = spec(write_lines(tmp_path / "in.jsonl", [line]), tmp_path / "out.jsonl")
    run(job, tmp_path)
    (error,) = read_lines(Path(job.paths.errors))
    assert "image_candidates" in error["error"]["message"]
