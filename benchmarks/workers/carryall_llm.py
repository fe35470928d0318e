"""carryall itself: LLM over a package or a Hugging Face folder; int4 by default, block 128."""

from __future__ import annotations

from collections.abc import Callable

from worker import Timing, Work, serve

import carryall
from carryall import LLM, RequestOutput, SamplingParams


def load(path: str) -> tuple[str, Callable[[Work], Timing]]:
    """Load the model; give the engine\'s name and its measuring function."""
    llm = LLM(path, prefix_cache=False)

    def measure(work: Work) -> Timing:
        params = SamplingParams(temperature=0.0, max_tokens=work.new_tokens, ignore_eos=True)
        return _timing(llm.generate([row.tolist() for row in work.prompts()], params))

    return f"carryall {carryall.__version__}", measure


def _timing(outputs: list[RequestOutput]) -> Timing:
    metrics = [output.metrics for output in outputs if output.metrics is not None]
    start = min(m.arrival for m in metrics)
    first = max(m.first_token or 0.0 for m in metrics)
    last = max(m.finished or 0.0 for m in metrics)
    return Timing(first - start, last - first, sum(len(o.outputs[0].token_ids) for o in outputs))


serve(load)
