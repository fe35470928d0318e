"""Checks of a step's rows against what the slots hold, before a runner computes them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import ProviderRuntimeError
from .base import Row, RunnerInfo


def _check_hidden_states(row: Row, hidden_size: int | None) -> None:
    """Check that a row has hidden states if and only if the graph takes them, with the right shape."""
    wanted = None if hidden_size is None else (len(row.tokens), hidden_size)
    given = None if row.hidden_states is None else row.hidden_states.shape
    if given != wanted:
        raise ProviderRuntimeError(f"hidden states have shape {given}, the graph takes {wanted}")


def _check_images(row: Row, states: npt.NDArray[np.float32], width: int) -> None:
    """Check that the states of pictures fit the graph, and that each row of them exists."""
    if not width:
        raise ProviderRuntimeError(f"slot {row.slot} has pictures, which the graph does not take")
    rows = row.image_rows
    if rows is None or states.shape[1:] != (width,) or len(rows) > len(row.tokens):
        raise ProviderRuntimeError(f"slot {row.slot} has states of pictures that do not fit its tokens")
    if len(rows) and rows.max() >= len(states):
        raise ProviderRuntimeError(f"slot {row.slot} lacks states of pictures: {len(states)}")


def _check_ahead(row: Row, ahead: npt.NDArray[np.int32], info: RunnerInfo) -> None:
    """Check that the graph lets tokens see others behind them, and that these are in the row."""
    last = np.arange(len(ahead)) + ahead
    fits = len(ahead) <= len(row.tokens) and bool((ahead >= 0).all() and (last < len(row.tokens)).all())
    if not info.image_ahead or not fits:
        raise ProviderRuntimeError(
            f"slot {row.slot} has tokens that see others behind them, which the graph does not take or the "
            f"row of {len(row.tokens)} tokens does not have"
        )


def _check_positions(row: Row, positions: npt.NDArray[np.int64], axes: int) -> None:
    """Check that positions fit the graph and the tokens of a row."""
    if not axes or positions.shape[0] != axes or not 1 <= positions.shape[1] <= len(row.tokens):
        raise ProviderRuntimeError(
            f"slot {row.slot} has positions {positions.shape} for {len(row.tokens)} tokens; the graph takes "
            f"{axes} axes"
        )


def check_rows(
    rows: Sequence[Row], info: RunnerInfo, held: Sequence[int] | npt.NDArray[Any], hidden_size: int | None
) -> None:
    """Check the rows of a step against the slots.

    Args:
        rows: the rows of the step.
        info: the info of the runner.
        held: number of tokens that each slot holds.
        hidden_size: width of the input ``hidden_states``; None if the graph has none.

    Raises:
        ProviderRuntimeError: a row names no slot, repeats one, needs KV that its slot lacks, has arrays of a
            wrong shape, or a token id that has no embedding.
    """
    slots = set[int]()
    for row in rows:
        if row.slot in slots:
            raise ProviderRuntimeError("a slot occurs twice in one step")
        slots.add(row.slot)
        if not 0 <= row.slot < info.max_slots:
            raise ProviderRuntimeError(
                f"there is no slot {row.slot}; the slots are 0 to {info.max_slots - 1}"
            )
        end = row.start + len(row.tokens)
        fits = row.start <= held[row.slot] and row.start < end <= info.context_length
        if not fits or row.num_logits > len(row.tokens):
            raise ProviderRuntimeError(
                f"row [{row.start}, {end}) with {row.num_logits} logits does not continue slot "
                f"{row.slot}, which holds {held[row.slot]} of at most {info.context_length} tokens"
            )
        if row.lora is not None and not 0 <= row.lora < info.max_loras:
            raise ProviderRuntimeError(
                f"slot {row.slot} has the adapter of place {row.lora}; there are {info.max_loras} places"
            )
        if row.hidden_states is not None or hidden_size is not None:
            _check_hidden_states(row, hidden_size)
        if row.image_states is not None:
            _check_images(row, row.image_states, info.image_width)
        if row.image_ahead is not None:
            _check_ahead(row, row.image_ahead, info)
        if row.rope_positions is not None:
            _check_positions(row, row.rope_positions, info.rope_axes)
        states = row.last_hidden_states
        if states is not None and states.shape != (len(row.tokens), info.hidden_width):
            raise ProviderRuntimeError(
                f"last_hidden_states has shape {states.shape}, not {(len(row.tokens), info.hidden_width)}"
            )
    rows_with_tokens = [row for row in rows if row.source is None]  # others hold a placeholder
    if info.num_tokens is not None and rows_with_tokens:
        # Of all rows at once. Kernels of devices read beyond the table, or return zeros.
        tokens = np.concatenate([row.tokens for row in rows_with_tokens])
        if tokens.min() < 0 or tokens.max() >= info.num_tokens:
            known = info.num_tokens
            wrong = next(row for row in rows_with_tokens if row.tokens.min() < 0 or row.tokens.max() >= known)
            raise ProviderRuntimeError(f"slot {wrong.slot}: a token id is outside the vocabulary of {known}")


def rows_in_cache(
    rows: Sequence[Row], dropped: npt.NDArray[np.int32], settled: npt.NDArray[np.int32]
) -> list[Row]:
    """Return rows whose ``start`` is the row in the cache, not the position in the text.

    Args:
        rows: rows whose ``start`` is a position.
        dropped: [slots], number of tokens evicted from each slot's cache.
        settled: [slots], KV before this position may be missing.

    Raises:
        ProviderRuntimeError: a row starts before ``settled`` of its slot.
    """
    for row in rows:
        if row.start < settled[row.slot]:
            raise ProviderRuntimeError(
                f"slot {row.slot} has evicted tokens that a row from {row.start} needs"
            )
    if not dropped.any():
        return list(rows)
    return [dataclasses.replace(row, start=row.start - int(dropped[row.slot])) for row in rows]
