"""The provider ``ep``: other execution providers of ONNX Runtime, built into the wheel or plugins.

``ep:NAME`` is a built-in one (``ep:XNNPACK``, ``ep:QNNExecutionProvider``), ``ep:PATH`` a plugin library
(https://onnxruntime.ai/docs/execution-providers/plugin-ep-libraries/).
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal

import onnx_ir as ir

from ...errors import ProviderUnavailableError, UsageError
from ...graph_opt.lower.kernels import Kernels
from ...graph_opt.lower.pipelines.standard import standard_passes
from ...options import Checked, option
from ...records import dataclass
from ..base import Runner, RunnerConfig
from ..kv.decoder_graph import read_slot_graph
from ..ort import ort
from ..ort.device_memory import Device, DeviceSlots
from ..ort.explicit import OrtExplicitSession
from ..ort.input_memory import cache_device
from ..ort.plugins import described, plugin_devices
from ..ort.provider import OrtProvider
from ..ort.slot_policy import SlotPolicy
from ..ort.slot_runner import SlotRunner
from ..runners.explicit_runner import ExplicitRunner
from ..runners.self_agreement import check_agreement

_SUFFIX = "ExecutionProvider"
_LIBRARIES = (".so", ".dll", ".dylib")


@dataclass(frozen=True, kw_only=True)
class PassThroughOptions(Checked):
    """Options of the provider.

    Args:
        lowering: ``standard``, operators of opset 21 alone, or ``slots``, ONNX Runtime's own kernels.
        device: of a plugin's devices those of this kind: CPU, GPU or NPU; empty takes the first.
        settings: of the provider's own, as ``NAME=VALUE;NAME=VALUE``.
        prefill_chunk: most tokens of a prompt in one run, with ``slots`` on a device.
    """

    lowering: Literal["standard", "slots"] = "standard"
    device: str = ""
    settings: str = ""
    prefill_chunk: int = option(128, least=1)


# What ONNX Runtime's providers for GPUs have in common: kernels that compute in float, none of int8 products.
KERNELS = Kernels(
    accuracy_level=0,
    dynamic_quantize_matmul=False,
    matmul_integer_to_float=False,
    int8_kv=False,
    softcap=False,
    padded_prompts=False,
    dequantize_blocks=False,
)
_REMEDY = (
    "Use --provider-option lowering=standard, or prefill_chunk=16 if kernels for long prompts are at fault"
)


class PassThroughProvider(OrtProvider):
    """An execution provider that carryall knows nothing about.

    With the lowering ``standard``, caches and logits pass through host memory. With ``slots``, caches stay
    where the session reads them.

    Args:
        target: its name, with or without ``ExecutionProvider``, or the path of a plugin library.
    """

    name = "ep"
    takes_argument = True
    kernels = KERNELS
    options: ClassVar[type[Any]] = PassThroughOptions

    def __init__(self, target: str = "") -> None:
        self.library = Path(target) if _is_library(target) else None
        named = self.library is None and target and not target.endswith(_SUFFIX)
        self.execution_provider = f"{target}{_SUFFIX}" if named else target

    def available(self) -> str | None:
        """Return None if the provider can run on this machine, else the reason and the remedy."""
        if not self.execution_provider:
            return "name one: ep:NAME for one of onnxruntime's, or ep:PATH for a plugin library"
        if self.library is None:
            return super().available()
        try:
            plugin_devices(self.library)
        except ProviderUnavailableError as error:
            return str(error)
        return None

    def passes(self, config: RunnerConfig) -> list[ir.passes.PassBase]:
        """Return the passes of the chosen lowering, in order."""
        if self.checked_options(config.options)["lowering"] == "slots":
            return super().passes(config)
        if config.context_length is None:
            raise UsageError("lowering needs RunnerConfig.context_length: rope tables have that length")
        return standard_passes(config.context_length)

    def runner(self, model: Path, config: RunnerConfig) -> Runner:
        """Load a graph lowered by ``passes`` for generation."""
        session = self._open(model, config, generating=True)
        if self.checked_options(config.options)["lowering"] == "slots":
            return self._slot_runner(session, model, config)
        device = Device(name="cpu", index=0)
        return ExplicitRunner(OrtExplicitSession(session, device, str(model)), config, str(model))

    def _slot_runner(self, session: Any, model: Path, config: RunnerConfig) -> Runner:
        """Keep caches where the session reads them; refuse kernels that contradict themselves."""
        graph = read_slot_graph(session, str(model))
        device = cache_device(session, graph.caches, str(model))
        if device is None:
            return SlotRunner(session, config, str(model))
        options = self.checked_options(config.options)
        settings, devices = self.provider_options(options, generating=False), self.devices(options)
        name = devices[0].ep_name if devices else self.execution_provider
        memory = functools.partial(
            DeviceSlots,
            device=device,
            session_factory=lambda content: ort.open_session(content, name, None, settings, devices=devices),
        )
        policy = SlotPolicy(max_hole=0, max_rows=1, max_scores=2**40, prefill_chunk=options["prefill_chunk"])
        runner = SlotRunner(session, config, str(model), memory=memory, policy=policy)
        if graph.hidden_size is None:
            chunk, half = options["prefill_chunk"], graph.is_half
            check_agreement(runner, f"{name}, {model},", _REMEDY, chunk=chunk, half=half)
        return runner

    def provider_options(self, options: Mapping[str, Any], *, generating: bool) -> dict[str, str]:
        """Return the options in ``settings``."""
        pairs = [setting.partition("=") for setting in options["settings"].split(";") if setting]
        wrong = [name for name, equals, _ in pairs if not equals]
        if wrong:
            raise UsageError(f"option 'settings' has '{wrong[0]}', which is not NAME=VALUE")
        return {name.strip(): value.strip() for name, _, value in pairs}

    def devices(self, options: Mapping[str, Any]) -> list[Any]:
        """Return the plugin's device to use; none for a built-in provider."""
        if self.library is None:
            return []
        devices, kind = plugin_devices(self.library), options["device"].upper()
        chosen = [device for device in devices if kind in ("", device.device.type.name)][:1]
        if not chosen:
            raise ProviderUnavailableError(
                f"{self.library} has no {kind} device, only {described(devices)}; change the option 'device'"
            )
        return chosen


def _is_library(target: str) -> bool:
    return target.endswith(_LIBRARIES) or "/" in target or "\\" in target


PROVIDER = PassThroughProvider
