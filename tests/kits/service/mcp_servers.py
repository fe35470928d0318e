"""Tools of public MCP servers of the npm registry, as the servers tell them."""

from __future__ import annotations

import json
import os
import subprocess
from typing import Any

from own_environment import npm_programs

Json = dict[str, Any]

_SCOPE = "@modelcontextprotocol/server-"
PACKAGES = (*(_SCOPE + name for name in ("filesystem", "memory", "everything", "github")), "@playwright/mcp")
_COMMANDS = (["mcp-server-filesystem", "."], ["mcp-server-memory"], ["mcp-server-everything"],
             ["mcp-server-github"], ["playwright-mcp"])  # fmt: skip


def mcp_tools() -> list[Json]:
    """The tools of all servers as functions; skips the test if they cannot be fetched."""
    programs = npm_programs(*PACKAGES)
    path = f"{programs}{os.pathsep}{os.environ['PATH']}"
    tools: list[Json] = []
    for program, *arguments in _COMMANDS:
        with subprocess.Popen(
            [str(programs / program), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, "PATH": path},
        ) as server:
            client = {"name": "test", "version": "1"}
            _asked(server, "initialize", {"protocolVersion": "2025-06-18", "capabilities": {},
                                          "clientInfo": client})  # fmt: skip
            _send(server, {"method": "notifications/initialized"})
            tools += _asked(server, "tools/list", {})["tools"]
            server.kill()
    return [{"type": "function", "function": {"name": tool["name"], "parameters": tool["inputSchema"],
                                              "description": tool.get("description", "")}}
            for tool in tools]  # fmt: skip


def _send(server: subprocess.Popen[str], message: Json) -> None:
    assert server.stdin is not None
    server.stdin.write(json.dumps({"jsonrpc": "2.0", **message}) + "\n")
    server.stdin.flush()


def _asked(server: subprocess.Popen[str], method: str, params: Json) -> Json:
    assert server.stdout is not None
    _send(server, {"id": method, "method": method, "params": params})
    for line in server.stdout:
        if (message := json.loads(line)).get("id") == method:
            result: Json = message["result"]
            return result
    raise RuntimeError(f"the server ended before it answered {method}")
