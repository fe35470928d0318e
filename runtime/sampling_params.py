"""How one request wants its tokens chosen."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from .errors import InvalidSamplingError
from .structured_output import StructuredOutput

MAX_LOGPROBS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling options of one request; names and meanings follow vLLM's.

    Args:
        max_tokens: most tokens to generate; None generates until a stop or the end of the context.
        min_tokens: end-of-sequence and stop tokens are masked until this many are generated.
        temperature: 0 is greedy; otherwise logits are divided by it.
        top_k: keep the k most likely tokens; 0 keeps all.
        top_p: keep the smallest set of tokens whose probability reaches p (nucleus, arXiv:1904.09751).
        min_p: drop tokens less likely than min_p times the most likely one (arXiv:2407.01082).
        typical_p: keep the tokens whose surprise is closest to the expected one, up to this probability
            (locally typical sampling, arXiv:2202.00666).
        repetition_penalty: divides positive, multiplies negative logits of tokens already seen in prompt
            or output (CTRL, arXiv:1909.05858); 1 is off.
        presence_penalty: subtracted once from each token already generated.
        frequency_penalty: subtracted per occurrence among the generated tokens.
        no_repeat_ngram_size: no n tokens in a row occur twice in prompt and output together; 0 is off.
        logit_bias: added to the logits of these token ids.
        allowed_token_ids: the only tokens that may be generated; empty allows all.
        bad_words: texts, or sequences of token ids, that must not be generated.
        structured_output: the form that the output must have, as a ``StructuredOutput`` or a mapping.
        seed: makes this request's draws reproducible, whatever else shares its batch.
        stop: strings that end the text; they are not part of it.
        stop_token_ids: tokens that end the text, in addition to the model's own end tokens.
        ignore_eos: keep generating past the model's end tokens.
        logprobs: how many alternatives to report per token (0 reports only the chosen one, None nothing).
        skip_special_tokens: leave special tokens out of the text.
        include_stop_str_in_output: keep the stop string at the end of the text.

    Raises:
        InvalidSamplingError: an option is out of its range.
    """

    max_tokens: int | None = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    no_repeat_ngram_size: int = 0
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)
    allowed_token_ids: tuple[int, ...] = ()
    bad_words: tuple[str | tuple[int, ...], ...] = ()
    structured_output: StructuredOutput | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop", _items("stop", self.stop, str))
        object.__setattr__(self, "stop_token_ids", _items("stop_token_ids", self.stop_token_ids, int))
        object.__setattr__(
            self, "allowed_token_ids", _items("allowed_token_ids", self.allowed_token_ids, int)
        )
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
        return {*self.stop_token_ids, *self.allowed_token_ids, *self.logit_bias, *words}

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
    if any(number != number or number == _INF for number in bias.values()):
        raise InvalidSamplingError(f"logit_bias must be finite, or -inf, not {value!r}")
    return bias


_INF = float("inf")
_OPTIONAL = ("max_tokens", "seed", "logprobs")
_WHOLE = ("max_tokens", "min_tokens", "top_k", "no_repeat_ngram_size", "seed", "logprobs")
# name: (lowest, highest, whether the lowest itself is allowed)
_RANGES: dict[str, tuple[float, float, bool]] = {
    "max_tokens": (1, _INF, True),
    "min_tokens": (0, _INF, True),
    "temperature": (0.0, _INF, True),
    "top_k": (0, _INF, True),
    "top_p": (0.0, 1.0, False),
    "min_p": (0.0, 1.0, True),
    "typical_p": (0.0, 1.0, False),
    "no_repeat_ngram_size": (0, _INF, True),
    "repetition_penalty": (0.0, _INF, False),
    "presence_penalty": (-2.0, 2.0, True),
    "frequency_penalty": (-2.0, 2.0, True),
    "seed": (0, 2**63 - 1, True),
    "logprobs": (0, MAX_LOGPROBS, True),
}
