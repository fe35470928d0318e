"""Repetition, presence and frequency penalties on tokens already seen."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ...types.sampling_params import SamplingParams

_FIRST_CAPACITY = 64


class Penalties:
    """The distinct tokens of one request, with the count of each among the generated ones.

    Repetition penalty as in CTRL (arXiv:1909.05858); presence and frequency penalty as in OpenAI's API. Only
    the repetition penalty includes the prompt.
    """

    def __init__(self, params: SamplingParams, prompt_token_ids: npt.NDArray[np.int64]) -> None:
        self._params = params
        self.lowers = (
            params.repetition_penalty >= 1.0 and min(params.presence_penalty, params.frequency_penalty) >= 0.0
        )
        seen = np.unique(prompt_token_ids) if params.repetition_penalty != 1.0 else np.empty(0, np.int64)
        self._size = len(seen)
        self._ids = np.concatenate([seen, np.zeros(_FIRST_CAPACITY, np.int64)])
        self._counts = np.zeros(len(self._ids), np.int64)
        self._position = {int(token): i for i, token in enumerate(seen)}

    @staticmethod
    def wanted(params: SamplingParams) -> bool:
        """Whether any penalty is set."""
        return (
            params.repetition_penalty != 1.0
            or params.presence_penalty != 0.0
            or params.frequency_penalty != 0.0
        )

    def observe(self, token: int) -> None:
        """Count a generated token."""
        position = self._position.get(token)
        if position is None:
            position = self._append(token)
        self._counts[position] += 1

    def apply(self, logits: npt.NDArray[np.float32]) -> None:
        """Apply the penalties to ``logits`` [vocab_size] in place."""
        ids, counts = self._ids[: self._size], self._counts[: self._size]
        values = logits[ids]
        params = self._params
        if params.repetition_penalty != 1.0:
            repetition = np.float32(params.repetition_penalty)
            values = np.where(values > 0, values / repetition, values * repetition)
        if params.frequency_penalty:
            values -= np.float32(params.frequency_penalty) * counts.astype(np.float32)
        if params.presence_penalty:
            values -= np.float32(params.presence_penalty) * (counts > 0)
        logits[ids] = values

    def _append(self, token: int) -> int:
        position = self._size
        if position == len(self._ids):
            self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
            self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
        self._ids[position] = token
        self._position[token] = position
        self._size += 1
        return position
