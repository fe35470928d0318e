"""``carryall serve``."""

from __future__ import annotations

import asyncio

import click

from ...errors import UsageError
from ...runtime.process.at_exit import leave_threads
from ...runtime.process.stop_signals import ending_at_interrupt
from ...runtime.service.core.repository import public_name
from ...runtime.service.core.served_model import ServedModel, load_served_model
from ..generation import tell_fallbacks
from ..load_options import SERVER_TABLES, Chosen, config_options
from ..options import json_option, quiet_option
from ..progress import PREPARE, progress
from ..sections import SectionedCommand
from ..serving import announce, check_packages, check_role, serve_on_cluster, served_models


@click.command("serve", cls=SectionedCommand)
@config_options(tables=SERVER_TABLES, max_queue=1024, prefix_cache_dir="auto")
@json_option
@quiet_option
def command(chosen: Chosen, as_json: bool, quiet: bool) -> None:
    """Serve a model over HTTP and gRPC.

    HTTP speaks OpenAI's API and others (docs/serving.md), gRPC several services
    (docs/grpc.md). Both stream text while it is generated, to many callers at once. /health and
    grpc.health.v1 say whether the model is loaded. SIGTERM or Ctrl-C lets running requests finish, a second
    one ends at once. With --json, one line tells the addresses once requests are accepted.

    \b
    Examples:
        carryall serve demo
        carryall serve ./qwen3 --quantize int4 --host 0.0.0.0 --http-port 9000
        carryall serve ./qwen3 --provider cuda --max-slots 128
        carryall serve ./minilm  # a text encoder: embeddings and reranking
        carryall serve --models ./models
        carryall serve ./qwen3 --ray auto --replicas 4
        carryall serve --config service.toml
    """
    check_packages()
    from ...runtime.batch.online.routes import BatchService
    from ...runtime.service.http.prefill import PrefillService
    from ...runtime.service.serve import Addresses, ServicePart, serve

    if chosen.model.loras and chosen.server.models is not None:
        raise UsageError("--lora needs one model; with --models, load adapters by /v1/load_lora_adapter")
    check_role(chosen)
    provider = chosen.model.provider
    name = public_name(chosen.model.model)

    def load() -> ServedModel:
        nonlocal provider
        with progress(PREPARE, quiet=quiet or as_json) as tell:
            served = load_served_model(
                chosen.model,
                name=name,
                engine_config=chosen.engine,
                progress=tell,
                warm_up=chosen.server.warm_up,
            )
        provider = served.info.provider  # "auto" has become the one that was chosen
        tell_fallbacks(served.fallbacks)
        return served

    def on_ready(addresses: Addresses) -> None:
        tls = chosen.server.tls_certificate is not None
        announce(chosen.model.model, provider, addresses.http, addresses.grpc, as_json=as_json, tls=tls)

    if chosen.server.ray is not None:
        serve_on_cluster(chosen, name, lambda http: on_ready(Addresses(http=http)))
        return
    models, scan = served_models(chosen, name, load)
    folder = chosen.server.batch_folder
    parts: list[ServicePart] = [BatchService(folder, chosen.server)] if folder is not None else []
    if chosen.server.role == "prefill":
        parts.append(PrefillService())
    with ending_at_interrupt():  # at a second Ctrl-C; the first one drains
        drained = asyncio.run(serve(models, chosen.server, on_ready, parts, chosen.reread, scan))
    if not drained:
        click.echo("requests that still ran after the time of --grace were cancelled", err=True)
    leave_threads(0)
