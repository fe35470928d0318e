"""``carryall agent``: what a client is told, and the service while it runs. The client is a script."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from click.testing import CliRunner

from carryall.cli import carryall
from carryall.cli.agents import CLIENTS, RunningService

ASKS = """\
#!{python}
import json, os, sys, urllib.request
url = os.environ["ANTHROPIC_BASE_URL"] + "/v1/messages"
messages = [{{"role": "user", "content": "x"}}]
body = {{"model": os.environ["ANTHROPIC_MODEL"], "max_tokens": 3, "messages": messages}}
request = urllib.request.Request(url, json.dumps(body).encode(), {{"Content-Type": "application/json"}})
answer = json.load(urllib.request.urlopen(request))
print(json.dumps([sys.argv[1:], url, answer["usage"]["output_tokens"]]))
sys.exit(7)
"""


@pytest.fixture
def models_only() -> Iterator[str]:
    """The address of a service that only lists its models."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = json.dumps({"data": [{"id": "qwen 3", "max_model_len": 4000}]}).encode()
            self.send_response(200 if self.path == "/v1/models" else 404)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


def called(client: str, url: str, *arguments: str) -> tuple[dict[str, str], list[str]]:
    given = ["agent", "--url", url, "--print", client, *(["--", *arguments] if arguments else [])]
    result = CliRunner().invoke(carryall, given, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    *exports, command = result.output.splitlines()
    pairs = [shlex.split(line.removeprefix("export "))[0].partition("=") for line in exports]
    return {name: value for name, _, value in pairs}, shlex.split(command)


def test_claude_is_told_by_variables(models_only: str) -> None:
    variables, command = called("claude", f"{models_only}/v1/", "-p", "say 'hi'")
    assert command == ["claude", "-p", "say 'hi'"]
    assert variables["ANTHROPIC_BASE_URL"] == models_only
    models = {value for name, value in variables.items() if name.endswith("_MODEL")}
    assert models == {"qwen 3"}


def test_codex_is_told_by_settings(models_only: str) -> None:
    variables, command = called("codex", models_only, "exec", "x")
    assert variables == {}
    assert command[0] == "codex"
    assert command[-2:] == ["exec", "x"]
    assert 'model="qwen 3"' in command
    assert "model_context_window=4000" in command
    provider = f'{{name="carryall", base_url="{models_only}/v1", wire_api="responses"}}'
    assert f"model_providers.carryall={provider}" in command


def test_opencode_is_told_by_a_configuration(models_only: str) -> None:
    variables, command = called("opencode", models_only)
    assert command == ["opencode"]
    config = json.loads(variables["OPENCODE_CONFIG_CONTENT"])
    assert config["model"] == "carryall/qwen 3"
    (provider,) = config["provider"].values()
    assert provider["options"]["baseURL"] == f"{models_only}/v1"
    assert provider["models"]["qwen 3"]["limit"]["context"] == 4000


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["claude"], "give a MODEL, as in"),
        (["--url", "http://127.0.0.1:9", "claude", "demo"], "so demo has no meaning"),
        (["--print", "claude", "demo"], "--print needs --url"),
        (["--url", "127.0.0.1:9", "--print", "claude"], "must be http://HOST:PORT"),
        (["--url", "http://127.0.0.1:9", "--print", "claude"], "no service with a model answers"),
        (["claude", "demo"], "claude is not installed; install it with: npm install -g @anthropic-ai/claude"),
    ],
)
def test_what_cannot_be_started_is_told(
    arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")
    result = CliRunner().invoke(carryall, ["agent", *arguments])
    assert result.exit_code == 2
    assert message in result.output


def test_a_service_without_a_context_length_gives_no_limit() -> None:
    call = CLIENTS["opencode"].call(RunningService("http://h:1", "m"), [])
    assert "limit" not in call.variables["OPENCODE_CONFIG_CONTENT"]


@pytest.mark.long
@pytest.mark.skipif(os.name != "posix", reason="the client is a script")
@pytest.mark.parametrize("interrupted", [False, True])
def test_the_model_is_served_while_the_client_runs(tmp_path: Path, interrupted: bool) -> None:
    """An interrupt of the terminal reaches the client, and neither the service nor carryall ends by it."""
    client = tmp_path / "claude"
    interrupt = "import os, signal; os.kill(os.getppid(), signal.SIGINT)\n" * interrupted
    script = ASKS.format(python=sys.executable)
    head, _, rest = script.partition("\n")
    client.write_text(f"{head}\n{interrupt}{rest}")
    client.chmod(0o755)
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    template = tmp_path / "template.jinja"
    template.write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    options = ["demo", "-q", "--chat-template", str(template)]
    command = [sys.executable, "-m", "carryall", "agent", "claude", *options, "--", "-p", "--url", "x"]
    done = subprocess.run(
        command, env={**os.environ, "PATH": path}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 7, done.stderr
    words, url, tokens = json.loads(done.stdout.splitlines()[-1])
    assert (words, tokens) == (["-p", "--url", "x"], 3)
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(url)  # noqa: S310 -- the address that the service had


@pytest.mark.long
@pytest.mark.skipif(os.name != "posix", reason="the client is a script")
def test_a_service_that_does_not_start_ends_the_command(tmp_path: Path) -> None:
    client = tmp_path / "claude"
    client.write_text("#!/bin/sh\n")
    client.chmod(0o755)
    command = [sys.executable, "-m", "carryall", "agent", "claude", str(tmp_path / "missing")]
    environment = {**os.environ, "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "the service did not start (exit code" in done.stderr
