"""``carryall agent``."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

import click

from ...errors import UsageError
from ..agents import CLIENTS, served, service_at


@click.command("agent", context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.option("--url", help="Use a service that runs, in place of MODEL.")
@click.option("--print", "prints", is_flag=True, help="Print the command and its variables, and end.")
@click.argument("client", type=click.Choice(sorted(CLIENTS)))
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def command(client: str, arguments: tuple[str, ...], url: str | None, *, prints: bool) -> None:
    """Start a coding agent on a local model.

    CLIENT must be installed. With MODEL and options of 'carryall serve', the model is served while the
    client runs, at a free port of this machine. Arguments of the client follow '--'. Agents send long
    prompts: choose a model with a context of 32,000 tokens or more.

    \b
    Examples:
        carryall agent claude qwen3
        carryall agent codex qwen3 --context-length 65536 -- exec "Fix the tests."
        carryall agent --url http://127.0.0.1:8000 opencode
        carryall agent --url http://127.0.0.1:8000 --print claude
    """
    options, extra = _split(arguments)
    start = CLIENTS[client]
    if url is not None and options:
        raise UsageError(f"--url names a running service, so {shlex.join(options)} has no meaning")
    if url is None and not options:
        raise UsageError(f"give a MODEL, as in 'carryall agent {client} MODEL', or --url of a service")
    if prints:
        if url is None:
            raise UsageError("--print needs --url, since a service that carryall starts ends with the client")
        call = start.call(service_at(url), extra)
        for name, value in call.variables.items():
            click.echo(f"export {name}={shlex.quote(value)}")
        click.echo(shlex.join(call.command))
        return
    start.check_installed()
    with served(options) if url is None else service_at(url).kept() as service:
        raise SystemExit(start.call(service, extra).run())


def _split(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return what comes before ``--`` and what follows it."""
    words = list(arguments)
    at = words.index("--") if "--" in words else len(words)
    return words[:at], words[at + 1 :]
