"""Measure carryall's ``LLM`` on a package or a Hugging Face folder.

The model is ``PATH`` or ``PATH,provider=NAME,max_step_slowdown=NUMBER,OPTION=TEXT`` with options of the
provider. ``max_step_slowdown=inf`` runs prompts first, as engines without a limit of the step time do.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from worker import Timing, Work, serve

import carryall
from carryall import LLM, SamplingParams
from carryall.runtime.engine.config import EngineConfig


def load(argument: str) -> tuple[str, Callable[[Work], Timing]]:
    """Load the model and return the engine's name and its measuring function."""
    path, *settings = argument.split(",")
    options = dict(setting.split("=", 1) for setting in settings)
    provider = options.pop("provider", "cpu")
    slowdown = options.pop("max_step_slowdown", None)
    config = EngineConfig() if slowdown is None else EngineConfig(max_step_slowdown=float(slowdown))
    llm = LLM(path, prefix_cache=False, provider=provider, provider_options=options, engine_config=config)

    def generate(work: Work, new_tokens: int) -> tuple[float, int]:
        params = SamplingParams(temperature=0.0, max_tokens=new_tokens, ignore_eos=True)
        prompts = [row.tolist() for row in work.prompts()]
        start = time.perf_counter()
        outputs = llm.generate(prompts, params)
        return time.perf_counter() - start, sum(len(output.outputs[0].token_ids) for output in outputs)

    def measure(work: Work) -> Timing:
        """Measure prompts with one new token, then with all, as for engines without a first-token time."""
        first, _ = generate(work, 1)
        whole, generated = generate(work, work.new_tokens)
        return Timing(first, whole - first, generated)

    return " ".join([f"carryall {carryall.__version__}", provider, *settings]), measure


serve(load)
