"""``carryall doctor``."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import click
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from ...errors import ProviderUnavailableError, UsageError
from ...providers.host.doctor import Diagnosis, KernelFacts, ProviderReport, diagnose, kernel_facts
from ...providers.host.selftest import SelftestReport
from ...providers.native.build import build_library
from ..options import human_bytes, json_option, print_json, quiet_option

_PROMPT = range(300, 316)  # token ids in the vocabulary of the demo model


@click.command("doctor")
@click.option("--provider", help="The provider to test, with --selftest.  [default: cpu]")
@click.option("--device", help="The provider's name of the device to test, with --selftest: 1, GPU.1.")
@click.option(
    "--selftest", "testing", is_flag=True, help="Generate text on one provider, and compare it with the CPU."
)
@click.option(
    "--build-kernels", "building", is_flag=True, help="Build carryall's CPU kernels with a C++ compiler."
)
@json_option
@quiet_option
@click.pass_context
def command(
    ctx: click.Context,
    provider: str | None,
    device: str | None,
    testing: bool,
    building: bool,
    as_json: bool,
    quiet: bool,
) -> None:
    """Check this machine: hardware, installed packages, and which providers work.

    Every available provider runs a tiny model, and its result is checked. For others, the line says what to
    install; the last lines repeat it for the devices of this machine. Exit code 0 if at least one provider
    works and no onnxruntime wheels conflict, else 1.

    With --selftest, a provider generates text with the demo model; logits and tokens are compared with the
    CPU's, and its speed is shown. Exit code 0 if the differences are within the tolerances, else 1.

    With --build-kernels, the CPU kernels are compiled and kept in the cache, which takes half a minute;
    models with int4 and int8 weights use them from then on.

    \b
    Examples:
        carryall doctor
        carryall doctor --json
        carryall doctor --build-kernels
        carryall doctor --provider directml --selftest
    """
    console = Console(stderr=True, quiet=quiet or as_json)
    if not testing and (device is not None or provider is not None):
        raise UsageError(f"{'--device' if device is not None else '--provider'} needs --selftest")
    provider = provider or "cpu"
    if building and testing:
        raise UsageError("--build-kernels excludes --selftest")
    if building:
        with console.status("building the CPU kernels"):
            build_library()
        facts = kernel_facts()
        line = f"CPU kernels: {facts.isa}, in {facts.path}" if facts.missing is None else facts.missing
        print_json(dataclasses.asdict(facts)) if as_json else Console(highlight=False, soft_wrap=True).print(
            line
        )
        ctx.exit(0 if facts.missing is None else 1)
    if testing:
        with console.status(f"testing {provider}"):
            report = _selftest(provider, device)
        print_json(report.to_dict()) if as_json else _show_selftest(report)
        ctx.exit(0 if report.passed else 1)
    with console.status("checking") as status:
        found = diagnose(lambda step: status.update(step))
    if as_json:
        print_json(found.to_dict())
    else:
        show(found)
    ctx.exit(found.exit_code)


def _selftest(name: str, device: str | None) -> SelftestReport:
    from ...exporter.demo import demo_path
    from ...exporter.export import export_model
    from ...providers import get_provider
    from ...providers.base import RunnerConfig
    from ...providers.host.selftest import selftest
    from ...runtime.models.split import with_device

    provider = get_provider(name)
    reason = provider.available()
    if reason is not None:
        raise ProviderUnavailableError(f"provider '{name}' is not available: {reason}")
    config = RunnerConfig() if device is None else with_device(RunnerConfig(), name, device)
    return selftest(
        provider, get_provider("cpu"), lambda: export_model(demo_path()), _PROMPT, options=config.options
    )


def _show_selftest(report: SelftestReport) -> None:
    table = Table(box=None, show_header=False, pad_edge=False)
    rows = {
        "provider": report.provider,
        "tokens": f"{report.agreement:.0%} of {report.tokens} equal to {report.reference}",
        "logits": f"differ by at most {report.worst:.2%} of the largest",
        "loading": f"{report.load_seconds:.2f} s, and {report.first_prompt_seconds:.2f} s for the first text",
        "prompt": f"{report.prompt_tokens_per_second:.0f} tokens/s",
        "decoding": f"{report.decode_tokens_per_second:.0f} tokens/s",
        "result": "passed" if report.passed else "FAILED: outputs differ from the reference",
    }
    for label, text in rows.items():
        table.add_row(Text(label, style="bold"), Text(text))
    Console(highlight=False).print(table)


def show(found: Diagnosis) -> None:
    """Print a diagnosis as tables."""
    console = Console(highlight=False)
    console.print(Padding(_machine(found), (0, 0, 1, 0)))
    providers = Table("provider", "", "", box=None, pad_edge=False, header_style="bold")
    for report in found.providers:
        mark, style = _mark(report)
        took = f" ({report.milliseconds:.0f} ms)" if report.milliseconds is not None else ""
        devices = f"; devices: {', '.join(report.devices)}" if report.devices else ""
        providers.add_row(report.name, Text(mark, style=style), Text(report.detail + took + devices))
    console.print(Padding(providers, (0, 0, 1, 0)))
    installed = [f"{name} {version}" for name, version in found.packages.items() if version]
    missing = [name for name, version in found.packages.items() if not version]
    packages = Table(box=None, show_header=False, pad_edge=False)
    packages.add_row(Text("installed", style="bold"), ", ".join(installed))
    packages.add_row(Text("missing", style="bold"), ", ".join(missing) or "nothing")
    console.print(Padding(packages, (0, 0, 1, 0)))
    nothing = "nothing: every device has a working provider"
    console.print(Text("next steps", style="bold"))
    for step in found.next_steps or [nothing]:
        console.print(Text(f"  {step}", style="red" if found.next_steps else ""))


def _machine(found: Diagnosis) -> Table:
    machine = found.machine
    table = Table(box=None, show_header=False, pad_edge=False)
    cores = f"{machine.usable_cores} of {machine.logical_cores} logical cores used"
    memory = [
        human_bytes(machine.memory_total),
        f"{human_bytes(machine.memory_available)} free",
        f"bandwidth {found.memory_bandwidth:.0f} GB/s",
    ]
    rows = {
        "machine": machine.system,
        "processor": f"{machine.cpu}, {cores}",
        "features": ", ".join(machine.features) or "unknown",
        "memory": ", ".join(memory),
        "accelerators": ", ".join(found.accelerators) or "none found",
        **({"libraries": ", ".join(_loadable(found.libraries))} if found.libraries else {}),
        "CPU kernels": _kernels(found.kernels),
        "cache": f"{human_bytes(found.cache.size)} in {found.cache.folder}, "
        f"{human_bytes(found.cache.free)} free there",
        "python": found.python,
    }
    for label, text in rows.items():
        table.add_row(Text(label, style="bold"), Text(text))
    return table


def _kernels(facts: KernelFacts) -> str:
    return f"{facts.isa}, in {facts.path}" if facts.missing is None else f"none: {facts.missing}"


def _loadable(libraries: Mapping[str, bool]) -> list[str]:
    return [name if loads else f"{name} MISSING" for name, loads in libraries.items()]


def _mark(report: ProviderReport) -> tuple[str, str]:
    if not report.counts:
        return ("for tests" if report.works else "needs a name"), "dim"
    return ("works", "green") if report.works else ("no", "red")
