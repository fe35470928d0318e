"""Test a provider with the embedded model: logits and tokens against the CPU's, and the speed."""

from __future__ import annotations

from ...errors import ProviderUnavailableError
from ...exporter.demo import demo_path
from ...exporter.export import export_model
from ...providers import get_provider
from ...providers.base import RunnerConfig
from ...providers.host import selftest
from ..models.split import with_device

_PROMPT = range(300, 316)  # token ids in the vocabulary of the demo model


def selftest_provider(name: str, device: str | None = None) -> selftest.SelftestReport:
    """Generate text on a provider, and compare it with the CPU.

    Args:
        name: of the provider.
        device: the provider's name of the device, such as ``1`` or ``GPU.1``; None is the default.

    Raises:
        ProviderUnavailableError: the provider does not work on this machine.
    """
    provider = get_provider(name)
    reason = provider.available()
    if reason is not None:
        raise ProviderUnavailableError(f"provider '{name}' is not available: {reason}")
    config = RunnerConfig() if device is None else with_device(RunnerConfig(), name, device)
    return selftest.selftest(
        provider, get_provider("cpu"), lambda: export_model(demo_path()), _PROMPT, options=config.options
    )
