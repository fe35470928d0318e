"""The state of one request: options, tokens, KV progress, output."""

from __future__ import annotations

import enum
import logging
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Protocol, Self, TypeVar

import numpy as np
import numpy.typing as npt

from ....errors import RequestError
from ...process.faults import fault_text, log_fault
from ...types.outputs import FinishReason, RequestMetrics
from ...types.sampling_params import SamplingParams
from ..sampling.logits_processors import LogitsProcessor, ThoughtMarks
from ..sampling.sampler import Sample, TokenLogprob
from ..sampling.sampling_state import SamplingState
from .chunk import ChunkKeys, KVSalt, TierPrefix
from .output_text import OutputText
from .pooled_states import PooledStates, Pooling
from .prompt_images import PromptImages
from .prompt_logprobs import PromptLogprobs

if TYPE_CHECKING:
    from ....exporter.adapter import LoraAdapter
    from ....providers.base import EncoderOutput

LONGEST = 64  # tokens of a repeated sequence
SHORTEST = 32  # tokens that repeat in all: a line of dashes is no loop yet


class RepetitionGuard:
    """Notices that the end of an output is one sequence of up to 64 tokens, again and again.

    Args:
        times: how often the sequence must stand there; at least 2.
    """

    def __init__(self, times: int) -> None:
        self._recent = np.full(LONGEST, -1, np.int64)  # the newest token first
        # By period: how many tokens up to the newest equal the token one period before.
        self._matched = np.zeros(LONGEST, np.int64)
        self._needed = np.maximum(np.arange(1, LONGEST + 1) * (times - 1), SHORTEST)

    def observe(self, token: int) -> bool:
        """Take a generated token; return whether the output runs in a circle."""
        same = self._recent == token
        self._matched = (self._matched + 1) * same
        self._recent[1:] = self._recent[:-1]
        self._recent[0] = token
        return bool((self._matched >= self._needed).any())


_log = logging.getLogger(__name__)

T = TypeVar("T")


class RequestStatus(enum.Enum):
    """The status of a request; a preempted one is WAITING again."""

    WAITING = enum.auto()
    RUNNING = enum.auto()
    FINISHED = enum.auto()


class Grammar(LogitsProcessor, Protocol):
    """The grammar state of one output; implemented in ``runtime/text/grammars.py``."""

    def prepare(self) -> None:
        """Start computing the mask of allowed tokens."""

    def ready(self, seconds: float) -> bool:
        """Whether that is known; wait at most so long for it."""

    @property
    def finished(self) -> bool:
        """Whether the grammar allows no further token."""

    @property
    def error(self) -> str:
        """Why the grammar failed, empty if it did not."""

    def copy(self) -> Self:
        """Return an independent copy of the state."""

    def forced_tokens(self) -> list[int]:
        """Return tokens of the text that must come next; empty if there is a choice."""

    def valid_prefix(self, tokens: Sequence[int]) -> int:
        """Return how many of these tokens the grammar allows next."""


class LateGrammar(Grammar, Protocol):
    """A grammar that begins within an output."""

    begun: bool


class Request:
    """A prompt, its options, and the tokens generated for it.

    Args:
        request_id: unique among the requests in the engine.
        prompt_token_ids: at least one token.
        params: the request's options.
        end_token_ids: tokens that end the output.
        bad_words: token sequences that must not be generated.
        dry_breakers: tokens that end a repeated run for DRY.
        thought: the marks of a thought in the answer, for ``reasoning_budget``.
        grammar: resolves to the grammar state that the output must follow; the request waits for it.
        late_grammar: holds the output from a marker on; several requests may be given the same one.
        text: the detokenizer; None leaves the text empty.
        prompt: the prompt text, if the prompt was given as text.
        priority: lower is served first, as in vLLM.
        cache_salt: only requests with the same salt share cached prefixes.
        tenant: slots are shared fairly between tenants; None uses ``cache_salt``.
        deadline: the time of ``time.monotonic`` at which the request is cancelled.
        pooling: return an embedding instead of generated tokens; None generates.
        adapter: the LoRA adapter to run with; None is the base model.
        streamed: whether its tokens are read while it runs; others' prompts then delay them little.
        images: the pictures of the prompt; None without pictures.
        pin_seconds: how long its KV is evicted after that of others when it has ended.
        resumption: lengths of the prompt at which later prompts may leave it; states are kept there.
        encoder: the output of the encoder of a model that has one; None for others.
        first_sample: the id of the request for another output of the same prompt, which computes it.
    """

    # The state of a request that has not run yet.
    status = RequestStatus.WAITING
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    error: str | None = None
    fault: RequestError | None = None  # set if the request itself was invalid
    invalid = False  # whether it turned out to be invalid while it ran

    # Set by the scheduler: `slot` holds KV of tokens [0, num_computed), except `num_dropped` evicted ones.
    arrival_index = 0
    slot: int | None = None
    num_computed = 0
    num_dropped = 0
    overtaken = 0  # how often a later request was admitted first
    resumes = False  # preempted, and not admitted again yet
    chunk_keys: ChunkKeys | None = None
    stored: TierPrefix | None = None  # what the tiers held at the last look-up, None before one
    queued_tokens = 0  # prompt tokens that were neither computed nor being computed when it was queued
    expected_seconds: float | None = None  # until its first token, estimated when it was queued
    restorable = 0  # tokens up to which KV is restored from the tiers
    restored = 0  # tokens up to which it was; more than `num_computed` until their state is there too
    capacity: int | None = None  # tokens at which the middle is dropped (context shift)
    losses = 0  # runs that failed and lost its KV, since its last token
    refused = 0  # tokens of the last row that needed too much memory, since its last token
    lora_place: int | None = None  # of the adapter, while the request runs

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        end_token_ids: Collection[int] = (),
        bad_words: Collection[tuple[int, ...]] = (),
        dry_breakers: Collection[int] = (),
        thought: ThoughtMarks | None = None,
        grammar: Future[Grammar] | None = None,
        late_grammar: LateGrammar | None = None,
        text: OutputText | None = None,
        prompt: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        tenant: str | None = None,
        deadline: float | None = None,
        pooling: Pooling | None = None,
        adapter: LoraAdapter | None = None,
        streamed: bool = True,
        images: PromptImages | None = None,
        encoder: EncoderOutput | None = None,
        pin_seconds: float = 0.0,
        resumption: Sequence[int] = (),
        first_sample: str | None = None,
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
        self.adapter = adapter
        self.streamed = streamed
        self.images = images
        self.encoder = encoder
        self.pin_seconds = pin_seconds
        self.resumption = resumption
        self.first_sample = first_sample
        self.max_tokens = params.max_tokens  # the engine limits it to the free part of the context
        self.end_token_ids = frozenset(end_token_ids)
        # These lists only grow, so any thread may read them.
        self.output_token_ids: list[int] = []
        self.output_logprobs: list[Sequence[TokenLogprob]] | None = None if params.logprobs is None else []
        self.metrics = RequestMetrics(arrival=time.monotonic())
        self._tokens = np.array(self.prompt_token_ids, np.int64)
        self.num_tokens = len(self._tokens)
        self.sampling = SamplingState(
            params, self._tokens, self.end_token_ids, bad_words, dry_breakers, thought
        )
        self._guard = RepetitionGuard(params.repetition_guard) if params.repetition_guard else None
        self.awaited_grammar = grammar
        self._late = None if late_grammar is None else late_grammar.copy()
        self.grammar: Grammar | None = None  # restricts the output, once it is compiled
        self.text = text
        self._pooled = PooledStates(pooling)
        self._prompt_logprobs = PromptLogprobs(self.prompt_token_ids, params)
        # Whether logits or hidden states of the prompt are wanted, beside the next token or instead of it.
        self.observes_prompt = pooling is not None or params.prompt_logprobs is not None

    def __repr__(self) -> str:
        return f"Request({self.request_id!r}, {self.status.name}, slot={self.slot}, tokens={self.num_tokens})"

    @property
    def finished(self) -> bool:
        """Whether the request has ended."""
        return self.status is RequestStatus.FINISHED

    @property
    def kv_salt(self) -> KVSalt:
        """What KV depends on beside the tokens; only requests with equal salts share it."""
        seen = [] if self.encoder is None else [self.encoder.key.hex()]
        names = [*([] if self.adapter is None else [self.adapter.key]), *seen]
        return (" ".join(names), self.cache_salt) if names else self.cache_salt

    @property
    def waits_for_grammar(self) -> bool:
        """Whether the request's grammar is still being compiled."""
        return self.awaited_grammar is not None and not self.awaited_grammar.done()

    def take_grammar(self) -> None:
        """Attach the compiled grammar to the request.

        Raises:
            RequestError: the grammar could not be compiled.
        """
        if self.awaited_grammar is not None:
            self.grammar = self.awaited_grammar.result().copy()
            self.sampling.restrict(self.grammar)

    def prepare_sampling(self) -> None:
        """Start the part of sampling that needs no logits, in parallel with the model's run."""
        self._of_grammar(lambda grammar: grammar.prepare(), None)

    def can_draw(self, seconds: float) -> bool:
        """Whether the grammar, if there is one, has told what may come next; wait at most so long for it."""
        return self._of_grammar(lambda grammar: grammar.ready(seconds), True)

    @property
    def sampling_error(self) -> str:
        """Why the grammar or a logits processor failed, empty if neither did."""
        return self.sampling.error or self._of_grammar(lambda grammar: grammar.error, "")

    def forced_tokens(self) -> list[int]:
        """Return the tokens of the text that the grammar forces next; empty if there is a choice."""
        return self._of_grammar(lambda grammar: grammar.forced_tokens(), [])

    def valid_prefix(self, tokens: npt.NDArray[np.int64]) -> int:
        """Return how many of these tokens the grammar allows next."""
        return self._of_grammar(lambda grammar: grammar.valid_prefix(tokens.tolist()), len(tokens))

    def _of_grammar(self, ask: Callable[[Grammar], T], otherwise: T) -> T:
        """Call the grammar, if there is one. If it raises, the request fails at its next token."""
        if self.grammar is None or self.sampling.error:
            return otherwise
        try:
            return ask(self.grammar)
        except Exception as error:  # noqa: BLE001 -- fails this request only
            self.sampling.error = fault_text("the grammar", error)
            log_fault(_log, self.request_id, "the grammar", error)
            return otherwise

    @property
    def remaining_tokens(self) -> int:
        """The number of tokens that may still be generated; only for requests added to an engine."""
        assert self.max_tokens is not None  # noqa: S101 -- the engine has set it
        remaining = self.max_tokens - len(self.output_token_ids)
        return remaining if self.capacity is None else min(remaining, self.capacity - self.num_tokens)

    @property
    def num_read(self) -> int:
        """The tokens of the prompt, and those that the encoder read in front of it."""
        return len(self.prompt_token_ids) + (0 if self.encoder is None else self.encoder.num_tokens)

    @property
    def num_uncomputed(self) -> int:
        """The number of known tokens without KV: 1 while decoding, more during prefill."""
        return self.num_tokens - self.num_computed

    @property
    def num_kept(self) -> int:
        """The number of known tokens less the evicted ones: the KV of the slot when all are computed."""
        return self.num_tokens - self.num_dropped

    @property
    def order(self) -> tuple[int, int]:
        """The sort key of preemption: the largest is preempted first."""
        return self.priority, self.arrival_index

    def drop_middle(self, first: int, last: int) -> None:
        """Drop all known tokens except the ``first`` and the ``last`` ones; the output does not change."""
        kept = np.concatenate([self._tokens[:first], self._tokens[self.num_tokens - last : self.num_tokens]])
        self.num_tokens = len(kept)
        self._tokens[: len(kept)] = kept
        self.num_computed = min(first, self.num_computed)
        self.chunk_keys, self.stored, self.restorable, self.restored = None, None, 0, 0

    def token_slice(self, start: int, stop: int) -> npt.NDArray[np.int64]:
        """Return tokens [start, stop) of prompt and output together, as a view."""
        return self._tokens[start:stop]

    def identity_slice(self, start: int, stop: int) -> npt.NDArray[np.int64]:
        """Return what KV of tokens [start, stop) depends on: token ids, and numbers below 0 for pictures."""
        if self.images is None:
            return self._tokens[start:stop]
        known = self.images.identity
        return np.concatenate([known[start:stop], self._tokens[max(start, len(known)) : stop]])

    @property
    def awaits_prompt_logprobs(self) -> bool:
        """Whether log-probabilities of prompt tokens are missing; these tokens must be computed."""
        return self._prompt_logprobs.awaited

    @property
    def first_prompt_logits(self) -> int:
        """The position of the first prompt logits that are missing."""
        return self._prompt_logprobs.first_logits

    @property
    def usable_prefix(self) -> int:
        """The number of tokens that may come from the prefix cache: at most all but the last."""
        if self.awaits_prompt_logprobs:
            return self.first_prompt_logits
        return self._pooled.num_tokens if self.pooling == "mean" else self.num_tokens - 1

    def wants_hidden_states(self, stop: int) -> bool:
        """Whether the embedding needs hidden states of a row that ends at ``stop``."""
        return self.pooling == "mean" or (self.pooling == "last" and stop == self.num_tokens)

    def observe_hidden_states(self, start: int, states: npt.NDArray[np.float32]) -> None:
        """Pool hidden states [n, hidden_size] of the tokens from ``start`` on; the last ends the request."""
        self._pooled.add(start, states)
        if start + len(states) == self.num_tokens:
            self.finish("stop")

    def observe_prompt(self, start: int, logits: npt.NDArray[np.float32]) -> None:
        """Record log-probabilities of the prompt tokens after ``start``, from logits [n, vocab_size]."""
        self._prompt_logprobs.observe(start, logits)

    def append(self, sample: Sample) -> None:
        """Append a generated token, and finish the request at an end token, stop string or length limit."""
        token = sample.token_id
        self.losses = self.refused = 0
        self._push(token)
        self.output_token_ids.append(token)
        if self.output_logprobs is not None:
            self.output_logprobs.append(sample.logprobs)
        self.sampling.observe(token, sample.surprise)
        if self._late is not None:
            self._follow(self._late, token)
        if not self.metrics.first_token:
            self.metrics.first_token = time.monotonic()
        circles = self._guard is not None and self._guard.observe(token)
        ended = token in self.end_token_ids
        stop_string = None
        if self.text is not None and (not ended or self.params.include_stop_str_in_output):
            check = len(self.output_token_ids) >= self.params.min_tokens and not ended
            stop_string = self.text.push(token, check_stop=check)
        if ended:
            self.finish("stop", token)
        elif stop_string is not None:
            self.finish("stop", stop_string)
        elif self.grammar is not None and self.grammar.finished and not self.grammar.error:
            self.finish("stop")
        elif self.max_tokens is not None and len(self.output_token_ids) >= self.max_tokens:
            self.finish("length")
        elif circles:
            self.finish("length", "repetition")

    def _follow(self, late: LateGrammar, token: int) -> None:
        """Attach the grammar once its marker is written."""
        late.observe(token)
        if late.begun:
            self.grammar, self._late = late, None
            self.sampling.restrict(late)

    def finish(
        self, reason: FinishReason, stop_reason: str | int | None = None, error: str | None = None
    ) -> None:
        """End the request."""
        if self.text is not None:
            try:
                self.text.end(cut=reason != "stop")
            except Exception as fault:  # noqa: BLE001 -- fails this request only
                reason, error = "error", error or fault_text("the tokenizer", fault)
                log_fault(_log, self.request_id, "the tokenizer", fault)
        self.finish_reason, self.stop_reason, self.error = reason, stop_reason, error
        self.metrics.finished = time.monotonic()
        # Last: a reader in another thread that sees a finished request sees all of its output.
        self.status = RequestStatus.FINISHED

    @property
    def embedding(self) -> npt.NDArray[np.float32] | None:
        """The pooled hidden states [hidden_size] of a finished embedding request."""
        return self._pooled.embedding() if self.finish_reason == "stop" else None

    def prompt_logprobs(self) -> list[Sequence[TokenLogprob]] | None:
        """Return the known log-probabilities of the prompt tokens; None if they are not asked for."""
        return self._prompt_logprobs.known()

    def _push(self, token: int) -> None:
        if self.num_tokens == len(self._tokens):
            self._tokens = np.concatenate([self._tokens, np.empty_like(self._tokens)])
        self._tokens[self.num_tokens] = token
        self.num_tokens += 1
