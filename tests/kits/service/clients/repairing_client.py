"""python repairing_client.py URL FOLDER SEED: an agent of OpenAI's SDK repairs a file with a small model.

The client demands which tool comes next, as a workflow does: read, edit, test. The model writes the
arguments, and the grammar of the demanded call keeps them to their schema: one of two files, and one of 16
expressions, of which two are right. So small a model repeats a wrong edit: a session whose test fails begins
anew, with other seeds.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

from agents import (
    Agent,
    MaxTurnsExceeded,
    ModelSettings,
    OpenAIChatCompletionsModel,
    RunHooks,
    Runner,
    ToolsToFinalOutputResult,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI
from pydantic import Field

set_tracing_disabled(True)
URL, FOLDER, SEED = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
PASSED = "calc is right"
EXPRESSION = r"^(left|right) [-+*/] (left|right)$"
SESSIONS = 8
STEPS: list[tuple[str, str]] = []


@function_tool  # type: ignore[untyped-decorator]
def read_file(path: Literal["calc.py", "test_calc.py"]) -> str:
    """Read a file."""
    STEPS.append(("read_file", path))
    return (FOLDER / path).read_text()


@function_tool  # type: ignore[untyped-decorator]
def set_return(expression: Annotated[str, Field(pattern=EXPRESSION)]) -> str:
    """Edit calc.py: write what the function add returns."""
    STEPS.append(("set_return", expression))
    text = f"def add(left, right):\n    return {expression}\n"
    (FOLDER / "calc.py").write_text(text)
    return f"calc.py is now:\n{text}"


@function_tool  # type: ignore[untyped-decorator]
def run_test() -> str:
    """Run the test of calc.py."""
    command = [sys.executable, "-B", "test_calc.py"]  # a cached calc.py may be that of a second ago
    done = subprocess.run(command, cwd=FOLDER, capture_output=True, text=True, check=False)
    told = done.stdout.strip() or done.stderr.strip().splitlines()[-1]
    STEPS.append(("run_test", told))
    return told


class Demands(RunHooks[Any]):  # type: ignore[misc]
    """Demands the next tool when one has ended, with another seed."""

    async def on_tool_end(self, context: Any, agent: Any, tool: Any, result: Any) -> None:
        """Set the tool of the next turn."""
        following = "run_test" if tool.name == "set_return" else "set_return"
        agent.model_settings = settings(following)


def settings(tool: str) -> ModelSettings:
    """Return the settings of a turn that must call a tool."""
    return ModelSettings(
        tool_choice=tool,
        max_tokens=60,
        temperature=0.8,
        extra_body={"seed": SEED + len(STEPS), "ignore_eos": False},
    )


def ends(context: Any, results: Any) -> ToolsToFinalOutputResult:
    """End when the test passes."""
    passed = any(result.tool.name == "run_test" and result.output == PASSED for result in results)
    return ToolsToFinalOutputResult(is_final_output=passed, final_output=PASSED if passed else None)


def session() -> str | None:
    """Run an agent; return its answer, or None if the test did not pass."""
    agent = Agent(
        name="repairer",
        instructions="You repair Python files with tools.",
        model=OpenAIChatCompletionsModel(
            "toy", AsyncOpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0, timeout=600)
        ),
        tools=[read_file, set_return, run_test],
        tool_use_behavior=ends,
        reset_tool_choice=False,
        model_settings=settings("read_file"),
    )
    task = "add(2, 3) in calc.py must be 5, but it is -1. Repair it."
    try:
        answer = Runner.run_sync(agent, task, max_turns=3, hooks=Demands())
    except MaxTurnsExceeded:
        return None
    return str(answer.final_output)


BROKEN = (FOLDER / "calc.py").read_text()
answer = None
while answer is None and [name for name, _ in STEPS].count("read_file") < SESSIONS:
    (FOLDER / "calc.py").write_text(BROKEN)
    answer = session()
print(json.dumps({"answer": answer, "steps": STEPS}))
