"""How one request wants its tokens chosen."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from ...errors import InvalidSamplingError
from .structured_output import StructuredOutput

MAX_LOGPROBS = 64
MAX_SAMPLES = 256

LogitsFunction = Callable[[list[int], npt.NDArray[np.float32]], npt.NDArray[np.float32]]


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling options of one request; names and meanings follow vLLM's.

    Args:
        n: how many continuations; their seeds are ``seed``, ``seed + 1``, and so on.
        best_of: generate this many, return the ``n`` of the highest log-probability per token; None is ``n``.
        max_tokens: most tokens to generate; None generates until a stop or the end of the context.
        min_tokens: end-of-sequence and stop tokens are masked until this many are generated.
        temperature: 0 is greedy; otherwise logits are divided by it.
        top_k: keep the k most likely tokens; 0 keeps all.
        top_p: keep the smallest set of tokens whose probability reaches p (nucleus, arXiv:1904.09751).
        min_p: drop tokens less likely than min_p times the most likely one (arXiv:2407.01082).
        typical_p: keep the tokens whose surprise is closest to the expected one, up to this probability
            (locally typical sampling, arXiv:2202.00666).
        mirostat: 2 draws among the tokens below a bound of surprise, which is moved so that the text's own
            comes to ``mirostat_tau`` (arXiv:2007.14966); the other filters are off then. 0 is off.
        mirostat_tau: bits of surprise a token.
        mirostat_eta: how fast the bound moves.
        xtc_probability: how often all tokens at least ``xtc_threshold`` likely are dropped, save the least
            likely of them (XTC); 0 is off.
        xtc_threshold: see there; above 0.5 it does nothing.
        dry_multiplier: size of the penalty on repeating a run of tokens (DRY); 0 is off.
        dry_base: how the penalty grows with each token more that is repeated.
        dry_allowed_length: runs shorter than this cost nothing.
        dry_penalty_last_n: how many tokens back runs are looked for; 0 is all.
        dry_sequence_breakers: texts that no run contains.
        repetition_penalty: divides positive, multiplies negative logits of tokens already seen in prompt
            or output (CTRL, arXiv:1909.05858); 1 is off.
        presence_penalty: subtracted once from each token already generated.
        frequency_penalty: subtracted per occurrence among the generated tokens.
        no_repeat_ngram_size: no n tokens in a row occur twice in prompt and output together; 0 is off.
        logit_bias: added to the logits of these token ids.
        allowed_token_ids: the only tokens that may be generated; empty allows all.
        bad_words: texts, or sequences of token ids, that must not be generated.
        logits_processors: called in turn with the tokens generated so far and the logits [vocab_size], a
            copy; what they return is drawn from. They do not travel over a wire.
        extra_args: whatever else the engine's own ``BatchLogitsProcessor``s understand.
        structured_output: the form that the output must have, as a ``StructuredOutput`` or a mapping.
        seed: makes this request's draws reproducible, whatever else shares its batch.
        stop: strings that end the text; they are not part of it.
        stop_token_ids: tokens that end the text, in addition to the model's own end tokens.
        ignore_eos: keep generating past the model's end tokens.
        logprobs: how many alternatives to report per token (0 reports only the chosen one, None nothing).
        logprob_token_ids: tokens whose log-probability is reported whatever their rank, if ``logprobs`` is.
        prompt_logprobs: the same as ``logprobs`` for the prompt's tokens.
        prompt_logprobs_start: the first of them that is wanted; what is before it may come from a cache.
        skip_special_tokens: leave special tokens out of the text.
        include_stop_str_in_output: keep the stop string at the end of the text.

    Raises:
        InvalidSamplingError: an option is out of its range.
    """

    n: int = 1
    best_of: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    mirostat: int = 0
    mirostat_tau: float = 5.0
    mirostat_eta: float = 0.1
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    dry_multiplier: float = 0.0
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_penalty_last_n: int = 0
    dry_sequence_breakers: tuple[str, ...] = ("\n", ":", '"', "*")
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    no_repeat_ngram_size: int = 0
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)
    allowed_token_ids: tuple[int, ...] = ()
    bad_words: tuple[str | tuple[int, ...], ...] = ()
    logits_processors: tuple[LogitsFunction, ...] = ()
    extra_args: Mapping[str, Any] = field(default_factory=dict, hash=False)
    structured_output: StructuredOutput | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    logprob_token_ids: tuple[int, ...] = ()
    prompt_logprobs: int | None = None
    prompt_logprobs_start: int = 0
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop", _items("stop", self.stop, str))
        object.__setattr__(self, "stop_token_ids", _items("stop_token_ids", self.stop_token_ids, int))
        for name in ("allowed_token_ids", "logprob_token_ids"):
            object.__setattr__(self, name, _items(name, getattr(self, name), int))
        breakers = _items("dry_sequence_breakers", self.dry_sequence_breakers, str)
        object.__setattr__(self, "dry_sequence_breakers", breakers)
        object.__setattr__(self, "logits_processors", _functions(self.logits_processors))
        object.__setattr__(self, "bad_words", _bad_words(self.bad_words))
        object.__setattr__(self, "logit_bias", _logit_bias(self.logit_bias))
        if self.structured_output is not None:
            object.__setattr__(self, "structured_output", StructuredOutput.of(self.structured_output))
        for name, (low, high, inclusive) in _RANGES.items():
            value = getattr(self, name)
            if value is None and name in _OPTIONAL:
                continue
            kind, noun = (int, "a whole number") if name in _WHOLE else (int | float, "a number")
            if isinstance(value, bool) or not isinstance(value, kind):
                raise InvalidSamplingError(f"{name} must be {noun}, not {value!r}")
            if not (low <= value <= high if inclusive else low < value <= high):
                bracket = "[" if inclusive else "("
                raise InvalidSamplingError(f"{name} must be in {bracket}{low}, {high}], not {value!r}")
        for name in ("ignore_eos", "skip_special_tokens", "include_stop_str_in_output"):
            if not isinstance(getattr(self, name), bool):
                raise InvalidSamplingError(f"{name} must be true or false, not {getattr(self, name)!r}")
        if any(not s for s in self.stop):
            raise InvalidSamplingError("stop strings must not be empty")
        if any(not s for s in self.dry_sequence_breakers):
            raise InvalidSamplingError("dry_sequence_breakers must not be empty texts")
        if self.mirostat not in (0, 2):
            raise InvalidSamplingError(f"mirostat is 2 or, off, 0, not {self.mirostat!r}")
        if not isinstance(self.extra_args, Mapping):
            raise InvalidSamplingError(f"extra_args must be a mapping, not {self.extra_args!r}")
        if self.best_of is not None and self.best_of < self.n:
            raise InvalidSamplingError(f"best_of {self.best_of} is less than n {self.n}")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidSamplingError(f"min_tokens {self.min_tokens} exceeds max_tokens {self.max_tokens}")

    @classmethod
    def from_dict(cls, options: Mapping[str, Any]) -> Self:
        """Build from a mapping, such as a JSON object.

        Raises:
            InvalidSamplingError: an option is unknown (the nearest known name is suggested) or out of range.
        """
        known = [field.name for field in dataclasses.fields(cls)]
        for name in options:
            if name not in known:
                near = difflib.get_close_matches(name, known, n=1)
                hint = f"did you mean '{near[0]}'?" if near else f"known options: {', '.join(known)}"
                raise InvalidSamplingError(f"unknown sampling option '{name}'; {hint}")
        return cls(**options)

    @property
    def token_ids(self) -> set[int]:
        """All token ids that the options name."""
        words = [token for word in self.bad_words if not isinstance(word, str) for token in word]
        listed = *self.stop_token_ids, *self.allowed_token_ids, *self.logprob_token_ids
        return {*listed, *self.logit_bias, *words}

    @property
    def num_samples(self) -> int:
        """How many continuations are generated, for those that are returned."""
        return self.best_of or self.n

    @property
    def greedy(self) -> bool:
        """Whether every token is the most likely one."""
        return self.temperature == 0.0


def _items(name: str, value: Any, kind: type) -> tuple[Any, ...]:
    """Return one item or several as a tuple, each checked to be of ``kind``."""
    several = isinstance(value, Iterable) and not isinstance(value, str | Mapping)
    items = tuple(value) if several else (value,)
    for item in items:
        if isinstance(item, bool) or not isinstance(item, kind):
            raise InvalidSamplingError(f"{name} must be a list of {kind.__name__}, not {value!r}")
    return items


def _functions(value: Any) -> tuple[LogitsFunction, ...]:
    if not isinstance(value, Iterable) or not all(map(callable, functions := tuple(value))):
        raise InvalidSamplingError(f"logits_processors must be a list of functions, not {value!r}")
    return functions


def _bad_words(value: Any) -> tuple[str | tuple[int, ...], ...]:
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise InvalidSamplingError(f"bad_words must be a list of texts or of token id lists, not {value!r}")
    words = tuple(word if isinstance(word, str) else _items("a bad word", word, int) for word in value)
    if not all(words):
        raise InvalidSamplingError("bad_words must not be empty")
    return words


def _logit_bias(value: Any) -> dict[int, float]:
    """Token ids may be text, as JSON wants its keys."""
    try:
        bias = {int(token): float(number) for token, number in value.items()}
    except (AttributeError, TypeError, ValueError) as error:
        raise InvalidSamplingError(f"logit_bias must map token ids to numbers, not {value!r}") from error
    if not all(abs(number) <= _MOST_LOGIT or number == -_INF for number in bias.values()):
        raise InvalidSamplingError(f"logit_bias must be within {_MOST_LOGIT}, or -inf, not {value!r}")
    return bias


_INF = float("inf")
_MOST_LOGIT = 1e30  # sums of a few such numbers are still float32
_MOST_COUNT = 2**31 - 1  # no text is longer, and arrays of int64 can be compared with it
_OPTIONAL = ("best_of", "max_tokens", "seed", "logprobs", "prompt_logprobs")
_WHOLE = (
    *_OPTIONAL,
    "n",
    "min_tokens",
    "top_k",
    "mirostat",
    "dry_allowed_length",
    "dry_penalty_last_n",
    "prompt_logprobs_start",
    "no_repeat_ngram_size",
)
# name: (lowest, highest, whether the lowest itself is allowed)
_RANGES: dict[str, tuple[float, float, bool]] = {
    "n": (1, MAX_SAMPLES, True),
    "best_of": (1, MAX_SAMPLES, True),
    "max_tokens": (1, _INF, True),
    "min_tokens": (0, _MOST_COUNT, True),
    "temperature": (0.0, _INF, True),
    "top_k": (0, _MOST_COUNT, True),
    "top_p": (0.0, 1.0, False),
    "min_p": (0.0, 1.0, True),
    "typical_p": (0.0, 1.0, False),
    "mirostat": (0, 2, True),
    "mirostat_tau": (0.0, _INF, True),
    "mirostat_eta": (0.0, _INF, True),
    "xtc_probability": (0.0, 1.0, True),
    "xtc_threshold": (0.0, 1.0, False),
    "dry_multiplier": (0.0, 1e6, True),
    "dry_base": (1.0, 1e6, True),
    "dry_allowed_length": (1, _MOST_COUNT, True),
    "dry_penalty_last_n": (0, _MOST_COUNT, True),
    "no_repeat_ngram_size": (0, _MOST_COUNT, True),
    "repetition_penalty": (1e-6, 1e6, True),
    "presence_penalty": (-2.0, 2.0, True),
    "frequency_penalty": (-2.0, 2.0, True),
    "seed": (0, 2**63 - 1, True),
    "logprobs": (0, MAX_LOGPROBS, True),
    "prompt_logprobs": (0, MAX_LOGPROBS, True),
    "prompt_logprobs_start": (0, _MOST_COUNT, True),
}
