"""carryall itself: LLM over a package or a Hugging Face folder.

The model is ``PATH`` or ``PATH,provider=NAME,step_stretch=NUMBER,OPTION=TEXT``, the options being the
provider's own; ``step_stretch=inf`` lets prompts go first, as peers without smooth streams do.
"""

from __future__ import annotations

from collections.abc import Callable

from worker import Timing, Work, serve

import carryall
from carryall import LLM, RequestOutput, SamplingParams
from carryall.runtime.engine.config import EngineConfig


def load(argument: str) -> tuple[str, Callable[[Work], Timing]]:
    """Load the model; give the engine's name and its measuring function."""
    path, *settings = argument.split(",")
    options = dict(setting.split("=", 1) for setting in settings)
    provider = options.pop("provider", "cpu")
    stretch = options.pop("step_stretch", None)
    config = EngineConfig() if stretch is None else EngineConfig(step_stretch=float(stretch))
    llm = LLM(path, prefix_cache=False, provider=provider, provider_options=options, engine_config=config)

    def measure(work: Work) -> Timing:
        params = SamplingParams(temperature=0.0, max_tokens=work.new_tokens, ignore_eos=True)
        return _timing(llm.generate([row.tolist() for row in work.prompts()], params))

    return " ".join([f"carryall {carryall.__version__}", provider, *settings]), measure


def _timing(outputs: list[RequestOutput]) -> Timing:
    metrics = [output.metrics for output in outputs if output.metrics is not None]
    start = min(m.arrival for m in metrics)
    first = max(m.first_token or 0.0 for m in metrics)
    last = max(m.finished or 0.0 for m in metrics)
    return Timing(first - start, last - first, sum(len(o.outputs[0].token_ids) for o in outputs))


serve(load)
