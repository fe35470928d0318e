"""What programs compute, beside the same requests without a shared cache: the shapes of SGLang's paper."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from null_llm import null_model

from carryall.exporter.demo import demo_path
from carryall.program import Run
from carryall.runtime.api.llm import LLM

BENCHMARK = Path(__file__).parents[3] / "benchmarks/engine/programs.py"


@pytest.fixture(scope="module")
def benchmark() -> ModuleType:
    """The benchmark whose figures docs/programs.md has."""
    spec = importlib.util.spec_from_file_location("programs_benchmark", BENCHMARK)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.long
@pytest.mark.parametrize(
    ("shape", "least"),
    [
        ("few_shot", 3),
        ("tree_of_thought", 3),
        ("self_consistency", 3),
        ("multi_turn", 3),
        ("document_to_json", 1),
    ],
)
def test_a_program_computes_a_part_of_what_its_requests_do(
    benchmark: ModuleType, shape: str, least: float
) -> None:
    program, arguments = benchmark.shapes((demo_path("pycoder") / "heldout.txt").read_text("utf-8"))[shape]

    def run(**options: Any) -> tuple[list[Run], int]:
        with LLM(null_model(max_slots=16), **options) as llm:
            return program.run_batch(llm, arguments), llm.stats().computed_tokens

    runs, computed = run()
    alone, computed_alone = run(prefix_cache=False)
    assert [each.text for each in runs] == [each.text for each in alone]
    prompts = sum(each.usage.prompt_tokens for each in alone)
    assert computed_alone >= prompts  # each request computes its prompt
    assert computed_alone >= least * computed
