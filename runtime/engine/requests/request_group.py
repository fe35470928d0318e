"""The requests of one prompt: several if ``n`` or ``best_of`` is set.

The engine runs each as a separate request. The first computes the prompt; the others copy its KV from the
prefix cache.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator, Sequence

from ....errors import RequestError
from ...process.faults import fault_text, log_fault
from ...types.outputs import CompletionOutput, RequestOutput
from ...types.sampling_params import SamplingParams
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


class RequestGroup:
    """The engine's requests that the caller sees as one request.

    Args:
        params: the caller's options.
        requests: one for each output; the first has the caller's request id.
    """

    def __init__(self, params: SamplingParams, requests: Sequence[Request]) -> None:
        self.requests = tuple(requests)
        self._params = params

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
    def num_generated(self) -> int:
        """The number of generated tokens of all requests together."""
        return sum(len(request.output_token_ids) for request in self.requests)

    def snapshot(self) -> RequestOutput:
        """Return an immutable view; with ``best_of``, ``outputs`` is empty until all requests have ended."""
        state = self.requests[0].snapshot()
        if len(self.requests) > 1:
            state.outputs = [request.completion(index) for index, request in enumerate(self.requests)]
            if self._params.num_samples > self._params.n:
                state.outputs = self._best(state.outputs) if self.finished else []
            state.finished = self.finished
            failed = next((one for one in self.requests if one.error is not None), None)
            if failed is not None:
                state.error, state.invalid = failed.error, failed.invalid
        return state

    def settled(self, state: RequestOutput) -> RequestOutput:
        """Make the text of a view in the reader's thread; return an error output if that fails."""
        try:
            for output in state.outputs:
                output.catch_up()
        except Exception as error:  # noqa: BLE001 -- a tokenizer or parser fault becomes the request's error
            log_fault(_log, self.request_id, "making the text", error)
            return RequestOutput(
                state.request_id,
                state.prompt,
                state.prompt_token_ids,
                [
                    CompletionOutput(output.index, token_ids=output.token_ids, finish_reason="error")
                    for output in state.outputs
                ],
                finished=True,
                metrics=state.metrics,
                error=fault_text("making the text", error),
            )
        return state

    def _best(self, outputs: list[CompletionOutput]) -> list[CompletionOutput]:
        best = sorted(outputs, key=_mean_logprob, reverse=True)[: self._params.n]
        for index, output in enumerate(best):
            output.index = index
            if self._params.logprobs is None:
                output.logprobs = output.cumulative_logprob = None
        return best


def _mean_logprob(output: CompletionOutput) -> float:
    return (output.cumulative_logprob or 0.0) / max(1, len(output.token_ids))
