"""The interfaces of providers and of the runners that they create.

A provider states whether it is available (and if not, why), which passes lower a portable graph for it, how
an ONNX session is opened on it, and how sequences run on it. Callers use the object and never branch on its
name.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from ..errors import ProviderRuntimeError
from ..options import NoOptions, checked
from ..records import dataclass
from .kv_groups import EncoderKV, KVGroups, StateKV

if TYPE_CHECKING:
    import onnx_ir as ir

    from .placement import Placement


Result = TypeVar("Result")
# Of a LoRA adapter, by module: A [rank, in] and scale * B^T [rank, out].
LoraMatrices = Mapping[str, tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerConfig:
    """Options of a runner.

    Args:
        max_slots: maximum number of sequences that hold KV at once.
        context_length: maximum tokens of a sequence; None takes the model's own.
        num_threads: number of CPU threads; 0 lets the provider choose.
        max_loras: maximum number of resident LoRA adapters, for a graph that takes them.
        max_lora_rank: maximum rank of an adapter.
        options: fields of ``Provider.options``, checked by the provider.
        on_fallback: allows nodes that the target cannot run on the CPU, and is called with the placement if
            there are any; None makes them an error.
    """

    max_slots: int = 32
    context_length: int | None = None
    num_threads: int = 0
    max_loras: int = 0
    max_lora_rank: int = 16
    options: dict[str, Any] = field(default_factory=dict)
    on_fallback: Callable[[Placement], None] | None = None


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """The memory of a device.

    Args:
        device: the name of the device: ``cuda:0``.
        used: bytes in use by all processes.
        total: bytes of the device.
    """

    device: str
    used: int
    total: int


STEP_TOKENS = 512  # of a step, where a runner has no other preference


@dataclass(frozen=True, slots=True)
class RunnerInfo:
    """Sizes of a loaded model, and abilities of its runner."""

    vocab_size: int  # or the hidden size, if the graph returns hidden states as its logits
    context_length: int
    max_slots: int
    kv_groups: KVGroups  # what a sequence's memory consists of
    batched_multi_token: bool  # whether one run takes several rows with more than one token on their caches
    # Dtypes and shapes of what ``read_kv`` and ``read_state`` return; empty if they cannot be read.
    kv_layout: str = ""
    state_arrays: int = 0  # number of arrays of ``read_state``; 0 if no layer has a state
    top_logits: int = 0  # number of ``BestLogits`` that the runner selects on the device; 0 is none
    evicts_kv: bool = False  # whether ``evict_kv`` is supported
    kv_tokens: int | None = None  # maximum tokens of all slots together; None is no limit
    embedding_size: int = 0  # columns of ``Row.last_hidden_states`` behind the last norm; 0 if there are none
    layer_states: int = 0  # further columns of it, of states that enter layers
    num_tokens: int | None = None  # rows of the embedding table; None if unknown, or if there is none
    max_loras: int = 0  # number of places for LoRA adapters; 0 if the graph takes none
    max_lora_rank: int = 0
    # Number of inputs and outputs of each linear layer that an adapter can change, by module.
    lora_modules: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    image_width: int = 0  # columns of ``Row.image_states``; 0 if the graph takes no pictures
    image_ahead: bool = False  # whether ``Row.image_ahead`` is taken: tokens of a picture see all of it
    rope_axes: int = 0  # rows of ``Row.rope_positions``; 0 if positions have one axis
    encoder_width: int = 0  # columns of ``EncoderOutput.states``; 0 without cross-attention
    encoder_rows: int = 0  # the most rows of an ``EncoderOutput``
    on_device: bool = False  # whether the model runs on a device and leaves the host's cores free
    step_tokens: int = STEP_TOKENS  # more tokens in a step hardly save time
    steps_ahead: int = 0  # 1 if ``submit`` takes a step while the step before it is in flight

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of KV that one more token takes in all layers."""
        return sum(group.bytes_per_token for group in self.kv_groups)

    @property
    def hidden_width(self) -> int:
        """Columns of ``Row.last_hidden_states``."""
        return self.embedding_size + self.layer_states

    @property
    def state_bytes(self) -> int:
        """Bytes of a state in all layers that have one; 0 if no layer has."""
        return sum(group.fixed_bytes for group in self.kv_groups if isinstance(group, StateKV))

    @property
    def encoder_bytes(self) -> int:
        """The most bytes that the keys and values of an encoder's rows take in all layers; 0 without them."""
        return sum(group.fixed_bytes for group in self.kv_groups if isinstance(group, EncoderKV))

    @property
    def sliding_window(self) -> int:
        """The largest window of any layer; 0 is none."""
        return max((group.reach for group in self.kv_groups), default=0)

    @property
    def trim_step(self) -> int:
        """Tokens behind windows that ``trim`` frees at a time, a multiple of 64; 0 if it cannot free any."""
        return max((group.trim_step for group in self.kv_groups), default=0)


class Draw(NamedTuple):
    """How a runner draws the token after a row's last logits, to feed it to the next step.

    The host draws again from the logits, and its token counts: the runner may round differently.

    Args:
        uniform: in [0, 1): the share of the kept probability, from the most likely token on, at which it is.
        temperature: divides the logits; 0 takes the most likely token.
        top_k: see ``SamplingParams``; 0 keeps all.
        top_p: see ``SamplingParams``.
        min_p: see ``SamplingParams``.
    """

    uniform: float
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0


@dataclass(frozen=True, slots=True, eq=False)
class EncoderOutput:
    """What an encoder made of a picture or a sound, to which cross-attention attends.

    Args:
        key: 32 bytes that tell outputs apart; slots with equal keys share their keys and values.
        states: [rows, info.encoder_width].
        num_tokens: tokens of a prompt that the encoder read, each row of a picture being one; 0 for sound.
    """

    key: bytes
    states: npt.NDArray[np.float32]
    num_tokens: int = 0


@dataclass(slots=True)
class Row:
    """One sequence's part of a step: run ``tokens`` after ``start`` cached tokens.

    Afterwards the slot holds KV of positions [0, start + len(tokens)). Layers with a state (``StateKV``) have
    it after the last token, and after each of ``checkpoints``; so ``start`` must be the slot's length, one
    of its checkpoints, or a length within the proposals of its last row.
    """

    slot: int
    tokens: npt.NDArray[np.int64]  # [n], n >= 1
    start: int
    num_logits: int = 1  # return logits of this many last tokens, from 0 to n
    # [n, hidden_size]: output of the earlier layers, if the graph has only later ones.
    hidden_states: npt.NDArray[np.float32] | None = None
    # [n, info.hidden_width]: if given, the run writes the last hidden states into it.
    last_hidden_states: npt.NDArray[np.float32] | None = None
    # [states, info.image_width]: outputs of ``vision.onnx``, for the tokens of pictures in this row.
    image_states: npt.NDArray[np.float32] | None = None
    # [m], m <= n: the state that replaces the embedding of each of the first m tokens, -1 for none.
    image_rows: npt.NDArray[np.int64] | None = None
    # [m], m <= n: how many tokens behind it each of the first m tokens sees too, all of them in this row.
    image_ahead: npt.NDArray[np.int32] | None = None
    # [info.rope_axes, m], 1 <= m <= n: positions of the first m tokens in time, height and width. Others go
    # on from the largest of the last; without it, all are those in the text.
    rope_positions: npt.NDArray[np.int64] | None = None
    encoder: EncoderOutput | None = (
        None  # with ``info.encoder_width``; a slot keeps that of its row at start 0
    )
    lora: int | None = None  # the place of the LoRA adapter, see ``Runner.load_lora``; None is none
    # Lengths at which states are kept, below start + len(tokens): of the slot's checkpoints and its former
    # length those that stay, and lengths within the row. Others are dropped.
    checkpoints: Sequence[int] = ()
    # How many tokens at the end are proposals: the slot's next row may start after any of them, and before
    # them, even if layers have a state.
    proposed: int = 0
    best_suffice: bool = False  # the largest logits may be enough; num_logits is 1
    draw: Draw | None = None  # draw the next token, for a row of the next step with ``source``
    # The row of the step before, which is in flight, whose drawn token is the only token of this row.
    # ``tokens`` is then a placeholder; ``Pending.wait`` writes the token that was run into it.
    source: int | None = None


@dataclass(frozen=True, slots=True)
class BestLogits:
    """The k largest logits of one position; all logits stay on the device.

    Args:
        token_ids: [k], in descending order of logits; equal logits in order of token id.
        logits: [k].
        logsumexp: over all logits; not finite if one of them is NaN.
        vocab_size: number of all logits.
        whole: returns all logits [vocab_size]; valid until the runner's next step.
        exact: whether ``logsumexp`` is that of all logits, and not an upper bound of it.
    """

    token_ids: npt.NDArray[np.int64]
    logits: npt.NDArray[np.float32]
    logsumexp: float
    vocab_size: int
    whole: Callable[[], npt.NDArray[np.float32]]
    exact: bool = True


@dataclass(frozen=True, slots=True)
class KVEviction:
    """How much of a sequence's KV an eviction keeps.

    Args:
        kept: total number of tokens; each KV head of each layer chooses its own.
        sinks: number of first tokens among them.
        recent: number of last tokens among them, at least ``RunnerInfo.sliding_window``.
    """

    kept: int
    sinks: int
    recent: int


@dataclass(frozen=True, slots=True)
class Pending(Generic[Result]):
    """A step that was given to a runner.

    Args:
        wait: returns the result when the step has been computed; to be called once.
    """

    wait: Callable[[], Result]


class Runner(abc.ABC):
    """Runs rows of tokens and owns their KV cache. Not thread-safe: one thread, the engine's, uses it.

    ``info`` states the abilities. A method of an ability that a runner lacks raises ``ProviderRuntimeError``.
    """

    info: RunnerInfo

    @abc.abstractmethod
    def forward(self, rows: Sequence[Row]) -> list[npt.NDArray[np.float32]]:
        """Run one step.

        Returns:
            Per row, logits [num_logits, vocab_size]; a view that the next step may overwrite.

        Raises:
            ProviderRuntimeError: the run failed; no row of it counts as computed.
        """

    def forward_best(self, rows: Sequence[Row]) -> list[npt.NDArray[np.float32] | BestLogits]:
        """Run one step as ``forward`` does, but download only the largest logits of some rows.

        Only if ``info.top_logits`` is not 0.

        Returns:
            Per row with ``best_suffice``, its ``info.top_logits`` largest logits; per other row, its logits.
            Views that the next step may overwrite.

        Raises:
            ProviderRuntimeError: the run failed. ``BestLogits.whole`` raises it if the download failed.
        """
        return list(self.forward(rows))

    def submit(self, rows: Sequence[Row]) -> Pending[list[npt.NDArray[np.float32] | BestLogits]]:
        """Begin one step, with the largest logits of some rows where the runner selects them.

        By default the step is computed at once. With ``info.steps_ahead``, one more step may be submitted
        before the first is waited for; steps run in order. While a step is in flight, the only other call is
        ``release`` of a slot that it does not use. If a step fails, so does the one submitted after it. The
        result of a step stays valid until the second next one is submitted.

        Returns:
            The step, whose ``wait`` returns what ``forward_best`` does.

        Raises:
            ProviderRuntimeError: as for ``forward``; ``wait`` may raise it too.
        """
        results: list[npt.NDArray[np.float32] | BestLogits]
        results = self.forward_best(rows) if self.info.top_logits else [*self.forward(rows)]
        return Pending(lambda: results)

    @property
    @abc.abstractmethod
    def kv_bytes(self) -> int:
        """Memory of the KV cache now, in bytes; shared blocks count once. Any thread may read it."""

    @abc.abstractmethod
    def copy_prefix(self, source: int, target: int, length: int) -> None:
        """Copy KV of positions [0, length), and the states kept there, from slot ``source`` to ``target``."""

    @abc.abstractmethod
    def release(self, slot: int) -> None:
        """Free the slot's memory. Its content is lost."""

    @abc.abstractmethod
    def close(self) -> None:
        """Free all resources. The runner cannot be used afterwards."""

    def read_kv(self, slot: int, start: int, length: int) -> list[npt.NDArray[Any]]:
        """Return KV of [start, start + length), for ``write_kv`` of a runner with equal ``kv_layout``.

        Only if ``info.kv_layout`` is not empty.

        Args:
            slot: the slot.
            start: a multiple of 64.
            length: number of positions.

        Returns:
            Arrays on the host: views, which the next call of any method may overwrite, or arrays with memory
            of their own, which the runner does not use again.

        Raises:
            ProviderRuntimeError: the slot holds fewer positions, or they cannot be read.
        """
        raise self._unable("read KV")

    def write_kv(self, slot: int, start: int, length: int, parts: Sequence[npt.NDArray[Any]]) -> None:
        """Write KV of positions [start, start + length) into a slot that holds at least ``start`` positions.

        Only if ``info.kv_layout`` is not empty.

        Args:
            slot: the slot.
            start: as for ``read_kv``.
            length: as for ``read_kv``.
            parts: the result of ``read_kv``.

        Raises:
            ProviderRuntimeError: the KV does not fit; the slot then holds ``start`` positions.
        """
        raise self._unable("write KV")

    def read_state(self, slot: int, length: int) -> list[npt.NDArray[Any]]:
        """Return the recurrent state after ``length`` tokens, for ``write_state`` of an equal ``kv_layout``.

        Only if ``info.kv_layout`` is not empty and ``info.state_arrays`` is not 0.

        Args:
            slot: the slot.
            length: the slot's length, or one of its checkpoints.

        Returns:
            ``info.state_arrays`` arrays on the host, as those of ``read_kv``.

        Raises:
            ProviderRuntimeError: the slot has no state there, or it cannot be read.
        """
        raise self._unable("read states")

    def write_state(self, slot: int, length: int, parts: Sequence[npt.NDArray[Any]]) -> None:
        """Write the state after ``length`` tokens into a slot that holds the KV of as many.

        Other states of the slot stay. Only as for ``read_state``.

        Args:
            slot: the slot.
            length: number of tokens that the state sums up.
            parts: the result of ``read_state``.

        Raises:
            ProviderRuntimeError: the state does not fit, or there is no memory for it; the slot lacks it.
        """
        raise self._unable("write states")

    def take_lost(self) -> set[int]:
        """Return the slots whose KV was lost since the last call, because a process or device failed."""
        return set()

    def trim(self, slot: int, length: int) -> None:
        """Free what the groups of layers free behind ``length`` (``KVGroup.freed``).

        Afterwards no row may start before ``length``, no shorter prefix may be copied, and no KV before it
        may be read or written. Only if ``info.trim_step`` is not 0.

        Args:
            slot: the slot.
            length: a multiple of ``info.trim_step``, at most what the slot holds.
        """
        raise self._unable("free KV behind windows")

    def evict_kv(self, slot: int, length: int, eviction: KVEviction) -> None:
        """Evict KV of positions [0, length) except the most important tokens.

        Positions do not change: later rows start as without the eviction, but not before ``length``. Only if
        ``info.evicts_kv`` is set.

        Raises:
            ProviderRuntimeError: the slot holds fewer positions, or less KV than the eviction keeps.
        """
        raise self._unable("evict tokens from KV")

    def load_lora(self, place: int, matrices: LoraMatrices) -> None:
        """Load a LoRA adapter into a place, instead of the one that it holds.

        Only if ``info.max_loras`` is not 0.

        Args:
            place: from 0 to ``info.max_loras`` - 1.
            matrices: by module, A [rank, in] and scale * B^T [rank, out]; modules of ``info.lora_modules``.

        Raises:
            ProviderRuntimeError: the matrices do not fit; nothing was changed.
        """
        raise self._unable("take LoRA adapters")

    def _unable(self, what: str) -> ProviderRuntimeError:
        return ProviderRuntimeError(f"this runner ({type(self).__name__}) cannot {what}")


class Provider(abc.ABC):
    """One target. See ``docs/adding_a_provider.md``."""

    name: str
    execution_provider: str | None = (
        None  # ONNX Runtime's name, if it is an execution provider of ONNX Runtime
    )
    takes_argument: bool = False  # whether NAME:ARGUMENT is valid; the class takes the argument
    takes_loras: bool = True  # whether graphs with branches for LoRA adapters run
    takes_ranks: bool = False  # whether its runners take graphs of ``graph_opt.shard``
    runs_models: bool = True  # False for a test double, which "auto" must not choose
    vendors: frozenset[str] = frozenset()  # vendors of its accelerators; empty if it is for any machine
    options: ClassVar[type[Any]] = NoOptions  # a dataclass of the options in RunnerConfig.options

    @abc.abstractmethod
    def available(self) -> str | None:
        """Return None if the provider can run on this machine, else the reason and the remedy."""

    def device_names(self) -> list[str]:
        """Return the possible values of the option ``device``; empty if there is no choice."""
        return []

    def device_descriptions(self) -> list[str]:
        """Return the values of ``device_names`` with what is known of each device, for people."""
        return self.device_names()

    def free_memory(self, options: Mapping[str, Any]) -> int | None:
        """Return the free memory of the device in bytes; None if it is the host's, or is not known.

        Args:
            options: given options, which may name a device.
        """
        return None

    def device_memory(self, options: Mapping[str, Any]) -> DeviceMemory | None:
        """Return the memory of the device; None if it is the host's, or is not known.

        Args:
            options: given options, which may name a device.
        """
        return None

    def memory_bandwidth(self, options: Mapping[str, Any]) -> float | None:
        """Return the bandwidth of the device's memory in bytes/s; None if it is not known.

        Args:
            options: given options, which may name a device.
        """
        return None

    def checked_options(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Return all options of the provider: the given ones, and defaults of the others.

        Raises:
            UsageError: an option is unknown, has a wrong type, or is not one of its choices.
        """
        return dataclasses.asdict(checked(self.options, options, f"provider '{self.name}'"))

    def rank_config(self, config: RunnerConfig, rank: int) -> RunnerConfig:
        """Return the options of one of the processes over which a model is cut."""
        return config

    def resolve_options(self, config: RunnerConfig) -> RunnerConfig:
        """Replace automatic options by values for this machine, for ``passes`` and ``runner``.

        Raises:
            UsageError: an option is not allowed.
        """
        self.checked_options(config.options)
        return config

    @abc.abstractmethod
    def passes(self, config: RunnerConfig) -> list[ir.passes.PassBase]:
        """Return the passes that lower a portable decoder graph to this target's kernels, in order.

        Args:
            config: the options of the runner; ``context_length`` must be set, for the rope tables.
        """

    def lowerings(self, config: RunnerConfig) -> Sequence[RunnerConfig]:
        """Return the options to lower a graph with, in the order to try.

        The next ones are for a graph whose attention ``passes`` of those before refuse, and ``runner`` takes
        the result of each.
        """
        return [config]

    def holds_angles(self, config: RunnerConfig) -> bool:
        """Return whether a lowered graph holds rotary tables of all positions of a long context."""
        return True

    def takes_images(self, config: RunnerConfig) -> bool:
        """Return whether ``runner`` takes graphs with the inputs of ``ImageInputsPass``."""
        return False

    def takes_stored(self, config: RunnerConfig) -> bool:
        """Return whether ``passes`` lower what GGUF files store, see ``SourceModel.load``."""
        return False

    def explicit_passes(self, config: RunnerConfig) -> list[ir.passes.PassBase] | None:
        """Return the passes for graphs whose attention no kernel computes in place, None if there are none.

        ``passes`` raises UnsupportedAttentionError for such a graph. The lowered graph keeps the portable
        contract, and ``runner`` opens it.
        """
        return None

    def model_passes(self) -> list[ir.passes.PassBase]:
        """Return the passes that lower a portable graph that is not a decoder for ``session``, in order."""
        return []

    def text_passes(self) -> list[ir.passes.PassBase]:
        """Return the passes that lower the portable graph of a text encoder without padding, in order."""
        return []

    def lowers_texts(self) -> bool:
        """Return whether ``text_passes`` has any; this needs no library of graphs."""
        return False

    def kernel_form(self) -> str:
        """Return what else passes depend on, such as the processor, for keys of the cache."""
        return ""

    def tower_passes(
        self, config: RunnerConfig, tower: ir.Model, *, quantized: bool = False
    ) -> list[ir.passes.PassBase]:
        """Return the passes that lower ``tower``, a ``vision.onnx`` whose groups will be full, in order.

        ``quantized`` says whether the model behind it has quantized weights.
        """
        return []

    def tower_form(self, config: RunnerConfig, *, quantized: bool = False) -> str | None:
        """Return a name for what ``tower_passes`` write, None if there are none; it needs no graphs."""
        return None

    def kept_products(self) -> Collection[int]:
        """Return the widths of quantized weights for which ``session`` has onnxruntime's MatMulNBits."""
        return ()

    @abc.abstractmethod
    def session(self, model: Path, options: RunnerConfig | None = None) -> Any:
        """Open any ONNX model on this target only.

        Raises:
            ProviderUnavailableError: the provider is not available on this machine.
        """

    @abc.abstractmethod
    def runner(self, model: Path, config: RunnerConfig) -> Runner:
        """Load a graph lowered by ``passes`` for generation.

        Args:
            model: the lowered ``model.onnx``.
            config: the options of the runner.
        """
