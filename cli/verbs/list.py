"""``carryall list``, also ``carryall ls``."""

from __future__ import annotations

import click

from ...runtime.models.stored_models import stored_models
from ..options import human_bytes, json_option, print_json
from .cache import age_text


@click.command("list")
@json_option
def command(as_json: bool) -> None:
    """List the models on this disk: downloaded ones, and what was prepared of any model.

    Preparing makes a model ready for this machine, when it runs for the first time. 'carryall rm NAME'
    deletes both; a file or folder of your own stays.

    \b
    Example:
        carryall list
    """
    models = stored_models()
    if as_json:
        print_json(
            [
                {
                    "name": model.name,
                    "downloaded_bytes": model.downloaded_bytes,
                    "prepared_bytes": model.prepared_bytes,
                    "used": model.used,
                }
                for model in models
            ]
        )
        return
    if not models:
        click.echo("no models yet: carryall pull ORG/NAME, or carryall run MODEL")
        return
    width = max(len(model.name) for model in models)  # names stay whole: `rm` and `run` take them
    click.echo(f"{'name':<{width}}  {'downloaded':>10}  {'prepared':>10}  used")
    for model in models:
        sizes = (model.downloaded_bytes, model.prepared_bytes)
        shown = "  ".join(f"{human_bytes(size) if size else '-':>10}" for size in sizes)
        click.echo(f"{model.name:<{width}}  {shown}  {age_text(model.used)}")
