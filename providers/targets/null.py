"""The provider ``null``: a test double with a toy language model, without a device.

Its logits are a pure function of the tokens that were run in a slot. It keeps a history per slot as a KV
cache does, so a wrong slot, position or order changes the output or is refused.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from ...contract import LOGITS
from ...errors import GraphError, ProviderRuntimeError, UsageError
from ...graph_opt.graph.load import read_model
from ...options import Checked, option
from ...records import dataclass
from ..base import BestLogits, KVEviction, LoraMatrices, Provider, Row, Runner, RunnerConfig, RunnerInfo
from ..kv_groups import KVGroups, StateKV, window_groups
from ..lora import lora_facts

_MODULUS = 2**61 - 1
_PATTERNS = 64
_GONE = -1  # replaces a trimmed hash

_LAYERS = {"layer": (1, 1)}  # what a LoRA adapter of the toy model changes


@dataclass(frozen=True, kw_only=True)
class NullOptions(Checked):
    """Options of the toy model.

    Args:
        vocab_size: size of the vocabulary.
        kv_bytes_per_token: reported KV bytes per token.
        step_seconds: duration of a run, beside its rows and tokens.
        row_seconds: duration of a row of one token.
        token_seconds: duration of a token of a longer row.
        seed: chooses the model.
        top_logits: number of logits that ``forward_best`` returns.
        embedding_size: width of the hidden states; 0 for none.
        sliding_window: hashes that a token depends on, at least 2; 0 is all.
        trim_step: see ``RunnerInfo``.
        state_bytes: reported bytes of a state, on which logits then depend too; 0 for no state.
    """

    vocab_size: int = option(256, least=1)
    kv_bytes_per_token: int = option(1024, least=1)
    step_seconds: float = option(0.0, least=0)
    row_seconds: float = option(0.0, least=0)
    token_seconds: float = option(0.0, least=0)
    seed: int = option(0, least=0)
    top_logits: int = option(0, least=0)
    embedding_size: int = option(0, least=0)
    sliding_window: int = option(0, least=0)
    trim_step: int = option(0, least=0)
    state_bytes: int = option(0, least=0)


class NullRunner(Runner):
    """The toy model and its cache of token histories.

    Args:
        config: options of the runner; the context length is 4,096 by default.
        options: options of the toy model.

    Attributes:
        before_forward: called with the rows of each run; it may raise ProviderRuntimeError.
        forwards: number of runs.
        downloads: how often ``BestLogits.whole`` was called.
    """

    def __init__(self, config: RunnerConfig, options: NullOptions) -> None:
        self.info = RunnerInfo(
            vocab_size=options.vocab_size,
            context_length=config.context_length or 4096,
            max_slots=config.max_slots,
            kv_groups=_groups(options),
            batched_multi_token=True,
            kv_layout="hash int64[n]" + "; state int64[]" * (options.state_bytes > 0),
            state_arrays=int(options.state_bytes > 0),
            top_logits=options.top_logits,
            embedding_size=options.embedding_size,
            evicts_kv=not options.state_bytes,
            **lora_facts(_LAYERS if config.max_loras else {}, config),
        )
        self._adapters: dict[int, int] = {}  # by place, a hash of the matrices
        self.before_forward: Callable[[Sequence[Row]], None] | None = None
        self.forwards = 0
        self.downloads = 0
        self.closed = False
        self._seconds = options.step_seconds, options.row_seconds, options.token_seconds
        rng = np.random.default_rng(options.seed)
        self._patterns = rng.normal(0.0, 3.0, (_PATTERNS, options.vocab_size)).astype(np.float32)
        # Per slot, a hash of the history after each token; it takes the role of KV.
        self.hashes: list[list[int]] = [[] for _ in range(config.max_slots)]
        # Per slot, the state after so many tokens: of the newest one, and checkpoints.
        self._states: list[dict[int, int]] = [{0: 0} for _ in range(config.max_slots)]
        self._dropped = [0] * config.max_slots  # tokens evicted by ``evict_kv``
        self._trimmed = [0] * config.max_slots  # the first position at which rows may start after ``trim``
        self._buffer = np.empty((0, options.vocab_size), np.float32)

    def forward(self, rows: Sequence[Row]) -> list[npt.NDArray[np.float32]]:
        """Run one step; the next step overwrites the result."""
        self.forwards += 1
        self._check(rows)
        if self.before_forward is not None:
            self.before_forward(rows)
        if any(self._seconds):
            step, single, token = self._seconds
            time.sleep(step + sum(token * n if (n := len(each.tokens)) > 1 else single for each in rows))
        wanted = sum(row.num_logits for row in rows)
        if wanted > len(self._buffer):
            self._buffer = np.empty((wanted, self.info.vocab_size), np.float32)
        self._buffer.fill(np.nan)
        results, used = [], 0
        for row in rows:
            hashes = self._extend(row)
            out = self._buffer[used : used + row.num_logits]
            for i, value in enumerate(hashes[len(hashes) - row.num_logits :]):
                out[i] = self._logits(value)
            if row.last_hidden_states is not None:
                row.last_hidden_states[:] = [self._hidden(value) for value in hashes[row.start :]]
            results.append(out)
            used += row.num_logits
        return results

    def forward_best(self, rows: Sequence[Row]) -> list[npt.NDArray[np.float32] | BestLogits]:
        """Run one step; see ``Runner``."""
        given = zip(rows, self.forward(rows), strict=True)
        return [self._best(logits[0]) if row.best_suffice else logits for row, logits in given]

    def load_lora(self, place: int, matrices: LoraMatrices) -> None:
        """Load an adapter into a place; it changes the hashes of its rows."""
        content = b"".join(array.tobytes() for pair in matrices.values() for array in pair)
        self._adapters[place] = zlib.crc32(content) + 1

    @property
    def kv_bytes(self) -> int:
        """The reported KV memory in bytes."""
        states = sum(len(states.keys() - {0}) for states in self._states)
        return self.held_tokens() * self.info.kv_bytes_per_token + states * self.info.state_bytes

    def copy_prefix(self, source: int, target: int, length: int) -> None:
        """Copy the history of positions [0, length)."""
        rows = length - self._dropped[source]
        if self.info.state_bytes and length not in self._states[source]:
            raise ProviderRuntimeError(f"slot {source} has no state after {length} tokens")
        if not max(1, self._trimmed[source]) <= rows <= len(self.hashes[source]):
            raise ProviderRuntimeError(
                f"slot {source} holds {len(self.hashes[source])} tokens, {length} cannot be copied"
            )
        self.hashes[target] = self.hashes[source][:rows]
        earlier = {n: state for n, state in self._states[source].items() if n < length}
        self._states[target] = {**earlier, length: self._states[source].get(length, 0)}
        self._dropped[target], self._trimmed[target] = self._dropped[source], self._trimmed[source]

    def trim(self, slot: int, length: int) -> None:
        """Drop hashes that no token from ``length`` on depends on; see ``Runner``."""
        hashes = self.hashes[slot]
        if length > len(hashes) or length % self.info.trim_step or self._dropped[slot]:
            raise ProviderRuntimeError(
                f"slot {slot} holds {len(hashes)} tokens, it cannot be cut to {length}"
            )
        gone = self.info.kv_groups[0].freed(length)
        hashes[:gone] = [_GONE] * gone
        self._trimmed[slot] = length
        self._states[slot] = {n: state for n, state in self._states[slot].items() if n >= length}

    def evict_kv(self, slot: int, length: int, eviction: KVEviction) -> None:
        """Keep the last hashes, since later tokens depend only on these; see ``Runner``."""
        hashes = self.hashes[slot][: length - self._dropped[slot]]
        if length - self._dropped[slot] != len(hashes) or eviction.kept > len(hashes):
            raise ProviderRuntimeError(
                f"slot {slot} holds {len(self.hashes[slot])} tokens, so {eviction} is impossible"
            )
        self.hashes[slot] = hashes[len(hashes) - eviction.kept :]
        self._dropped[slot] = length - eviction.kept

    def release(self, slot: int) -> None:
        """Drop a slot's history."""
        self.hashes[slot] = []
        self._states[slot] = {0: 0}
        self._dropped[slot] = self._trimmed[slot] = 0

    def read_kv(self, slot: int, start: int, length: int) -> list[npt.NDArray[Any]]:
        """Return the hashes of positions [start, start + length)."""
        held = len(self.hashes[slot]) if start >= self._trimmed[slot] else 0
        if start + length > held or self._dropped[slot]:
            raise ProviderRuntimeError(f"slot {slot} holds {len(self.hashes[slot])} tokens")
        return [np.array(self.hashes[slot][start : start + length], np.int64)]

    def write_kv(self, slot: int, start: int, length: int, parts: Sequence[npt.NDArray[Any]]) -> None:
        """Write the hashes of positions [start, start + length)."""
        fits = self._trimmed[slot] <= start <= len(self.hashes[slot]) and not self._dropped[slot]
        if not fits or [len(part) for part in parts] != [length]:
            raise ProviderRuntimeError(f"{length} hashes from {start} do not continue slot {slot}")
        self.hashes[slot][start:] = parts[0].tolist()

    def read_state(self, slot: int, length: int) -> list[npt.NDArray[Any]]:
        """Return the state after ``length`` tokens."""
        if length not in self._states[slot]:
            raise ProviderRuntimeError(f"slot {slot} has no state after {length} tokens")
        return [np.array(self._states[slot][length], np.int64)]

    def write_state(self, slot: int, length: int, parts: Sequence[npt.NDArray[Any]]) -> None:
        """Write the state after ``length`` tokens."""
        if length != len(self.hashes[slot]) or [part.shape for part in parts] != [()]:
            raise ProviderRuntimeError(f"the state does not fit slot {slot} after {length} tokens")
        self._states[slot][length] = int(parts[0])

    def close(self) -> None:
        """Drop all histories."""
        self.closed = True
        self.hashes = []

    def held_tokens(self) -> int:
        """Return the number of tokens in all slots."""
        return sum(len(hashes) - hashes.count(_GONE) for hashes in self.hashes)

    def _extend(self, row: Row) -> list[int]:
        hashes = self.hashes[row.slot]
        del hashes[row.start - self._dropped[row.slot] :]
        value = hashes[-1] if hashes else 0
        adapter = 0 if row.lora is None else self._adapters[row.lora]
        for token in row.tokens.tolist():
            value = (value * 1_000_003 + token + 1 + adapter) % _MODULUS
            hashes.append(value)
        return self._with_states(row, hashes) if self.info.state_bytes else hashes

    def _with_states(self, row: Row, hashes: Sequence[int]) -> list[int]:
        """Run the recurrence of the states; return the hashes as logits depend on them."""
        states = self._states[row.slot]
        state, mixed = states[row.start], list(hashes)
        for length, token in enumerate(row.tokens.tolist(), start=row.start + 1):
            state = (state * 7_368_787 + token + 3) % _MODULUS
            states[length] = state
            mixed[length - 1] = (hashes[length - 1] + state) % _MODULUS
        end = row.start + len(row.tokens)
        kept = {*row.checkpoints, *range(end - row.proposed, end + 1)}
        self._states[row.slot] = {length: states[length] for length in kept}
        return mixed

    def _best(self, logits: npt.NDArray[np.float32]) -> BestLogits:
        def whole() -> npt.NDArray[np.float32]:
            self.downloads += 1
            return logits

        best = np.argsort(-logits, kind="stable")[: self.info.top_logits]
        largest = logits.max()
        logsumexp = float(largest + np.log(np.exp(logits - largest).sum()))
        return BestLogits(best, logits[best], logsumexp, len(logits), whole)

    def _hidden(self, value: int) -> npt.NDArray[np.float32]:
        return self._logits(value)[: self.info.embedding_size]

    def _logits(self, value: int) -> npt.NDArray[np.float32]:
        pattern, shift = value % _PATTERNS, value // _PATTERNS % self.info.vocab_size
        return np.roll(self._patterns[pattern], shift)

    def _check(self, rows: Sequence[Row]) -> None:
        """Raise ProviderRuntimeError for rows that would silently corrupt a real cache."""
        if len({row.slot for row in rows}) != len(rows):
            raise ProviderRuntimeError(f"a slot appears twice in {[row.slot for row in rows]}")
        for row in rows:
            if not 0 <= row.slot < len(self.hashes):
                raise ProviderRuntimeError(f"there is no slot {row.slot}")
            dropped = self._dropped[row.slot]
            held, end = dropped + len(self.hashes[row.slot]), row.start + len(row.tokens)
            first = max(dropped + 1, self._trimmed[row.slot])
            if not (first <= row.start <= held or row.start == 0 == max(dropped, self._trimmed[row.slot])):
                raise ProviderRuntimeError(
                    f"row starts at {row.start}, but slot {row.slot} holds {held} tokens"
                )
            states = self._states[row.slot]
            if self.info.state_bytes and row.start not in states:
                raise ProviderRuntimeError(f"slot {row.slot} has no state after {row.start} tokens")
            wrong = [n for n in row.checkpoints if n >= end or (n < row.start and n not in states)]
            if wrong:
                raise ProviderRuntimeError(f"the states after {wrong} tokens cannot be kept")
            if not len(row.tokens) or end > self.info.context_length:
                raise ProviderRuntimeError(
                    f"row [{row.start}, {end}) does not fit into {self.info.context_length}"
                )
            if not 0 <= row.num_logits <= len(row.tokens):
                raise ProviderRuntimeError(f"{row.num_logits} logits wanted of {len(row.tokens)} tokens")
            if row.tokens.min() < 0 or row.tokens.max() >= self.info.vocab_size:
                raise ProviderRuntimeError(f"token outside the vocabulary of {self.info.vocab_size}")


def _groups(options: NullOptions) -> KVGroups:
    groups = window_groups([(options.sliding_window, options.kv_bytes_per_token)], options.trim_step)
    return (*groups, StateKV(state_bytes=options.state_bytes)) if options.state_bytes else groups


class NullProvider(Provider):
    """Runs the toy model instead of the given model."""

    name = "null"
    runs_models = False
    options: ClassVar[type[Any]] = NullOptions

    def available(self) -> str | None:
        """Return None: it is always available."""
        return None

    def passes(self, config: RunnerConfig) -> list[ir.passes.PassBase]:
        """Return no passes: no graph is run."""
        return []

    def session(self, model: Path, options: RunnerConfig | None = None) -> Any:
        """Raise UsageError: the null provider runs no graphs."""
        raise UsageError("the null provider runs no graphs; it only replaces language models in tests")

    def runner(self, model: Path, config: RunnerConfig) -> Runner:
        """Return the toy model, with the vocabulary size of ``model`` if that file exists."""
        options = self.checked_options(config.options)
        if model.exists() and "vocab_size" not in config.options:
            options["vocab_size"] = _vocab_size(model)
        return NullRunner(config, NullOptions(**options))


def _vocab_size(model: Path) -> int:
    outputs = read_model(model).graph.outputs
    logits = next((value for value in outputs if value.name == LOGITS), None)
    if logits is None:
        raise GraphError(f"{model} is not a decoder: it has no output 'logits'")
    size = logits.shape[-1] if logits.shape is not None else None
    if not isinstance(size, int):
        raise UsageError(f"{model} does not state its vocabulary size; set the option vocab_size")
    return size


PROVIDER = NullProvider
