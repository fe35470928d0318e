"""``carryall pull``."""

from __future__ import annotations

import click

from ...errors import UsageError
from ...exporter.gguf.file import shard_paths
from ...exporter.hub import download, is_hub_id
from ...exporter.model_names import named_model, similar_names
from ...providers.host.machine import describe_machine
from ..options import human_bytes, json_option, print_json


@click.command("pull")
@click.argument("model", metavar="HUB_ID")
@json_option
def command(model: str, as_json: bool) -> None:
    """Download a model from the Hugging Face hub, unless it is there.

    HUB_ID is org/name[@revision][:part], or a short name of 'carryall list --names'. Of a repository with
    GGUF files of several types, the one that suits this machine is taken: Q4_K_M if it fits into the memory,
    else a smaller one; ':Q8_0' takes another. What 'carryall run' needs is downloaded by it too.

    \b
    Examples:
        carryall pull qwen3.5-4b
        carryall pull Qwen/Qwen3-4B-GGUF
        carryall pull Qwen/Qwen3-4B-GGUF:Q8_0
    """
    known = named_model(model)
    if known is None and (not is_hub_id(model) or model.startswith(".")):
        meant = "".join(f"; do you mean {name}?" for name in similar_names(model)[:1])
        raise UsageError(
            f"'{model}' is not a hub id, org/name[@revision][:part], and no short name; only these are "
            f"downloaded{meant}"
        )
    path = download(known.hub if known else model, describe_machine().memory_total)
    files = shard_paths(path) if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    size = sum(file.stat().st_size for file in files)
    if as_json:
        print_json({"model": model, "path": str(path), "bytes": size})
        return
    click.echo(f"{path}: {human_bytes(size)}")
    click.echo(f"run it: carryall run {model}", err=True)
