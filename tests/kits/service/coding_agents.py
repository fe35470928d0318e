"""Coding agents that others wrote: how each is installed and started, and what its session is recorded as."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from own_environment import npm_programs, python_with

from carryall.cli.agents import CLIENTS
from carryall.cli.agents import RunningService as AgentService

Json = dict[str, Any]

MODEL, CONTEXT_LENGTH = "toy", 200_000
TASK = "Repair {folder}/calc.py and run its test."
BROKEN = "def add(left, right):\n    return left - right\n"
REPAIRED = BROKEN.replace("-", "+")
_TEST = 'from calc import add\n\nassert add(2, 3) == 5, add(2, 3)\nprint("calc is right")\n'


@dataclass(frozen=True)
class CodingAgent:
    """A client.

    Args:
        programs: returns the folder of its program; skips the test if it cannot be fetched.
        start: returns its command and variables for a service, a task and a folder for settings.
        path: of the requests that it sends.
    """

    programs: Callable[[], Path]
    start: Callable[[str, str, Path], tuple[list[str], Mapping[str, str]]]
    path: str


def _own(client: str, *arguments: str) -> Callable[[str, str, Path], tuple[list[str], Mapping[str, str]]]:
    """A client that ``carryall agent`` knows; its last argument is the task."""

    def start(url: str, task: str, settings: Path) -> tuple[list[str], Mapping[str, str]]:
        words = [task if word == "TASK" else word for word in arguments]
        call = CLIENTS[client].call(AgentService(url, MODEL, CONTEXT_LENGTH), words)
        return call.command, call.variables

    return start


def _continue(url: str, task: str, settings: Path) -> tuple[list[str], Mapping[str, str]]:
    model = {"name": MODEL, "provider": "openai", "model": MODEL, "apiKey": "none", "apiBase": f"{url}/v1",
             "roles": ["chat"], "capabilities": ["tool_use"],
             "defaultCompletionOptions": {"contextLength": CONTEXT_LENGTH, "maxTokens": 1000}}  # fmt: skip
    config = settings / "config.yaml"  # JSON is YAML
    config.write_text(json.dumps({"name": "local", "version": "0.0.1", "schema": "v1", "models": [model]}))
    return ["cn", "--config", str(config), "--auto", "-p", task], {}


def _aider(url: str, task: str, settings: Path) -> tuple[list[str], Mapping[str, str]]:
    quiet = ["--no-check-update", "--no-show-model-warnings", "--no-analytics", "--no-gitignore"]
    tested = ["--test-cmd", "python3 test_calc.py", "--auto-test"]
    command = ["aider", "--model", f"openai/{MODEL}", "--yes-always", "--edit-format", "diff", *quiet]
    variables = {"OPENAI_API_BASE": f"{url}/v1", "OPENAI_API_KEY": "none"}
    return [*command, *tested, "--message", task, "calc.py"], variables


AGENTS = {
    "claude_code": CodingAgent(
        lambda: npm_programs("@anthropic-ai/claude-code"),
        _own("claude", "-p", "TASK", "--allowedTools", "Read,Edit,Bash"),
        "/v1/messages",
    ),
    "codex": CodingAgent(
        lambda: npm_programs("@openai/codex"),
        _own("codex", "exec", "--skip-git-repo-check", "--sandbox", "danger-full-access", "TASK"),
        "/v1/responses",
    ),
    "opencode": CodingAgent(
        lambda: npm_programs("opencode-ai"), _own("opencode", "run", "TASK"), "/v1/chat/completions"
    ),
    "continue": CodingAgent(lambda: npm_programs("@continuedev/cli"), _continue, "/v1/chat/completions"),
    "aider": CodingAgent(lambda: python_with("aider-chat").parent, _aider, "/v1/chat/completions"),
}


def workspace(folder: Path) -> Path:
    """A repository of git with a file that is wrong and its test."""
    repository = folder / "repository"
    repository.mkdir()
    (repository / "calc.py").write_text(BROKEN)
    (repository / "test_calc.py").write_text(_TEST)
    author = ["-c", "user.name=A", "-c", "user.email=a@example.org"]
    for words in (["init", "-q"], ["add", "."], [*author, "commit", "-qm", "The sum of two numbers"]):
        subprocess.run(["git", *words], cwd=repository, check=True)
    return repository


def environment(programs: Path, folder: Path, repository: Path) -> dict[str, str]:
    """Variables of a process whose settings and caches are below a folder."""
    home = folder / "home"
    home.mkdir()
    names = ("ANTHROPIC", "OPENAI", "CLAUDE", "CODEX", "OPENCODE")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(names)}
    below = {f"XDG_{kind}_HOME": str(home / kind.lower()) for kind in ("CONFIG", "DATA", "CACHE", "STATE")}
    path = f"{programs}{os.pathsep}{os.environ['PATH']}"
    return {**kept, **below, "HOME": str(home), "PATH": path, "PWD": str(repository)}


# --- recordings

_PROSE = 120  # characters: longer texts say nothing about the form of a request
_MOST_PROSE = 600


_IDENTIFIER = re.compile(r"\b[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}\b")


def recorded(bodies: Sequence[Json], places: Mapping[str, str]) -> list[Json]:
    """The bodies of a session without the client's prose, and without names of this machine.

    Long texts become words that differ where theirs do, at most 600 characters. A body after another of the
    same fields has only those that differ, and ``"kept": true``.

    Args:
        bodies: of the requests, in order.
        places: what stands for paths of this machine.
    """
    text = json.dumps(list(bodies))
    for place, name in sorted(places.items(), key=lambda item: -len(item[0])):
        text = text.replace(place, name).replace(place.replace("/", "-"), name.replace("/", "-"))
    text = _IDENTIFIER.sub("00000000-0000-0000-0000-000000000000", text)
    found: list[Json] = []
    before: Json = {}
    for body in [_without_prose(body, "") for body in json.loads(text)]:
        changed = {name: value for name, value in body.items() if before.get(name) != value}
        found.append({"kept": True, **changed} if body.keys() == before.keys() else body)
        before = body
    return found


def replayed(session: Sequence[Json]) -> list[Json]:
    """The bodies of what ``recorded`` returned."""
    found: list[Json] = []
    for entry in session:
        body = dict(entry)
        found.append({**found[-1], **body} if body.pop("kept", False) else body)
    return found


def _without_prose(value: Any, name: str) -> Any:
    if isinstance(value, dict):
        return {key: _without_prose(item, key) for key, item in value.items()}
    if isinstance(value, list):
        return [_without_prose(item, name) for item in value]
    if not isinstance(value, str) or len(value) <= _PROSE or name in ("arguments", "id", "call_id"):
        return value
    task = re.search(r"Repair \S+calc\.py and run its test\.", value)
    kept = [task[0]] if task is not None else []
    line = re.search(r" *return left - right", value)
    kept += [line[0]] if line is not None else []
    kept += ["SEARCH/REPLACE"] if "SEARCH/REPLACE" in value else []
    words = hashlib.shake_256(value.encode()).hexdigest(min(len(value), _MOST_PROSE) // 3)
    return " ".join([*(words[at : at + 6] for at in range(0, len(words), 6)), *kept])
