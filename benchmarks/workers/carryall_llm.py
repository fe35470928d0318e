"""Measure carryall's ``LLM`` on a package or a Hugging Face folder.

The model is ``PATH`` or ``PATH,provider=NAME,max_step_slowdown=NUMBER,OPTION=TEXT`` with options of the
provider. ``max_step_slowdown=inf`` runs prompts first, as engines without a limit of the step time do.
"""

from __future__ import annotations

from collections.abc import Callable

from worker import Timing, Work, clock, serve

import carryall
from carryall import LLM, SamplingParams
from carryall.runtime.engine.config import EngineConfig
from carryall.runtime.engine.requests.request import Request


def load(argument: str) -> tuple[str, Callable[[Work], Timing]]:
    """Load the model and return the engine's name and its measuring function."""
    path, *settings = argument.split(",")
    options = dict(setting.split("=", 1) for setting in settings)
    provider = options.pop("provider", "cpu")
    slowdown = options.pop("max_step_slowdown", None)
    config = EngineConfig() if slowdown is None else EngineConfig(max_step_slowdown=float(slowdown))
    llm = LLM(path, prefix_cache=False, provider=provider, provider_options=options, engine_config=config)

    def measure(work: Work) -> Timing:
        params = SamplingParams(temperature=0.0, max_tokens=work.new_tokens, ignore_eos=True)
        rows = [
            Request(str(number), row.tolist(), params, streamed=False)
            for number, row in enumerate(work.prompts())
        ]
        start, moments = clock(), []
        for row in rows:
            llm.engine.add(row)
        while llm.engine.has_work:
            llm.engine.step()
            if min(len(row.output_token_ids) for row in rows) > len(moments):
                moments.append(clock())
        return Timing.of(start, moments, sum(len(row.output_token_ids) for row in rows))

    return " ".join([f"carryall {carryall.__version__}", provider, *settings]), measure


serve(load)
