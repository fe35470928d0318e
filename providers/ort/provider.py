"""The base of all ONNX Runtime targets: strict sessions and a slot runner."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from ...errors import CarryallError, ProviderUnavailableError, UsageError
from ...graph_opt.lower.kernels import Kernels
from ..base import Provider, Runner, RunnerConfig
from . import ort

if TYPE_CHECKING:
    import onnx_ir as ir

    from ...graph_opt.lower.pipelines.slots import SlotOptions
    from .device_memory import Device


class OrtProvider(Provider):
    """A provider that is one of ONNX Runtime's execution providers."""

    execution_provider: str
    kernels: ClassVar[Kernels]  # the abilities of its kernels, which decide the lowering

    def available(self) -> str | None:
        """Return None if the provider can run on this machine, else the reason and the remedy."""
        try:
            ort.check_available(self.execution_provider)
        except CarryallError as error:
            return str(error)
        return None

    def passes(self, config: RunnerConfig) -> list[ir.passes.PassBase]:
        """Return the passes that lower a portable decoder graph to slots, in order."""
        from ...graph_opt.lower.pipelines.slots import slot_passes

        return slot_passes(self._slot_options(config))

    def explicit_passes(self, config: RunnerConfig) -> list[ir.passes.PassBase] | None:
        """Return the passes that keep attention and caches as they are, in order, if there are kernels."""
        from ...graph_opt.lower.pipelines.slots import slot_passes

        if not self.kernels.explicit_states:
            return None
        options = self._slot_options(config)
        return slot_passes(
            dataclasses.replace(options, explicit=True, paged=False, top_logits=0, draws=False)
        )

    def model_passes(self) -> list[ir.passes.PassBase]:
        """Return the passes that lower any other portable graph to the kernels of this target, in order."""
        from ...graph_opt.lower.pipelines.any_graph import graph_passes

        return graph_passes(self.kernels)

    def tower_passes(
        self, config: RunnerConfig, tower: ir.Model, *, quantized: bool = False
    ) -> list[ir.passes.PassBase]:
        """Return the passes that lower ``vision.onnx``, in float32; none without a kernel for it."""
        from ...graph_opt.lower.pipelines.towers import tower_passes

        return tower_passes(self.kernels, "float32") if self.kernels.tower_attention else []

    def tower_form(self, config: RunnerConfig, *, quantized: bool = False) -> str | None:
        """Return the type that ``tower_passes`` compute in; None without passes."""
        return "float32" if self.kernels.tower_attention else None

    def kept_products(self) -> Collection[int]:
        return self.kernels.matmul_nbits

    def session(self, model: Path, options: RunnerConfig | None = None) -> Any:
        """Open any ONNX model on this target only; return an ``onnxruntime.InferenceSession``."""
        return self._open(model, options or RunnerConfig(), generating=False)

    def runner(self, model: Path, config: RunnerConfig) -> Runner:
        """Load a graph lowered by ``passes`` for generation."""
        from .slot_runner import SlotRunner  # other sessions do not need it

        return SlotRunner(self._open(model, config, generating=True), config, str(model))

    def _explicit_runner(
        self, session: Any, model: Path, config: RunnerConfig, device: Device, reason: str
    ) -> Runner:
        """Open a graph lowered by ``explicit_passes``; its metadata has the reason, else ``reason`` is it."""
        from ..runners.explicit_runner import ExplicitRunner, warn_of_explicit_kv
        from .explicit import OrtExplicitSession

        warn_of_explicit_kv(session.get_modelmeta().custom_metadata_map, reason)
        return ExplicitRunner(OrtExplicitSession(session, device, str(model)), config, str(model))

    def session_entries(self, options: Mapping[str, Any]) -> dict[str, str]:
        """Return ``session.*`` configuration entries; ``options`` are all options of the provider."""
        return {}

    def extend(self, settings: Any, options: Mapping[str, Any]) -> None:
        """Register further operators with an ``onnxruntime.SessionOptions``; ``options`` as above."""

    def provider_options(self, options: Mapping[str, Any], *, generating: bool) -> dict[str, str]:
        """Return options of the execution provider; ``generating`` for a runner, else for other sessions."""
        return {}

    def devices(self, options: Mapping[str, Any]) -> list[Any]:
        """Return the ``onnxruntime.OrtEpDevice`` to run on, if the execution provider is a plugin."""
        return []

    def num_threads(self) -> int:
        """Return the default number of threads; 0 is onnxruntime's default."""
        return 0

    def kernels_for(self, options: Mapping[str, Any]) -> Kernels:
        """Return the abilities of the kernels with these options."""
        return self.kernels

    def _slot_options(self, config: RunnerConfig) -> SlotOptions:
        from ...graph_opt.lower.pipelines.slots import SlotOptions

        if config.context_length is None:
            raise UsageError("lowering needs RunnerConfig.context_length: rope tables have that length")
        options = self.checked_options(config.options)
        return SlotOptions(
            context_length=config.context_length,
            kernels=self.kernels_for(options),
            fused_experts=options.get("fused_experts") != "off",
            kv_cache=options.get("kv_cache", "auto"),
            compute=compute_type(options.get("compute")),
            top_logits=options.get("top_logits", 0),
            draws=is_paged(options) and bool(options.get("steps_ahead")),
            paged=is_paged(options),
            compressed_kv=options.get("latent_kv") == "compressed",
            bfloat16_states=options.get("state_cache") == "bfloat16",
        )

    def _open(
        self,
        model: Path,
        config: RunnerConfig,
        *,
        generating: bool,
        sizes: Mapping[str, int] | None = None,
        provider_settings: Mapping[str, str] | None = None,
    ) -> Any:
        options = self.checked_options(config.options)
        reason = self.available()  # also loads libraries, so that onnxruntime finds them
        if reason is not None:
            raise ProviderUnavailableError(f"provider '{self.name}' is not available: {reason}")
        settings = ort.session_options(
            config.num_threads or self.num_threads(),
            self.session_entries(options),
            fixed_shapes=not generating,
            sizes=sizes,
        )
        self.extend(settings, options)
        provider_settings = (
            provider_settings
            if provider_settings is not None
            else self.provider_options(options, generating=generating)
        )
        devices = self.devices(options)
        return ort.open_session(
            model,
            devices[0].ep_name if devices else self.execution_provider,
            settings,
            provider_settings,
            devices=devices,
            on_fallback=config.on_fallback,
        )


def is_paged(options: Mapping[str, Any]) -> bool:
    """Whether the option ``kv_memory`` is ``paged``; targets without the option, and ``auto``, use slots."""
    return bool(options.get("kv_memory") == "paged")


def compute_type(name: str | None) -> ir.DataType | None:
    """Return the dtype of the option ``compute``; None for fp32, or if a target has no such option."""
    from ...graph_opt.quantize.formats.half_pass import HALF_TYPES

    return None if name in (None, "fp32") else HALF_TYPES[name]
