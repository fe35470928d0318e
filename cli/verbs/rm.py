"""``carryall rm``."""

from __future__ import annotations

import click

from ...exporter.model_names import named_model
from ...runtime.models.stored_models import remove_model
from ..options import human_bytes, json_option, print_json


@click.command("rm")
@click.argument("name")
@json_option
def command(name: str, as_json: bool) -> None:
    """Delete a downloaded model, and what was prepared of it.

    NAME is one of 'carryall list', or a short name of 'carryall list --names'. The files of a model that
    was not downloaded stay.

    \b
    Example:
        carryall rm Qwen/Qwen3-4B-GGUF:Q4_K_M
    """
    known = named_model(name)
    model = remove_model(known.hub if known else name)
    if as_json:
        sizes = {"downloaded_bytes": model.downloaded_bytes, "prepared_bytes": model.prepared_bytes}
        print_json({"removed": name, **sizes})
        return
    click.echo(
        f"deleted {name}: {human_bytes(model.downloaded_bytes)} downloaded, "
        f"{human_bytes(model.prepared_bytes)} prepared"
    )
