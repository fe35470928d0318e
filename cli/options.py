"""Arguments and options that several verbs share, so that they read the same everywhere."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import click

model_argument = click.argument("model")

json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON document, nothing else.")

quiet_option = click.option("-q", "--quiet", is_flag=True, help="No progress on stderr.")

provider_option = click.option(
    "--provider",
    "--split",
    "provider",
    default="cpu",
    show_default=True,
    help="Where to run, see 'carryall doctor'; 'auto' tries the model on all and takes the fastest; "
    "cuda:1 takes one of its devices; cpu:0-11,openvino:12-27 splits the layers, and cpu@process:... uses a "
    "process of its own.",
)


def _provider_options(_: click.Context, __: click.Parameter, given: Sequence[str]) -> dict[str, Any]:
    """NAME=VALUE by name; values that read as JSON are numbers and booleans, others are text."""
    found: dict[str, Any] = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not name or not equals:
            raise click.BadParameter(f"'{text}' is not NAME=VALUE, such as device=1")
        try:
            found[name] = json.loads(value)
        except ValueError:
            found[name] = value
    return found


provider_options_option = click.option(
    "--provider-option",
    "provider_options",
    metavar="NAME=VALUE",
    multiple=True,
    callback=_provider_options,
    help="A setting of the provider's own, such as device=1 or compute=bf16; may be repeated.",
)

ep_library_option = click.option(
    "--ep-library",
    metavar="PATH",
    help="Run on a plugin library of ONNX Runtime, in place of --provider; --provider ep:NAME takes an "
    "execution provider that the installed onnxruntime has.",
)

allow_fallback_option = click.option(
    "--allow-fallback",
    is_flag=True,
    help="Let nodes that the provider cannot run lie on the CPU, and say which.",
)


def print_json(document: Any) -> None:
    """Write ``document`` to stdout as one line of JSON."""
    click.echo(json.dumps(document, ensure_ascii=False))


def human_bytes(size: float) -> str:
    """Return a size for people, in powers of 1000: ``14.7 MB``."""
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"
