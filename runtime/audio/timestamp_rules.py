"""What a transcript of Whisper may go on with, and how likely the model found it.

Published with the model: https://arxiv.org/abs/2212.04356, section 4.5.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from .speech_tokens import SpeechTokens

Logits = npt.NDArray[np.float32]  # [vocab_size]


class TranscriptRules:
    """A logits processor of one request: forbids tokens, and keeps the log-probabilities of those written.

    Times come in pairs, except at the end, and never fall. A time is forced where all times together are more
    likely than any other token.

    Args:
        tokens: the special tokens of the model.
        timed: whether the transcript has times.
    """

    def __init__(self, tokens: SpeechTokens, *, timed: bool) -> None:
        self._tokens, self._timed = tokens, timed
        self._steps: list[Logits] = []  # the log-probabilities at each step

    def __call__(self, written: Sequence[int], logits: Logits) -> Logits:
        """Return the logits of the next token, given those that were written."""
        allowed = self.allowed(written, logits)
        del self._steps[len(written) :]
        self._steps.append(log_softmax(allowed))
        return allowed

    def allowed(self, written: Sequence[int], logits: Logits) -> Logits:
        """Return the logits of the next token, without those that may not follow the written ones."""
        tokens, allowed = self._tokens, np.array(logits, np.float32)
        allowed[list(tokens.suppressed)] = -np.inf
        if not written:
            allowed[list(tokens.suppressed_first)] = -np.inf
        if self._timed:
            self._restrict(written, allowed)
        return allowed

    def mean_logprob(self, written: Sequence[int]) -> float:
        """Return the mean log-probability of all tokens that were written, the end included."""
        chosen = [float(step[token]) for step, token in zip(self._steps, written, strict=False)]
        return sum(chosen) / max(1, len(chosen))

    def _restrict(self, written: Sequence[int], allowed: Logits) -> None:
        first = self._tokens.first_time
        allowed[self._tokens.untimed] = -np.inf
        timed = bool(written) and written[-1] >= first
        closed = len(written) < 2 or written[-2] >= first
        if timed and closed:  # a pair is complete, or the first time is: text follows
            allowed[first:] = -np.inf
        elif timed:  # the end of a segment: another time, or the end of all
            allowed[: self._tokens.end] = -np.inf
        times = [token for token in written if token >= first]
        if times:
            allowed[first : times[-1] + (0 if timed and not closed else 1)] = -np.inf
        if not written:
            allowed[:first] = -np.inf
            if self._tokens.latest_first is not None:
                allowed[first + self._tokens.latest_first + 1 :] = -np.inf
        logprobs = log_softmax(allowed)
        if np.logaddexp.reduce(logprobs[first:]) > logprobs[:first].max():
            allowed[:first] = -np.inf


class NextTokens:
    """A logits processor of a request for one token, behind the tokens of a beam: keeps the most likely.

    Args:
        rules: what may follow.
        beam: the tokens that were written.
        count: of tokens that are kept.

    Attributes:
        logprobs: of the most likely tokens that may follow.
    """

    def __init__(self, rules: TranscriptRules, beam: Sequence[int], count: int) -> None:
        self.logprobs: dict[int, float] = {}
        self._rules, self._beam, self._count = rules, beam, count

    def __call__(self, written: Sequence[int], logits: Logits) -> Logits:
        """Return the logits of the token behind the beam."""
        allowed = self._rules.allowed(self._beam, logits)
        logprobs = log_softmax(allowed)
        likely = np.argpartition(-logprobs, min(self._count, len(logprobs) - 1))[: self._count].tolist()
        self.logprobs = {token: float(logprobs[token]) for token in likely if np.isfinite(logprobs[token])}
        return allowed


class FirstLogits:
    """A logits processor that keeps the logits of a request's first token."""

    def __init__(self) -> None:
        self.logits = np.empty(0, np.float32)

    def __call__(self, written: Sequence[int], logits: Logits) -> Logits:
        """Return the logits as they are."""
        if not written:
            self.logits = np.array(logits, np.float32)
        return logits


def log_softmax(logits: Logits) -> Logits:
    """Return log-probabilities."""
    shifted = logits - logits.max()
    return np.asarray(shifted - np.log(np.exp(shifted).sum(dtype=np.float64)), np.float32)
