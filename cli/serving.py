"""The parts of ``carryall serve``: its packages, its models, what it prints when ready, and ``--ray``."""

from __future__ import annotations

import asyncio
import functools
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from ..errors import MissingExtraError, UsageError
from ..runtime.service.core.model_folder import encoder_loader, models_in
from ..runtime.service.core.repository import ModelRepository
from ..runtime.service.core.served_model import ServedModel
from ..runtime.service.core.upkeep import Scan
from ..runtime.service.signals import stop_signal
from .options import print_json

if TYPE_CHECKING:
    from .load_options import Chosen


def check_packages() -> None:
    """Import the service, whose packages are optional.

    Raises:
        MissingExtraError: a package is missing.
        UsageError: gRPC's packages do not fit each other.
    """
    try:
        # gRPC prints an error that it also raises; the variable is read when it is imported.
        os.environ.setdefault("GRPC_VERBOSITY", "NONE")
        from ..runtime.batch.online.routes import BatchService  # noqa: F401
        from ..runtime.service.serve import serve  # noqa: F401
    except ModuleNotFoundError as error:
        raise MissingExtraError("'carryall serve'", error.name or "grpc", "service") from error
    except RuntimeError as error:  # generated code of gRPC is newer than grpcio
        raise UsageError(
            f"gRPC's packages do not fit each other: {str(error).partition('. Please')[0]}. "
            "Install those that do with: pip install --upgrade 'carryall[service]'"
        ) from error


def check_role(chosen: Chosen) -> None:
    """Check that a service can do its part of prefill and decode apart.

    Raises:
        UsageError: an option that its role needs is not set, or the role cannot be used.
    """
    role, engine = chosen.server.role, chosen.engine
    if role != "both" and engine.prefix_cache_url is None:
        raise UsageError(f"--role {role} hands KV over through a shared store; add --prefix-cache-url")
    if role == "prefill" and chosen.server.http_port is None and chosen.server.unix_socket is None:
        raise UsageError("--role prefill is asked over HTTP; omit --http-port none")
    if role != "both" and (chosen.server.models is not None or chosen.server.ray is not None):
        raise UsageError(f"--role {role} serves one model; omit --models and --ray")
    if (role == "decode") != (engine.prefill_server is not None):
        raise UsageError("--role decode and --prefill-server belong together; one of them is not set")


def served_models(
    chosen: Chosen, name: str, load: Callable[[], ServedModel]
) -> tuple[ModelRepository, Scan | None]:
    """Return the models that the options name, and the function that finds those of a folder.

    Args:
        chosen: the options of the command.
        name: the name of a single model for clients.
        load: loads it, unless it is an encoder.

    Raises:
        UsageError: the folder of models, or a setting in it, is invalid.
        CheckpointError: the files of an encoder are damaged.
    """
    server = chosen.server
    if server.models is not None:
        scan = functools.partial(
            models_in, server.models, chosen.model, chosen.engine, warm_up=server.warm_up
        )
        return ModelRepository(
            scan(), aliases=server.names_for(None), keep_seconds=server.keep_alive_seconds
        ), scan
    loader = encoder_loader(chosen.model, warm_up=server.warm_up) or load
    models = ModelRepository.of_one(
        name, loader, aliases=server.names_for(name), keep_seconds=server.keep_alive_seconds
    )
    return models, None


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
        deployed = await asyncio.to_thread(deploy, spec)
        with stop_signal() as stop:  # replaces Ray's handler, which aborts the process 3 s after SIGTERM
            on_ready(deployed.address)
            await stop.wait()
        await asyncio.to_thread(remove, deployed)

    asyncio.run(run())
