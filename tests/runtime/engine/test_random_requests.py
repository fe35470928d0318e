"""Random requests over all options of sampling, several at once, against a second implementation.

``pytest -m slow`` draws others for a share of ``CARRYALL_FUZZ_SECONDS``.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from fuzzing import new_seeds
from plain_requests import PlainRequest, judge
from plain_sampler import whole_rows_used

from carryall.providers.base import Row, RunnerConfig
from carryall.providers.targets.null import NullOptions, NullRunner
from carryall.runtime.engine.engine import Engine, EngineConfig
from carryall.runtime.engine.requests.request import Request
from carryall.runtime.engine.speculation.prompt_lookup import PromptLookup
from carryall.runtime.types.sampling_params import SamplingParams

Logits = npt.NDArray[np.float32]
LONGEST = 64  # tokens of an output
CONTEXT = 128
# By option, values to draw; the default comes from leaving the option out.
FILTERS: dict[str, Sequence[Any]] = {
    "top_k": (1, 3, 40, 600),
    "top_p": (0.3, 0.9, 0.99),
    "min_p": (0.01, 0.2),
    "typical_p": (0.3, 0.9),
    "xtc_probability": (0.5, 1.0),
    "xtc_threshold": (0.02, 0.2),
}
MIROSTAT: dict[str, Sequence[Any]] = {"mirostat_tau": (1.0, 3.0, 8.0), "mirostat_eta": (0.1, 1.0)}
REPEATS: dict[str, Sequence[Any]] = {
    "repetition_penalty": (0.7, 1.3, 3.0),
    "presence_penalty": (-0.5, 0.5, 2.0),
    "frequency_penalty": (-0.5, 0.3, 2.0),
    "no_repeat_ngram_size": (1, 2, 3, 5),
    "repetition_guard": (2, 3, 20),
    "dry_allowed_length": (1, 2, 4),
    "dry_base": (1.0, 1.75, 9.0),
    "dry_penalty_last_n": (2, 9, 40),
}
VERDICTS: Counter[str] = Counter()


def later(tokens: list[int], logits: Logits) -> Logits:
    """A request's own function: it depends on the tokens, and forbids one."""
    changed = np.roll(logits, len(tokens) % 3)
    changed[sum(tokens) % len(changed)] = -np.inf
    return changed


def drawn_options(rng: random.Random, vocab_size: int) -> dict[str, Any]:
    """Draw the options of a request: those of each group more often together than alone."""
    options: dict[str, Any] = {"seed": rng.randrange(2**63), "temperature": rng.choice((0.0, 0.3, 1.0, 1.5))}
    groups: list[dict[str, Sequence[Any]]] = [REPEATS]
    if rng.random() < 0.25:
        options["mirostat"] = 2
        groups.append(MIROSTAT)
    groups.append(FILTERS)  # without effect beside Mirostat
    for group in groups:
        share = rng.choice((0.0, 0.15, 0.4))
        options |= {name: rng.choice(values) for name, values in group.items() if rng.random() < share}
    if rng.random() < 0.4:
        options["dry_multiplier"] = rng.choice((0.5, 3.0))
    # Few tokens, so that texts repeat themselves and meet their ends.
    tokens = rng.sample(range(vocab_size), rng.choice((1, 2, 3, 5)))
    if rng.random() < 0.6:
        options["allowed_token_ids"] = tuple(tokens)
    if rng.random() < 0.3:
        near = [*tokens[:2], rng.randrange(vocab_size)]
        options["logit_bias"] = {token: rng.choice((-100.0, -1.5, 2.0, 9.0)) for token in near}
    if rng.random() < 0.2:
        options["logits_processors"] = (later,)
    if rng.random() < 0.3:
        options["logprobs"] = rng.choice((0, 3))
    options["max_tokens"] = rng.choice((1, 7, LONGEST, LONGEST, LONGEST))
    options["min_tokens"] = rng.choice((0, 3, 20)) if options["max_tokens"] == LONGEST else 0
    return options


def drawn_request(rng: random.Random, vocab_size: int) -> PlainRequest:
    """Draw a request."""
    params = SamplingParams(**drawn_options(rng, vocab_size))
    known = [*params.allowed_token_ids] or list(range(min(vocab_size, 9)))

    def several(most: int) -> list[int]:
        return [rng.choice(known) for _ in range(rng.randint(0, most))]

    return PlainRequest(
        params,
        [rng.choice(known), *several(30)],
        frozenset(several(2)) if rng.random() < 0.4 else frozenset(),
        tuple((*several(2), rng.choice(known)) for _ in range(rng.choice((0, 0, 1, 3)))),
        frozenset(several(2)),
    )


class Model:
    """The toy model's logits after some tokens, from a run of their own."""

    def __init__(self, options: NullOptions) -> None:
        self._runner = NullRunner(RunnerConfig(max_slots=1, context_length=CONTEXT), options)

    def __call__(self, tokens: Sequence[int]) -> Logits:
        (logits,) = self._runner.forward([Row(0, np.array(tokens, np.int64), 0, 1)])
        return np.array(logits[0])


def check(seed: int) -> list[str]:
    """Run a few requests together; return what is wrong with each."""
    rng = random.Random(seed)
    vocab_size, best = rng.choice(((13, 0), (13, 13), (256, 0), (256, 64), (1500, 0), (1500, 64)))
    options = NullOptions(vocab_size=vocab_size, seed=seed % 7, top_logits=best)
    runner = NullRunner(RunnerConfig(max_slots=rng.choice((1, 3)), context_length=CONTEXT), options)
    config = EngineConfig(max_step_tokens=rng.choice((4, 32)), prefix_cache=rng.random() < 0.5)
    proposer = PromptLookup() if rng.random() < 0.5 else None
    engine, plain = Engine(runner, config, proposer), [drawn_request(rng, vocab_size) for _ in range(4)]
    requests = [
        Request(
            str(place),
            each.prompt,
            each.params,
            end_token_ids=each.ends,
            bad_words=each.bad_words,
            dry_breakers=each.breakers,
        )
        for place, each in enumerate(plain)
    ]
    with whole_rows_used() as used:
        for request in requests:
            engine.add(request)
        while engine.has_work:
            engine.step()
    found = []
    for request, each in zip(requests, plain, strict=True):
        finish = str(request.finish_reason), request.stop_reason
        VERDICTS["guard" if finish[1] == "repetition" else finish[0]] += 1
        wrong = judge(each, request.output_token_ids, finish, Model(options), set(used))
        found += [f"{seed}: {wrong} of {each}"] if wrong else []
    return found


@pytest.mark.long
@pytest.mark.parametrize("seed", range(40))
def test_requests_get_the_tokens_of_the_plain_sampler(seed: int) -> None:
    assert check(seed) == []


@pytest.mark.slow
def test_random_requests_get_the_tokens_of_the_plain_sampler(capsys: pytest.CaptureFixture[str]) -> None:
    wrong = [error for seed in new_seeds() for error in check(seed)]
    with capsys.disabled():
        print(f"{VERDICTS.total()} requests: {dict(VERDICTS)}")
    assert wrong == []
    assert VERDICTS.keys() == {"error", "guard", "length", "stop"}
