"""What ``carryall serve`` prints when it is ready, and ``carryall serve --ray``."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from ..runtime.service.signals import stop_signal
from .options import print_json

if TYPE_CHECKING:
    from .load_options import Chosen


def announce(
    model: Any, provider: str, http: str | None, grpc: str | None, *, as_json: bool, tls: bool = False
) -> None:
    """Print the addresses of a service that accepts requests, as one line of text or of JSON."""
    if as_json:
        print_json({"event": "ready", "http": http, "grpc": grpc, "model": str(model), "provider": provider})
        return
    doors = [f"{'https' if tls else 'http'}://{http}"] if http else []
    doors += [f"gRPC on {grpc}"] if grpc else []
    click.echo(f"{model} ({provider}): {', '.join(doors)}, Ctrl-C stops")


def serve_on_cluster(chosen: Chosen, name: str, on_ready: Callable[[str], None]) -> None:
    """Serve with Ray Serve until SIGTERM or Ctrl-C; during the start, these end the process at once.

    Args:
        chosen: the options of the command.
        name: the name of the model for clients.
        on_ready: called with the address when requests are accepted.

    Raises:
        UsageError: there is no cluster, or an option cannot be used with it.
    """
    from ..runtime.cluster.deployment import deploy, remove
    from ..runtime.cluster.replica import ReplicaSpec

    async def run() -> None:
        spec = ReplicaSpec(name, chosen.model, chosen.engine, chosen.server)
        address = await asyncio.to_thread(deploy, spec)
        with stop_signal() as stop:  # replaces Ray's handler, which aborts the process 3 s after SIGTERM
            on_ready(address)
            await stop.wait()
        await asyncio.to_thread(remove)

    asyncio.run(run())
