"""What a provider is, and what the engine may ask of the runner it makes.

A provider answers four questions: is it available here (and if not, why), which passes lower a portable
graph to it, how is an ONNX session opened on it, and how are sequences run on it. One file and one class
each; callers hold the object and never ask for its name.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import numpy as np
import numpy.typing as npt

from ..errors import ProviderRuntimeError
from ..options import NoOptions, checked

if TYPE_CHECKING:
    import onnx_ir as ir

    from .placement import Placement


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerConfig:
    """How much room and how many threads a runner gets.

    Args:
        max_slots: sequences that may hold KV at once.
        context_length: most tokens a sequence may have; None takes the model's own.
        num_threads: 0 lets the provider choose.
        options: fields of ``Provider.options``, checked by the provider.
        on_fallback: lets nodes that the target cannot run lie on the CPU, and is told where everything lies
            if there are such; None makes them an error.
    """

    max_slots: int = 32
    context_length: int | None = None
    num_threads: int = 0
    options: dict[str, Any] = field(default_factory=dict)
    on_fallback: Callable[[Placement], None] | None = None


@dataclass(frozen=True, slots=True)
class RunnerInfo:
    """What a loaded model is, and what its runner can do."""

    vocab_size: int  # or the hidden size, where the graph gives out hidden states as its logits
    context_length: int
    max_slots: int
    kv_bytes_per_token: int
    batched_multi_token: bool  # several rows with more than one token on top of a cache, in one run
    sliding_window: int = 0  # the widest window of layers that have one; 0 is none
    # ``trim`` gives back what lies behind windows, so many tokens at a time, a multiple of 64; 0 is never.
    trim_step: int = 0
    window_bytes_per_token: int = 0  # how much of ``kv_bytes_per_token`` that is
    kv_layout: str = ""  # what ``read_kv`` gives, as a name: types and shapes; empty if it cannot be read
    top_logits: int = 0  # how many ``BestLogits`` the runner finds where the logits lie; 0 is none
    evicts_kv: bool = False  # whether old KV can be dropped by ``evict_kv``
    kv_tokens: int | None = None  # most tokens that all slots together may hold; None is no limit
    embedding_size: int = 0  # width of ``Row.last_hidden_states``; 0 where there are none


@dataclass(slots=True)
class Row:
    """One sequence's part of a step: run ``tokens`` on top of ``start`` cached tokens.

    Afterwards the slot holds KV for positions [0, start + len(tokens)).
    """

    slot: int
    tokens: npt.NDArray[np.int64]  # [n], n >= 1
    start: int
    num_logits: int = 1  # logits wanted, of the last num_logits of the tokens; any from none to all of them
    # [n, hidden_size]: what the earlier layers gave, where the graph holds the later ones only.
    hidden_states: npt.NDArray[np.float32] | None = None
    # [n, embedding_size]: where given, the run fills it with what the head reads.
    last_hidden_states: npt.NDArray[np.float32] | None = None
    best_suffice: bool = False  # for ``forward_best``: of its one position's logits, the best are enough


@dataclass(frozen=True, slots=True)
class BestLogits:
    """The best of one position's logits, while all of them stay where they were computed.

    Args:
        token_ids: [k], most likely first; equal logits in order of token id.
        logits: [k].
        logsumexp: of all logits; not finite where one of them is NaN.
        vocab_size: how many there are.
        whole: gives them all, [vocab_size], until the runner's next step.
    """

    token_ids: npt.NDArray[np.int64]
    logits: npt.NDArray[np.float32]
    logsumexp: float
    vocab_size: int
    whole: Callable[[], npt.NDArray[np.float32]]


def _check_hidden_states(row: Row, hidden_size: int | None) -> None:
    """Refuse hidden states that the graph does not take, and their lack where it does."""
    wanted = None if hidden_size is None else (len(row.tokens), hidden_size)
    given = None if row.hidden_states is None else row.hidden_states.shape
    if given != wanted:
        raise ProviderRuntimeError(f"hidden states are {given} where the graph takes {wanted}")


def check_rows(
    rows: Sequence[Row], info: RunnerInfo, held: Sequence[int] | npt.NDArray[Any], hidden_size: int | None
) -> None:
    """Refuse a step that needs KV that is not there.

    Args:
        rows: of the step.
        info: of the runner.
        held: tokens that each slot holds.
        hidden_size: width of the input ``hidden_states``; None where the graph has none.

    Raises:
        ProviderRuntimeError: a row does not fit.
    """
    if len({row.slot for row in rows}) != len(rows):
        raise ProviderRuntimeError("a slot occurs twice in one step")
    for row in rows:
        if not 0 <= row.slot < info.max_slots:
            raise ProviderRuntimeError(f"there is no slot {row.slot}, only {info.max_slots} of them")
        end = row.start + len(row.tokens)
        fits = row.start <= held[row.slot] and row.start < end <= info.context_length
        if not fits or row.num_logits > len(row.tokens):
            raise ProviderRuntimeError(
                f"row [{row.start}, {end}) with {row.num_logits} logits does not continue slot "
                f"{row.slot}, which holds {held[row.slot]} of at most {info.context_length} tokens"
            )
        _check_hidden_states(row, hidden_size)
        states = row.last_hidden_states
        if states is not None and states.shape != (len(row.tokens), info.embedding_size):
            raise ProviderRuntimeError(f"no room of {states.shape} is filled with hidden states here")


def rows_in_cache(
    rows: Sequence[Row], dropped: npt.NDArray[np.int32], settled: npt.NDArray[np.int32]
) -> list[Row]:
    """Rows that start where their tokens go in the cache, in place of their positions.

    Args:
        rows: by positions.
        dropped: tokens that have left each slot's cache.
        settled: the positions from which on none has that later tokens need.

    Raises:
        ProviderRuntimeError: a row starts before those.
    """
    for row in rows:
        if row.start < settled[row.slot]:
            raise ProviderRuntimeError(
                f"slot {row.slot} has dropped tokens that a row from {row.start} needs"
            )
    if not dropped.any():
        return list(rows)
    return [dataclasses.replace(row, start=row.start - int(dropped[row.slot])) for row in rows]


class Runner(Protocol):
    """Runs rows of tokens against KV storage that it owns. Not thread-safe: one engine thread drives it."""

    info: RunnerInfo

    def forward(self, rows: Sequence[Row]) -> list[npt.NDArray[np.float32]]:
        """Run one step.

        Returns:
            Per row, logits [num_logits, vocab_size]. A view that the next ``forward`` may overwrite.

        Raises:
            ProviderRuntimeError: the run failed; no row of it counts as computed.
        """

    @property
    def kv_bytes(self) -> int:
        """Memory that KV takes up now; what slots share counts once. Any thread may ask."""

    def copy_prefix(self, source: int, target: int, length: int) -> None:
        """Copy KV of positions [0, length) from slot ``source`` to slot ``target``."""

    def release(self, slot: int) -> None:
        """Give the slot's memory back to the operating system. Its content is lost."""

    def close(self) -> None:
        """Free everything. The runner cannot be used afterwards."""


class MovableRunner(Runner, Protocol):
    """A runner whose ``info.kv_layout`` is not empty."""

    def read_kv(self, slot: int, start: int, length: int) -> list[npt.NDArray[Any]]:
        """KV of positions [start, start + length), for ``write_kv`` of a runner of equal ``kv_layout``.

        Args:
            slot: holds them.
            start: a multiple of 64.
            length: how many.

        Returns:
            Arrays on the host, perhaps views, which the next call of any method may change.

        Raises:
            ProviderRuntimeError: the slot holds less, or cannot give it.
        """

    def write_kv(self, slot: int, start: int, length: int, parts: Sequence[npt.NDArray[Any]]) -> None:
        """Let a slot, which holds at least ``start`` positions, hold ``start + length``.

        Args:
            slot: where to.
            start: as it was read.
            length: as it was read.
            parts: what ``read_kv`` gave.

        Raises:
            ProviderRuntimeError: they do not fit; the slot holds ``start`` positions.
        """


class BestLogitsRunner(Runner, Protocol):
    """A runner whose ``info.top_logits`` is not 0."""

    def forward_best(self, rows: Sequence[Row]) -> list[npt.NDArray[np.float32] | BestLogits]:
        """Run one step as ``forward`` does, but leave what need not cross the bus on the device.

        Returns:
            Per row with ``best_suffice``, its best ``info.top_logits``; per other row, its logits. Views that
            the next step may overwrite.

        Raises:
            ProviderRuntimeError: the run failed; or later, from ``BestLogits.whole``: the download did.
        """


class TrimmingRunner(Runner, Protocol):
    """A runner whose ``info.trim_step`` is not 0."""

    def trim(self, slot: int, length: int) -> None:
        """Give back KV of layers with a sliding window that no token from position ``length`` on looks at.

        Afterwards no row may start before ``length``, no shorter prefix be copied, and no KV before it be
        read or written.

        Args:
            slot: whose.
            length: a multiple of ``info.trim_step``, no more than the slot holds.
        """


@dataclass(frozen=True, slots=True)
class KVEviction:
    """How much of a sequence's KV stays.

    Args:
        kept: tokens in all; each KV head of each layer has its own.
        sinks: that many of the first are among them.
        recent: that many of the last are too, which is no less than ``RunnerInfo.sliding_window``.
    """

    kept: int
    sinks: int
    recent: int


class EvictingRunner(Runner, Protocol):
    """A runner whose ``info.evicts_kv`` is set."""

    def evict_kv(self, slot: int, length: int, eviction: KVEviction) -> None:
        """Drop KV of all but the tokens that matter most, of those at positions [0, length).

        Positions go on, so later rows start as if nothing had gone, but none before ``length`` any more.

        Raises:
            ProviderRuntimeError: the slot holds fewer positions, or less KV than is to be kept.
        """


class Provider(abc.ABC):
    """One target. See ``docs/adding_a_provider.md``."""

    name: str
    execution_provider: str | None = None  # ONNX Runtime's name of it, where it is one of ONNX Runtime's
    takes_argument: bool = False  # whether NAME:ARGUMENT names one, its class taking the argument
    runs_models: bool = True  # False for a stand-in, which "auto" must not choose
    vendors: frozenset[str] = frozenset()  # whose accelerators it is for; empty for none in particular
    options: ClassVar[type[Any]] = NoOptions  # a dataclass: what RunnerConfig.options may set

    @abc.abstractmethod
    def available(self) -> str | None:
        """None if this provider can run here, else why not and what to do about it."""

    def device_names(self) -> list[str]:
        """Devices to choose from, as the option ``device`` calls them; empty where there is no choice."""
        return []

    def checked_options(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """All options of the provider: those that are given, and the defaults of the others.

        Raises:
            UsageError: an option is unknown, has another type, or is none of the choices.
        """
        return dataclasses.asdict(checked(self.options, given, f"provider '{self.name}'"))

    def resolve_options(self, config: RunnerConfig, graph: Callable[[], ir.Model]) -> RunnerConfig:
        """Decide what options leave to machine and model; the result is for ``passes`` and ``runner``.

        Args:
            config: as the caller wants it.
            graph: gives the portable graph, to look at.

        Raises:
            UsageError: an option is not allowed.
        """
        self.checked_options(config.options)
        return config

    @abc.abstractmethod
    def passes(self, config: RunnerConfig) -> list[ir.passes.PassBase]:
        """Passes that lower a portable decoder graph to this target's kernels, in order.

        Args:
            config: as it will be given to ``runner``; ``context_length`` must be set, for the rope tables.
        """

    def model_passes(self) -> list[ir.passes.PassBase]:
        """Passes that lower any other portable graph to what ``session`` runs fastest, in order."""
        return []

    def companions(self, config: RunnerConfig) -> Mapping[str, list[ir.passes.PassBase]]:
        """Further graphs of the model that ``runner`` looks for beside the first: passes by file name."""
        return {}

    @abc.abstractmethod
    def session(self, model: Path, options: RunnerConfig | None = None) -> Any:
        """Open any ONNX model on this target and nowhere else.

        Raises:
            ProviderUnavailableError: the provider cannot load here.
        """

    @abc.abstractmethod
    def runner(self, model: Path, config: RunnerConfig) -> Runner:
        """Load a graph lowered by ``passes`` for generation.

        Args:
            model: the lowered ``model.onnx``.
            config: slots, context and threads.
        """
