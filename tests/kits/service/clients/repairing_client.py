"""python repairing_client.py URL FOLDER: an agent of OpenAI's SDK repairs a file with a small real model.

The client demands which tool comes next, as a workflow does: read, then edit and test until the test passes.
The model chooses the arguments, and the grammar of the demanded call keeps them valid.
"""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any, Literal

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    RunHooks,
    Runner,
    ToolsToFinalOutputResult,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI

set_tracing_disabled(True)
URL, FOLDER = sys.argv[1], Path(sys.argv[2])
PASSED = "calc is right"
TURNS = 20
STEPS: list[tuple[str, str]] = []


@function_tool  # type: ignore[untyped-decorator]
def read_file(path: Literal["calc.py", "test_calc.py"]) -> str:
    """Read a file."""
    STEPS.append(("read_file", path))
    return (FOLDER / path).read_text()


@function_tool  # type: ignore[untyped-decorator]
def set_operator(operator: Literal["+", "-", "*", "/"]) -> str:
    """Edit calc.py: replace the operator between left and right."""
    STEPS.append(("set_operator", operator))
    text = f"def add(left, right):\n    return left {operator} right\n"
    (FOLDER / "calc.py").write_text(text)
    return f"calc.py is now:\n{text}"


@function_tool  # type: ignore[untyped-decorator]
def run_test() -> str:
    """Run the test of calc.py."""
    command = [sys.executable, "test_calc.py"]
    done = subprocess.run(command, cwd=FOLDER, capture_output=True, text=True, check=False)
    told = done.stdout.strip() or done.stderr.strip().splitlines()[-1]
    STEPS.append(("run_test", told))
    return told


class Demands(RunHooks[Any]):  # type: ignore[misc]
    """Demands the next tool when one has ended."""

    async def on_tool_end(self, context: Any, agent: Any, tool: Any, result: Any) -> None:
        """Set the tool of the next turn."""
        following = "run_test" if tool.name == "set_operator" else "set_operator"
        agent.model_settings = dataclasses.replace(agent.model_settings, tool_choice=following)


def ends(context: Any, results: Any) -> ToolsToFinalOutputResult:
    """End when the test passes."""
    passed = any(PASSED in str(result.output) for result in results)
    return ToolsToFinalOutputResult(is_final_output=passed, final_output=PASSED if passed else None)


repairer = Agent(
    name="repairer",
    instructions="You repair Python files with tools.",
    model=OpenAIChatCompletionsModel(
        "toy", AsyncOpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0, timeout=600)
    ),
    tools=[read_file, set_operator, run_test],
    tool_use_behavior=ends,
    reset_tool_choice=False,
    model_settings=ModelSettings(
        tool_choice="read_file", max_tokens=60, temperature=0.8, extra_body={"seed": 1, "ignore_eos": False}
    ),
)
answer = Runner.run_sync(
    repairer, "add(2, 3) in calc.py must be 5, but it is -1. Repair it.", max_turns=TURNS, hooks=Demands()
)
print(json.dumps({"answer": answer.final_output, "steps": STEPS}))
