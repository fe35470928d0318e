"""Plan how a model runs on a machine: what fits, which form of weights to take, and the speed to expect.

Nothing but headers is read: the graph is lowered for the CPU in each form of its weights, and the sizes of
the result are counted.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ...contract import SLIDING_WINDOWS, is_past, is_past_state
from ...errors import UsageError
from ...exporter.hub import download_headers, is_hub_id
from ...exporter.model_names import named_model
from ...graph_opt.lower.paged_kv import CACHE_TYPE, row_bytes, width_of
from ...progress import Progress, phase
from ...providers import get_provider
from ...providers.base import RunnerConfig
from ...providers.host import machine
from ...providers.kv_groups import TRIM_STEP
from ...providers.native.library import find_library
from ...providers.native.speed import ProductForm, seconds_per_byte
from ...records import dataclass
from ...reports import Report, human_bytes
from ...storage.scratch import scratch_folder
from ..models.lowering import with_context
from ..models.model_source import SourceModel, resolve_model
from ..types.arguments import checked_arguments

if TYPE_CHECKING:
    import onnx_ir as ir

DEFAULT_CONTEXT = 8192  # tokens, if the model's own context is longer
MOST_BATCH = 4096
FORMS = ("int8-fast", "int4-fast")  # of float weights, besides the float ones: the most accurate first
STORED = "as stored"
# Bytes of the process itself: libraries, tokenizer, activations. 155 to 255 MB are measured (docs/models.md).
_PROCESS = 230_000_000
_BLOCK = 32  # positions that KV grows by
_WIDE_KV, _NARROW_KV = "float32", "int8"


@dataclass(frozen=True, slots=True)
class PlannedForm:
    """One form of a model's weights on the machine.

    Attributes:
        form: ``as stored``, or a method of ``--quantize``.
        kv_cache: the type of keys and values; int8 if another does not fit.
        weight_bytes: bytes of all weights and tables of the decoder.
        encoder_bytes: bytes of the weights that pictures or sound are encoded with; 0 for a model that reads
            text only.
        step_bytes: bytes of weights that a decoding step reads.
        kv_bytes_per_token: bytes of a token's keys and values in all layers.
        sequence_bytes: bytes of KV and states of one sequence of the whole context.
        total_bytes: weights of both, all sequences and the process.
        fits: whether the total is at most the memory.
        most_sequences: sequences of the whole context that fit together.
        tokens_per_second: expected of all sequences together, with the whole context cached.
    """

    form: str
    kv_cache: str
    weight_bytes: int
    encoder_bytes: int
    step_bytes: int
    kv_bytes_per_token: int
    sequence_bytes: int
    total_bytes: int
    fits: bool
    most_sequences: int
    tokens_per_second: float


@dataclass(frozen=True, kw_only=True)
class PlanReport(Report):
    """The result of ``plan``.

    Attributes:
        model: the name of the model.
        parameters: their number.
        context_length: tokens of a sequence.
        batch: sequences at once.
        goal: ``quality`` or ``speed``.
        memory_bytes: the memory to fit into.
        bandwidth_gb_s: of the memory, in 1e9 bytes/s.
        measured: whether speeds follow from products that were measured here; else from the bandwidth.
        forms: the forms of the weights, the most accurate first.
        choice: the form to take; None if none fits.
        reason: why.
        command: how to run it; empty if none fits.
    """

    model: str
    parameters: int
    context_length: int
    batch: int
    goal: str
    memory_bytes: int
    bandwidth_gb_s: float
    measured: bool
    forms: tuple[PlannedForm, ...]
    choice: str | None
    reason: str
    command: str

    def to_dict(self) -> dict[str, Any]:
        """Return all values, as types that JSON supports."""
        return asdict(self)

    def rows(self) -> list[tuple[str, str]]:
        """Return the lines for people, each a label and a text."""
        how = "measured here" if self.measured else "of its bandwidth alone: an upper bound"
        sizes = f"{self.batch} x {self.context_length} tokens"
        rows = [
            ("model", f"{self.model}, {self.parameters / 1e6:.1f} M parameters"),
            ("machine", f"{human_bytes(self.memory_bytes)}, {self.bandwidth_gb_s:.1f} GB/s, speeds {how}"),
            *((form.form, _line(form)) for form in self.forms),
            ("choice", f"{self.choice or 'none'} for {sizes}: {self.reason}"),
        ]
        return [*rows, ("run", self.command)] if self.command else rows


def _line(form: PlannedForm) -> str:
    fits = f"fits, up to {form.most_sequences} sequences" if form.fits else "does not fit"
    beside = f", {human_bytes(form.encoder_bytes)} of its encoder" if form.encoder_bytes else ""
    return (
        f"{human_bytes(form.weight_bytes)} of weights{beside}, {form.kv_cache} KV of "
        f"{human_bytes(form.kv_bytes_per_token)} a token, {human_bytes(form.total_bytes)} in all: {fits}; "
        f"about {form.tokens_per_second:.3g} tokens/s"
    )


@dataclass(frozen=True, slots=True)
class Cache:
    """Keys or values of a layer.

    Args:
        heads: KV heads.
        row: bytes of a head's row.
        window: positions that a token sees; 0 for all.
    """

    heads: int
    row: int
    window: int

    def size(self, tokens: int) -> int:
        """Return the bytes of so many positions, of which those behind the window are freed."""
        kept = min(tokens, self.window + TRIM_STEP) if self.window else tokens
        return self.heads * self.row * (-(-kept // _BLOCK) * _BLOCK)

    def read(self, tokens: int) -> int:
        """Return the bytes that a token reads if so many positions are cached."""
        return self.heads * self.row * (min(tokens, self.window) if self.window else tokens)


@dataclass(frozen=True, slots=True)
class Loads:
    """What a lowered graph holds and reads.

    Args:
        weights: bytes of all weights of the decoder.
        encoders: bytes of the weights of what it sees or hears with.
        products: bytes that a step reads, by the form of the tiles.
        others: bytes of other weights that a step reads.
        caches: keys and values of the layers.
        states: bytes of the recurrent states of a sequence.
        kv_cache: the type of the caches.
    """

    weights: int
    encoders: int
    products: Mapping[ProductForm, int]
    others: int
    caches: Sequence[Cache]
    states: int
    kv_cache: str

    @classmethod
    def of(cls, model: ir.Model, encoders: Sequence[ir.Model]) -> Loads:
        """Count the sizes of graphs for the CPU; products of the decoder's are nodes of their own."""
        from ...graph_opt.graph.graph_facts import bytes_per_step, initializers

        products: Counter[ProductForm] = Counter()
        for node in model.graph:
            if node.op_type == "QuantizedLinear" and node.inputs[1] is not None:
                tiles, names = node.inputs[1].const_value, ProductForm.__dataclass_fields__
                form = ProductForm(**{name: node.attributes[name].as_int() for name in names})
                products[form] += 0 if tiles is None else tiles.nbytes
        windows = json.loads(model.metadata_props.get(SLIDING_WINDOWS, "{}"))
        pasts = [value for value in model.graph.inputs if is_past(str(value.name))]
        states = [value for value in model.graph.inputs if is_past_state(str(value.name))]
        return cls(
            weights=sum(tensor.nbytes for tensor in initializers(model)),
            encoders=sum(tensor.nbytes for encoder in encoders for tensor in initializers(encoder)),
            products=products,
            others=bytes_per_step(model) - products.total(),
            caches=[_cache(value, windows.get(value.name, 0)) for value in pasts],
            states=sum(4 * math.prod(_sizes(value)[1:]) for value in states),
            kv_cache=model.metadata_props.get(CACHE_TYPE, _WIDE_KV),
        )

    def with_kv(self, kind: str) -> Loads:
        """Return the same with another type of caches."""
        rows = [row_bytes(width_of(cache.row, self.kv_cache), kind) for cache in self.caches]
        caches = [Cache(cache.heads, row, cache.window) for cache, row in zip(self.caches, rows, strict=True)]
        return replace(self, caches=caches, kv_cache=kind)

    @property
    def step_bytes(self) -> int:
        """Bytes of weights that a decoding step reads."""
        return sum(self.products.values()) + self.others

    def sequence_bytes(self, tokens: int) -> int:
        """Bytes of a sequence of so many tokens."""
        return self.states + sum(cache.size(tokens) for cache in self.caches)

    def sequence_reads(self, tokens: int) -> int:
        """Bytes that a step reads and writes for a sequence of which so many tokens are cached."""
        return 2 * self.states + sum(cache.read(tokens) for cache in self.caches)


def _sizes(value: ir.Value) -> list[int]:
    """Return the axes of a value, 1 for those without a number."""
    return [axis if isinstance(axis, int) else 1 for axis in value.shape or ()]


def _cache(value: ir.Value, window: int) -> Cache:
    sizes, bits = _sizes(value), 32 if value.dtype is None else value.dtype.bitwidth
    return Cache(sizes[1], sizes[3] * bits // 8, window)


@dataclass(frozen=True, slots=True)
class Speed:
    """How fast the machine reads.

    Args:
        bandwidth: of the memory, in bytes/s.
        threads: threads whose products are measured; 0 for the bandwidth alone.
    """

    bandwidth: float
    threads: int

    def tokens_per_second(self, loads: Loads, batch: int, context: int) -> float:
        """Return the expected speed of all sequences together."""
        seconds = (loads.others + batch * loads.sequence_reads(context)) / self.bandwidth
        library = find_library() if self.threads else None
        for form, size in loads.products.items():
            if library is None:
                seconds += size / self.bandwidth
            else:
                seconds += size * seconds_per_byte(library, form, batch, self.threads)
        return batch / seconds


@checked_arguments
def plan(
    model: str | Path,
    *,
    memory: int | None = None,
    bandwidth: float | None = None,
    context_length: int | None = None,
    rope_scaling: str | None = None,
    batch: int = 1,
    goal: Literal["quality", "speed"] = "quality",
    progress: Progress | None = None,
) -> PlanReport:
    """Plan how a model runs on the CPU, from its headers.

    Args:
        model: a package, a checkpoint folder, a GGUF file, ``demo``, or a hub id or short name, of which only
            headers are downloaded.
        memory: bytes of the machine's memory; None is this machine's.
        bandwidth: of its memory in bytes/s; None measures this machine, and the products of its kernels.
        context_length: tokens of a sequence; None is the model's own, at most 8,192.
        rope_scaling: extend the context, see ``ModelConfig``.
        batch: sequences at once.
        goal: ``quality`` takes the most accurate form that fits, of those that are quantized; ``speed`` the
            one that reads the fewest bytes a step.
        progress: called for each form.

    Raises:
        UsageError: a number is out of range, or the model is lowered already or no decoder.
        CarryallError: the model cannot be read.
    """
    _check(memory, bandwidth, batch)
    with _headers(model) as place:
        files = resolve_model(place, rope_scaling=rope_scaling)
        if files.lowered or files.facts.sizes is None:
            reason = "was lowered for a target" if files.lowered else "is not a decoder with a KV cache"
            raise UsageError(f"{model} {reason}; plan takes a package, a checkpoint folder or a GGUF file")
        longest = DEFAULT_CONTEXT if files.context is None else min(files.context.default, DEFAULT_CONTEXT)
        wanted = longest if context_length is None else context_length
        config = with_context(RunnerConfig(context_length=wanted), files)
        speed = _speed(bandwidth)
        size = machine.memory()[0] if memory is None else memory
        context = config.context_length or longest
        names = _forms(files)
        tell, forms = phase(progress, "plan"), []
        for index, name in enumerate(names):
            loads = _loads(files, name, config)
            forms.append(_planned(name, loads, size, speed, batch, context))
            tell(index + 1, len(names), name)
        choice = _choice(forms, goal)
        return PlanReport(
            model=str(model),
            parameters=files.summary.parameters,
            context_length=context,
            batch=batch,
            goal=goal,
            memory_bytes=size,
            bandwidth_gb_s=round(speed.bandwidth / 1e9, 2),
            measured=bool(speed.threads),
            forms=tuple(forms),
            choice=None if choice is None else choice.form,
            reason=_reason(forms, choice, goal, size),
            command="" if choice is None else _command(str(model), choice, forms, rope_scaling),
        )


@contextlib.contextmanager
def _headers(model: str | Path) -> Iterator[str | Path]:
    """Yield a model on this disk: of one that is on the hub only, the headers, which are deleted behind."""
    known = named_model(str(model))
    hub_id = known.hub if known is not None else str(model)
    if isinstance(model, Path) or Path(model).exists() or not is_hub_id(hub_id):
        yield model
        return
    with scratch_folder() as folder:
        yield download_headers(hub_id, folder, machine.memory()[0])


def _check(memory: int | None, bandwidth: float | None, batch: int) -> None:
    if memory is not None and memory < 1:
        raise UsageError(f"memory must be at least 1 byte, not {memory}")
    if bandwidth is not None and not 0 < bandwidth < math.inf:
        raise UsageError(f"bandwidth must be a positive number of bytes/s, not {bandwidth}")
    if not 1 <= batch <= MOST_BATCH:
        raise UsageError(f"batch must be between 1 and {MOST_BATCH}, not {batch}")


def _speed(bandwidth: float | None) -> Speed:
    if bandwidth is not None:
        return Speed(bandwidth, 0)
    threads = machine.usable_cores()
    return Speed(machine.memory_bandwidth(threads) * 1e9, threads)


def _forms(files: SourceModel) -> list[str]:
    from ...graph_opt.graph.graph_facts import has_quantized_weights

    is_file = files.package is None and files.model_path.suffix == ".onnx"  # which runs as it is
    fixed = is_file or files.quantization is not None or has_quantized_weights(files.graph.graph)
    return [STORED] if fixed else [STORED, *FORMS]


def _loads(files: SourceModel, form: str, config: RunnerConfig) -> Loads:
    from ...graph_opt.graph.graph_facts import has_quantized_weights
    from ...graph_opt.lower.chain.chain_pass import ChainPass
    from ...graph_opt.pipeline.pipeline import run
    from ...graph_opt.quantize.formats.weight_only import WeightOnlyQuantizationPass
    from ...graph_opt.quantize.recipe import QuantizationRecipe
    from ...graph_opt.quantize.search.outliers import sensitive_weights
    from ..models.lowered_graph import lower

    provider = get_provider("cpu")
    passes = [] if form == STORED else QuantizationRecipe(form).passes()[0]
    for quantizing in passes:
        if isinstance(quantizing, WeightOnlyQuantizationPass) and quantizing.promote is not None:
            # Which layers get 8 bits depends on their content, how many does not: no weight is read.
            quantizing.promote = partial(sensitive_weights, peak_of=lambda _: 0.0)
    options = provider.resolve_options(config)
    quantized = form != STORED or has_quantized_weights(files.graph.graph)
    encoders = [
        run(encoder, provider.tower_passes(options, encoder, quantized=quantized))[0]
        for encoder in files.encoders()
    ]
    # A chain hides the forms of its products.
    return Loads.of(lower(files, provider, options, passes, without=ChainPass), encoders)


def _planned(name: str, loads: Loads, memory: int, speed: Speed, batch: int, context: int) -> PlannedForm:
    def total(loads: Loads) -> int:
        return loads.weights + loads.encoders + batch * loads.sequence_bytes(context) + _PROCESS

    if total(loads) > memory and loads.kv_cache != _NARROW_KV and find_library() is not None:
        loads = loads.with_kv(_NARROW_KV)
    room = memory - loads.weights - loads.encoders - _PROCESS
    return PlannedForm(
        form=name,
        kv_cache=loads.kv_cache,
        weight_bytes=loads.weights,
        encoder_bytes=loads.encoders,
        step_bytes=loads.step_bytes,
        kv_bytes_per_token=sum(cache.heads * cache.row for cache in loads.caches),
        sequence_bytes=loads.sequence_bytes(context),
        total_bytes=total(loads),
        fits=total(loads) <= memory,
        most_sequences=max(0, room // max(1, loads.sequence_bytes(context))),
        tokens_per_second=speed.tokens_per_second(loads, batch, context),
    )


def _choice(forms: Sequence[PlannedForm], goal: str) -> PlannedForm | None:
    """Return the form to take: of float models a quantized one, whose results hardly differ with 8 bits."""
    fitting = [form for form in forms if form.fits]
    quantized = [form for form in fitting if form.form != STORED] or fitting
    if goal == "speed":
        return min(quantized, key=lambda form: form.step_bytes, default=None)
    return next(iter(quantized), None)


def _reason(forms: Sequence[PlannedForm], choice: PlannedForm | None, goal: str, memory: int) -> str:
    if choice is None:
        least = min(forms, key=lambda form: form.total_bytes)
        return (
            f"even {least.form} takes {human_bytes(least.total_bytes)} of {human_bytes(memory)}; take fewer "
            "or shorter sequences, or a smaller model"
        )
    if len(forms) == 1:
        return "it runs in this form only; other forms need the float checkpoint"
    if goal == "speed":
        return "it reads the fewest bytes a step of the forms that fit"
    if choice.form == "int4-fast":
        return "8 bits do not fit; the method int4 has its size and is calibrated, so more accurate"
    return "the most accurate quantized form that fits; it reads a quarter of the bytes of float32"


def _command(name: str, choice: PlannedForm, forms: Sequence[PlannedForm], rope_scaling: str | None) -> str:
    words = ["carryall run", name]
    if choice.form != STORED:
        words.append(f"--quantize {choice.form}")
    if choice.kv_cache == _NARROW_KV and len(forms) > 1 and choice.form != "int4-fast":
        words.append(f"--kv-cache-dtype {_NARROW_KV}")
    if rope_scaling is not None:
        words.append(f"--rope-scaling {rope_scaling}")
    return " ".join(words)
