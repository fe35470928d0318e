"""Test a provider on this machine: everything that only its device can prove, in a report of one file."""

from __future__ import annotations

import dataclasses
import functools
import json
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import onnx_ir as ir

from ...errors import ProviderUnavailableError
from ...exporter.demo import demo_path
from ...exporter.export import export_model
from ...options import declared
from ...plain_json import plain_json
from ...providers import get_provider
from ...providers.base import Provider, RunnerConfig
from ...providers.host import selftest
from ...providers.host.doctor import installed_packages
from ...providers.host.machine import describe_machine
from ...providers.host.selftest_checks import (
    Check,
    Logits,
    checked,
    difference,
    logits_of,
    memory_figures,
    speed_figures,
    tower_states,
)
from ...records import dataclass
from ...storage.writing import write_whole
from ..models.split import with_device
from . import selftest_models as models
from .random_model import random_model

_PROMPT = range(300, 316)  # token ids in the vocabulary of the demo model
# Largest ``difference`` of logits. With float weights only the dtype differs. The CPU
# quantizes activations of models with quantized weights (0.03), and some targets do not quantize the
# activations (0.11) or the KV (0.05) that others do. Wrong positions give 0.5 and more.
_TOLERANCE = {"float": 0.01, "int4": 0.06, "int4-minima": 0.06, "int8": 0.06}
# Of other forms, of bf16, and of mixtures: rounding may choose another expert for a token (0.19; in fp16,
# qwen3_moe with float weights differs by 0.059 on the CPU and on an H200).
_COARSE = 0.25
_OPTIONS_MODEL = ("llama", "int8-kv")  # it has what most options need
_MEMORY_CONTEXT = 2**16  # tokens: few slots fill a device
_DEVICE = "device"
_REFERENCE = {"kernels": "onnxruntime"}  # of the CPU: independent of carryall's own kernels


@dataclass(frozen=True, slots=True, kw_only=True)
class FullReport:
    """A self-test with the machine that it ran on.

    Attributes:
        demo: the comparison with the demo model.
        checks: all further checks.
        running: the check that was running when the report was written; None in a finished report.
        seconds: of the whole test.
        machine: of ``describe_machine``.
        devices: the provider's devices.
        packages: versions of the installed packages.
    """

    demo: selftest.SelftestReport
    checks: tuple[Check, ...]
    running: str | None
    seconds: float
    machine: Mapping[str, Any]
    devices: tuple[str, ...]
    packages: Mapping[str, str | None]

    @property
    def passed(self) -> bool:
        """Whether no check failed."""
        return self.demo.passed and not any(check.status == "failed" for check in self.checks)

    def to_dict(self) -> dict[str, Any]:
        """Return the report as JSON types."""
        named = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        own = {name: value for name, value in named.items() if name not in ("demo", "checks")}
        checks = [check.to_dict() for check in self.checks]
        return {**self.demo.to_dict(), **own, "passed": self.passed, "checks": checks}


@dataclass(frozen=True, slots=True)
class _Plan:
    """The checks of a provider, lazily: each with its area and name."""

    provider: Provider
    options: Mapping[str, Any]

    def __iter__(self) -> Iterator[tuple[Any, str, Callable[[], tuple[bool, Mapping[str, float]]]]]:
        """Yield area, name and measurement; the important ones are first, because time may end."""
        pairs = list(models.cases())
        diagonal = len(models.FAMILIES)
        yield from (("values", " ".join(pair), self._values(*pair)) for pair in pairs[:diagonal])
        yield "values", "smolvlm tower", self._tower
        for name, value in self._other_values():
            yield "options", f"{name}={value}".lower(), self._values(*_OPTIONS_MODEL, {name: value})
        yield "speed", "float", self._speed("float")
        yield "speed", "int4", self._speed("int4")
        for name, value in self._other_values():
            if isinstance(value, bool):
                yield "speed", f"int4 {name}={value}".lower(), self._speed("int4", {name: value})
        if self.provider.free_memory(self.options) is not None:
            yield "memory", "more KV than memory", self._memory
        yield from (("values", " ".join(pair), self._values(*pair)) for pair in pairs[diagonal:])

    def _other_values(self) -> Iterator[tuple[str, Any]]:
        """Yield each value of a choice or switch that is not the default, with the option's name."""
        for name, option in declared(self.provider.options).items():
            if name == _DEVICE:
                continue
            others: list[Any] = [choice for choice in option.choices if choice != option.default]
            yield from ((name, other) for other in others)
            if isinstance(option.default, bool):
                yield name, not option.default

    def _values(
        self, family: str, form: str, extra: Mapping[str, Any] | None = None
    ) -> Callable[[], tuple[bool, Mapping[str, float]]]:
        def measure() -> tuple[bool, Mapping[str, float]]:
            make = functools.partial(models.decoder, family, form)
            got = logits_of(self.provider, make, models.CONTEXT, {**self.options, **(extra or {})})
            found = difference(got, _reference(family, form))
            bar = _COARSE if extra else tolerance(family, form)
            return found <= bar, {"difference": found, "tolerance": bar}

        return measure

    def _tower(self) -> tuple[bool, Mapping[str, float]]:
        found = difference(
            tower_states(self.provider, models.tower, models.pictures(), self.options), _tower_reference()
        )
        return found <= _TOLERANCE["float"], {"difference": found, "tolerance": _TOLERANCE["float"]}

    def _speed(
        self, form: str, extra: Mapping[str, Any] | None = None
    ) -> Callable[[], tuple[bool, Mapping[str, float]]]:
        def make() -> ir.Model:
            return models.in_form(random_model({"model_type": "llama", **models.LARGE}), form)

        return lambda: speed_figures(self.provider, make, {**self.options, **(extra or {})})

    def _memory(self) -> tuple[bool, Mapping[str, float]]:
        config = {"model_type": "llama", **models.FAMILIES["llama"]}
        config["max_position_embeddings"] = _MEMORY_CONTEXT
        make = functools.partial(random_model, config)
        return memory_figures(self.provider, make, _MEMORY_CONTEXT, self.options)


def tolerance(family: str, form: str) -> float:
    """Return the largest allowed difference of a form, of a family of the self-test."""
    mixture = any("experts" in name for name in models.FAMILIES[family])
    return _COARSE if mixture else _TOLERANCE.get(form, _COARSE)


@functools.cache
def _reference(family: str, form: str) -> Logits:
    make = functools.partial(models.decoder, family, form)
    return logits_of(get_provider("cpu"), make, models.CONTEXT, _REFERENCE)


@functools.cache
def _tower_reference() -> Logits:
    return tower_states(get_provider("cpu"), models.tower, models.pictures(), _REFERENCE)


def selftest_provider(
    name: str,
    device: str | None = None,
    *,
    time_limit: float = 240,
    report: Path | None = None,
    on_check: Callable[[str], None] | None = None,
) -> FullReport:
    """Compare a provider with the CPU by family, form and option; measure its speed and its memory.

    Args:
        name: of the provider.
        device: the provider's name of the device, such as ``1`` or ``GPU.1``; None is the default.
        time_limit: seconds after which no further check begins; 0 compares the demo model only.
        report: a JSON file, written before each check, so that it names the one in which a driver ended the
            process.
        on_check: called with the name of each check that begins.

    Raises:
        ProviderUnavailableError: the provider does not work on this machine.
        OSError: the report cannot be written.
    """
    start = time.perf_counter()
    provider = get_provider(name)
    reason = provider.available()
    if reason is not None:
        raise ProviderUnavailableError(f"provider '{name}' is not available: {reason}")
    config = RunnerConfig() if device is None else with_device(RunnerConfig(), name, device)
    demo = selftest.selftest(
        provider, get_provider("cpu"), lambda: export_model(demo_path()), _PROMPT, options=config.options
    )
    found = FullReport(
        demo=demo,
        checks=(),
        running=None,
        seconds=0.0,
        machine=dataclasses.asdict(describe_machine()),
        devices=tuple(provider.device_descriptions()),
        packages=installed_packages(),
    )

    def told(checks: tuple[Check, ...], running: str | None) -> FullReport:
        seconds = round(time.perf_counter() - start, 3)
        now = dataclasses.replace(found, checks=checks, running=running, seconds=seconds)
        if report is not None:
            write_whole(report, json.dumps(json.loads(plain_json(now.to_dict())), indent=1) + "\n")
        return now

    done: tuple[Check, ...] = ()
    for area, what, measure in _Plan(provider, config.options) if provider.runs_models else ():
        if time.perf_counter() - start >= time_limit:
            done += (Check(area=area, name=what, status="skipped", detail=f"after {time_limit:g} s"),)
            continue
        if on_check is not None:
            on_check(f"{area}: {what}")
        told(done, f"{area}: {what}")
        done += (checked(area, what, measure),)
    return told(done, None)
