"""Coding agents that others wrote: each reads, repairs and tests a file with a model behind this service.

The model answers by a rule (``scripted_model``). All between is real: the client with its prompts and tools,
the API, the chat template, the cache, the grammar of the calls, the parser, and the tools that it runs.

With ``CARRYALL_RECORD_AGENTS=FOLDER`` the sessions are recorded there for ``http/test_recorded_agents.py``.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from coding_agents import AGENTS, BROKEN, REPAIRED, TASK, environment, recorded, workspace
from http_serving import http_serving
from own_environment import python_with, smollm2_gguf
from scripted_model import repair, scripted_llm

from carryall.runtime.service.http.service import HttpService

pytestmark = pytest.mark.slow
SECONDS = 300
CLIENTS = Path(__file__).resolve().parents[2] / "kits/service/clients"


@pytest.mark.parametrize("name", AGENTS)
@pytest.mark.parametrize("style", ["tagged objects", "parameters"])
def test_a_file_is_read_repaired_and_tested(
    name: str, style: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = AGENTS[name]
    programs, repository = agent.programs(), workspace(tmp_path)
    variables = environment(programs, tmp_path, repository)
    bodies: list[dict[str, Any]] = []
    read: Callable[..., Awaitable[dict[str, Any]]] = HttpService.body

    async def body(self: HttpService, request: Any) -> dict[str, Any]:
        given = await read(self, request)
        if request.url.path == agent.path:
            bodies.append(json.loads(json.dumps(given)))
        return given

    monkeypatch.setattr(HttpService, "body", body)

    async def scenario() -> str:
        async with scripted_llm(tmp_path / "model", repair, style) as llm, http_serving(llm) as served:
            task = TASK.format(folder=repository)
            command, settings = agent.start(served.url, task, tmp_path)
            process = await asyncio.create_subprocess_exec(
                shutil.which(command[0], path=variables["PATH"]) or command[0],
                *command[1:],
                cwd=repository,
                env={**variables, **settings},
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
            )
            out, err = await asyncio.wait_for(process.communicate(), SECONDS)
            assert process.returncode == 0, f"{out.decode()[-3000:]}\n{err.decode()[-3000:]}"
            return out.decode()

    out = asyncio.run(scenario())
    assert (repository / "calc.py").read_text() == REPAIRED, out[-3000:]
    assert ("calc is right" if name == "aider" else "The test passes.") in out
    folder = os.environ.get("CARRYALL_RECORD_AGENTS")
    if folder:
        places = {str(repository): "/home/user/calc", str(tmp_path): "/home/user", str(Path.cwd()): "/home"}
        session = recorded(bodies, places)
        Path(folder, f"{name}.json").write_text(
            json.dumps({"path": agent.path, "session": session}, indent=1)
        )


def test_a_small_real_model_repairs_a_file_by_demanded_calls(tmp_path: Path) -> None:
    """SmolLM2 with 135 M parameters, from the package index, as ``carryall serve`` runs it.

    The client demands the name of each tool, and the grammar holds its arguments to their schema. The model
    writes them: which file to read, and which of 16 expressions the function returns, until the test passes.
    """
    python, gguf, repository = python_with("openai-agents"), smollm2_gguf(), workspace(tmp_path)
    serve = [sys.executable, "-m", "carryall", "serve", str(gguf), "--served-model-name", "toy", "--json"]
    serve += ["--http-port", "0", "--grpc-port", "none", "--context-length", "4096"]

    async def scenario() -> Any:
        service = await asyncio.create_subprocess_exec(*serve, stdout=asyncio.subprocess.PIPE)
        assert service.stdout is not None
        try:
            url = f"http://{json.loads(await service.stdout.readline())['http']}"
            client = await asyncio.create_subprocess_exec(
                python,
                CLIENTS / "repairing_client.py",
                url,
                str(repository),
                "1",  # a seed
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
            )
            out, err = await asyncio.wait_for(client.communicate(), 2 * SECONDS)
            assert client.returncode == 0, err.decode()[-3000:]
            return json.loads(out.splitlines()[-1])
        finally:
            service.terminate()
            await service.wait()

    assert (repository / "calc.py").read_text() == BROKEN
    result = asyncio.run(scenario())
    assert result["answer"] == "calc is right"
    source = (repository / "calc.py").read_text()
    expression = source.removeprefix("def add(left, right):\n    return ").removesuffix("\n")
    assert expression in ("left + right", "right + left")
    assert result["steps"][0][0] == "read_file"
    assert result["steps"][-2:] == [["set_return", expression], ["run_test", "calc is right"]]
    failed = [told for name, told in result["steps"][:-1] if name == "run_test"]
    assert all(told.startswith(("AssertionError", "ZeroDivisionError")) for told in failed)
    told = subprocess.run([sys.executable, "test_calc.py"], cwd=repository, capture_output=True, check=True)
    assert told.stdout == b"calc is right\n"


FRAMEWORKS = {
    "pydantic_ai": ["pydantic-ai-slim[openai]"],
    "openai_agents": ["openai-agents"],
    "langgraph": ["langgraph", "langchain-openai"],
    "smolagents": ["smolagents[openai]"],
    "dspy": ["dspy"],
    "semantic_kernel": ["semantic-kernel"],
    "autogen": ["autogen-agentchat", "autogen-ext[openai]"],
}


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_an_agent_of_a_framework_repairs_a_file(framework: str, tmp_path: Path) -> None:
    python, repository = python_with(*FRAMEWORKS[framework]), workspace(tmp_path)

    async def scenario() -> None:
        async with scripted_llm(tmp_path / "model", repair) as llm, http_serving(llm) as served:
            client = await asyncio.create_subprocess_exec(
                python,
                CLIENTS / "agent_loops.py",
                served.url,
                str(repository),
                framework,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
            )
            out, err = await asyncio.wait_for(client.communicate(), SECONDS)
            assert client.returncode == 0, f"{out.decode()[-2000:]}\n{err.decode()[-3000:]}"
            assert out.decode().splitlines()[-1] == "fine"

    asyncio.run(scenario())
