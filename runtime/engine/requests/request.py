"""One request and everything it has become so far."""

from __future__ import annotations

import enum
import logging
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from typing import Literal, Protocol, Self, TypeVar

import numpy as np
import numpy.typing as npt

from ....errors import RequestError
from ...process.faults import fault_text, log_fault
from ...types.outputs import CompletionOutput, FinishReason, Logprob, RequestMetrics, RequestOutput
from ...types.sampling_params import SamplingParams
from ..sampling.logits_processors import LogitsProcessor
from ..sampling.sampler import Sample, TokenLogprob, token_logprobs
from ..sampling.sampling_state import SamplingState
from .chunk import ChunkKeys
from .history import History, OutputText

_log = logging.getLogger(__name__)

T = TypeVar("T")

# What a text's vector is made of: the hidden state of its last token, or the mean over all of them.
Pooling = Literal["last", "mean"]


class RequestStatus(enum.Enum):
    """Where a request stands; a preempted one waits again."""

    WAITING = enum.auto()
    RUNNING = enum.auto()
    FINISHED = enum.auto()


class Grammar(LogitsProcessor, Protocol):
    """Where an output stands in its grammar; see ``runtime/text/grammars.py``."""

    def prepare(self) -> None:
        """Begin to find out what may come next."""

    def ready(self, seconds: float) -> bool:
        """Whether that is known; wait at most so long for it."""

    @property
    def finished(self) -> bool:
        """Whether nothing more may come."""

    @property
    def error(self) -> str:
        """Why the grammar could not go on, empty if it could."""

    def copy(self) -> Self:
        """The same place in the same grammar."""

    def forced_tokens(self) -> list[int]:
        """A spelling of the text that must come next; empty if there is a choice."""

    def valid_prefix(self, tokens: Sequence[int]) -> int:
        """How many of these tokens may come next."""


class Request:
    """A prompt, its options, and the tokens generated for it.

    Args:
        request_id: unique among the requests in the engine.
        prompt_token_ids: at least one.
        params: the request's options.
        end_token_ids: tokens that end it.
        bad_words: token sequences that must not be generated.
        dry_breakers: tokens that runs counted by DRY do not contain.
        grammar: becomes the matcher that the output must follow; the request waits for it.
        text: makes the text; None leaves it empty.
        prompt: the prompt as it was written, if it was text.
        priority: lower is served first, as in vLLM.
        cache_salt: only requests of the same salt share cached prefixes.
        tenant: slots are shared out fairly between tenants; None takes the salt.
        deadline: the moment, of the monotonic clock, at which the request ends however far it is.
        pooling: makes the request one for a vector instead of tokens; None generates.
    """

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        end_token_ids: Collection[int] = (),
        bad_words: Collection[tuple[int, ...]] = (),
        dry_breakers: Collection[int] = (),
        grammar: Future[Grammar] | None = None,
        text: OutputText | None = None,
        prompt: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        tenant: str | None = None,
        deadline: float | None = None,
        pooling: Pooling | None = None,
    ) -> None:
        self.request_id = request_id
        self.prompt = prompt
        self.prompt_token_ids = list(prompt_token_ids)
        self.params = params
        self.priority = priority
        self.cache_salt = cache_salt
        self.tenant = tenant if tenant is not None else cache_salt
        self.deadline = deadline
        self.pooling = pooling
        self.max_tokens = params.max_tokens  # the engine lowers it to the room there is
        self.end_token_ids = frozenset(end_token_ids)
        self.history = History(text, logprobs=params.logprobs is not None)
        self.output_token_ids = self.history.token_ids
        self.metrics = RequestMetrics(arrival=time.monotonic())

        self.status = RequestStatus.WAITING
        self.finish_reason: FinishReason | None = None
        self.stop_reason: str | int | None = None
        self.error: str | None = None
        self.fault: RequestError | None = None  # set where the request itself is why it failed

        # The scheduler's part: KV of tokens [0, num_computed) lies in `slot`, but for `num_dropped` of them.
        self.arrival_index = 0
        self.slot: int | None = None
        self.num_computed = 0
        self.num_dropped = 0
        self.overtaken = 0  # times that a later request was admitted first
        self.resumes = False  # preempted, and not admitted again yet
        self.chunk_keys: ChunkKeys | None = None
        self.stored: int | None = None  # tokens whose KV the tiers held when last looked, None if nobody has
        self.restorable = 0  # tokens up to which KV comes back from the tiers
        self.capacity: int | None = None  # tokens after which the middle is dropped, if that may be

        self._tokens = np.array(self.prompt_token_ids, np.int64)
        self.num_tokens = len(self._tokens)
        self.sampling = SamplingState(params, self._tokens, self.end_token_ids, bad_words, dry_breakers)
        self.awaited_grammar = grammar
        self._grammar: Grammar | None = None
        self._text = text
        self._pooled: npt.NDArray[np.float64] | None = None  # sum of hidden states
        self._num_pooled = 0
        # The first token of a prompt has no probability.
        unwanted = min(max(1, params.prompt_logprobs_start), len(self.prompt_token_ids))
        self._prompt_logprobs: list[Sequence[TokenLogprob]] = [()] * unwanted

    def __repr__(self) -> str:
        return f"Request({self.request_id!r}, {self.status.name}, slot={self.slot}, tokens={self.num_tokens})"

    @property
    def finished(self) -> bool:
        """Whether no more tokens will come."""
        return self.status is RequestStatus.FINISHED

    @property
    def waits_for_grammar(self) -> bool:
        """Whether the request's grammar is still being compiled."""
        return self.awaited_grammar is not None and not self.awaited_grammar.done()

    def take_grammar(self) -> None:
        """Begin to follow the grammar.

        Raises:
            RequestError: it could not be compiled.
        """
        if self.awaited_grammar is not None:
            self._grammar = self.awaited_grammar.result().copy()
            self.sampling.processors.append(self._grammar)

    def prepare_draw(self) -> None:
        """Do what of the next draw does not need the logits, beside the model's run."""
        self._of_grammar(lambda grammar: grammar.prepare(), None)

    def can_draw(self, seconds: float) -> bool:
        """Whether the grammar, if there is one, has told what may come next; wait at most so long for it."""
        return self._of_grammar(lambda grammar: grammar.ready(seconds), True)

    @property
    def draw_error(self) -> str:
        """Why the grammar or a logits processor could not go on, empty if they could."""
        return self.sampling.error or self._of_grammar(lambda grammar: grammar.error, "")

    def forced_tokens(self) -> list[int]:
        """The tokenizer's spelling of the text that must come next, if the grammar leaves no choice."""
        return self._of_grammar(lambda grammar: grammar.forced_tokens(), [])

    def valid_prefix(self, tokens: npt.NDArray[np.int64]) -> int:
        """How many of these tokens may come next, as far as the grammar is concerned."""
        return self._of_grammar(lambda grammar: grammar.valid_prefix(tokens.tolist()), len(tokens))

    def _of_grammar(self, ask: Callable[[Grammar], T], otherwise: T) -> T:
        """Ask the grammar, if there is one; where it fails, so does the next draw."""
        if self._grammar is None or self.sampling.error:
            return otherwise
        try:
            return ask(self._grammar)
        except Exception as error:  # noqa: BLE001 -- the engine, and all other requests, live on
            self.sampling.error = fault_text("the grammar", error)
            log_fault(_log, self.request_id, "the grammar", error)
            return otherwise

    @property
    def remaining_tokens(self) -> int:
        """Tokens that may still be generated; of a request that the engine took in."""
        assert self.max_tokens is not None  # noqa: S101 -- the engine has set it
        remaining = self.max_tokens - len(self.output_token_ids)
        return remaining if self.capacity is None else min(remaining, self.capacity - self.num_tokens)

    @property
    def num_uncomputed(self) -> int:
        """Known tokens whose KV is missing: 1 while decoding, more during prefill."""
        return self.num_tokens - self.num_computed

    @property
    def num_kept(self) -> int:
        """Known tokens whose KV is in the slot, or will be once they are computed."""
        return self.num_tokens - self.num_dropped

    @property
    def order(self) -> tuple[int, int]:
        """Sorts requests by who is served first."""
        return self.priority, self.arrival_index

    def drop_middle(self, first: int, last: int) -> None:
        """Forget all known tokens but the ``first`` and the ``last`` so many; the output stays what it is."""
        kept = np.concatenate([self._tokens[:first], self._tokens[self.num_tokens - last : self.num_tokens]])
        self.num_tokens = len(kept)
        self._tokens[: len(kept)] = kept
        self.num_computed = min(first, self.num_computed)
        self.chunk_keys, self.stored, self.restorable = None, None, 0

    def token_slice(self, start: int, stop: int) -> npt.NDArray[np.int64]:
        """Tokens [start, stop) of prompt and output together; a view."""
        return self._tokens[start:stop]

    @property
    def awaits_prompt_logprobs(self) -> bool:
        """Whether logits of the prompt are still wanted, which only computing it gives."""
        wanted = self.params.prompt_logprobs is not None
        return wanted and len(self._prompt_logprobs) < len(self.prompt_token_ids)

    @property
    def first_prompt_logits(self) -> int:
        """The position of the first logits still wanted of the prompt."""
        return len(self._prompt_logprobs) - 1

    @property
    def usable_prefix(self) -> int:
        """Tokens that need not be computed if their KV is at hand: at most all but the last."""
        if self.awaits_prompt_logprobs:
            return self.first_prompt_logits
        return self._num_pooled if self.pooling == "mean" else self.num_tokens - 1

    def wants_hidden_states(self, stop: int) -> bool:
        """Whether those of tokens up to ``stop`` are part of the vector."""
        return self.pooling == "mean" or (self.pooling == "last" and stop == self.num_tokens)

    def observe_hidden_states(self, start: int, states: npt.NDArray[np.float32]) -> None:
        """Pool hidden states [n, size] of the tokens from ``start`` on; after the last the request ends.

        Tokens that are in the sum are passed over: a preempted request is computed again.
        """
        stop = start + len(states)
        fresh = states[-1:] if self.pooling == "last" else states[max(0, self._num_pooled - start) :]
        found = fresh.sum(axis=0, dtype=np.float64)
        self._pooled = found if self._pooled is None else self._pooled + found
        self._num_pooled = max(self._num_pooled, stop)
        if stop == self.num_tokens:
            self.finish("stop")

    def observe_prompt(self, start: int, logits: npt.NDArray[np.float32]) -> None:
        """Note the log-probabilities of the prompt's tokens after ``start``, from logits [n, vocab_size].

        Tokens whose log-probabilities are known are passed over: a preempted request is computed again.
        """
        logits = logits[self.first_prompt_logits - start :]
        start = self.first_prompt_logits
        tokens = self.prompt_token_ids[start + 1 : start + 1 + len(logits)]
        counts = [self.params.prompt_logprobs or 0] * len(tokens)
        self._prompt_logprobs += token_logprobs(list(logits[: len(tokens)]), tokens, counts)

    def append(self, sample: Sample) -> None:
        """Take a generated token; finishes the request where the token, its text or the length ends it."""
        token = sample.token_id
        self._push(token)
        self.history.add(token, sample.logprobs)
        self.sampling.observe(token, sample.surprise)
        if not self.metrics.first_token:
            self.metrics.first_token = time.monotonic()
        ended = token in self.end_token_ids
        stop_string = None
        if self._text is not None and (not ended or self.params.include_stop_str_in_output):
            check = len(self.output_token_ids) >= self.params.min_tokens and not ended
            stop_string = self._text.push(token, check_stop=check)
        if ended:
            self.finish("stop", token)
        elif stop_string is not None:
            self.finish("stop", stop_string)
        elif self._grammar is not None and self._grammar.finished and not self._grammar.error:
            self.finish("stop")
        elif self.max_tokens is not None and len(self.output_token_ids) >= self.max_tokens:
            self.finish("length")

    def finish(
        self, reason: FinishReason, stop_reason: str | int | None = None, error: str | None = None
    ) -> None:
        """End the request."""
        self.status = RequestStatus.FINISHED
        self.finish_reason, self.stop_reason, self.error = reason, stop_reason, error
        self.metrics.finished = time.monotonic()
        if self._text is not None:
            try:
                self._text.end()
            except Exception as fault:  # noqa: BLE001 -- the engine, and all other requests, live on
                self.finish_reason, self.error = "error", error or fault_text("the tokenizer", fault)
                log_fault(_log, self.request_id, "the tokenizer", fault)

    def snapshot(self) -> RequestOutput:
        """The request's state now, which later tokens do not change. The cost does not grow with the text."""
        return RequestOutput.of(
            _PromptRecord(self),
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=self.prompt_token_ids,
            outputs=[self.completion()],
            finished=self.finished,
            metrics=self.metrics,
            error=self.error,
            embedding=self._embedding() if self.finish_reason == "stop" else None,
        )

    def completion(self, index: int = 0) -> CompletionOutput:
        """What has been generated so far."""
        history = self.history
        total = history.cumulative_logprob if history.logprobs is not None else None
        return CompletionOutput.of(history.state(), self.finish_reason, self.stop_reason, total, index)

    def prompt_logprobs(self) -> list[dict[int, Logprob] | None] | None:
        """Log-probabilities of the prompt's tokens, as far as they are known; those not wanted are None."""
        if self.params.prompt_logprobs is None:
            return None
        return [self.history.reported(one) if one else None for one in self._prompt_logprobs.copy()]

    def _embedding(self) -> npt.NDArray[np.float32] | None:
        if self._pooled is None:
            return None
        return (self._pooled / (self.num_tokens if self.pooling == "mean" else 1)).astype(np.float32)

    def _push(self, token: int) -> None:
        if self.num_tokens == len(self._tokens):
            self._tokens = np.concatenate([self._tokens, np.empty_like(self._tokens)])
        self._tokens[self.num_tokens] = token
        self.num_tokens += 1


class _PromptRecord:
    """What of a request's outputs belongs to its prompt."""

    __slots__ = ("_request",)

    def __init__(self, request: Request) -> None:
        self._request = request

    def field(self, name: str) -> list[dict[int, Logprob] | None] | None:
        """See ``Record``."""
        return {"prompt_logprobs": self._request.prompt_logprobs}[name]()

    def after(self, earlier: _PromptRecord) -> _PromptRecord:
        """A prompt does not grow."""
        return self

    def catch_up(self) -> None:
        """Nothing is worth making in advance."""
