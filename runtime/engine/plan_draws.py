"""Draws the tokens that a plan's logits lead to, proposed ones included."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from ...providers.base import BestLogits
from .draw_best import place, sample_rows
from .late_draws import PATIENCE, LateDraws
from .plan_runner import Logits
from .requests.request import Request
from .sampling.sampler import BatchLogitsProcessor, Sample, is_wanted
from .schedule.scheduler import StepPlan


def draw_tokens(
    plan: StepPlan,
    logits: Sequence[Logits],
    drawing: Sequence[int],
    processors: Sequence[BatchLogitsProcessor],
    take: Callable[[Request, Sample], None],
    late: LateDraws,
) -> list[int]:
    """Draw the next token of the ``drawing`` rows, and another while the last was the one proposed.

    Every token is drawn as it would be without proposals, so these change no result: neither the most likely
    token, nor the one that a seed leads to.

    Args:
        plan: as it was run.
        logits: of its rows.
        drawing: rows that end with the newest token of their requests.
        processors: change the logits of whole batches.
        take: gives a request its token; the request may be finished then.
        late: gets the requests whose grammar has not told in time what may come next.

    Returns:
        Per row, how many of the proposed tokens were drawn.
    """
    accepted, one_by_one = [0] * len(plan.rows), []
    for i in drawing:
        tokens = _all_at_once(plan, i, logits[i], processors)
        if tokens is None:
            one_by_one.append(i)
        else:
            accepted[i] = _take_all(plan, i, tokens, take)
    drawing = one_by_one
    while drawing:
        places = {i: place(logits[i], accepted[i] - plan.proposed[i] - 1) for i in drawing}
        until = time.monotonic() + PATIENCE
        for i, own in list(places.items()):
            if not isinstance(own, BestLogits) and not plan.requests[i].can_draw(until - time.monotonic()):
                late.set_aside(plan.requests[i], own)
                del places[i]
        drawing = list(places)
        samples = sample_rows(list(places.values()), [plan.requests[i].sampling for i in drawing], processors)
        for i, drawn in zip(drawing, samples, strict=True):
            take(plan.requests[i], drawn)
        drawing = [
            i
            for i, drawn in zip(drawing, samples, strict=True)
            if not plan.requests[i].finished and plan.accepts(i, accepted[i], drawn.token_id)
        ]
        for i in drawing:
            accepted[i] += 1
            plan.requests[i].num_computed += 1
    return accepted


def _all_at_once(
    plan: StepPlan, index: int, logits: Logits, processors: Sequence[BatchLogitsProcessor]
) -> npt.NDArray[np.intp] | None:
    """The tokens of all positions that a row proposes, where none depends on those before it."""
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
    """Give a request its tokens as long as they are those proposed, and one more; return how many were."""
    request = plan.requests[index]
    for accepted, token in enumerate(tokens.tolist()):
        take(request, Sample(token))
        if request.finished or not plan.accepts(index, accepted, token):
            break
        request.num_computed += 1
    return accepted


def observe_prompts(plan: StepPlan, logits: Sequence[Logits]) -> list[Request]:
    """Give logits and hidden states of prompts to the requests that want them; return those that ended."""
    ended = []
    for row, request, own in zip(plan.rows, plan.requests, logits, strict=True):
        if request.awaits_prompt_logprobs and not isinstance(own, BestLogits) and len(own):
            request.observe_prompt(row.start + len(row.tokens) - len(own), own)
        if row.last_hidden_states is not None:
            request.observe_hidden_states(row.start, row.last_hidden_states)
            if request.finished:
                ended.append(request)
    return ended
