"""``carryall doctor``."""

from __future__ import annotations

from pathlib import Path

import click
from rich.console import Console

from ...errors import UsageError
from ...providers.host.doctor import diagnose
from ..options import check_exclusive, json_option, kernel_options, print_json, quiet_option, selftest_options
from ..printing.doctor import show, show_selftest
from .doctor_kernels import autotune, build_kernels


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
