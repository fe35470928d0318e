"""One request and everything it has become so far."""

from __future__ import annotations

import enum
import time
from collections.abc import Collection, Sequence
from concurrent.futures import Future
from typing import Literal, Protocol, Self

import numpy as np
import numpy.typing as npt

from ....errors import RequestError
from ...types.outputs import CompletionOutput, FinishReason, Logprob, RequestMetrics, RequestOutput, ToolCall
from ...types.sampling_params import SamplingParams
from ..sampling.logits_processors import LogitsProcessor
from ..sampling.sampler import Sample, TokenLogprob, token_logprobs
from ..sampling.sampling_state import SamplingState
from .chunk import ChunkKeys

# What a text's vector is made of: the hidden state of its last token, or the mean over all of them.
Pooling = Literal["last", "mean"]


class RequestStatus(enum.Enum):
    """Where a request stands; a preempted one waits again."""

    WAITING = enum.auto()
    RUNNING = enum.auto()
    FINISHED = enum.auto()


class OutputText(Protocol):
    """Turns tokens into the request's text; see ``runtime/api/output_text.py``."""

    @property
    def text(self) -> str:
        """The text so far, or the content of an answer."""

    @property
    def reasoning_content(self) -> str | None:
        """An answer's reasoning."""

    @property
    def tool_calls(self) -> list[ToolCall]:
        """An answer's tool calls."""

    def push(self, token_id: int, *, check_stop: bool) -> str | None:
        """Add a token; return the stop string that it completed."""

    def end(self) -> None:
        """Give out what was held back."""

    def token_text(self, token_id: int) -> str:
        """The text of one token on its own."""


class Grammar(LogitsProcessor, Protocol):
    """Where an output stands in its grammar; see ``runtime/text/grammars.py``."""

    def prepare(self) -> None:
        """Begin to find out what may come next."""

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
        self.output_token_ids: list[int] = []
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
        self._logprobs: list[dict[int, Logprob]] = []
        self._pooled: npt.NDArray[np.float64] | None = None  # sum of hidden states
        self._num_pooled = 0
        # The first token of a prompt has no probability.
        unwanted = min(max(1, params.prompt_logprobs_start), len(self.prompt_token_ids))
        self._prompt_logprobs: list[dict[int, Logprob] | None] = [None] * unwanted

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
        if self._grammar is not None:
            self._grammar.prepare()

    @property
    def draw_error(self) -> str:
        """Why the grammar or a logits processor could not go on, empty if they could."""
        return self.sampling.error or (self._grammar.error if self._grammar is not None else "")

    def forced_tokens(self) -> list[int]:
        """The tokenizer's spelling of the text that must come next, if the grammar leaves no choice."""
        return self._grammar.forced_tokens() if self._grammar is not None else []

    def valid_prefix(self, tokens: npt.NDArray[np.int64]) -> int:
        """How many of these tokens may come next, as far as the grammar is concerned."""
        return self._grammar.valid_prefix(tokens.tolist()) if self._grammar is not None else len(tokens)

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
        found = token_logprobs(list(logits[: len(tokens)]), tokens, counts)
        self._prompt_logprobs += [self._reported(logprobs) for logprobs in found]

    def append(self, sample: Sample) -> None:
        """Take a generated token; finishes the request where the token, its text or the length ends it."""
        token = sample.token_id
        self._push(token)
        self.sampling.observe(token, sample.surprise)
        if not self.metrics.first_token:
            self.metrics.first_token = time.monotonic()
        if sample.logprobs:
            self._logprobs.append(self._reported(sample.logprobs))
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
            self._text.end()

    def snapshot(self) -> RequestOutput:
        """The request's state now; later tokens do not change it."""
        logprobs = list(self._logprobs) if self.params.logprobs is not None else None
        cumulative = None
        if logprobs is not None:
            tokens = zip(logprobs, self.output_token_ids, strict=True)
            cumulative = sum(choices[token].logprob for choices, token in tokens)
        completion = CompletionOutput(
            index=0,
            text=self._text.text if self._text is not None else "",
            token_ids=self.output_token_ids.copy(),
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            logprobs=logprobs,
            cumulative_logprob=cumulative,
            reasoning_content=self._text.reasoning_content if self._text is not None else None,
            tool_calls=self._text.tool_calls if self._text is not None else [],
        )
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=self.prompt_token_ids,
            prompt_logprobs=None if self.params.prompt_logprobs is None else self._prompt_logprobs.copy(),
            outputs=[completion],
            finished=self.finished,
            metrics=self.metrics,
            error=self.error,
            embedding=self._embedding() if self.finish_reason == "stop" else None,
        )

    def _embedding(self) -> npt.NDArray[np.float32] | None:
        if self._pooled is None:
            return None
        return (self._pooled / (self.num_tokens if self.pooling == "mean" else 1)).astype(np.float32)

    def _push(self, token: int) -> None:
        if self.num_tokens == len(self._tokens):
            self._tokens = np.concatenate([self._tokens, np.empty_like(self._tokens)])
        self._tokens[self.num_tokens] = token
        self.num_tokens += 1
        self.output_token_ids.append(token)

    def _reported(self, logprobs: Sequence[TokenLogprob]) -> dict[int, Logprob]:
        return {
            p.token_id: Logprob(p.token_id, p.logprob, p.rank, self._token_text(p.token_id)) for p in logprobs
        }

    def _token_text(self, token: int) -> str:
        return self._text.token_text(token) if self._text is not None else ""
