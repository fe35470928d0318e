"""``carryall doctor``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from ...errors import UsageError
from ...providers.host.doctor import Diagnosis, KernelFacts, ProviderReport, diagnose, kernel_facts
from ...providers.host.tuning import Tuning
from ...providers.native.build import build_library
from ...providers.targets.cpu import CpuProvider
from ..options import (
    check_exclusive,
    human_bytes,
    json_option,
    kernel_options,
    print_json,
    quiet_option,
    selftest_options,
)

if TYPE_CHECKING:  # it imports the exporter
    from ...runtime.tasks.selftest import FullReport


def show_selftest(full: FullReport) -> None:
    """Print the report of a self-test as tables."""
    report, console = full.demo, Console(highlight=False)
    table = Table(box=None, show_header=False, pad_edge=False)
    counts = Counter(check.status for check in full.checks)
    rows = {
        "provider": report.provider,
        "tokens": f"{report.agreement:.0%} of {report.tokens} equal to {report.reference}",
        "logits": f"differ by at most {report.worst:.2%} of the largest",
        "loading": f"{report.load_seconds:.2f} s, and {report.first_prompt_seconds:.2f} s for the first text",
        "prompt": f"{report.prompt_tokens_per_second:.0f} tokens/s",
        "decoding": f"{report.decode_tokens_per_second:.0f} tokens/s",
        "checks": ", ".join(f"{count} {status}" for status, count in counts.items()) or "none",
        "result": "passed" if full.passed else "FAILED: outputs differ from the reference, or a check failed",
    }
    for label, text in rows.items():
        table.add_row(Text(label, style="bold"), Text(text))
    shown = [check for check in full.checks if check.status != "skipped"]
    if shown:
        checks = Table("", "check", "", "", box=None, pad_edge=False, header_style="bold")
        for check in shown:
            facts = check.detail or ", ".join(f"{name} {value:.4g}" for name, value in check.figures.items())
            style = {"failed": "red", "passed": "green"}.get(check.status, "")
            checks.add_row(Text(check.area), Text(check.name), Text(check.status, style=style), Text(facts))
        console.print(Padding(checks, (0, 0, 1, 0)))
    console.print(table)


def show(diagnosis: Diagnosis) -> None:
    """Print a diagnosis as tables."""
    console = Console(highlight=False)
    console.print(Padding(_machine(diagnosis), (0, 0, 1, 0)))
    providers = Table("provider", "", "", box=None, pad_edge=False, header_style="bold")
    for report in diagnosis.providers:
        mark, style = _mark(report)
        took = f" ({report.milliseconds:.0f} ms)" if report.milliseconds is not None else ""
        devices = f"; devices: {', '.join(report.devices)}" if report.devices else ""
        providers.add_row(report.name, Text(mark, style=style), Text(report.detail + took + devices))
    console.print(Padding(providers, (0, 0, 1, 0)))
    installed = [f"{name} {version}" for name, version in diagnosis.packages.items() if version]
    missing = [name for name, version in diagnosis.packages.items() if not version]
    packages = Table(box=None, show_header=False, pad_edge=False)
    packages.add_row(Text("installed", style="bold"), ", ".join(installed))
    packages.add_row(Text("missing", style="bold"), ", ".join(missing) or "nothing")
    console.print(Padding(packages, (0, 0, 1, 0)))
    nothing = "nothing: every device has a working provider"
    console.print(Text("next steps", style="bold"))
    for step in diagnosis.next_steps or [nothing]:
        console.print(Text(f"  {step}", style="red" if diagnosis.next_steps else ""))


def _machine(diagnosis: Diagnosis) -> Table:
    machine = diagnosis.machine
    table = Table(box=None, show_header=False, pad_edge=False)
    cores = f"{machine.usable_cores} of {machine.logical_cores} logical cores used"
    memory = [
        human_bytes(machine.memory_total),
        f"{human_bytes(machine.memory_available)} free",
        f"bandwidth {diagnosis.memory_bandwidth:.0f} GB/s",
    ]
    rows = {
        "machine": machine.system,
        "processor": f"{machine.cpu}, {cores}",
        "features": ", ".join(machine.features) or "unknown",
        "memory": ", ".join(memory),
        "accelerators": ", ".join(diagnosis.accelerators) or "none found",
        **({"libraries": ", ".join(_loadable(diagnosis.libraries))} if diagnosis.libraries else {}),
        "CPU kernels": kernels_text(diagnosis.kernels),
        "autotune": tuning_text(diagnosis.kernels.tuning),
        "cache": f"{human_bytes(diagnosis.cache.size)} in {diagnosis.cache.folder}, "
        f"{human_bytes(diagnosis.cache.free)} free there",
        "python": diagnosis.python,
    }
    for label, text in rows.items():
        table.add_row(Text(label, style="bold"), Text(text))
    return table


def kernels_text(facts: KernelFacts) -> str:
    """Return the instruction set and the file of the CPU kernels, or why there are none."""
    return f"{facts.isa}, in {facts.path}" if facts.missing is None else f"none: {facts.missing}"


def tuning_text(tuning: Tuning | None) -> str:
    """Return what was measured to be the fastest, beside the others in percent of the default's speed."""
    if tuning is None:
        return "not measured: carryall doctor --autotune"

    def beside(gains: Mapping[Any, Sequence[float]]) -> str:
        texts = [f"{name} {' and '.join(f'{gain:.0%}' for gain in both)}" for name, both in gains.items()]
        return ", ".join(texts)

    return (
        f"{tuning.isa} of {beside(tuning.isas)}; {tuning.threads} threads of "
        f"{beside(tuning.thread_counts)} (a decoding step and a prompt, relative to the default)"
    )


def _loadable(libraries: Mapping[str, bool]) -> list[str]:
    return [name if loads else f"{name} MISSING" for name, loads in libraries.items()]


def _mark(report: ProviderReport) -> tuple[str, str]:
    if not report.counts:
        return ("for tests" if report.works else "needs a name"), "dim"
    return ("works", "green") if report.works else ("no", "red")


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


@click.command("doctor")
@click.option("--provider", help="The provider to test, with --selftest.  [default: cpu]")
@click.option("--device", help="The provider's name of the device to test, with --selftest: 1, GPU.1.")
@selftest_options
@kernel_options
@json_option
@quiet_option
@click.pass_context
def command(
    ctx: click.Context,
    provider: str | None,
    device: str | None,
    testing: bool,
    report: Path | None,
    limit: float,
    building: bool,
    tuning: bool,
    as_json: bool,
    quiet: bool,
) -> None:
    """Check this machine: hardware, installed packages, and which providers work.

    Every available provider runs a tiny model, and its result is checked. For others, the line says what to
    install; the last lines repeat it for the devices of this machine. Exit code 0 if at least one provider
    works and no onnxruntime wheels conflict, else 1.

    With --selftest, a provider generates text with the demo model; logits and tokens are compared with the
    CPU's. Then it computes small random models of every family, in every quantized form and with every choice
    of its options, and its speed and memory are measured. Exit code 0 if all results are within the
    tolerances, else 1.

    With --build-kernels, the CPU kernels are compiled and kept in the cache, which takes half a minute;
    models with int4 and int8 weights use them from then on.

    With --autotune, the CPU kernels' instruction sets and numbers of threads are measured, which takes about
    5 seconds. The fastest are used from then on; a default is replaced by what is 5 % faster.

    \b
    Examples:
        carryall doctor
        carryall doctor --json
        carryall doctor --provider directml --selftest
        carryall doctor --provider cuda --selftest --selftest-report cuda.json
    """
    console = Console(stderr=True, quiet=quiet or as_json)
    if not testing and (device is not None or provider is not None):
        raise UsageError(f"{'--device' if device is not None else '--provider'} needs --selftest")
    if not testing and report is not None:
        raise UsageError("--selftest-report needs --selftest")
    provider = provider or "cpu"
    check_exclusive({"--autotune": tuning, "--build-kernels": building, "--selftest": testing})
    if tuning:
        autotune(console, as_json=as_json)
        return
    if building:
        ctx.exit(0 if build_kernels(console, as_json=as_json) else 1)
    if testing:
        ctx.exit(0 if _selftest(console, provider, device, limit, report, as_json=as_json) else 1)
    with console.status("checking") as status:
        diagnosis = diagnose(lambda step: status.update(step))
    if as_json:
        print_json(diagnosis.to_dict())
    else:
        show(diagnosis)
    ctx.exit(diagnosis.exit_code)


def _selftest(
    console: Console, provider: str, device: str | None, limit: float, report: Path | None, *, as_json: bool
) -> bool:
    """Test a provider, print the results, and return whether all are within the tolerances."""
    from ...runtime.tasks.selftest import selftest_provider  # imports the exporter

    with console.status(f"testing {provider}") as status:
        result = selftest_provider(
            provider,
            device,
            time_limit=limit,
            report=report,
            on_check=lambda check: status.update(f"testing {provider}, {check}"),
        )
    print_json(result.to_dict()) if as_json else show_selftest(result)
    return result.passed
