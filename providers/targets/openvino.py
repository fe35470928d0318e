"""The provider ``openvino``: Intel devices with paged attention, prompts and decode rows in one inference."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

import onnx_ir as ir

from ...contract import (
    CONTEXT_LENGTH,
    DRAW,
    ENCODER_ROWS,
    ENCODER_STATES,
    HIDDEN_STATES,
    LAST_HIDDEN_STATE,
    LOGITS,
    NUM_TOKENS,
    TOP_LOGITS,
    is_past,
    is_past_encoder,
    is_past_state,
)
from ...errors import (
    GraphError,
    MissingExtraError,
    ProviderRuntimeError,
    ProviderUnavailableError,
    UsageError,
)
from ...graph_opt.graph.edit import static_size
from ...graph_opt.graph.onnx_files import read_onnx
from ...graph_opt.lower.outputs.draw_tokens import DrawTokensPass
from ...graph_opt.lower.outputs.hidden_states import LastHiddenStatePass
from ...graph_opt.lower.outputs.top_logits import TopLogitsPass
from ...graph_opt.lower.pipelines.paged import INT8_CACHE, paged_passes
from ...graph_opt.lower.pipelines.paged_form import TABLES, PagedLayer, paged_layers
from ...graph_opt.lower.products.arithmetic_dequantize import COMMON_BLOCK_SIZE
from ...options import Checked, option
from ...records import dataclass
from ..base import Provider, Runner, RunnerConfig
from ..host import machine
from ..kv.block_pool import BlockTables
from ..kv.decoder_graph import DecoderGraph, known_size
from ..kv.kv_memory import KVSpec
from ..kv_groups import TRIM_STEP, KVGroups, widest, window_groups
from ..lora import LoraPlaces, lora_modules
from ..runners.explicit_runner import ExplicitRunner, warn_of_explicit_kv
from ..runners.paged_runner import PagedRunner

_PROPERTIES = {
    "inference_precision": "INFERENCE_PRECISION_HINT",
    "performance_hint": "PERFORMANCE_HINT",
    "dynamic_quantization_group": "DYNAMIC_QUANTIZATION_GROUP_SIZE",
}
# Properties of all models; the others are for generation only.
_GENERAL = ("inference_precision", "performance_hint")
_DEVICES_CHOICE = "auto"
_NUMBER_OR_AUTO = "dynamic_quantization_group"
_HOST = "CPU"  # OpenVINO's name of the device
_TOP_LOGITS = 64


@dataclass(frozen=True, kw_only=True)
class OpenVinoOptions(Checked):
    """Options of the provider.

    Args:
        device: CPU, GPU, GPU.1, NPU.
        inference_precision: f32 is exact; bf16 or f16 is faster if the device supports it; auto is OpenVINO's
            default.
        kv_cache: int8, or float32 for the precision of the inference; auto is int8 if the model was
            calibrated for it.
        kv_cache_precision: overrides ``kv_cache``: f32, f16 (half the memory), u8 (int8, a quarter), or auto
            for OpenVINO's default; empty follows ``kv_cache``.
        dynamic_quantization_group: matrix products with int4 and int8 weights round activations to int8 in
            groups of this size; 0, or a number larger than the weights' blocks, keeps them float; auto is the
            size of those blocks.
        kv_cache_bytes: size of the KV pool; 0 takes what all slots need, at most half of the free memory.
        performance_hint: LATENCY or THROUGHPUT.
        top_logits: number of largest logits selected on the device, for requests that need no more; 0
            selects none. auto is 64 on other devices than the CPU, on which NumPy is faster.
        steps_ahead: with ``top_logits``, 1 lets the device draw tokens and begin the next step with them
            while the host samples; the host's tokens count. auto is 1 on other devices than the CPU.
    """

    device: str = _HOST
    inference_precision: str = "f32"
    kv_cache: Literal["auto", "int8", "float32"] = "auto"
    kv_cache_precision: str = ""
    dynamic_quantization_group: int | Literal["auto"] = option("auto", least=0)
    kv_cache_bytes: int = option(0, least=0, unit="bytes")
    performance_hint: str = "LATENCY"
    top_logits: int | Literal["auto"] = option("auto", least=0)
    steps_ahead: int | Literal["auto"] = option("auto", least=0, most=1)


class OpenVinoProvider(Provider):
    """One device of OpenVINO."""

    name = "openvino"
    vendors = frozenset({"Intel"})
    options: ClassVar[type[Any]] = OpenVinoOptions

    def available(self) -> str | None:
        """Return None if the package openvino can be imported, else what to install."""
        try:
            import openvino  # noqa: F401
        except ModuleNotFoundError:
            return str(MissingExtraError("provider 'openvino'", "openvino", "openvino"))
        except ImportError as error:
            return f"openvino cannot be loaded: {error}"
        return None

    def device_names(self) -> list[str]:
        """Return the devices that OpenVINO finds."""
        from ..openvino.model import present_devices

        return present_devices()

    def memory_bandwidth(self, options: Mapping[str, Any]) -> float | None:
        """Return the measured bandwidth of the host's memory in bytes/s; None for other devices."""
        on_host = self.checked_options(options)["device"] == _HOST
        return machine.memory_bandwidth() * 1e9 if on_host else None

    def passes(self, config: RunnerConfig) -> list[ir.passes.PassBase]:
        """Return the passes that lower a portable decoder graph to a paged cache, in order."""
        if config.context_length is None:
            raise UsageError("lowering needs RunnerConfig.context_length: rope tables have that length")
        return [*self._with_states(paged_passes(config.context_length), config), *self._draws(config)]

    def explicit_passes(self, config: RunnerConfig) -> list[ir.passes.PassBase] | None:
        """Return the passes that decompose attention and keep explicit KV, in order."""
        if config.context_length is None:
            return None
        return self._with_states(paged_passes(config.context_length, explicit=True), config)

    def _draws(self, config: RunnerConfig) -> list[ir.passes.PassBase]:
        """Return the passes that select logits and draw tokens in the graph."""
        settings = self.checked_options(config.options)
        auto = {"top_logits": _TOP_LOGITS, "steps_ahead": 1} if settings["device"] != _HOST else {}
        count, ahead = (
            auto.get(name, 0) if settings[name] == _DEVICES_CHOICE else settings[name]
            for name in ("top_logits", "steps_ahead")
        )
        return [TopLogitsPass(count), *([DrawTokensPass()] if ahead else [])] if count else []

    def _with_states(
        self, passes: list[ir.passes.PassBase], config: RunnerConfig
    ) -> list[ir.passes.PassBase]:
        # With an output of hidden states, OpenVINO computes everything it depends on, back to the last matrix
        # products, in f32: here all residual sums.
        full = self.checked_options(config.options)["inference_precision"] == "f32"
        return [LastHiddenStatePass(), *passes] if full else passes

    def session(self, model: Path, options: RunnerConfig | None = None) -> Any:
        """Open any ONNX model on the device; the result has onnxruntime's ``run(output_names, feeds)``."""
        from ..openvino.model import OpenVinoSession

        return OpenVinoSession(self._compile(model, options or RunnerConfig())[1])

    def runner(self, model: Path, config: RunnerConfig) -> Runner:
        """Load a graph lowered by ``passes`` for generation.

        Raises:
            GraphError: the graph is not lowered to a paged cache, or the device cannot run it.
            ProviderRuntimeError: there is not enough memory for the KV pool.
        """
        facts = _facts(model, config)
        length = facts.graph.context_length or 0
        if facts.graph.caches or facts.graph.states:
            return self._explicit_runner(model, config, facts)
        settings = self.checked_options(config.options)
        core, compiled = self._compile(model, config, facts)
        from ..openvino.sessions import OpenVinoPagedSession, make_cache

        form = _cache_form(compiled)
        wanted = config.max_slots * -(-length // form.block_size)
        num_blocks = _num_blocks(settings["kv_cache_bytes"], form.block_bytes, wanted)
        caches = {
            name: make_cache(core, settings["device"], form.types[name], [num_blocks, *shape])
            for name, shape in form.shapes.items()
        }
        session = OpenVinoPagedSession(compiled, caches, facts.layers, form.block_size)
        on_host = settings["device"] == _HOST
        info = facts.graph.info(
            config,
            _groups(form, facts.layers),
            length=length,
            batched_multi_token=True,
            kv_layout=form.layout if on_host else "",
            evicts_kv=on_host and session.rows_are_whole,
            on_device=not on_host,
            steps_ahead=int(DRAW in facts.graph.inputs),
        )
        tables = BlockTables(num_blocks, form.block_size, config.max_slots)
        modules = facts.graph.lora_modules
        loras = LoraPlaces(modules, config.max_loras, config.max_lora_rank) if modules else None
        ahead = session if info.steps_ahead else None
        return PagedRunner(session, tables, info, facts.graph.hidden_size, loras, ahead=ahead)

    def _explicit_runner(self, model: Path, config: RunnerConfig, facts: _Facts) -> Runner:
        """Open a graph with decomposed attention, whose caches are inputs and outputs."""
        from ..openvino.sessions import OpenVinoExplicitSession

        warn_of_explicit_kv(facts.graph.metadata)
        _, compiled = self._compile(model, config, facts)
        return ExplicitRunner(OpenVinoExplicitSession(compiled, facts.graph), config, str(model))

    def _compile(self, model: Path, config: RunnerConfig, facts: _Facts | None = None) -> tuple[Any, Any]:
        """Return the core and the compiled model; ``facts`` are those of a decoder, else None."""
        settings = self.checked_options(config.options)
        reason = self.available()
        if reason is not None:
            raise ProviderUnavailableError(reason)
        from ..openvino.model import compile_model, open_core, own_precision, read

        device = settings["device"]
        core = open_core(device)
        names = {*config.options, *(_PROPERTIES if facts is not None else _GENERAL)}
        if facts is not None and facts.block_size and settings[_NUMBER_OR_AUTO] == _DEVICES_CHOICE:
            settings[_NUMBER_OR_AUTO] = facts.block_size
        properties = {
            key: str(settings[name])
            for name, key in _PROPERTIES.items()
            if name in names and settings[name] != _DEVICES_CHOICE
        }
        if facts is not None and not (facts.graph.caches or facts.graph.states):
            precision = settings["inference_precision"]
            if precision == _DEVICES_CHOICE:
                precision = own_precision(core, device)
            properties |= _cache_properties(settings, precision, facts.int8_cache)
        if config.num_threads:
            properties["INFERENCE_NUM_THREADS"] = str(config.num_threads)
        return core, compile_model(core, read(core, model), device, properties)


@dataclass(frozen=True, slots=True)
class _Facts:
    """The facts of a lowered graph.

    Args:
        graph: its interface; without caches if they are in blocks, whose form the device chooses.
        int8_cache: whether the model was calibrated for an int8 KV cache.
        block_size: number of weights that share a scale in all matrix products; 0 if they have no blocks.
        layers: the layers of a paged cache.
    """

    graph: DecoderGraph
    int8_cache: bool
    block_size: int
    layers: list[PagedLayer]


def _facts(path: Path, config: RunnerConfig) -> _Facts:
    """Read a lowered graph's facts."""
    try:
        model = read_onnx(path)
    except Exception as error:  # protobuf and onnx_ir raise many kinds for a damaged file
        raise GraphError(f"{path} is not a readable ONNX file: {error}") from error
    inputs = {str(value.name): value for value in model.graph.inputs}
    missing = sorted(set(TABLES) - inputs.keys())
    if missing and INT8_CACHE not in model.metadata_props:
        raise GraphError(
            f"{path} is not lowered to a paged cache (no input '{missing[0]}'); lower it with "
            "provider.passes()"
        )
    known = int(model.metadata_props[CONTEXT_LENGTH])
    if config.context_length is not None and config.context_length > known:
        raise UsageError(f"context length {config.context_length} exceeds the {known} of {path}")
    outputs = {value.name: value for value in model.graph.outputs}
    vocab_size = known_size(static_size(outputs.get(LOGITS), -1), str(path))
    num_tokens = model.metadata_props.get(NUM_TOKENS)
    hidden_size = static_size(inputs.get(HIDDEN_STATES), -1)
    int8_cache = model.metadata_props.get(INT8_CACHE) == "1"
    length = config.context_length or known
    graph = DecoderGraph(
        inputs=frozenset(inputs),
        caches=_explicit_caches(inputs, is_past) if missing else {},
        vocab_size=vocab_size,
        context_length=length,
        hidden_size=hidden_size,
        hidden_width=static_size(outputs.get(LAST_HIDDEN_STATE), -1) or 0,
        num_tokens=None if num_tokens is None else int(num_tokens),
        top_logits=static_size(outputs.get(TOP_LOGITS), -1) or 0,
        states={
            name: tuple(static_size(value, axis) or 0 for axis in range(1, len(value.shape or ())))
            for name, value in inputs.items()
            if is_past_state(name)
        },
        lora_modules=lora_modules({name: list(value.shape or ()) for name, value in inputs.items()}),
        encoder_caches=_explicit_caches(inputs, is_past_encoder),
        encoder_width=static_size(inputs.get(ENCODER_STATES), -1) or 0,
        encoder_rows=int(model.metadata_props.get(ENCODER_ROWS, 0)),
        metadata=model.metadata_props,
    )
    weights = int(model.metadata_props.get(COMMON_BLOCK_SIZE, 0))
    return _Facts(graph, int8_cache, weights, paged_layers(model))


def _explicit_caches(inputs: Mapping[str, ir.Value], kind: Callable[[str], bool]) -> dict[str, KVSpec]:
    return {
        name: KVSpec(static_size(value, 1) or 0, static_size(value, 3) or 0, value.dtype.numpy())
        for name, value in inputs.items()
        if kind(name) and value.dtype is not None
    }


@dataclass(frozen=True, slots=True)
class _CacheForm:
    """How a compiled model stores its paged KV.

    Args:
        shapes: of a block of each cache, by the name of its input: heads, tokens, size of a head.
        types: OpenVINO's types of the elements, by the same names.
    """

    shapes: Mapping[str, list[int]]
    types: Mapping[str, Any]

    @property
    def block_size(self) -> int:
        """The number of tokens of a block."""
        return next(shape[1] for name, shape in self.shapes.items() if name.endswith(".value"))

    @property
    def block_bytes(self) -> int:
        """The size of a block of all caches together."""
        return sum(map(self.cache_bytes, self.shapes))

    def cache_bytes(self, name: str) -> int:
        """Return the size of a block of one cache."""
        return math.prod(self.shapes[name]) * int(self.types[name].bitwidth) // 8

    @property
    def layout(self) -> str:
        """A text that changes whenever the form does."""
        return "; ".join(f"{name} {self.types[name]} blocks {shape}" for name, shape in self.shapes.items())


def _groups(form: _CacheForm, layers: Sequence[PagedLayer]) -> KVGroups:
    """Return the groups of layers. All share one block table, so KV is freed only if all have a window."""
    readers = [(name, layer.window) for layer in layers for name in (layer.key, layer.value)]
    common = widest(window for _, window in readers)
    if common:
        return window_groups([(common, form.block_bytes // form.block_size)], TRIM_STEP)
    sizes = {name: form.cache_bytes(name) // form.block_size for name in form.shapes}
    windows = {name: widest(window for reader, window in readers if reader == name) for name in sizes}
    return window_groups([(windows[name], size) for name, size in sizes.items()], step=0)


def _cache_form(compiled: Any) -> _CacheForm:
    """Return the form of the caches of a compiled model, whose device may have chosen it."""
    ports = {port.get_any_name(): port for port in compiled.inputs}
    caches = {name: port for name, port in ports.items() if is_past(name)}
    return _CacheForm(
        shapes={
            name: [size.get_length() for size in list(port.partial_shape)[1:]]
            for name, port in caches.items()
        },
        types={name: port.element_type for name, port in caches.items()},
    )


def _cache_properties(settings: Mapping[str, Any], inference: str, int8_cache: bool) -> dict[str, str]:
    """Return OpenVINO's properties of the KV cache.

    Args:
        settings: all options of the provider.
        inference: the precision of the inference.
        int8_cache: whether the model was calibrated for an int8 KV cache.
    """
    mode, precision = settings["kv_cache"], settings["kv_cache_precision"]
    if not precision:
        int8 = mode == "int8" or (mode == "auto" and int8_cache)
        precision = "u8" if int8 else inference
    if precision == _DEVICES_CHOICE:
        return {}
    # OpenVINO's default has scales per channel and block, so every new token rounds its block again.
    by_token = {"KEY_CACHE_QUANT_MODE": "BY_TOKEN"} if precision == "u8" else {}
    return {"KV_CACHE_PRECISION": precision, **by_token}


def _num_blocks(limit: int, block_bytes: int, wanted: int) -> int:
    """Return the number of blocks: what all slots need, limited by ``limit`` or half of the free memory."""
    if not limit:
        limit = machine.memory()[1] // 2
    blocks = min(wanted, limit // block_bytes)
    if blocks < 1:
        raise ProviderRuntimeError(
            f"a KV pool of {limit} bytes cannot hold one block of {block_bytes} bytes; raise kv_cache_bytes"
        )
    return blocks


PROVIDER = OpenVinoProvider
