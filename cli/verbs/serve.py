"""``carryall serve``."""

from __future__ import annotations

import asyncio
import signal

import click

from ...errors import MissingExtraError
from ...runtime.process.at_exit import leave_threads
from ...runtime.service.core.config import ServerConfig
from ...runtime.service.core.repository import ModelRepository, public_name
from ...runtime.service.core.served_model import ServedModel, load_served_model
from ..generation import tell_fallbacks
from ..load_options import Chosen, config_options
from ..options import json_option, print_json, quiet_option
from ..progress import progress
from ..sections import SectionedCommand

_DEFAULTS = ServerConfig()


@click.command("serve", cls=SectionedCommand)
@config_options(max_queue=1024)
@click.option("--host", default=_DEFAULTS.host, show_default=True, help="Where to listen; 0.0.0.0 is all.")
@click.option(
    "--grpc-port",
    type=click.IntRange(0, 65535),
    default=_DEFAULTS.grpc_port,
    show_default=True,
    help="Port for gRPC; 0 takes a free one.",
)
@click.option(
    "--grace",
    type=click.FloatRange(0),
    default=_DEFAULTS.grace_seconds,
    show_default=True,
    help="Seconds that running requests get when the service is stopped.",
)
@json_option
@quiet_option
def command(
    chosen: Chosen,
    host: str,
    grpc_port: int,
    grace: float,
    as_json: bool,
    quiet: bool,
) -> None:
    """Serve a model over gRPC.

    The service carryall.v1.LLM (proto/carryall.proto) streams text while it is generated, to many callers at
    once; grpc.health.v1 says SERVING once the model is loaded. SIGTERM or Ctrl-C lets running requests
    finish, a second one ends at once. With --json, one line tells the address once requests are accepted.

    \b
    Examples:
        carryall serve demo
        carryall serve ./qwen3 --quantize int4 --host 0.0.0.0 --grpc-port 9000
        carryall serve ./qwen3 --provider cuda --provider-option kv_memory=paged --max-slots 128
        carryall serve --config service.toml
    """
    try:
        from ...runtime.service.serve import Addresses, serve
    except ModuleNotFoundError as error:
        raise MissingExtraError("'carryall serve'", error.name or "grpc", "service") from error

    provider = chosen.model.provider
    name = public_name(chosen.model.model)

    def load() -> ServedModel:
        nonlocal provider
        with progress("prepare", quiet=quiet or as_json) as tell:
            served = load_served_model(chosen.model, name=name, engine_config=chosen.engine, progress=tell)
        provider = served.info.provider  # "auto" has become the one that was chosen
        tell_fallbacks(served.fallbacks)
        return served

    def on_ready(addresses: Addresses) -> None:
        model = str(chosen.model.model)
        if as_json:
            print_json({"event": "ready", "grpc": addresses.grpc, "model": model, "provider": provider})
        else:
            click.echo(f"{model} ({provider}): gRPC on {addresses.grpc}, Ctrl-C stops")

    config = ServerConfig(host=host, grpc_port=grpc_port, grace_seconds=grace)
    before = signal.signal(signal.SIGINT, signal.SIG_DFL)  # what a second Ctrl-C does: end at once
    try:
        drained = asyncio.run(serve(ModelRepository.of_one(name, load), config, on_ready))
    finally:
        signal.signal(signal.SIGINT, before)
    if not drained:
        click.echo(f"requests that ran longer than {grace:g} s after the stop were cancelled", err=True)
    leave_threads(0)
