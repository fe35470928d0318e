"""Sample the tokens of a step, and verify proposed tokens."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from ...providers.base import BestLogits
from .best_logits import logits_at, sample_rows
from .late_draws import PATIENCE, LateDraws
from .plan_runner import Logits
from .requests.request import Request
from .sampling.sampler import BatchLogitsProcessor, Sample, is_wanted
from .schedule.scheduler import StepPlan


def sample_tokens(
    plan: StepPlan,
    logits: Sequence[Logits],
    sampling: Sequence[int],
    processors: Sequence[BatchLogitsProcessor],
    take: Callable[[Request, Sample], None],
    late: LateDraws,
) -> list[int]:
    """Sample the next token of the ``sampling`` rows, and further ones while they equal the proposed tokens.

    Every token is sampled as without proposals, so proposals change neither greedy nor seeded results.

    Args:
        plan: the plan that was run.
        logits: per row of the plan.
        sampling: indices of rows that end with the newest token of their requests.
        processors: change the logits of whole batches.
        take: appends a token to its request, which may finish the request.
        late: receives the requests whose grammar has no mask within 10 ms.

    Returns:
        Per row, the number of accepted proposed tokens.
    """
    accepted, one_by_one = [0] * len(plan.rows), []
    for i in sampling:
        tokens = _all_at_once(plan, i, logits[i], processors)
        if tokens is None:
            one_by_one.append(i)
        else:
            accepted[i] = _take_all(plan, i, tokens, take)
    sampling = one_by_one
    while sampling:
        places = {i: logits_at(logits[i], accepted[i] - plan.proposed[i] - 1) for i in sampling}
        until = time.monotonic() + PATIENCE
        for i, own in list(places.items()):
            if not isinstance(own, BestLogits) and not plan.requests[i].can_draw(until - time.monotonic()):
                late.set_aside(plan.requests[i], own)
                del places[i]
        sampling = list(places)
        samples = sample_rows(
            list(places.values()), [plan.requests[i].sampling for i in sampling], processors
        )
        for i, drawn in zip(sampling, samples, strict=True):
            take(plan.requests[i], drawn)
        sampling = [
            i
            for i, drawn in zip(sampling, samples, strict=True)
            if not plan.requests[i].finished and plan.accepts(i, accepted[i], drawn.token_id)
        ]
        for i in sampling:
            accepted[i] += 1
            plan.requests[i].num_computed += 1
    return accepted


def _all_at_once(
    plan: StepPlan, index: int, logits: Logits, processors: Sequence[BatchLogitsProcessor]
) -> npt.NDArray[np.intp] | None:
    """Return the most likely tokens of all positions of a row; None unless greedy sampling needs no more."""
    extra, state = plan.proposed[index], plan.requests[index].sampling
    if not extra or not state.takes_most_likely or isinstance(logits, BestLogits):
        return None
    if any(is_wanted(processor, state) for processor in processors):
        return None
    places = logits[-extra - 1 :]
    tokens: npt.NDArray[np.intp] = places.argmax(axis=1)
    return tokens if np.isfinite(places[np.arange(extra + 1), tokens]).all() else None


def _take_all(
    plan: StepPlan, index: int, tokens: npt.NDArray[np.intp], take: Callable[[Request, Sample], None]
) -> int:
    """Append tokens while they equal the proposed ones, and one more; return the number accepted."""
    request = plan.requests[index]
    for accepted, token in enumerate(tokens.tolist()):
        take(request, Sample(token))
        if request.finished or not plan.accepts(index, accepted, token):
            break
        request.num_computed += 1
    return accepted


def observe_prompts(plan: StepPlan, logits: Sequence[Logits]) -> list[Request]:
    """Pass prompt logits and hidden states to the requests that want them; return finished requests."""
    ended = []
    for row, request, own in zip(plan.rows, plan.requests, logits, strict=True):
        if request.awaits_prompt_logprobs and not isinstance(own, BestLogits) and len(own):
            request.observe_prompt(row.start + len(row.tokens) - len(own), own)
        if row.last_hidden_states is not None:
            request.observe_hidden_states(row.start, row.last_hidden_states)
            if request.finished:
                ended.append(request)
    return ended
