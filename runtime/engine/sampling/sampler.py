"""The sampler: from logits to tokens and log-probabilities, for a whole batch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol, cast, runtime_checkable

import numpy as np
import numpy.typing as npt

from ....errors import ProviderRuntimeError
from ....providers.base import BestLogits
from ....providers.native.best_draws import best_draws
from ...types.sampling_params import SamplingParams
from .candidates import GROUP_LOGITS, Row, top_candidates
from .lowered_logits import lowered_logits
from .random_sampling import NO_TOKEN as NO_TOKEN
from .random_sampling import RandomSampler, draw_best
from .sampling_state import SamplingState
from .whole_rows import log_sum_exp


class TokenLogprob(NamedTuple):
    """Natural-log probability of a token under the model's own distribution; rank 1 is the most likely."""

    token_id: int
    logprob: float
    rank: int


class Sample(NamedTuple):
    """A sampled token, NO_TOKEN if no logit is finite; the first of its log-probabilities is its own."""

    token_id: int
    logprobs: tuple[TokenLogprob, ...] = ()
    surprise: float | None = None  # in bits, for SamplingState.observe
    error: str = ""  # why there is NO_TOKEN, if something other than the logits failed


_NOTHING = Sample(NO_TOKEN)
_LARGEST = 64  # logits of a row on the host from which a token is drawn, if they decide


@runtime_checkable
class BatchLogitsProcessor(Protocol):
    """Changes the logits of many requests at once, before all filters; an option of the engine."""

    def wants(self, params: SamplingParams) -> bool:
        """Whether this processor applies to requests with these options, such as their ``extra_args``."""

    def apply(self, logits: npt.NDArray[np.float32], states: Sequence[SamplingState]) -> None:
        """Change ``logits`` [rows, vocab_size] in place.

        Args:
            logits: rows of the requests that ``wants`` accepts, after the requests' own processors.
            states: per row; read ``params``, ``prompt_token_ids`` and ``output_token_ids``.
        """


def is_wanted(processor: BatchLogitsProcessor, state: SamplingState) -> bool:
    """Whether a processor applies to a row; True if ``wants`` raises, so that ``apply`` reports the error."""
    try:
        return bool(processor.wants(state.params))
    except Exception:  # noqa: BLE001 -- user code may raise anything; reported when it is applied
        return True


def sample(
    rows: Sequence[Row | BestLogits],
    states: Sequence[SamplingState],
    processors: Sequence[BatchLogitsProcessor] = (),
) -> list[Sample]:
    """Sample the next token of each row.

    Args:
        rows: per row, logits float32 [vocab_size], or only the largest where ``best_may_suffice``; not
            changed. All logits are fetched only where the largest were not enough.
        states: per row; not changed, so that a step can be repeated.
        processors: change the logits of the rows that they apply to.

    Returns:
        One ``Sample`` per row; NO_TOKEN where nothing can be sampled.
    """
    samples = [_NOTHING] * len(rows)
    rows = _largest_first(rows, states, processors)
    best: dict[int, BestLogits] = {}  # from which a token is drawn
    processed: dict[int, BestLogits] = {}  # whose logits processors change before that
    undecided: list[int] = []
    for i, (row, state) in enumerate(zip(rows, states, strict=True)):
        if isinstance(row, BestLogits):
            if not math.isfinite(row.logsumexp):
                undecided.append(i)
            elif state.processors or state.error:
                processed[i] = row
            elif state.greedy:
                samples[i] = _best_sample(row, int(row.token_ids[0]), state)
            else:
                best[i] = row
        elif processors or not state.takes_most_likely:
            undecided.append(i)
        else:
            token = int(row.argmax())  # also finds any NaN
            if math.isfinite(row[token]):
                samples[i] = Sample(token)
    if processed:
        undecided += _lower_best(processed, states, best, samples)
    if best:
        undecided += _sample_best(best, processed, states, samples)
    if undecided:
        _sample_whole(rows, states, undecided, processors, samples)
    return samples


def _largest_first(
    rows: Sequence[Row | BestLogits],
    states: Sequence[SamplingState],
    processors: Sequence[BatchLogitsProcessor],
) -> list[Row | BestLogits]:
    """Replace logits by their largest ones where these may be enough, if the library of kernels is there."""
    given, native = list(rows), best_draws()
    wanted = [
        i
        for i, (row, state) in enumerate(zip(rows, states, strict=True))
        if not isinstance(row, BestLogits)
        and len(row) > _LARGEST
        and (processors or not state.takes_most_likely)
        and best_may_suffice(state, _LARGEST, processors)
    ]
    if native is None or not wanted:
        return given
    summed = [_needs_sum(states[i]) for i in wanted]
    largest = native.largest([cast(Row, rows[i]) for i in wanted], _LARGEST, summed)
    for i, row in zip(wanted, largest, strict=True):
        given[i] = row
    return given


def _needs_sum(state: SamplingState) -> bool:
    """Return whether sampling from the largest logits reads the log-sum-exp of all."""
    params = state.params
    return params.logprobs is not None or not (params.greedy or 0 < params.top_k <= _LARGEST)


def best_may_suffice(
    state: SamplingState, count: int, processors: Sequence[BatchLogitsProcessor] = ()
) -> bool:
    """Whether the ``count`` largest logits may be enough to sample a request's next token.

    With top-p, with min-p and without a filter this depends on the logits.
    """
    params = state.params
    if state.processors and not state.lowers:
        return False
    if processors and any(is_wanted(processor, state) for processor in processors):
        return False
    if params.logprob_token_ids or (params.logprobs or 0) > count:
        return False
    if params.greedy:
        return True
    if params.mirostat or params.typical_p < 1.0:
        return False
    if params.top_p < 1.0 or params.min_p > 0.0:
        return True
    return params.top_k <= count if params.top_k else not params.xtc_probability


def _lower_best(
    rows: Mapping[int, BestLogits],
    states: Sequence[SamplingState],
    best: dict[int, BestLogits],
    samples: list[Sample],
) -> list[int]:
    """Apply processors to the largest logits of ``rows``.

    Greedy rows are sampled, and what is left of others is added to ``best``.

    Returns:
        The rows for which these logits are not enough.
    """
    undecided, scratch = list[int](), np.empty(0, np.float32)
    for i, row in rows.items():
        state, left = states[i], None
        if state.lowers and not state.error:
            if not len(scratch):
                scratch = np.full(row.vocab_size, -np.inf, np.float32)
            left = lowered_logits(row, state, scratch)
        if left is None:
            undecided.append(i)
        elif state.greedy:
            samples[i] = _best_sample(row, int(left.token_ids[0]), state)
        else:
            best[i] = left
    return undecided


def _sample_best(
    best: Mapping[int, BestLogits],
    processed: Mapping[int, BestLogits],
    states: Sequence[SamplingState],
    samples: list[Sample],
) -> list[int]:
    """Sample rows from their largest logits; return the rows for which these are not enough.

    Log-probabilities are relative to all logits, up to rounding in the log-sum-exp, and those of
    ``processed`` to the logits before.
    """
    undecided = []
    drawn = _draw_best([*best.values()], [states[i] for i in best])
    for (i, row), token in zip(best.items(), drawn, strict=True):
        if token == NO_TOKEN:
            undecided.append(i)
        else:
            samples[i] = _best_sample(processed.get(i, row), token, states[i])
    return undecided


def _draw_best(rows: Sequence[BestLogits], states: Sequence[SamplingState]) -> list[int]:
    """Draw a token for each row by the library if it can draw all, else with NumPy; NO_TOKEN if undecided."""
    native, options = best_draws(), [each for state in states if (each := state.draw_options) is not None]
    if native is not None and len(options) == len(states):
        return native(rows, options, [state.num_tokens for state in states])
    return draw_best(rows, [state.filters() for state in states], [state.uniform() for state in states])


def _sample_whole(
    rows: Sequence[Row | BestLogits],
    states: Sequence[SamplingState],
    chosen: Sequence[int],
    processors: Sequence[BatchLogitsProcessor],
    samples: list[Sample],
) -> None:
    """Sample the chosen rows from all of their logits."""
    whole: dict[int, Row] = {}
    for i in chosen:
        row = rows[i]
        try:
            whole[i] = row.whole() if isinstance(row, BestLogits) else row
        except ProviderRuntimeError as error:
            samples[i] = Sample(NO_TOKEN, error=str(error))
    if whole:
        drawn = _sample_logits(list(whole.values()), [states[i] for i in whole], processors)
        for i, sampled in zip(whole, drawn, strict=True):
            samples[i] = sampled


def _sample_logits(
    logits: Sequence[Row], states: Sequence[SamplingState], processors: Sequence[BatchLogitsProcessor]
) -> list[Sample]:
    changed, faults = _changed_together(logits, states, processors)
    step = max(1, GROUP_LOGITS // len(logits[0]))
    tokens, random_sampler = [NO_TOKEN] * len(states), RandomSampler(len(states))
    logprobs: dict[int, tuple[TokenLogprob, ...]] = {}
    random: list[int] = []
    for start in range(0, len(logits), step):
        group = range(start, min(start + step, len(logits)))
        rows = [changed[i] if i in changed else states[i].processed(logits[i]) for i in group]
        greedy = [i for i in group if states[i].params.greedy]
        for i in greedy:
            tokens[i] = _most_likely(rows[i - start])
        logprobs |= _wanted_logprobs(logits, tokens, states, greedy)
        random += _add(random_sampler, group, rows, states)
    drawn = random_sampler.finish()
    surprises: dict[int, float] = {}
    for i in random:
        tokens[i] = int(drawn.token_ids[i])
        surprises[i] = float(drawn.surprises[i])
    logprobs |= _wanted_logprobs(logits, tokens, states, random)
    return [
        Sample(
            token,
            logprobs.get(i, ()),
            None if math.isnan(bits := surprises.get(i, math.nan)) else bits,
            faults.get(i, ""),
        )
        for i, token in enumerate(tokens)
    ]


def _changed_together(
    logits: Sequence[Row], states: Sequence[SamplingState], processors: Sequence[BatchLogitsProcessor]
) -> tuple[dict[int, Row], dict[int, str]]:
    """Apply batch processors to the rows that they want.

    Returns:
        The changed rows by index, and the errors by index; rows with an error are NaN.
    """
    changed: dict[int, Row] = {}
    faults: dict[int, str] = {}
    for processor in processors:
        wanted = [i for i, state in enumerate(states) if is_wanted(processor, state)]
        if wanted:
            rows = [changed[i] if i in changed else states[i].processed(logits[i]) for i in wanted]
            wanting = [states[i] for i in wanted]
            stacked, error = _applied(processor, rows, wanting)
            changed |= zip(wanted, stacked, strict=True)
            if error is not None:  # run each row alone to find the rows at fault
                for i, row, state in zip(wanted, rows, wanting, strict=True):
                    (changed[i],), error = _applied(processor, [row], [state])
                    if error is not None:
                        faults[i] = f"logits processor {processor!r} failed: {error!r}"
    return changed, faults


def _applied(
    processor: BatchLogitsProcessor, rows: Sequence[Row], states: Sequence[SamplingState]
) -> tuple[npt.NDArray[np.float32], Exception | None]:
    """Return changed copies of rows, and None; if the processor raises, NaN rows and the error."""
    stacked = np.stack(rows)
    try:
        for state in states:
            processor.wants(state.params)  # raises what ``is_wanted`` ignored
        processor.apply(stacked, states)
    except Exception as error:  # noqa: BLE001 -- user code may raise anything
        stacked.fill(np.nan)
        return stacked, error
    return stacked, None


def _add(
    random_sampler: RandomSampler, group: Sequence[int], rows: Sequence[Row], states: Sequence[SamplingState]
) -> list[int]:
    """Add the rows of a group that sample randomly and are finite to the sampler; return their indices."""
    best = {
        i: token
        for i, row in zip(group, rows, strict=True)
        if not states[i].params.greedy and (token := _most_likely(row)) != NO_TOKEN
    }
    random = list(best)
    if random:
        uniforms = [states[i].uniform() for i in random]
        filters = [states[i].filters() for i in random]
        logits = [rows[i - group[0]] for i in random]
        random_sampler.add(random, logits, list(best.values()), filters, uniforms)
    return random


def _wanted_logprobs(
    logits: Sequence[Row], tokens: Sequence[int], states: Sequence[SamplingState], chosen: Sequence[int]
) -> dict[int, tuple[TokenLogprob, ...]]:
    """Return log-probabilities, under the model's own distribution, of the chosen rows that ask for them."""
    wanted = [i for i in chosen if states[i].params.logprobs is not None and tokens[i] != NO_TOKEN]
    counts = [states[i].params.logprobs or 0 for i in wanted]
    named = [states[i].params.logprob_token_ids for i in wanted]
    logprobs = token_logprobs([logits[i] for i in wanted], [tokens[i] for i in wanted], counts, named)
    return dict(zip(wanted, logprobs, strict=True))


def _most_likely(logits: Row) -> int:
    """Return the first most likely token, NO_TOKEN if its logit is not finite; argmax also finds any NaN."""
    token = int(logits.argmax())
    return token if np.isfinite(logits[token]) else NO_TOKEN


def token_logprobs(
    logits: Sequence[Row],
    tokens: Sequence[int],
    counts: Sequence[int],
    named: Sequence[Sequence[int]] | None = None,
) -> list[tuple[TokenLogprob, ...]]:
    """Return log-probabilities per row: of its token, the ``counts`` most likely and the ``named`` tokens."""
    if not logits:
        return []
    counts = [min(count, len(row)) for count, row in zip(counts, logits, strict=True)]
    top = top_candidates(logits, np.maximum(counts, 1))
    likely = [ids[own > -np.inf].tolist() for ids, own in zip(top.token_ids, top.logits, strict=True)]
    named = named or [()] * len(tokens)
    return [
        _row_logprobs(row, token, others, count, more)
        for row, token, others, count, more in zip(logits, tokens, likely, counts, named, strict=True)
    ]


def _row_logprobs(
    logits: Row, token: int, best: Sequence[int], count: int, named: Sequence[int]
) -> tuple[TokenLogprob, ...]:
    normalizer = log_sum_exp(logits, best[0])
    best = best[:count]
    places = {other: place for place, other in enumerate(best, start=1)}
    return tuple(
        TokenLogprob(listed, float(logits[listed]) - normalizer, places.get(listed) or _rank(logits, listed))
        for listed in dict.fromkeys([token, *best, *named])
    )


def _rank(logits: Row, token: int) -> int:
    logit = logits[token]
    return 1 + int(np.count_nonzero(logits > logit)) + int(np.count_nonzero(logits[:token] == logit))


def _best_sample(row: BestLogits, token: int, state: SamplingState) -> Sample:
    count = state.params.logprobs
    if count is None:
        return Sample(token)
    ids, logits = row.token_ids[:count].tolist(), row.logits[:count].tolist()
    ranks = [*range(1, len(ids) + 1)]
    if token not in ids:
        place = row.token_ids.tolist().index(token)
        ids.append(token)
        logits.append(row.logits.item(place))
        ranks.append(place + 1)
    place = ids.index(token)
    for column in (ids, logits, ranks):
        column.insert(0, column.pop(place))
    total = row.logsumexp
    return Sample(token, tuple(map(TokenLogprob, ids, [logit - total for logit in logits], ranks)))
