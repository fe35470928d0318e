"""``carryall doctor``."""

from __future__ import annotations

import click
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from ..providers.doctor import Diagnosis, ProviderReport, diagnose
from .options import human_bytes, json_option, print_json, quiet_option


@click.command("doctor")
@json_option
@quiet_option
@click.pass_context
def command(ctx: click.Context, as_json: bool, quiet: bool) -> None:
    """Check this machine: what it is, what is installed, and which providers work.

    Every provider that can load computes a tiny model, and the result is checked. Where something is missing,
    the line says what to install. Exit code 0 if at least one provider works, else 1.

    \b
    Example:
        carryall doctor
    """
    console = Console(stderr=True, quiet=quiet or as_json)
    with console.status("looking") as status:
        found = diagnose(lambda step: status.update(step))
    if as_json:
        print_json(found.to_dict())
    else:
        show(found)
    ctx.exit(found.exit_code)


def show(found: Diagnosis) -> None:
    """Print a diagnosis for a person."""
    console = Console(highlight=False)
    console.print(Padding(_machine(found), (0, 0, 1, 0)))
    providers = Table("provider", "", "", box=None, pad_edge=False, header_style="bold")
    for report in found.providers:
        mark, style = _mark(report)
        took = f" ({report.milliseconds:.0f} ms)" if report.milliseconds is not None else ""
        providers.add_row(report.name, Text(mark, style=style), Text(report.detail + took))
    console.print(Padding(providers, (0, 0, 1, 0)))
    installed = [f"{name} {version}" for name, version in found.packages.items() if version]
    missing = [name for name, version in found.packages.items() if not version]
    packages = Table(box=None, show_header=False, pad_edge=False)
    packages.add_row(Text("installed", style="bold"), ", ".join(installed))
    packages.add_row(Text("missing", style="bold"), ", ".join(missing) or "nothing")
    console.print(packages)
    if found.wheel_conflict:
        console.print(Text(f"\n{found.wheel_conflict}", style="red"))


def _machine(found: Diagnosis) -> Table:
    machine = found.machine
    table = Table(box=None, show_header=False, pad_edge=False)
    cores = f"{machine.usable_cores} of {machine.logical_cores} logical cores used"
    memory = [f"reads at {found.memory_bandwidth:.0f} GB/s"]
    if machine.memory_available is not None:
        memory.insert(0, f"{human_bytes(machine.memory_available)} free")
    if machine.memory_total is not None:
        memory.insert(0, human_bytes(machine.memory_total))
    rows = {
        "machine": machine.system,
        "processor": f"{machine.cpu}, {cores}",
        "features": ", ".join(machine.features) or "unknown",
        "memory": ", ".join(memory),
        "python": found.python,
    }
    for label, text in rows.items():
        table.add_row(Text(label, style="bold"), Text(text))
    return table


def _mark(report: ProviderReport) -> tuple[str, str]:
    if not report.counts:
        return "test stand-in", "dim"
    return ("works", "green") if report.works else ("no", "red")
