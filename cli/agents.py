"""Coding agents on a local model: how each is told of a service, and the service while one runs."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence

from ..errors import UsageError
from ..records import dataclass

_ANSWER_SECONDS = 10.0
_END_SECONDS = 15.0


@dataclass(frozen=True, slots=True)
class RunningService:
    """A service that answers.

    Args:
        url: such as ``http://127.0.0.1:8000``, without a slash at the end.
        model: the name of its model.
        context_length: of the model, in tokens; 0 if the service does not tell.
    """

    url: str
    model: str
    context_length: int = 0

    @contextlib.contextmanager
    def kept(self) -> Iterator[RunningService]:
        """Yield the service, which goes on afterwards."""
        yield self


@dataclass(frozen=True, slots=True)
class Launch:
    """How a client is started: its command, and variables besides those of this process."""

    command: list[str]
    variables: Mapping[str, str]

    def run(self) -> int:
        """Run the client in the foreground; return its exit code."""
        # Ctrl-C is the client's. A handler, unlike SIG_IGN, does not pass to the other program.
        before = signal.signal(signal.SIGINT, lambda *_: None)
        try:
            return subprocess.run(self.command, env={**os.environ, **self.variables}, check=False).returncode
        finally:
            signal.signal(signal.SIGINT, before)


@dataclass(frozen=True, slots=True)
class CodingAgent:
    """A coding agent.

    Args:
        program: the command.
        package: of npm.
        settings: returns variables and arguments that tell it of a service.
    """

    program: str
    package: str
    settings: Callable[[RunningService], tuple[dict[str, str], list[str]]]

    def check_installed(self) -> None:
        """Check that the program can be started.

        Raises:
            UsageError: it cannot.
        """
        if shutil.which(self.program) is None:
            raise UsageError(
                f"{self.program} is not installed; install it with: npm install -g {self.package}"
            )

    def call(self, service: RunningService, arguments: Sequence[str]) -> Launch:
        """Return how the client is started on a service."""
        variables, own = self.settings(service)
        return Launch([self.program, *own, *arguments], variables)


def _claude(service: RunningService) -> tuple[dict[str, str], list[str]]:
    roles = ("MODEL", "DEFAULT_OPUS_MODEL", "DEFAULT_SONNET_MODEL", "DEFAULT_HAIKU_MODEL", "SMALL_FAST_MODEL")
    return {
        "ANTHROPIC_BASE_URL": service.url,
        "ANTHROPIC_AUTH_TOKEN": "none",
        "ANTHROPIC_API_KEY": "",
        **{f"ANTHROPIC_{role}": service.model for role in roles},
        "CLAUDE_CODE_SUBAGENT_MODEL": service.model,
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "API_TIMEOUT_MS": "3600000",  # a long prompt takes minutes on a CPU
    }, []


def _codex(service: RunningService) -> tuple[dict[str, str], list[str]]:
    provider = f'{{name="carryall", base_url="{service.url}/v1", wire_api="responses"}}'
    settings = [f"model_providers.carryall={provider}", 'model_provider="carryall"',
                f"model={json.dumps(service.model)}"]  # fmt: skip
    if service.context_length:
        settings.append(f"model_context_window={service.context_length}")
    return {}, [word for setting in settings for word in ("-c", setting)]


def _opencode(service: RunningService) -> tuple[dict[str, str], list[str]]:
    limit = {"limit": {"context": service.context_length, "output": service.context_length // 4}}
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "carryall",
        "options": {"baseURL": f"{service.url}/v1", "apiKey": "none"},
        "models": {service.model: {"name": service.model, **(limit if service.context_length else {})}},
    }
    model = f"carryall/{service.model}"
    config = {"provider": {"carryall": provider}, "model": model, "small_model": model}
    return {"OPENCODE_CONFIG_CONTENT": json.dumps(config)}, []


CLIENTS = {
    "claude": CodingAgent("claude", "@anthropic-ai/claude-code", _claude),
    "codex": CodingAgent("codex", "@openai/codex", _codex),
    "opencode": CodingAgent("opencode", "opencode-ai", _opencode),
}


def service_at(url: str) -> RunningService:
    """Return the service at an address, with the first of its models.

    Raises:
        UsageError: no service answers there, or it has no model.
    """
    url = url.rstrip("/").removesuffix("/v1")
    if not url.startswith(("http://", "https://")):
        raise UsageError(f"--url must be http://HOST:PORT or https://HOST:PORT, not {url!r}")
    try:
        with urllib.request.urlopen(f"{url}/v1/models", timeout=_ANSWER_SECONDS) as answer:  # noqa: S310 -- http
            models = json.load(answer)["data"]
        model = models[0]
        return RunningService(url, str(model["id"]), int(model.get("max_model_len") or 0))
    except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
        raise UsageError(f"no service with a model answers at {url}: {error}") from error


@contextlib.contextmanager
def served(arguments: Sequence[str]) -> Iterator[RunningService]:
    """Serve a model in another process while the context lasts.

    Args:
        arguments: of ``carryall serve``.

    Raises:
        UsageError: the service did not start; it has told why on the standard error.
    """
    command = [sys.executable, "-m", "carryall", "serve", *arguments]
    ports = ["--http-port", "0", "--grpc-port", "none", "--json"]
    # A session of its own: the keys that interrupt the client do not end the service.
    process = subprocess.Popen([*command, *ports], stdout=subprocess.PIPE, text=True, start_new_session=True)
    try:
        assert process.stdout is not None  # noqa: S101 -- a pipe
        line = process.stdout.readline()
        if not line:
            raise UsageError(f"the service did not start (exit code {process.wait()})")
        yield service_at(f"http://{json.loads(line)['http']}")
    finally:
        process.terminate()
        try:
            process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
