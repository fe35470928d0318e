"""The provider ``directml``: any Direct3D 12 device on Windows through ONNX Runtime's DirectML kernels."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal

from ...graph_opt.lower.kernels import DIRECTML
from ...options import Checked, option
from ...records import dataclass
from ..base import Runner, RunnerConfig
from ..kv.kv_memory import KVSpec
from ..ort import ort
from ..ort.device_memory import Device, DeviceSlots
from ..ort.provider import OrtProvider
from ..ort.slot_policy import SlotPolicy
from ..ort.slot_runner import SlotRunner

# Values of the free dimensions of the lowered graph; see "The slot graph" in docs/contract.md.
_DECODE_SIZES = {"batch": 1, "sequence": 1, "wanted": 1}
POLICY = SlotPolicy(max_hole=0, max_rows=1, prompts_on_cache=False)


@dataclass(frozen=True, kw_only=True)
class DirectMLOptions(Checked):
    """Options of the provider.

    Args:
        device: index of the adapter, in the order of DXGI.
        compute: ``fp16`` (or ``bf16``, computed in fp16) halves memory; ``fp32`` if the device lacks fp16.
        static_shapes: open a second session for decoding with fixed sizes, which DirectML compiles into one
            graph; the weights are then in memory twice.
    """

    device: int = option(0, least=0)
    compute: Literal["fp16", "bf16", "fp32"] = "fp16"
    static_shapes: bool = False


class DirectMLProvider(OrtProvider):
    """A GPU or NPU with DirectML.

    Its attention kernel runs rows one by one, and a prompt only as a whole and with an empty cache.
    """

    name = "directml"
    vendors = frozenset({"NVIDIA", "AMD", "Intel", "Qualcomm"} if sys.platform == "win32" else ())
    execution_provider = "DmlExecutionProvider"
    kernels = DIRECTML
    device_name = "dml"
    options: ClassVar[type[Any]] = DirectMLOptions

    def available(self) -> str | None:
        """Return None if the provider can run on this machine, else the reason and the remedy."""
        if sys.platform != "win32":
            return "DirectML exists on Windows only; on this system use cuda, openvino or cpu"
        return super().available()

    def provider_options(self, options: Mapping[str, Any], *, generating: bool) -> dict[str, str]:
        """Return the options of the execution provider."""
        return {"device_id": str(options["device"])}

    def runner(self, model: Path, config: RunnerConfig) -> Runner:
        """Load a graph lowered by ``passes`` for generation."""
        session = self._open(model, config, generating=True)
        options = self.checked_options(config.options)
        own = self.provider_options(options, generating=False)
        device = Device(name=self.device_name, index=options["device"], addressable=False, updates=False)

        def memory(specs: Mapping[str, KVSpec], slots: int, length: int) -> DeviceSlots:
            return DeviceSlots(
                specs,
                slots,
                length,
                device=device,
                session_factory=lambda content: ort.open_session(content, self.execution_provider, None, own),
            )

        return SlotRunner(
            session,
            config,
            str(model),
            memory=memory,
            policy=POLICY,
            decode_session=self._decoder(model, config) if options["static_shapes"] else None,
        )

    def _decoder(self, model: Path, config: RunnerConfig) -> Any:
        sizes = _DECODE_SIZES | ({"max_length": config.context_length} if config.context_length else {})
        return self._open(model, config, generating=True, sizes=sizes)


PROVIDER = DirectMLProvider
