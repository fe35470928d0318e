"""What ``carryall doctor`` does with the CPU kernels: build them, and measure which are the fastest."""

from __future__ import annotations

from dataclasses import asdict

import click
from rich.console import Console

from ...providers.host.doctor import kernel_facts
from ...providers.native.build import build_library
from ...providers.targets.cpu import CpuProvider
from ..options import print_json
from ..printing.doctor import kernels_text, tuning_text


def autotune(console: Console, *, as_json: bool) -> None:
    """Measure instruction sets and numbers of threads, and print the fastest."""
    with console.status("measuring the CPU kernels"):
        fastest = CpuProvider().autotune()
    print_json(asdict(fastest)) if as_json else click.echo(f"autotune: {tuning_text(fastest)}")


def build_kernels(console: Console, *, as_json: bool) -> bool:
    """Build the CPU kernels, and print what was built; return whether they can be used."""
    with console.status("building the CPU kernels"):
        build_library()
    facts = kernel_facts()
    print_json(asdict(facts)) if as_json else click.echo(f"CPU kernels: {kernels_text(facts)}")
    return facts.missing is None
