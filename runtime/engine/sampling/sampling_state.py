"""The sampling state of one request."""

from __future__ import annotations

import secrets
from collections.abc import Collection, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from ....errors import RequestError
from ....providers.base import Draw
from ....providers.native.best_draws import pack_options
from ...process.faults import fault_text
from ...types.sampling_params import SamplingParams
from ...types.watermark import Watermark
from .dry import Dry
from .filters import COLDEST, Filters
from .logits_processors import (
    AllowedTokens,
    BadWords,
    CustomFunctions,
    LogitBias,
    LogitsProcessor,
    MinTokens,
    NoRepeatNgram,
    ThoughtBudget,
    ThoughtMarks,
)
from .penalties import Penalties
from .splitmix import mix, uniform
from .watermarks import GreenList, SynthId


class Mirostat:
    """Adjusts the maximum surprise of a token, so that the surprise of the text approaches the target.

    Args:
        target: bits of surprise per token (tau in the paper).
        rate: learning rate (eta in the paper).
    """

    def __init__(self, target: float, rate: float) -> None:
        self.max_surprise = 2.0 * target
        self._target, self._rate = target, rate

    def observe(self, surprise: float) -> None:
        """Update the maximum with the surprise of a generated token, in bits."""
        self.max_surprise -= self._rate * (surprise - self._target)


_XTC = 1  # the stream of uniforms that decides whether XTC applies


class SamplingState:
    """Sampling options, random stream and logits processors of one request.

    The uniform of the n-th token is a pure function of seed and n. It does not depend on the batch, on
    preemption or on repeated steps.

    Args:
        params: the request's options.
        prompt_token_ids: [n], for the repetition penalty, DRY and repeated n-grams.
        end_token_ids: tokens masked until ``min_tokens`` are generated.
        bad_words: token sequences that must not be generated.
        dry_breakers: token ids that end a repetition for DRY.
        thought: the marks of a thought, which ``reasoning_budget`` limits; None if the answer has none.

    Attributes:
        draw_options: filters and key for ``BestDraws``; None if it lacks a filter of the request.
        greedy: whether the most likely token is taken.
        error: why a logits processor failed; nothing is sampled then. Empty if none did.
        invalid: whether the request itself caused that error.
        thought: the budget of a thought; None if nothing limits it.
    """

    __slots__ = (
        "_filters",
        "_key",
        "_mirostat",
        "_tournament",
        "draw_options",
        "error",
        "greedy",
        "invalid",
        "num_tokens",
        "output_token_ids",
        "params",
        "processors",
        "prompt_token_ids",
        "thought",
    )

    def __init__(
        self,
        params: SamplingParams,
        prompt_token_ids: npt.NDArray[np.int64],
        end_token_ids: Collection[int] = (),
        bad_words: Collection[Sequence[int]] = (),
        dry_breakers: Collection[int] = (),
        thought: ThoughtMarks | None = None,
    ) -> None:
        self.params = params
        self.greedy = params.greedy
        self.error = ""
        self.invalid = False
        self._filters = _filters(params)
        self._mirostat = None
        if params.mirostat:
            self._mirostat = Mirostat(params.mirostat_tau, params.mirostat_eta)
        self.prompt_token_ids = prompt_token_ids
        self.output_token_ids: list[int] = []
        self.num_tokens = 0
        self._key = mix(params.seed if params.seed is not None else secrets.randbits(63))
        self.processors: list[LogitsProcessor] = list(_penalties(params, prompt_token_ids))
        if params.dry_multiplier:
            self.processors.append(Dry(params, dry_breakers, prompt_token_ids))
        if bad_words:
            self.processors.append(BadWords(bad_words))
        if params.min_tokens:
            self.processors.append(MinTokens(end_token_ids))
        self.thought: ThoughtBudget | None = None
        if thought is not None and params.reasoning_budget is not None:
            self.thought = ThoughtBudget(params.reasoning_budget, thought)
            self.processors.append(self.thought)
        if params.logits_processors:
            self.processors.append(CustomFunctions(params.logits_processors))
        self._tournament: SynthId | None = None
        if params.watermark is not None:
            self._mark(params.watermark)
        self.draw_options: bytes | None = None
        if params.greedy or not (params.mirostat or params.typical_p < 1.0 or params.xtc_probability):
            f = self._filters
            self.draw_options = pack_options(f.temperature, f.top_k, f.top_p, f.min_p, self._key)

    def _mark(self, watermark: Watermark) -> None:
        if watermark.kind == "green":
            self.processors.append(GreenList(watermark, self.prompt_token_ids))
            return
        # It applies the filters itself, so that none is left for the draw.
        self._tournament = SynthId(watermark, self._filters)
        self._filters = Filters()
        self.processors.append(self._tournament)

    def restrict(self, grammar: LogitsProcessor) -> None:
        """Add a grammar; a tournament stays the last processor."""
        self.processors.insert(len(self.processors) - (self._tournament is not None), grammar)

    def observe(self, token: int, surprise: float | None = None) -> None:
        """Record a generated token and its surprise in bits (``Sample.surprise``)."""
        self.num_tokens += 1
        self.output_token_ids.append(token)
        if self._mirostat is not None and surprise is not None:
            self._mirostat.observe(surprise)
        for processor in self.processors:
            processor.observe(token)
        if self.num_tokens == self.params.min_tokens:
            self.processors = [p for p in self.processors if not isinstance(p, MinTokens)]

    @property
    def lowers(self) -> bool:
        """Whether the processors raise no logit."""
        return all(processor.lowers for processor in self.processors)

    @property
    def takes_most_likely(self) -> bool:
        """Whether the next token is the argmax of the model's logits, and no log-probabilities are wanted."""
        return self.greedy and not self.processors and self.params.logprobs is None

    def uniform(self, stream: int = 0, ahead: int = 0) -> float:
        """Return the uniform in [0, 1) of the next token, or ``ahead`` tokens later, in a ``stream``."""
        return uniform(mix(self._key ^ stream) if stream else self._key, self.num_tokens + ahead)

    def filters(self) -> Filters:
        """Return the filters of the next token."""
        if self._mirostat is not None:
            return self._filters._replace(max_surprise=self._mirostat.max_surprise)
        if self.params.xtc_probability and self.uniform(_XTC) < self.params.xtc_probability:
            return self._filters._replace(xtc_threshold=self.params.xtc_threshold)
        return self._filters

    def draw(self, ahead: int = 0) -> Draw | None:
        """Return how a device draws the token ``ahead`` of the next one; None if only the host can."""
        if self.processors or self.error or self.draw_options is None:
            return None
        if self.greedy:
            return Draw(0.0)
        f = self._filters
        return Draw(self.uniform(ahead=ahead), f.temperature, f.top_k, f.top_p, f.min_p)

    def processed(self, logits: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        """Return a copy of ``logits`` [vocab_size] with all processors applied; itself without any."""
        if not self.processors and not self.error:
            return logits
        logits = logits.copy()
        self.process(logits)
        return logits

    def process(self, logits: npt.NDArray[np.float32]) -> None:
        """Apply all processors to ``logits`` [vocab_size] in place.

        If one fails, ``error`` is set and the logits are NaN, so that nothing is sampled.
        """
        try:
            for processor in self.processors:
                processor.apply(logits)
        except Exception as error:  # noqa: BLE001 -- user code and libraries may raise anything
            self.error = self.error or fault_text(type(processor).__name__, error)
            self.invalid = isinstance(error, RequestError)
        if self.error:
            logits.fill(np.nan)


def _penalties(params: SamplingParams, prompt_token_ids: npt.NDArray[np.int64]) -> Iterator[LogitsProcessor]:
    if Penalties.wanted(params):
        yield Penalties(params, prompt_token_ids)
    if params.logit_bias:
        yield LogitBias(params.logit_bias)
    if params.no_repeat_ngram_size:
        yield NoRepeatNgram(params.no_repeat_ngram_size, prompt_token_ids)
    if params.allowed_token_ids:
        yield AllowedTokens(params.allowed_token_ids)


def _filters(params: SamplingParams) -> Filters:
    return Filters(
        temperature=max(params.temperature, COLDEST),
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=params.min_p,
        typical_p=params.typical_p,
    )
