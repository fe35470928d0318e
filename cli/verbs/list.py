"""``carryall list``, also ``carryall ls``."""

from __future__ import annotations

import click

from ...exporter.hub import fits
from ...exporter.model_names import named_models
from ...providers.host.machine import describe_machine
from ...runtime.models.stored_models import stored_models
from ..options import human_bytes, json_option, print_json
from .cache import age_text


@click.command("list")
@click.option("--names", is_flag=True, help="Show the short names that 'run' and 'pull' take instead.")
@json_option
def command(names: bool, as_json: bool) -> None:
    """List the models on this disk: downloaded ones, and what was prepared of any model.

    Preparing makes a model ready for this machine, when it runs for the first time. 'carryall rm NAME'
    deletes both; a file or folder of your own stays.

    \b
    Examples:
        carryall list
        carryall list --names
    """
    if names:
        _show_names(as_json=as_json)
        return
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


def _show_names(*, as_json: bool) -> None:
    """Print the models with short names, and whether they fit into this machine."""
    models, memory = named_models(), describe_machine().memory_total
    rows = [
        {
            "name": name,
            "hub_id": model.hub,
            "bytes": int(model.size * 1e9),
            "licence": model.licence,
            "fits": fits(model.size * 1e9, memory),
        }
        for name, model in models.items()
    ]
    if as_json:
        print_json(rows)
        return
    width, licence = max(map(len, models)), max(len(model.licence) for model in models.values())
    click.echo(f"{'name':<{width}}  {'GB':>5}  fits here  {'licence':<{licence}}  hub id")
    for row, model in zip(rows, models.values(), strict=True):
        here = "yes" if row["fits"] else "no"
        shown = f"{row['name']:<{width}}  {model.size:>5.1f}  {here:<9}  {model.licence:<{licence}}"
        click.echo(f"{shown}  {model.hub}")
