"""Watermarks: signals in the choice of tokens by which a text can be recognized later."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Self

from ...errors import InvalidSamplingError
from ...options import shown
from ...records import dataclass

_MOST_KEYS = 64
_MOST_TABLE = 1 << 24
_MOST_NGRAM = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Watermark:
    """A watermark, and the secret numbers by which it is written and recognized.

    Args:
        kind: ``green`` raises the logits of a part of the vocabulary that depends on the token before
            (green lists, arXiv:2301.10226, as text-generation-inference and transformers write them);
            ``synthid`` draws by a tournament of pseudorandom values of the n-gram (SynthID-Text,
            doi:10.1038/s41586-024-08025-4, as transformers writes it), which keeps the distribution of
            single tokens.
        ratio: of ``green``: the part of the vocabulary that is green.
        bias: of ``green``: added to the logits of green tokens.
        key: of ``green``: a secret number.
        keys: of ``synthid``: secret numbers, one for each round of the tournament.
        ngram_length: of ``synthid``: tokens of an n-gram.
        context_history: of ``synthid``: contexts that are remembered, since repeated ones get no watermark.
        table_seed: of ``synthid``: the seed of the table of values.
        table_size: of ``synthid``: its entries.

    Raises:
        InvalidSamplingError: a value has a wrong type or is out of range.
    """

    kind: Literal["green", "synthid"] = "green"
    ratio: float = 0.5
    bias: float = 2.0
    key: int = 15485863
    keys: tuple[int, ...] = ()
    ngram_length: int = 5
    context_history: int = 1024
    table_seed: int = 0
    table_size: int = 65536

    def __post_init__(self) -> None:
        if self.kind not in ("green", "synthid"):
            raise InvalidSamplingError(
                f"the kind of a watermark must be green or synthid, not {shown(self.kind)}"
            )
        for name, least, most in (("ratio", 0.0, 1.0), ("bias", 0.0, 100.0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not least < value <= most:
                raise InvalidSamplingError(
                    f"{name} of a watermark must be above {least:g} and at most {most:g}, not {shown(value)}"
                )
        if self.ratio == 1.0 or not math.isfinite(self.bias):
            raise InvalidSamplingError("ratio of a watermark must be below 1")
        if isinstance(self.keys, str | bytes | Mapping) or not isinstance(self.keys, Sequence):
            raise InvalidSamplingError(
                f"keys of a watermark must be a list of numbers, not {shown(self.keys)}"
            )
        object.__setattr__(self, "keys", tuple(self.keys))
        limits = {
            "key": (1, 2**63 - 1),
            "ngram_length": (2, _MOST_NGRAM),
            "context_history": (1, 1 << 20),
            "table_seed": (0, 2**32 - 1),
            "table_size": (2, _MOST_TABLE),
        }
        for name, (low, high) in limits.items():
            _check_int(name, getattr(self, name), low, high)
        for value in self.keys:
            _check_int("each of keys", value, 0, 2**63 - 1)
        if (self.kind == "synthid") is not bool(self.keys) or len(self.keys) > _MOST_KEYS:
            raise InvalidSamplingError(
                f"a watermark has 1 to {_MOST_KEYS} keys if it is of the kind synthid, else none; not "
                f"{len(self.keys)}"
            )

    @classmethod
    def of(cls, value: Any) -> Self | None:
        """Build from true (green lists with the usual values), a mapping such as a JSON object, or None.

        Raises:
            InvalidSamplingError: the value has another type, or an unknown or invalid field.
        """
        if value is None or value is False or isinstance(value, cls):
            return value or None
        if value is True:
            return cls()
        try:
            return cls(**value)
        except TypeError as error:
            fields = ", ".join(field.name for field in dataclasses.fields(cls))
            raise InvalidSamplingError(
                f"watermark must be true or an object with some of {fields}, not {shown(value)}"
            ) from error


def _check_int(name: str, value: Any, least: int, most: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise InvalidSamplingError(
            f"{name} of a watermark must be an integer from {least} to {most}, not {shown(value)}"
        )
