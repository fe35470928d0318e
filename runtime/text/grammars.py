"""Grammars for structured output: compiled in a thread, and cached for requests with the same format."""

from __future__ import annotations

import json
import logging
import re
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from itertools import islice
from typing import Protocol

import llguidance
import numpy as np
import numpy.typing as npt
from llguidance.gbnf_to_lark import gbnf_to_lark

from ...errors import InvalidSamplingError, RequestFailedError
from ..process.faults import raised_in_thread
from ..types.structured_output import StructuredOutput
from .json_schema import held_schema
from .tokenizer import Tokenizer

_log = logging.getLogger(__name__)

_MAX_CACHED = 128
_GBNF_RULE = re.compile(r"^\s*[\w-]+\s*::=", re.MULTILINE)
# About a second of work to compile and 0.1 s a mask, then the library gives up. Its own limits allow more.
_LIMITS = llguidance.LLParserLimits(
    initial_lexer_fuel=1_000_000,
    max_grammar_size=200_000,
    max_lexer_states=50_000,
    step_max_items=20_000,
    verbose_errors=False,
)
# How the library's messages begin when one of its limits is exceeded; the limit follows.
_EXCEEDED = re.compile("too many (items|states)|current row has|fuel|too big", re.IGNORECASE)

# The library recurses as deeply as the grammar: with a stack of 8 MiB, 5,000 chained rules end the process.
_STACK_BYTES = 512 << 20
# Seconds. A grammar whose first mask takes longer would delay every step, so it is refused.
_MAX_MASK_SECONDS = 0.5
# Seconds of processor time. llguidance 1.9 holds the GIL while it checks or finds proposals. All wait.
# A check stops then, and a grammar that took longer to find forced text is not asked again.
_MAX_PROPOSAL_SECONDS = 0.002
_MAX_FORCED = 64  # tokens


def _threads(name: str, count: int = 1) -> ThreadPoolExecutor:
    """Threads with deep stacks; these cost memory only as far as they are used."""
    pool, together = ThreadPoolExecutor(count, name), threading.Barrier(count)
    before = threading.stack_size(_STACK_BYTES)
    try:
        for _ in range(count):
            pool.submit(together.wait)  # each starts a thread, as none of them is idle before all are there
    finally:
        threading.stack_size(before)
    return pool


_Key = tuple[tuple[str, str] | None, "Frame | None"]

_MASKS = _threads("carryall-mask", 4)  # several, so that a slow mask does not hold up those of other requests


class GrammarMatcher:
    """The grammar state of one request: a ``LogitsProcessor`` that masks tokens the grammar forbids."""

    lowers = True

    def __init__(self, matcher: llguidance.LLMatcher, vocab_size: int) -> None:
        self._matcher = matcher
        self._mask = np.zeros((vocab_size + 31) // 32, np.int32)
        self._filled: Future[None] | None = None
        self._forced: deque[int] = deque()
        self._asks_for_forced = True

    @property
    def finished(self) -> bool:
        """Whether the grammar allows no further token."""
        return bool(self._matcher.is_stopped())

    @property
    def error(self) -> str:
        """Why the grammar failed, empty if it did not."""
        return str(self._matcher.get_error())

    def prepare(self) -> None:
        """Start computing the token mask in a thread, in parallel with the model's run."""
        if self._filled is None:
            self._filled = _MASKS.submit(self._fill)

    def ready(self, seconds: float) -> bool:
        """Whether it is known what may come next; wait at most so long for it."""
        self.prepare()
        assert self._filled is not None  # noqa: S101 -- prepared
        return bool(wait([self._filled], max(0.0, seconds)).done)

    def observe(self, token: int) -> None:
        """Advance the state by a generated token."""
        self._filled = None
        if not self._forced or self._forced.popleft() != token:
            self._forced.clear()
        self._matcher.consume_token(token)

    def apply(self, logits: npt.NDArray[np.float32]) -> None:
        """Forbid all tokens that the grammar does not allow here.

        Raises:
            InvalidSamplingError: the grammar takes more work than a limit allows.
            RequestFailedError: the library gave up for another reason.
        """
        self.prepare()
        assert self._filled is not None  # noqa: S101 -- set by ``prepare``
        error = self._filled.exception()
        if error is not None:
            raise raised_in_thread("computes masks", error) from error
        if self.error:  # the library then allows the end alone, which would pass for that of the text
            _refuse_work("the grammar", self.error)
            raise RequestFailedError(f"the grammar cannot go on: {self.error.splitlines()[0]}")
        forbid(logits, self._mask)

    def forced_tokens(self) -> list[int]:
        """Return the next 64 tokens of the text that must come next; empty if there is a choice.

        Also empty after a search that took over 2 ms, such as for a literal of 10,000 characters.
        """
        if not self._forced and self._asks_for_forced:
            begin = time.thread_time()
            self._forced.extend(self._matcher.compute_ff_tokens())
            self._asks_for_forced = time.thread_time() - begin <= _MAX_PROPOSAL_SECONDS
        return list(islice(self._forced, _MAX_FORCED))

    def valid_prefix(self, tokens: Sequence[int]) -> int:
        """Return how many of these tokens the grammar allows next, as far as 2 ms of work show."""
        until = time.thread_time() + _MAX_PROPOSAL_SECONDS
        state = self._matcher.deep_copy()
        for count, token in enumerate(tokens):
            if time.thread_time() > until:
                return count
            if not state.try_consume_tokens([token]):  # an end token is never consumed, but may be valid
                return int(self._matcher.validate_tokens(list(tokens[: count + 1])))
        return len(tokens)

    def _fill(self) -> None:
        self._matcher.unsafe_compute_mask_ptr(self._mask.ctypes.data, self._mask.nbytes)

    def copy(self) -> GrammarMatcher:
        """Return an independent copy of the state."""
        return GrammarMatcher(self._matcher.deep_copy(), 32 * len(self._mask))


def forbid(logits: npt.NDArray[np.float32], mask: npt.NDArray[np.int32]) -> None:
    """Set the logits of tokens whose bit is 0 to -inf, in place.

    Where few logits are left, as of a device's largest alone, their bits are read. Otherwise words of few
    ones or few zeros alone are unpacked.

    Args:
        logits: [vocab_size].
        mask: [>= vocab_size / 32], bit i % 32 of word i // 32 for token i.
    """
    if np.count_nonzero(logits > -np.inf) <= len(mask) // 8:
        left = np.flatnonzero(logits > -np.inf)
        logits[left[(mask[left >> 5] >> (left & 31)) & 1 == 0]] = -np.inf
        return
    some, rest = np.flatnonzero(mask), np.flatnonzero(mask != -1)
    if len(some) <= len(mask) // 8:
        kept = _tokens(mask, some, len(logits))
        values = logits[kept]
        logits.fill(-np.inf)
        logits[kept] = values
    elif len(rest) <= len(mask) // 8:
        logits[_tokens(~mask, rest, len(logits))] = -np.inf
    else:
        allowed = np.unpackbits(mask.view(np.uint8), bitorder="little", count=len(logits)).view(bool)
        np.copyto(logits, -np.inf, where=~allowed)  # two thirds of the time of an index


def _tokens(mask: npt.NDArray[np.int32], words: npt.NDArray[np.intp], count: int) -> npt.NDArray[np.intp]:
    """Return the tokens below ``count`` whose bits are set in these words of a mask."""
    bits = np.unpackbits(mask[words].view(np.uint8), bitorder="little").reshape(-1, 32)
    rows, columns = np.nonzero(bits)
    tokens = words[rows] * 32 + columns
    return tokens[tokens < count]


class LateMatcher:
    """The grammar of calls that a model may make or not: it holds an answer from the first marker on.

    Before, nothing is forbidden and no mask is computed. Then the request waits until the grammar is
    compiled, so that the tokens do not depend on the time that this takes. An answer that does not fit the
    grammar up to the marker, and tools whose schema no grammar can hold, stay free.

    Args:
        compiled: the initial state; failed if the schemas cannot be used.
        marker: the text that begins a call.
        text_of: returns the text of a token.

    Attributes:
        begun: whether the marker was written.
    """

    lowers = True

    def __init__(self, compiled: Future[GrammarMatcher], marker: str, text_of: Callable[[int], str]) -> None:
        self.begun = False
        self._compiled, self._marker, self._text_of = compiled, marker, text_of
        self._tokens: list[int] = []  # that the matcher has not seen
        self._text = ""
        self._matcher: GrammarMatcher | None = None
        self._free = False

    def observe(self, token: int) -> None:
        """Follow the answer."""
        if self._matcher is not None:
            self._matcher.observe(token)
            return
        if not self._free:
            self._tokens.append(token)
        if not self.begun:
            text = self._text + self._text_of(token)
            self.begun = self._marker in text
            self._text = text[-len(self._marker) :]

    @property
    def _held(self) -> GrammarMatcher | None:
        """The matcher, if it holds the answer and is compiled."""
        if self._matcher is None and self.begun and not self._free and self._compiled.done():
            try:
                matcher = self._compiled.result().copy()
            except Exception as error:  # noqa: BLE001 -- nobody asked for a grammar, so that none is no fault
                self._give_up(error)
                return None
            for token in self._tokens:
                matcher.observe(token)
            self._tokens.clear()
            if matcher.error:
                self._free = True
            else:
                self._matcher = matcher
        return self._matcher

    def prepare(self) -> None:
        """Start computing the mask, if there is one."""
        if (matcher := self._held) is not None:
            matcher.prepare()

    def ready(self, seconds: float) -> bool:
        """Whether it is known what may come next; wait at most so long for it."""
        if not self.begun or self._free:
            return True
        if not self._compiled.done():
            wait([self._compiled], max(0.0, seconds))
        matcher = self._held
        return self._free if matcher is None else matcher.ready(seconds)

    @property
    def finished(self) -> bool:
        """Whether the grammar allows no further token."""
        return self._matcher is not None and self._matcher.finished

    @property
    def error(self) -> str:
        """Why the grammar failed, empty if it did not."""
        return "" if self._matcher is None else self._matcher.error

    def apply(self, logits: npt.NDArray[np.float32]) -> None:
        """Forbid all tokens that the grammar does not allow here; one that is too much work is given up."""
        if (matcher := self._held) is not None:
            try:
                matcher.apply(logits)
            except (InvalidSamplingError, RequestFailedError) as error:
                self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        _log.info("calls are not held to their schemas: %s", error)
        self._free, self._matcher = True, None

    def forced_tokens(self) -> list[int]:
        """Return the tokens that must come next; see ``GrammarMatcher``."""
        return [] if self._matcher is None else self._matcher.forced_tokens()

    def valid_prefix(self, tokens: Sequence[int]) -> int:
        """Return how many of these tokens are allowed next; none while that is not known."""
        if self._free or not self.begun:
            return len(tokens)
        return 0 if self._matcher is None else self._matcher.valid_prefix(tokens)

    def copy(self) -> LateMatcher:
        """Return an independent copy of the state."""
        copied = LateMatcher(self._compiled, self._marker, self._text_of)
        copied.begun, copied._free, copied._text = self.begun, self._free, self._text
        copied._tokens = list(self._tokens)
        copied._matcher = None if self._matcher is None else self._matcher.copy()
        return copied


class Frame(Protocol):
    """What is around a structured output, or in its place. Hashable."""

    def lark(self, split: Callable[[str], Sequence[str | int]], *, has_body: bool) -> str:
        """Return a grammar whose rule ``@body`` is that of the structured output.

        Args:
            split: splits a text into plain texts and the ids of tokens that are no text for a grammar.
            has_body: whether there is a structured output.
        """
        ...


class GrammarCompiler:
    """Compile grammars for one tokenizer in a background thread. Thread-safe.

    Args:
        tokenizer: the model's tokenizer.
        end_token_ids: tokens that end an output.
        vocab_size: number of logits of the model.
    """

    def __init__(self, tokenizer: Tokenizer, end_token_ids: Collection[int], vocab_size: int) -> None:
        self._source = tokenizer.to_json()
        self._end_token_ids = sorted(end_token_ids)
        self._vocab_size = max(vocab_size, tokenizer.vocab_size)
        self._tokenizer: llguidance.LLTokenizer | None = None
        self._lock = threading.Lock()
        self._pool = _threads("carryall-grammar")
        self._compiled: OrderedDict[_Key, Future[GrammarMatcher]] = OrderedDict()

    def compile(self, wanted: StructuredOutput | None, frame: Frame | None = None) -> Future[GrammarMatcher]:
        """Return a future of the initial state, to be copied; it fails with InvalidSamplingError.

        Args:
            wanted: the structured output; None if the frame is the whole grammar.
            frame: what is around it; None if nothing is.
        """
        key = (None if wanted is None else wanted.key, frame)
        with self._lock:
            future = self._compiled.get(key)
            if future is None:
                future = self._compiled[key] = self._pool.submit(self._compile, *key)
            self._compiled.move_to_end(key)
            if len(self._compiled) > _MAX_CACHED:
                self._compiled.popitem(last=False)
            return future

    def _compile(self, wanted: tuple[str, str] | None, frame: Frame | None) -> GrammarMatcher:
        if self._tokenizer is None:
            self._tokenizer = llguidance.LLTokenizer(
                self._source, n_vocab=self._vocab_size, eos_token=self._end_token_ids or None
            )
            self._split = _splitter(self._source, self._tokenizer)
        kind = "tools" if wanted is None else wanted[0]
        try:
            grammar = "" if wanted is None else _grammar(*wanted)
            if frame is not None:
                grammar = _framed(frame.lark(self._split, has_body=wanted is not None), grammar)
        except InvalidSamplingError:
            raise
        except ValueError as error:
            if "recursion limit" in str(error):
                raise InvalidSamplingError(f"{kind} is nested too deeply: {error}") from error
            raise InvalidSamplingError(f"{kind} is not valid JSON: {error}") from error
        matcher = llguidance.LLMatcher(self._tokenizer, grammar, log_level=0, limits=_LIMITS)
        if matcher.is_error():
            raise InvalidSamplingError(f"{kind} cannot be used: {matcher.get_error()}")
        start = time.monotonic()
        first = matcher.deep_copy()
        first.compute_bitmask()
        if time.monotonic() - start > _MAX_MASK_SECONDS:
            raise InvalidSamplingError(f"{kind} is too complex: computing its first mask takes too long")
        if first.get_error():
            _refuse_work(kind, first.get_error())
            raise InvalidSamplingError(f"{kind} cannot be met: it allows no first token")
        return GrammarMatcher(matcher, self._vocab_size)


def _splitter(source: str, tokenizer: llguidance.LLTokenizer) -> Callable[[str], list[str | int]]:
    """Return what splits a text at the tokens that the library does not match with text."""
    added = json.loads(source).get("added_tokens") or []
    ids: dict[str, int] = {
        token["content"]: token["id"] for token in added if tokenizer.is_special_token(token["id"])
    }
    longest_first = sorted(filter(None, ids), key=len, reverse=True)
    pattern = re.compile(f"({'|'.join(map(re.escape, longest_first))})" if ids else "(?!)")

    def split(text: str) -> list[str | int]:
        return [ids.get(part, part) for part in pattern.split(text) if part]

    return split


def _framed(lark: str, body: str) -> str:
    """Return a grammar in Lark with another one as its rule ``@body``."""
    grammars = [{"lark_grammar": lark}]
    if body:
        inner = json.loads(body)["grammars"][0] if body.startswith("{") else {"lark_grammar": body}
        grammars.append({**inner, "name": "body"})
    return json.dumps({"grammars": grammars})


def _refuse_work(what: str, message: str) -> None:
    """Check that an error message of the library is not about an exceeded limit.

    Raises:
        InvalidSamplingError: it is; the error names the limit.
    """
    reason = message.splitlines()[0]
    if _EXCEEDED.search(reason):
        raise InvalidSamplingError(f"{what} takes too much work; simplify it: {reason}")


def _grammar(kind: str, text: str) -> str:
    """Return the grammar in llguidance's own format."""
    matcher = llguidance.LLMatcher
    if kind == "regex":
        grammar = matcher.grammar_from_regex(text)
    elif kind == "grammar":
        grammar = matcher.grammar_from_lark(_lark(text))
    elif kind == "choice":
        choices = (json.dumps(choice, ensure_ascii=False) for choice in json.loads(text))
        # One terminal for all choices, since the parser tracks at most 2,000 alternatives at a time.
        grammar = matcher.grammar_from_lark(f"start: CHOICE\nCHOICE: {' | '.join(choices)}")
    else:
        held = held_schema(text if kind == "json_schema" else '{"type": "object"}')
        grammar = matcher.grammar_from_json_schema(held.text, dict(held.options))
    return str(grammar)


def _lark(text: str) -> str:
    """Return a grammar in Lark syntax; llama.cpp's GBNF is converted.

    Raises:
        InvalidSamplingError: the grammar looks like GBNF, but cannot be converted.
    """
    if not _GBNF_RULE.search(text):
        return text
    try:
        return str(gbnf_to_lark(text))
    except Exception as error:  # the converter raises plain exceptions too
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise InvalidSamplingError(f"grammar is not valid GBNF: {reason}") from error
