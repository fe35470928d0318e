"""The reference of a whole request: what its options make of the logits, token by token.

``judge`` follows the tokens that an engine gave and says at which place one is wrong. Every rule is written
from the documentation of ``SamplingParams`` as loops over the history: nothing is kept from token to token
but Mirostat's bound. Logits are changed in float32, as the engine does it, so that equal ones stay equal.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from plain_sampler import ROUNDING, keep, most_likely

from carryall.runtime.engine.sampling.filters import Filters
from carryall.runtime.types.sampling_params import SamplingParams

Logits = npt.NDArray[np.float32]
_MASK = 2**64 - 1


@dataclass(frozen=True)
class PlainRequest:
    """A request as an engine takes it.

    Args:
        params: with a seed.
        prompt: token ids.
        ends: tokens that end the output.
        bad_words: sequences of tokens.
        breakers: tokens that end a repetition for DRY.
    """

    params: SamplingParams
    prompt: list[int]
    ends: frozenset[int] = frozenset()
    bad_words: tuple[tuple[int, ...], ...] = ()
    breakers: frozenset[int] = frozenset()


def judge(
    request: PlainRequest,
    outputs: Sequence[int],
    finish: tuple[str, Any],
    model: Callable[[Sequence[int]], Logits],
    unordered: Collection[Filters],
) -> str:
    """Return what is wrong with an output; empty if nothing is.

    Args:
        request: the request.
        outputs: its tokens.
        finish: the reason of its end, and the reason of the stop.
        model: returns the logits [vocab_size] after some tokens.
        unordered: filters that drew from whole rows, where a uniform does not tell the token.
    """
    params, bound = request.params, 2 * request.params.mirostat_tau
    assert params.seed is not None
    uniforms, chances = _stream(_mix(params.seed)), _stream(_mix(_mix(params.seed) ^ 1))
    for place in range(len(outputs) + 1):
        if place and (ended := _end(request, outputs[:place])):
            return "" if (place, ended) == (len(outputs), finish) else f"{place}: {ended}, not {finish}"
        logits = _changed(request, list(outputs[:place]), model([*request.prompt, *outputs[:place]]))
        if not np.isfinite(logits.max()):
            return (
                "" if (place, finish[0]) == (len(outputs), "error") else f"{place}: every token is forbidden"
            )
        uniform, chance = next(uniforms), next(chances)
        if place == len(outputs):
            return f"{place}: it ended, {finish}"
        token = outputs[place]
        if params.temperature == 0:
            if logits[token] < logits.max() or token != most_likely(logits):
                return f"{place}: {token} is not the most likely {most_likely(logits)}"
            continue
        filters = _filters(params, bound, chance)
        kept = keep(logits, filters)
        if kept.margin <= ROUNDING:
            pass  # any of two results
        elif token not in kept.tokens:
            return f"{place}: {token} is none of the {len(kept.tokens)} that {filters} keep"
        elif not params.mirostat and filters not in unordered:
            expected, margin = kept.draw(uniform)
            if token != expected and margin > ROUNDING:
                return f"{place}: {token} was drawn at {uniform}, not {expected}"
        if params.mirostat:
            if not any(abs(each.max_surprise - bound) < 1e-3 for each in unordered):
                return f"{place}: no bound of {bound} bits was used"
            bound -= params.mirostat_eta * (_surprise(logits, params, token) - params.mirostat_tau)
    raise AssertionError("not reached")


def _end(request: PlainRequest, outputs: Sequence[int]) -> tuple[str, Any] | None:
    """Return why the output ends with its last token; None if it goes on."""
    if outputs[-1] in request.ends:
        return "stop", outputs[-1]
    if len(outputs) == request.params.max_tokens:
        return "length", None
    times = request.params.repetition_guard
    for period in range(1, 65) if times else ():
        # So many times the sequence, and 32 tokens at least behind its first time.
        count = max(period * (times - 1), 32)
        same = outputs[-count:] == outputs[-count - period : -period]
        if len(outputs) >= count + period and same:
            return "length", "repetition"
    return None


def _filters(params: SamplingParams, bound: float, chance: float) -> Filters:
    if params.mirostat:
        return Filters(temperature=params.temperature, max_surprise=bound)
    return Filters(
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=params.min_p,
        typical_p=params.typical_p,
        xtc_threshold=params.xtc_threshold if chance < params.xtc_probability else 1.0,
    )


def _surprise(logits: Logits, params: SamplingParams, token: int) -> float:
    """Return the bits of a token among all tokens."""
    scaled = (logits.astype(np.float64) - float(logits.max())) / params.temperature
    return float((math.log(np.exp(scaled).sum()) - scaled[token]) / math.log(2))


def _changed(request: PlainRequest, outputs: list[int], logits: Logits) -> Logits:
    """Return the logits after everything that changes them."""
    params, history, changed = request.params, [*request.prompt, *outputs], logits.copy()
    for token in range(len(changed)):
        _penalize(changed, token, params, history, outputs)
    for token, bias in params.logit_bias.items():
        changed[token] += np.float32(bias)
    size = params.no_repeat_ngram_size
    for start in range(len(history) - size + 1 if size else 0):
        if history[start : start + size - 1] == history[len(history) - size + 1 :]:
            changed[history[start + size - 1]] = -np.inf
    if params.allowed_token_ids:
        changed[[token for token in range(len(changed)) if token not in params.allowed_token_ids]] = -np.inf
    for token, length in _repeated(params, request.breakers, history).items():
        if params.dry_multiplier and length >= params.dry_allowed_length:
            lowered = params.dry_multiplier * params.dry_base ** (length - params.dry_allowed_length)
            changed[token] -= np.float32(min(lowered, 1e30))
    for word in request.bad_words:
        if tuple(outputs[len(outputs) - len(word) + 1 :]) == word[:-1]:
            changed[word[-1]] = -np.inf
    if len(outputs) < params.min_tokens:
        changed[list(request.ends)] = -np.inf
    for function in params.logits_processors:
        changed = function(outputs, changed)
    return changed


def _penalize(
    logits: Logits, token: int, params: SamplingParams, history: list[int], outputs: list[int]
) -> None:
    if token in (history if params.repetition_penalty != 1 else outputs):
        factor = np.float32(params.repetition_penalty)
        logits[token] = logits[token] / factor if logits[token] > 0 else logits[token] * factor
    if count := outputs.count(token):
        logits[token] -= np.float32(params.frequency_penalty) * np.float32(count)
        logits[token] -= np.float32(params.presence_penalty)


def _repeated(params: SamplingParams, breakers: Collection[int], history: list[int]) -> dict[int, int]:
    """Return, by token that would continue a repetition, the longest sequence before it (DRY)."""
    tokens = history[-params.dry_penalty_last_n :]  # 0 is all
    found: dict[int, int] = {}
    for place in range(1, len(tokens)):
        length = 0
        while length < place and tokens[place - 1 - length] == tokens[-1 - length] not in breakers:
            length += 1
        if length and tokens[place] not in breakers:
            found[tokens[place]] = max(length, found.get(tokens[place], 0))
    return found


def _stream(key: int) -> Iterator[float]:
    """Yield the numbers of SplitMix64 as uniforms."""
    while True:
        key = (key + 0x9E3779B97F4A7C15) & _MASK
        yield (_mix(key) >> 11) / 2**53


def _mix(z: int) -> int:
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    z = (z ^ z >> 27) * 0x94D049BB133111EB & _MASK
    return z ^ z >> 31
