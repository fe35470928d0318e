"""``carryall doctor``."""

from __future__ import annotations

import click
from rich.console import Console

from ...errors import ProviderUnavailableError, UsageError
from ...providers.host.doctor import diagnose
from ...providers.host.selftest import SelftestReport
from ..options import json_option, print_json, quiet_option
from ..printing.doctor import show, show_selftest

_PROMPT = range(300, 316)  # token ids in the vocabulary of the demo model


@click.command("doctor")
@click.option("--provider", help="The provider to test, with --selftest.  [default: cpu]")
@click.option("--device", help="The provider's name of the device to test, with --selftest: 1, GPU.1.")
@click.option(
    "--selftest", "testing", is_flag=True, help="Generate text on one provider, and compare it with the CPU."
)
@json_option
@quiet_option
@click.pass_context
def command(
    ctx: click.Context, provider: str | None, device: str | None, testing: bool, as_json: bool, quiet: bool
) -> None:
    """Check this machine: hardware, installed packages, and which providers work.

    Every available provider runs a tiny model, and its result is checked. For others, the line says what to
    install; the last lines repeat it for the devices of this machine. Exit code 0 if at least one provider
    works and no onnxruntime wheels conflict, else 1.

    With --selftest, a provider generates text with the demo model; logits and tokens are compared with the
    CPU's, and its speed is shown. Exit code 0 if the differences are within the tolerances, else 1.

    \b
    Examples:
        carryall doctor
        carryall doctor --json
        carryall doctor --provider directml --selftest
    """
    console = Console(stderr=True, quiet=quiet or as_json)
    if not testing and (device is not None or provider is not None):
        raise UsageError(f"{'--device' if device is not None else '--provider'} needs --selftest")
    provider = provider or "cpu"
    if testing:
        with console.status(f"testing {provider}"):
            report = _selftest(provider, device)
        print_json(report.to_dict()) if as_json else show_selftest(report)
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
