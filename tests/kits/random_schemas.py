"""Random JSON schemas, and random texts of a grammar, one byte at a time."""

from __future__ import annotations

import random
from typing import Any

import llguidance

_NAMES = ("a", "b", "c", "a1", "x-y", "é", " k", "type")
_PATTERNS = ("^a", "^a$", "b$", "^x-", "[0-9]", "^(a|b)$", "^a|b$", "^.{1,2}$", "^[a-c]+$", r"^\d{2}$")
_FORMATS = ("date", "time", "date-time", "email", "uuid", "ipv4", "ipv6", "uri", "hostname", "duration")
_VALUES = ("x", "y", 1, 2.5, None, True, {"a": 1}, [1, "q"], 'é\n"', 0, 1.0, 1e3)
_LIKELY = b'"}],:ab01-.e\\ \nt{[xn'


class RandomSchemas:
    """Draws schemas.

    Args:
        seed: two of equal seeds draw the same.
    """

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def schema(self) -> dict[str, Any]:
        """Draw a schema with two definitions, which it may refer to."""
        drawn = self._any(0)
        return {**drawn, "$defs": {"A": self._leaf(), "B": self._leaf()}}

    def _chance(self, of: float) -> bool:
        return self._random.random() < of

    def _some(self, **bounds: tuple[Any, ...]) -> dict[str, Any]:
        """Draw some keywords, each with one of its values."""
        return {name: self._random.choice(values) for name, values in bounds.items() if self._chance(0.4)}

    def _leaf(self) -> dict[str, Any]:
        pick = self._random.choice
        bounds = {"minimum": (-3, 0, 5, 1.5), "maximum": (7, 10, 99, 12.5)}
        leaves: list[dict[str, Any]] = [
            {"type": "integer", **self._some(**bounds, multipleOf=(2, 5))},
            {"type": "number", **self._some(minimum=(-1.5, 0.25), exclusiveMaximum=(1, 2.5, 1e3))},
            {"type": "string", **self._some(minLength=(0, 1, 3), maxLength=(3, 5))},
            {"type": pick(("boolean", "null"))},
            {"enum": self._random.sample(_VALUES, 2)},
            {"const": pick(_VALUES)},
            {"type": "string", "pattern": pick(_PATTERNS), **self._some(maxLength=(4, 6))},
            {"type": "string", "format": pick(_FORMATS)},
            {"type": self._random.sample(["string", "integer", "null", "boolean"], 2)},
            {"type": "array", "items": {"type": "integer"}, "maxItems": pick((0, 1, 2))},
            {},
        ]
        return pick(leaves)

    def _any(self, depth: int) -> dict[str, Any]:
        if depth > 2 or self._chance(0.35):
            return self._leaf()
        pick, below = self._random.choice, [self._any(depth + 1) for _ in range(2)]
        names = self._random.sample(_NAMES, self._random.randint(0, 2))
        thing = {
            "type": "object",
            "properties": dict(zip(names, below, strict=False)),
            "required": self._random.sample(names, self._random.randint(0, len(names))),
            **self._some(
                additionalProperties=(False, True, self._leaf()),
                patternProperties=({pick(_PATTERNS): self._leaf(), pick(_PATTERNS): self._leaf()},),
                propertyNames=({"maxLength": 2},),
            ),
        }
        array = {"type": "array", "items": below[0], **self._some(minItems=(0, 1), maxItems=(2, 3))}
        others: list[dict[str, Any]] = [
            array,
            {"type": "array", "prefixItems": below, **self._some(items=(False, self._leaf()))},
            {pick(("anyOf", "oneOf", "allOf")): below, **self._some(properties=({"p": self._leaf()},))},
            {"$ref": f"#/$defs/{pick('AB')}"},
        ]
        return thing if self._chance(0.5) else pick(others)

    def text(self, matcher: llguidance.LLMatcher, most: int = 300) -> bytes | None:
        """Draw a text of a grammar by bytes.

        Args:
            matcher: the grammar, at its start, with a tokenizer whose tokens are bytes.
            most: the largest length.

        Returns:
            The text; None if it is not complete after ``most`` bytes.

        Raises:
            ValueError: the grammar ends before a text is complete.
        """
        text = b""
        while len(text) < most:
            if matcher.is_accepting() and (self._chance(0.5) or matcher.is_stopped()):
                return text
            mask = matcher.compute_bitmask()
            allowed = [byte for byte in range(256) if mask[byte // 8] >> (byte % 8) & 1]
            if not allowed or matcher.is_stopped():
                raise ValueError(f"the grammar ends behind {text!r}")
            closing = [byte for byte in allowed if byte in b'"}]']
            likely = [byte for byte in allowed if byte in _LIKELY]
            if closing and (self._chance(0.3) or len(text) > most / 3):
                byte = self._random.choice(closing)
            else:
                byte = self._random.choice(likely if likely and self._chance(0.6) else allowed)
            if not matcher.consume_token(byte):
                raise ValueError(f"the grammar forbids {byte!r}, which it allowed behind {text!r}")
            text += bytes([byte])
        return None
