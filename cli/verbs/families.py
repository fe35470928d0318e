"""``carryall families``."""

from __future__ import annotations

import inspect

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ...exporter import export
from ...exporter.encoders.export import encoder_family
from ...exporter.encoders.names import encoder_families
from ..options import json_option, print_json


@click.command("families")
@json_option
def command(as_json: bool) -> None:
    """List the model families that can be exported.

    A family is identified by "model_type" in a checkpoint's config.json. Its exporter is the file
    MODEL_TYPE.py in exporter/models, or in exporter/encoders/families for text encoders.

    \b
    Example:
        carryall families
    """
    known = {name: inspect.getdoc(export.family(name)) or "" for name in export.families()}
    known |= {name: inspect.getdoc(encoder_family(name)) or "" for name in encoder_families()}
    about = {name: " ".join(text.split("\n\n")[0].split()) for name, text in known.items()}
    if as_json:
        print_json([{"model_type": name, "about": text} for name, text in about.items()])
        return
    table = Table("model_type", "description", box=None, pad_edge=False)
    for name, text in about.items():
        table.add_row(name, Text(text))
    Console().print(table)
