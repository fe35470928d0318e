"""The requests of one prompt, several if ``n`` or ``best_of`` is set, and the increments of their outputs.

The engine runs each as a separate request. The first computes the prompt; the others copy its KV from the
prefix cache.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterable, Iterator, Sequence

from ....errors import InvalidSamplingError, ProviderRuntimeError, RequestError, RequestFailedError
from ....records import dataclass
from ...process.faults import fault_text, log_fault
from ...types.outputs import (
    CompletionOutput,
    Delta,
    Logprob,
    RequestOutput,
    Usage,
    merged_calls,
)
from ...types.sampling_params import SamplingParams
from ..sampling.sampler import TokenLogprob
from .output_text import OutputPart, OutputText
from .request import Request

_log = logging.getLogger(__name__)

_SEEDS = 2**63


def sample_params(params: SamplingParams) -> Iterator[SamplingParams]:
    """Yield the options of each separate request; the seeds are ``seed``, ``seed + 1`` and so on."""
    if params.num_samples == 1 and params.best_of is None:
        yield params
        return
    ranked = params.num_samples > params.n
    for i in range(params.num_samples):
        yield dataclasses.replace(
            params,
            n=1,
            best_of=None,
            seed=None if params.seed is None else (params.seed + i) % _SEEDS,
            logprobs=(params.logprobs or 0) if ranked else params.logprobs,
            prompt_logprobs=None if i else params.prompt_logprobs,
        )


@dataclass(slots=True)
class _Position:
    """How much of a request's output was read."""

    tokens: int = 0
    reasoning_tokens: int = 0
    ended: bool = False  # whether the finish reason was read


class RequestGroup:
    """The engine's requests that the caller sees as one request.

    The engine's thread extends the outputs; one other thread may read them at the same time.

    Args:
        params: the caller's options.
        requests: one for each output; the first has the caller's request id.

    Attributes:
        read_whole: whether ``read`` has returned everything.
    """

    def __init__(self, params: SamplingParams, requests: Sequence[Request]) -> None:
        self.requests = tuple(requests)
        self.read_whole = False
        self._params = params
        self._ranked = params.num_samples > params.n
        self._positions = [_Position() for _ in self.requests]
        self._prompt_read = False
        self._fault: str | None = None  # why no text could be made

    @property
    def request_id(self) -> str:
        """The caller's request id."""
        return self.requests[0].request_id

    @property
    def finished(self) -> bool:
        """Whether all requests have ended."""
        return all(request.finished for request in self.requests)

    @property
    def cancelled(self) -> bool:
        """Whether any request was cancelled."""
        return any(request.finish_reason == "cancelled" for request in self.requests)

    @property
    def fault(self) -> RequestError | None:
        """The error of an invalid request, None if it is valid."""
        return next((request.fault for request in self.requests if request.fault is not None), None)

    @property
    def failure(self) -> InvalidSamplingError | ProviderRuntimeError | None:
        """Why the group failed while it ran: by its own fault, or for another reason; None if it did not."""
        if self._fault is not None:
            return ProviderRuntimeError(self._fault)
        failed = next((request for request in self.requests if request.error is not None), None)
        if failed is None:
            return None
        return (InvalidSamplingError if failed.invalid else ProviderRuntimeError)(failed.error)

    @property
    def num_generated(self) -> int:
        """The number of generated tokens of all requests together."""
        return sum(len(request.output_token_ids) for request in self.requests)

    @property
    def usage(self) -> Usage:
        """The token counts of what was read."""
        times = self.requests[0].metrics
        first = times.first_token
        return Usage(
            prompt_tokens=self.requests[0].num_read,
            completion_tokens=sum(position.tokens for position in self._positions),
            cached_tokens=times.cached_tokens,
            reasoning_tokens=sum(position.reasoning_tokens for position in self._positions),
            prompt_seconds=first - times.first_scheduled if first and times.first_scheduled else 0.0,
            decode_seconds=times.finished - first if first and times.finished else 0.0,
            pictures=images.usage if (images := self.requests[0].images) else (),
        )

    @property
    def empty_outputs(self) -> list[CompletionOutput]:
        """The outputs before the first token; with ``best_of``, none until all requests have ended."""
        total = None if self._params.logprobs is None else 0.0
        logprobs: list[dict[int, Logprob]] | None = None if self._params.logprobs is None else []
        count = 0 if self._ranked else len(self.requests)
        return [CompletionOutput(i, logprobs=logprobs, cumulative_logprob=total) for i in range(count)]

    def read(self) -> list[Delta]:
        """Return what each output gained since the last call, as text too; the last delta has the usage.

        A fault of the tokenizer or the parser ends all outputs with finish_reason "error".
        """
        if self.read_whole:
            return []
        try:
            if not self._ranked:
                deltas = [self._delta(i, i) for i in range(len(self.requests))]
            else:
                deltas = self._best() if self.finished else []
        except Exception as error:  # noqa: BLE001 -- a tokenizer or parser fault becomes the request's error
            log_fault(_log, self.request_id, "making the text", error)
            self._fault = fault_text("making the text", error)
            deltas = [self._failed(i) for i in range(0 if self._ranked else len(self.requests))]
        news = [delta for delta in deltas if delta is not None]
        self.read_whole = self._fault is not None or all(position.ended for position in self._positions)
        if self.read_whole and news:
            news[-1].usage = self.usage
        return news

    def output(self) -> RequestOutput:
        """Return the whole output of finished requests that were not read before."""
        return GrowingOutput(self).add(self.read())

    def _delta(self, place: int, index: int) -> Delta | None:
        """Return what request ``place`` gained, as output ``index``; None if that is nothing."""
        request, position = self.requests[place], self._positions[place]
        ended = request.finished  # read first: then all of its output is there
        start, stop = position.tokens, len(request.output_token_ids)
        if stop == start and (not ended or position.ended):
            return None
        part = OutputPart() if request.text is None else request.text.take(stop, ended=ended)
        delta = Delta(
            request_id=self.request_id,
            index=index,
            text=part.text,
            token_ids=request.output_token_ids[start:stop],
            reasoning=part.reasoning,
            tool_calls=part.tool_calls,
            prompt_tokens=request.num_read,
            cached_tokens=self.requests[0].metrics.cached_tokens,
            reasoning_tokens=part.reasoning_tokens,
        )
        if self._params.logprobs is not None and request.output_logprobs is not None:
            delta.logprobs = [_reported(each, request.text) for each in request.output_logprobs[start:stop]]
        if index == 0 and not self._prompt_read:
            self._prompt_read = True  # they are complete with the first token
            known = self.requests[0].prompt_logprobs() or []
            delta.prompt_logprobs = [_reported(each, request.text) if each else None for each in known]
        if ended:
            delta.finish_reason, delta.stop_reason = request.finish_reason, request.stop_reason
        position.tokens, position.ended = stop, ended
        position.reasoning_tokens += part.reasoning_tokens
        return delta

    def _best(self) -> list[Delta | None]:
        """Return the ``n`` outputs of the largest mean log-probability, the best first."""
        order = sorted(range(len(self.requests)), key=lambda i: _mean_logprob(self.requests[i]), reverse=True)
        deltas = [self._delta(place, index) for index, place in enumerate(order[: self._params.n])]
        for position in self._positions:
            position.ended = True
        return deltas

    def _failed(self, place: int) -> Delta:
        request, position = self.requests[place], self._positions[place]
        tokens = request.output_token_ids[position.tokens :]
        return Delta(request_id=self.request_id, index=place, token_ids=tokens, finish_reason="error")


class GrowingOutput:
    """The whole output of a group, as the sum of its deltas.

    Args:
        group: the group whose deltas are added.
    """

    def __init__(self, group: RequestGroup) -> None:
        self._group = group
        self._outputs = {output.index: output for output in group.empty_outputs}
        self._prompt_logprobs: list[dict[int, Logprob] | None] | None = None

    def add(self, deltas: Iterable[Delta]) -> RequestOutput:
        """Add deltas; return the output so far. States that were returned before do not change."""
        for delta in deltas:
            self._outputs[delta.index] = _grown(self._outputs.get(delta.index), delta)
            if delta.prompt_logprobs:
                self._prompt_logprobs = list(delta.prompt_logprobs)
        group, first = self._group, self._group.requests[0]
        failure = group.failure
        return RequestOutput(
            request_id=group.request_id,
            prompt=first.prompt,
            prompt_token_ids=first.prompt_token_ids,
            outputs=list(self._outputs.values()),
            finished=group.read_whole,
            metrics=first.metrics,
            error=None if failure is None else str(failure),
            prompt_logprobs=self._prompt_logprobs,
            embedding=first.embedding if group.read_whole else None,
            invalid=isinstance(failure, InvalidSamplingError),
        )


def _grown(output: CompletionOutput | None, delta: Delta) -> CompletionOutput:
    """Return an output with a delta at its end; None is an output of ``best_of``, which comes whole."""
    before = output or CompletionOutput(delta.index)
    with_logprobs = before.logprobs is not None or bool(delta.logprobs)
    total = before.cumulative_logprob or 0.0
    for entry, token in zip(delta.logprobs, delta.token_ids, strict=False):
        total += entry[token].logprob if token in entry else 0.0
    return CompletionOutput(
        index=delta.index,
        text=before.text + delta.text,
        token_ids=[*before.token_ids, *delta.token_ids],
        finish_reason=delta.finish_reason or before.finish_reason,
        stop_reason=delta.stop_reason if delta.finish_reason else before.stop_reason,
        logprobs=[*(before.logprobs or ()), *delta.logprobs] if with_logprobs else None,
        cumulative_logprob=total if with_logprobs else None,
        reasoning_content=(before.reasoning_content or "") + delta.reasoning or None,
        tool_calls=merged_calls([*before.tool_calls, *delta.tool_calls]),
        reasoning_tokens=before.reasoning_tokens + delta.reasoning_tokens,
    )


def _reported(logprobs: Sequence[TokenLogprob], text: OutputText | None) -> dict[int, Logprob]:
    """Return log-probabilities by token id, with the text of each token.

    Raises:
        RequestFailedError: a token cannot be decoded.
    """
    reported = {}
    for entry in logprobs:
        try:
            pair = ("", None) if text is None else text.token_text(entry.token_id)
        except Exception as error:
            raise RequestFailedError(
                f"token {entry.token_id} cannot be decoded to text: {error!r}"
            ) from error
        reported[entry.token_id] = Logprob(entry.token_id, entry.logprob, entry.rank, *pair)
    return reported


def _mean_logprob(request: Request) -> float:
    total = sum(entry[0].logprob if entry else 0.0 for entry in request.output_logprobs or ())
    return total / max(1, len(request.output_token_ids))
