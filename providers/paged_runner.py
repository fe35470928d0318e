"""The ``Runner`` on a compiled OpenVINO model with paged attention: one inference a step for all rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ..runtime.errors import ProviderRuntimeError
from .base import Row, RunnerInfo, check_rows
from .block_pool import BlockPool, Copies

Logits = npt.NDArray[np.float32]


class PagedRunner:
    """Runs flat batches of rows; block tables, keyed by slot, are its own business.

    Args:
        compiled: an ``openvino.CompiledModel`` of a paged graph.
        caches: the KV tensors by input name, [blocks, ...] each.
        pool: block tables over as many blocks.
        info: what the model is.
        num_tokens: tokens that the embedding knows; None where the graph has none.
        hidden_size: width of the input ``hidden_states``; None where the graph has none.
        copy_block: copies one block's content, of all caches: (source, target).
    """

    def __init__(
        self,
        compiled: Any,
        caches: dict[str, Any],
        pool: BlockPool,
        info: RunnerInfo,
        copy_block: Callable[[dict[str, Any], int, int], None],
        num_tokens: int | None = None,
        hidden_size: int | None = None,
    ) -> None:
        self.info = info
        self._num_tokens, self._hidden_size = num_tokens, hidden_size
        self._pool = pool
        self._caches = caches
        self._copy_block = copy_block
        self._request = compiled.create_infer_request()
        for name, tensor in caches.items():
            self._request.set_tensor(name, tensor)

    def forward(self, rows: Sequence[Row]) -> list[Logits]:
        """Run one step; see ``Runner.forward``."""
        self._check(rows)
        for row in rows:
            self._pool.truncate(row.slot, row.start)
        copies = self._pool.reserve([(row.slot, row.start + len(row.tokens)) for row in rows])
        try:
            self._copy(copies)
            logits = self._infer(self._feeds(rows))
        except RuntimeError as error:
            text = " ".join(str(error).split())
            raise ProviderRuntimeError(f"a run of {len(rows)} rows failed: {text}") from error
        for row in rows:
            self._pool.lengths[row.slot] = row.start + len(row.tokens)
        ends = np.cumsum([row.num_logits for row in rows])
        return [logits[end - row.num_logits : end] for row, end in zip(rows, ends, strict=True)]

    def copy_prefix(self, source: int, target: int, length: int) -> None:
        """Let slot ``target`` hold positions [0, length) of slot ``source``, sharing its blocks."""
        held = self._pool.lengths[source]
        if length > held:
            raise ProviderRuntimeError(f"slot {source} holds {held} tokens, not {length}")
        self._pool.share(source, target, length)

    def release(self, slot: int) -> None:
        """Give the slot's blocks back to the pool. Its content is lost."""
        self._pool.truncate(slot, 0)

    def read_kv(self, slot: int, start: int, length: int) -> list[npt.NDArray[Any]]:
        """Whole blocks of positions [start, start + length); see ``Runner.read_kv``."""
        held = self._pool.lengths[slot]
        if start % self._pool.block_size or start + length > held:
            raise ProviderRuntimeError(f"slot {slot} holds {held} tokens, not {start + length} in blocks")
        return [tensor.data[self._blocks(slot, start, length)] for tensor in self._caches.values()]

    def write_kv(self, slot: int, start: int, length: int, parts: Sequence[npt.NDArray[Any]]) -> None:
        """Let a slot hold ``start + length`` positions; see ``Runner.write_kv``."""
        held = self._pool.lengths[slot]
        if start % self._pool.block_size or start > held or start + length > self.info.context_length:
            raise ProviderRuntimeError(f"positions [{start}, {start + length}) do not continue slot {slot}")
        self._pool.truncate(slot, start)
        self._pool.reserve([(slot, start + length)])
        blocks = self._blocks(slot, start, length)
        for tensor, part in zip(self._caches.values(), parts, strict=True):
            tensor.data[blocks] = part
        self._pool.lengths[slot] = start + length

    def check_integrity(self) -> None:
        """Raise ProviderRuntimeError if the block tables contradict each other."""
        self._pool.check_integrity()

    def close(self) -> None:
        """Free everything. The runner cannot be used afterwards."""
        self._request = None
        self._caches = {}

    def _check(self, rows: Sequence[Row]) -> None:
        """Refuse a step that needs KV that is not there, before anything is changed."""
        if self._request is None:
            raise ProviderRuntimeError("the runner is closed")
        check_rows(rows, self.info, self._pool.lengths, self._hidden_size)
        known = self._num_tokens
        for row in rows:
            if known is not None and (row.tokens.min() < 0 or row.tokens.max() >= known):
                raise ProviderRuntimeError(f"token outside the vocabulary of {known}")

    def _blocks(self, slot: int, start: int, length: int) -> list[int]:
        size = self._pool.block_size
        return self._pool.tables[slot][start // size : -(-(start + length) // size)]

    def _copy(self, copies: Copies) -> None:
        for source, target in copies:
            self._copy_block(self._caches, source, target)

    def _feeds(self, rows: Sequence[Row]) -> dict[str, npt.NDArray[Any]]:
        """Describe the rows as one flat batch."""
        counts = [len(row.tokens) for row in rows]
        begins = np.concatenate([[0], np.cumsum(counts)])
        tables = [self._pool.tables[row.slot] for row in rows]
        positions = [np.arange(row.start, row.start + len(row.tokens)) for row in rows]
        wanted = [
            np.arange(end - row.num_logits, end) for row, end in zip(rows, begins[1:].tolist(), strict=True)
        ]
        # A graph need not run for no logits at all; the one then computed is given to nobody.
        chosen = np.concatenate(wanted) if any(row.num_logits for row in rows) else np.zeros(1)
        feeds: dict[str, npt.NDArray[Any]] = {
            "input_ids": np.concatenate([row.tokens for row in rows]).astype(np.int64)[:, None],
            "position_ids": np.concatenate(positions).astype(np.int64)[:, None],
            "logits_positions": chosen.astype(np.int64),
            "past_lens": np.array([row.start for row in rows], np.int32),
            "subsequence_begins": begins.astype(np.int32),
            "block_indices": np.concatenate(tables).astype(np.int32),
            "block_indices_begins": np.concatenate([[0], np.cumsum([len(t) for t in tables])]).astype(
                np.int32
            ),
            "max_context_len": np.array(max(row.start + len(row.tokens) for row in rows), np.int32),
        }
        states = [row.hidden_states for row in rows if row.hidden_states is not None]
        if states:
            feeds["hidden_states"] = np.concatenate(states)[:, None]
        return feeds

    def _infer(self, feeds: dict[str, npt.NDArray[Any]]) -> Logits:
        import openvino

        for name, array in feeds.items():
            self._request.set_tensor(name, openvino.Tensor(array))
        self._request.infer()
        logits: Logits = self._request.get_tensor("logits").data[:, 0]
        return logits
