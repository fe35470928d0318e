"""Sampling options of a request."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import field
from typing import Any

import numpy as np
import numpy.typing as npt

from ...errors import InvalidSamplingError, UsageError
from ...options import Option, check_names, declared, option, shown
from ...records import dataclass
from .structured_output import StructuredOutput
from .watermark import Watermark

MAX_LOGPROBS = 64
_MAX_NUMBER = 1e6  # and not infinite, as JSON's 1e999
MAX_SAMPLES = 256
_MAX_COUNT = 2**31 - 1  # above any text length, and within int64
_MAX_LOGIT = 1e30  # sums of a few such numbers are finite in float32

LogitsFunction = Callable[[list[int], npt.NDArray[np.float32]], npt.NDArray[np.float32]]


# Sections of the command line's help; options without a section are not flags.
_TOKENS, _REPEATS, _LENGTH = "Sampling", "Repetition", "Length and number"


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling options of one request; names and meanings follow vLLM's.

    Args:
        temperature: divides the logits before sampling; 0 is greedy.
        top_k: sample from the k most likely tokens; 0 keeps all.
        top_p: sample from the most likely tokens whose probabilities reach this sum (nucleus,
            arXiv:1904.09751); 1 is off.
        min_p: drop tokens less likely than this share of the most likely one (arXiv:2407.01082); 0 is off.
        typical_p: sample from the tokens whose surprise is closest to the entropy, up to this total
            probability (locally typical sampling, arXiv:2202.00666); 1 is off.
        mirostat: 2 enables Mirostat 2 (arXiv:2007.14966), which replaces top-k, top-p and min-p; 0 is off.
        mirostat_tau: target surprise of Mirostat, in bits per token.
        mirostat_eta: learning rate of Mirostat.
        xtc_probability: probability of applying XTC at a token; 0 is off.
        xtc_threshold: XTC drops all tokens with at least this probability, except the least likely of them.
        seed: seed of the random numbers; equal seeds give equal samples, whatever else is in the batch.
        repetition_penalty: divides positive and multiplies negative logits of tokens in prompt or output
            (CTRL, arXiv:1909.05858); above 1 makes them less likely, 1 is off.
        presence_penalty: subtracted from the logit of each token generated before.
        frequency_penalty: subtracted from a token's logit for each time it was generated.
        no_repeat_ngram_size: never repeat an n-gram of this length, from prompt or output; 0 is off.
        repetition_guard: end the output, as if it were too long (stop_reason "repetition"), when it ends with
            so many times the same sequence of at most 64 tokens, 32 tokens in all at least; 0 is off.
        dry_multiplier: penalty on continuing a repeated sequence (DRY); 0 is off.
        dry_base: growth of the DRY penalty per repeated token.
        dry_allowed_length: shortest repeated sequence that DRY penalizes, in tokens.
        dry_penalty_last_n: number of last tokens that DRY searches for repetitions; 0 is all.
        dry_sequence_breakers: texts that end a repeated sequence of DRY.
        max_tokens: maximum number of tokens to generate; None generates until a stop or the end of the
            context.
        reasoning_budget: maximum number of tokens of a thought in a chat, which is ended then; 0 ends it at
            once, and None leaves its length to the model.
        reasoning_budget_message: a text that is written before a thought is ended by its budget.
        min_tokens: minimum number of tokens to generate; end and stop tokens are masked before.
        stop: end the output before this text.
        n: number of outputs; their seeds are ``seed``, ``seed + 1``, and so on.
        best_of: generate this many and return the n with the highest log-probability per token; None is n.
        logprobs: report log-probabilities of this many most likely tokens at each position; 0 reports only
            the chosen token, None nothing.
        logit_bias: added to the logits of these token ids.
        allowed_token_ids: the only tokens that may be generated; empty allows all.
        bad_words: texts, or sequences of token ids, that must not be generated.
        logits_processors: functions called in order with the generated token ids and a copy of the logits,
            float32 [vocab_size]; each returns the logits to use. Only in Python, not over a network.
        extra_args: options for ``BatchLogitsProcessor``s of the engine.
        structured_output: the format that the output must have, as a ``StructuredOutput`` or a mapping.
        watermark: write a watermark, by which ``carryall detect`` recognizes the text: true, a ``Watermark``,
            or a mapping of its fields. Below a temperature of about 0.5, ``synthid`` writes little.
        stop_token_ids: tokens that end the output, in addition to the model's own end tokens.
        ignore_eos: keep generating past the model's end tokens.
        logprob_token_ids: tokens whose log-probability is also reported, if ``logprobs`` is set.
        prompt_logprobs: the same as ``logprobs``, for the prompt tokens.
        prompt_logprobs_start: the first prompt token to report; tokens before it may come from the prefix
            cache.
        skip_special_tokens: leave special tokens out of the text.
        include_stop_str_in_output: keep the stop string at the end of the text.

    Raises:
        InvalidSamplingError: an option has a wrong type or is out of range.
    """

    temperature: float = option(1.0, least=0, most=_MAX_NUMBER, section=_TOKENS)
    top_k: int = option(0, least=0, most=_MAX_COUNT, section=_TOKENS)
    top_p: float = option(1.0, above=0, most=1, section=_TOKENS)
    min_p: float = option(0.0, least=0, most=1, section=_TOKENS)
    typical_p: float = option(1.0, above=0, most=1, section=_TOKENS)
    mirostat: int = option(0, least=0, most=2, section=_TOKENS)
    mirostat_tau: float = option(5.0, least=0, most=_MAX_NUMBER, section=_TOKENS)
    mirostat_eta: float = option(0.1, least=0, most=_MAX_NUMBER, section=_TOKENS)
    xtc_probability: float = option(0.0, least=0, most=1, section=_TOKENS)
    xtc_threshold: float = option(0.1, above=0, most=1, section=_TOKENS)
    seed: int | None = option(None, least=0, section=_TOKENS)
    repetition_penalty: float = option(1.0, least=1e-6, most=1e6, section=_REPEATS)
    presence_penalty: float = option(0.0, least=-2, most=2, section=_REPEATS)
    frequency_penalty: float = option(0.0, least=-2, most=2, section=_REPEATS)
    no_repeat_ngram_size: int = option(0, least=0, most=_MAX_COUNT, section=_REPEATS)
    repetition_guard: int = option(0, least=0, most=_MAX_COUNT, section=_REPEATS)
    dry_multiplier: float = option(0.0, least=0, most=1e6, section=_REPEATS)
    dry_base: float = option(1.75, least=1, most=1e6, section=_REPEATS)
    dry_allowed_length: int = option(2, least=1, most=_MAX_COUNT, section=_REPEATS)
    dry_penalty_last_n: int = option(0, least=0, most=_MAX_COUNT)
    dry_sequence_breakers: tuple[str, ...] = ("\n", ":", '"', "*")
    max_tokens: int | None = option(16, least=1, most=math.inf, section=_LENGTH)
    reasoning_budget: int | None = option(None, least=0, most=_MAX_COUNT, section=_LENGTH)
    reasoning_budget_message: str = ""
    min_tokens: int = option(0, least=0, most=_MAX_COUNT, section=_LENGTH)
    stop: tuple[str, ...] = option((), section=_LENGTH)
    n: int = option(1, least=1, most=MAX_SAMPLES, section=_LENGTH, flags=("-n",))
    best_of: int | None = option(None, least=1, most=MAX_SAMPLES, section=_LENGTH)
    logprobs: int | None = option(None, least=0, most=MAX_LOGPROBS, section=_LENGTH)
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)
    allowed_token_ids: tuple[int, ...] = ()
    bad_words: tuple[str | tuple[int, ...], ...] = ()
    logits_processors: tuple[LogitsFunction, ...] = ()
    extra_args: Mapping[str, Any] = field(default_factory=dict, hash=False)
    structured_output: StructuredOutput | None = None
    watermark: Watermark | None = None
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprob_token_ids: tuple[int, ...] = ()
    prompt_logprobs: int | None = option(None, least=0, most=MAX_LOGPROBS)
    prompt_logprobs_start: int = option(0, least=0, most=_MAX_COUNT)
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False

    def __post_init__(self) -> None:
        try:
            for name, declaration in declared(type(self)).items():
                value, read = getattr(self, name), _READERS.get(name)
                if value is declaration.default:
                    continue
                if read is None:
                    value = declaration.check(_several(value) if declaration.repeated else value)
                object.__setattr__(self, name, value if read is None else read(value))
        except UsageError as error:
            raise InvalidSamplingError(str(error)) from None
        if not all(self.stop):
            raise InvalidSamplingError("stop strings must not be empty")
        if not all(self.dry_sequence_breakers):
            raise InvalidSamplingError("dry_sequence_breakers must not be empty texts")
        if self.repetition_guard == 1:
            raise InvalidSamplingError("repetition_guard must be 0 (off) or at least 2, not 1")
        if self.mirostat == 1:
            raise InvalidSamplingError("mirostat must be 0 (off) or 2, not 1")
        if self.best_of is not None and self.best_of < self.n:
            raise InvalidSamplingError(f"best_of {self.best_of} is less than n {self.n}")
        tournament = self.watermark is not None and self.watermark.kind == "synthid"
        if tournament and (self.mirostat or self.typical_p < 1.0 or self.xtc_probability):
            raise InvalidSamplingError(
                "a watermark of the kind synthid excludes mirostat, typical_p and xtc_probability; omit these"
            )
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidSamplingError(f"min_tokens {self.min_tokens} exceeds max_tokens {self.max_tokens}")

    @staticmethod
    def from_dict(options: Mapping[str, Any]) -> SamplingParams:
        """Build from a mapping, such as a JSON object.

        Raises:
            InvalidSamplingError: an option is unknown (the nearest known name is suggested) or out of range.
        """
        # Most requests of a service or a batch differ only in their seed: the rest is checked once. The types
        # are part of the key, since 1, 1.0 and True are equal.
        key = tuple((name, type(value), value) for name, value in options.items() if name != "seed")
        try:
            known = _checked(key)
        except TypeError:  # a value cannot be hashed
            return _made(options)
        return known if options.get("seed") is None else _with_seed(known, options["seed"])

    @property
    def token_ids(self) -> set[int]:
        """All token ids in the options."""
        words = [token for word in self.bad_words if not isinstance(word, str) for token in word]
        listed = *self.stop_token_ids, *self.allowed_token_ids, *self.logprob_token_ids
        return {*listed, *self.logit_bias, *words}

    @property
    def num_samples(self) -> int:
        """The number of generated outputs, of which ``n`` are returned."""
        return self.best_of or self.n

    @property
    def greedy(self) -> bool:
        """Whether sampling is greedy."""
        return self.temperature == 0.0


def _made(options: Mapping[str, Any]) -> SamplingParams:
    try:
        check_names(options, declared(SamplingParams), "SamplingParams")
    except UsageError as error:
        raise InvalidSamplingError(str(error)) from None
    return SamplingParams(**options)


@functools.lru_cache(maxsize=64)
def _checked(items: tuple[tuple[str, type, Any], ...]) -> SamplingParams:
    return _made({name: value for name, _, value in items})


def _with_seed(params: SamplingParams, seed: Any) -> SamplingParams:
    try:
        checked = declared(SamplingParams)["seed"].check(seed)
    except UsageError as error:
        raise InvalidSamplingError(str(error)) from None
    found = object.__new__(SamplingParams)
    for name in SamplingParams.__slots__:  # copy.copy looks up all fields twice: 40 us
        object.__setattr__(found, name, checked if name == "seed" else getattr(params, name))
    return found


def _several(value: Any) -> tuple[Any, ...]:
    """Return one item or several as a tuple."""
    several = isinstance(value, Iterable) and not isinstance(value, str | Mapping)
    return tuple(value) if several else (value,)


def _functions(value: Any) -> tuple[LogitsFunction, ...]:
    if not isinstance(value, Iterable) or not all(map(callable, functions := tuple(value))):
        raise InvalidSamplingError(f"logits_processors must be a list of functions, not {shown(value)}")
    return functions


def _bad_words(value: Any) -> tuple[str | tuple[int, ...], ...]:
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise InvalidSamplingError(
            f"bad_words must be a list of texts or of token id lists, not {shown(value)}"
        )
    words = tuple(word if isinstance(word, str) else _TOKEN_IDS.check(_several(word)) for word in value)
    if not all(words):
        raise InvalidSamplingError("bad_words must not be empty")
    return words


def _logit_bias(value: Any) -> dict[int, float]:
    """Return the biases with integer keys; JSON object keys are strings."""
    try:
        bias = {int(token): float(number) for token, number in value.items()}
    except (AttributeError, TypeError, ValueError) as error:
        raise InvalidSamplingError(f"logit_bias must map token ids to numbers, not {shown(value)}") from error
    if not all(abs(number) <= _MAX_LOGIT or number == -math.inf for number in bias.values()):
        raise InvalidSamplingError(f"logit_bias must be within {_MAX_LOGIT}, or -inf, not {shown(value)}")
    return bias


def _structured_output(value: Any) -> StructuredOutput | None:
    return None if value is None else StructuredOutput.of(value)


_TOKEN_IDS = Option(name="a bad word", default=(), help="", kinds=(int,), repeated=True)
# Readers of options whose type an annotation cannot declare.
_READERS: dict[str, Callable[[Any], Any]] = {
    "logit_bias": _logit_bias,
    "bad_words": _bad_words,
    "logits_processors": _functions,
    "structured_output": _structured_output,
    "watermark": Watermark.of,
}
