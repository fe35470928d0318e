"""Print what ``carryall doctor`` found."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from ...providers.host.doctor import Diagnosis, KernelFacts, ProviderReport
from ...providers.host.tuning import Tuning
from ..options import human_bytes

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
