"""Count the tokens that programs compute, beside the same requests without a prefix cache.

    python benchmarks/engine/programs.py [--model demo] [--json]

The shapes are those of SGLang's paper (arXiv:2312.07104, section 6): few-shot questions, a tree of thought,
self-consistency, and conversations of several turns; and JSON under a schema, for forced text. Each program
runs twice: on an engine with its radix tree, and on one without, where each request computes all of its
prompt. Both run the same requests, since sampling is seeded. Computed tokens are the engine's own count
(``EngineStats.computed_tokens``), steps its number of runs of the model.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from carryall import LLM
from carryall.exporter.demo import demo_path
from carryall.program import Program, gen, program, select

SCHEMA = {
    "type": "object",
    "properties": {
        "class_name": {"enum": ["Stack", "Queue", "Tree"]},
        "number_of_methods": {"type": "integer", "minimum": 0, "maximum": 99},
        "has_documentation": {"type": "boolean"},
        "raises_exceptions": {"type": "boolean"},
    },
    "required": ["class_name", "number_of_methods", "has_documentation", "raises_exceptions"],
}


@dataclass(frozen=True, slots=True)
class Result:
    """The work of one shape: tokens and steps of the engine, and seconds."""

    shape: str
    requests: int
    prompt_tokens: int
    generated_tokens: int
    computed: int
    computed_alone: int
    steps: int
    seconds: float
    seconds_alone: float

    @property
    def ratio(self) -> float:
        """How many times fewer tokens the program computes."""
        return self.computed_alone / self.computed


def shapes(text: str) -> Mapping[str, tuple[Program, Sequence[Mapping[str, Any]]]]:
    """Return the programs and their arguments; ``text`` is held-out code."""
    pieces = [text[start : start + 400] for start in range(0, 40_000, 400)]

    @program(temperature=0)
    def few_shot(s: Any, question: str) -> None:
        s += "".join(f"# Example\n{piece}\n" for piece in pieces[:5])  # 5 shots, as MMLU
        s += f"# Question\n{question}\n# Answer: " + select("answer", ["A", "B", "C", "D"])

    @program(max_tokens=32)
    def tree_of_thought(s: Any, question: str) -> None:
        s += f"# Task\n{pieces[10]}{question}\n"
        frontier = [s]
        for level in range(3):
            branches = [branch for state in frontier for branch in state.fork(2)]
            for seed, branch in enumerate(branches):
                branch += f"# Step {level}: " + gen("step", temperature=0.9, seed=seed)
                branch += "\n# Score: " + gen("score", regex="[0-9]", temperature=0)
            frontier = sorted(branches, key=lambda branch: branch["score"])[-2:]

    @program(max_tokens=48)
    def self_consistency(s: Any, question: str) -> None:
        s += "".join(f"# Example\n{piece}\n" for piece in pieces[20:22]) + f"# Question\n{question}\n"
        for seed, branch in enumerate(s.fork(8)):
            branch += gen("answer", temperature=0.9, seed=seed)

    @program(temperature=0, max_tokens=32)
    def multi_turn(s: Any, question: str) -> None:
        s += f"# System\n{pieces[30]}\n"
        for turn in range(8):
            s += f"# User {turn}\n{question[: 80 + turn]}\n# Assistant\n" + gen("answer") + "\n"

    @program(temperature=0)
    def document_to_json(s: Any, question: str) -> None:
        s += f"# Facts of the code as JSON\n{question}\n# JSON\n" + gen("json", schema=SCHEMA, max_tokens=128)

    questions = [{"question": piece} for piece in pieces[40:48]]
    programs = few_shot, tree_of_thought, self_consistency, multi_turn, document_to_json
    return {each.__name__: (each, questions) for each in programs}  # type: ignore[attr-defined]


def measured(model: str, run: Callable[[LLM], Any], **options: Any) -> tuple[Any, int, int, float]:
    """Return the result of a run, the tokens it computed, its steps and its seconds."""
    with LLM(model, max_slots=16, **options) as llm:
        begin = time.perf_counter()
        result = run(llm)
        seconds = time.perf_counter() - begin
        stats = llm.stats()
    return result, stats.computed_tokens, stats.steps, seconds


def main() -> None:
    """Run all shapes and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="demo")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args()
    text = (demo_path("pycoder") / "heldout.txt").read_text(encoding="utf-8")
    results = []
    for name, (shape, arguments) in shapes(text).items():

        def run(llm: LLM, shape: Program = shape, arguments: Any = arguments) -> Any:
            return shape.run_batch(llm, arguments)

        runs, computed, steps, seconds = measured(options.model, run)
        alone, computed_alone, _, seconds_alone = measured(options.model, run, prefix_cache=False)
        if [each.text for each in runs] != [each.text for each in alone]:
            print(f"{name}: some texts differ without the cache")
        usages = [each.usage for each in runs]
        results.append(
            Result(
                name,
                sum(len(each.requests()) for each in runs),
                sum(usage.prompt_tokens for usage in usages),
                sum(usage.completion_tokens for usage in usages),
                computed,
                computed_alone,
                steps,
                seconds,
                seconds_alone,
            )
        )
    if options.json:
        print(json.dumps([asdict(result) for result in results], indent=2))
        return
    print("shape              requests  prompt  generated  computed    alone  ratio  steps  seconds   alone")
    for each in results:
        print(
            f"{each.shape:18} {each.requests:8} {each.prompt_tokens:7} {each.generated_tokens:10} "
            f"{each.computed:9} {each.computed_alone:8} {each.ratio:6.1f} {each.steps:6} "
            f"{each.seconds:8.2f} {each.seconds_alone:7.2f}"
        )


if __name__ == "__main__":
    main()
