"""Random arrivals, preemptions, restarts and faults of device and disk: restored KV equals computed KV."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from engine_kit import VOCAB, alone, make_request, make_runner
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from carryall.errors import ProviderRuntimeError
from carryall.providers.base import Row
from carryall.runtime.engine.engine import Engine, EngineConfig
from carryall.runtime.engine.kv.tiers.disk import DiskTier
from carryall.runtime.engine.requests.request import Request
from carryall.runtime.types.sampling_params import SamplingParams

CONTEXT = 256
FAMILIES = [np.random.default_rng(n).integers(0, VOCAB, CONTEXT).tolist() for n in range(2)]


class TierMachine(RuleBasedStateMachine):
    """An engine with little KV memory and with tiers, under random operations and faults."""

    @initialize(
        max_slots=st.integers(1, 3),
        kv_tokens=st.one_of(st.none(), st.integers(CONTEXT, CONTEXT + 100)),
        swap_bytes=st.sampled_from([0, 2000, 10**6]),
        with_files=st.booleans(),
        file_bytes=st.sampled_from([3000, 10**6]),
    )
    def start(
        self, max_slots: int, kv_tokens: int | None, swap_bytes: int, with_files: bool, file_bytes: int
    ) -> None:
        self.folder = Path(tempfile.mkdtemp())
        self.config = EngineConfig(
            max_step_tokens=60,
            kv_bytes=kv_tokens,
            swap_bytes=swap_bytes,
            prefix_cache_dir=self.folder if with_files else None,
            prefix_cache_bytes=file_bytes,
        )
        self.max_slots = max_slots
        self.all: list[Request] = []
        self.faults = dict.fromkeys(("forward", "copy_prefix", "read_kv", "write_kv"), 0)
        self.open()

    def open(self) -> None:
        runner = self.runner = make_runner(max_slots=self.max_slots, context_length=CONTEXT)
        for name in ("copy_prefix", "read_kv", "write_kv"):
            setattr(runner, name, self.failing(name, getattr(runner, name)))
        runner.before_forward = self.fail_forward
        self.engine = Engine(runner, self.config, identity="toy")

    def failing(self, name: str, method: Any) -> Any:
        def call(*arguments: Any) -> Any:
            if self.faults[name]:
                self.faults[name] -= 1
                if name == "write_kv":
                    del self.runner.hashes[arguments[0]][arguments[1] :]
                if name == "copy_prefix":  # left by an interrupted copy
                    self.runner.hashes[arguments[1]] = [0] * arguments[2]
                raise ProviderRuntimeError(f"no {name}")
            return method(*arguments)

        return call

    def fail_forward(self, rows: Sequence[Row]) -> None:
        if self.faults["forward"] and len(rows) > 1:
            self.faults["forward"] -= 1
            raise ProviderRuntimeError("no forward")

    @rule(
        family=st.sampled_from(FAMILIES),
        shared=st.integers(1, 200),
        own=st.integers(1, 40),
        max_tokens=st.integers(1, 60),
        priority=st.integers(0, 1),
        salt=st.sampled_from([None, None, "a", "b"]),
        late=st.sampled_from([False, False, False, True]),
    )
    def add(
        self,
        family: list[int],
        shared: int,
        own: int,
        max_tokens: int,
        priority: int,
        salt: str | None,
        late: bool,
    ) -> None:
        tail = np.random.default_rng(len(self.all)).integers(0, VOCAB, own).tolist()
        prompt = (family[:shared] + tail)[: CONTEXT - 61]
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
        request = make_request(str(len(self.all)), prompt, params, priority=priority, cache_salt=salt)
        request.deadline = 0.0 if late else None
        self.all.append(request)
        self.engine.add(request)

    @rule(which=st.integers(0, 10))
    def cancel(self, which: int) -> None:
        if self.all:
            self.engine.cancel(self.all[which % len(self.all)].request_id)

    @rule(count=st.integers(1, 15))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.engine.step()
            self.engine.check_integrity()

    @rule(name=st.sampled_from(["forward", "copy_prefix", "read_kv", "write_kv"]))
    def break_the_device(self, name: str) -> None:
        self.faults[name] = 1

    @rule(number=st.integers(0, 9), keep=st.floats(0, 1), position=st.floats(0, 0.999))
    def damage_a_file(self, number: int, keep: float, position: float) -> None:
        self.flush()
        files = sorted(self.folder.glob("??/*.kv"))
        if files:
            path = files[number % len(files)]
            content = bytearray(path.read_bytes())
            content[int(position * len(content))] ^= 1
            path.write_bytes(content[: int(keep * len(content)) + 1])

    @rule()
    def lose_the_files(self) -> None:
        self.flush()
        shutil.rmtree(self.folder)
        self.folder.mkdir()

    @rule()
    def restart(self) -> None:
        cut = self.engine.close()
        assert all(request.finished for request in cut)
        assert self.runner.closed
        self.open()

    @invariant()
    def books_are_right(self) -> None:
        self.engine.check_integrity()
        stats = self.engine.stats()
        assert stats.running + stats.waiting == sum(not request.finished for request in self.all)
        assert self.runner.held_tokens() <= stats.kv_tokens

    def flush(self) -> None:
        tier = self.engine._mover._tier
        below = getattr(tier, "below", None)
        for each in (tier, below):
            if isinstance(each, DiskTier):
                each.flush()

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        for _ in range(200 + 400 * len(self.all)):
            if not self.engine.has_work:
                break
            self.engine.step()
            self.engine.check_integrity()
        assert not self.engine.has_work, "somebody starves"
        self.engine.clear_prefix_cache()
        assert self.runner.held_tokens() == 0, "a slot's memory leaks"
        self.engine.close()
        shutil.rmtree(self.folder)
        for request in self.all:
            count = len(request.output_token_ids)
            assert request.finish_reason in ("length", "cancelled")
            assert request.finish_reason == "cancelled" or count == request.max_tokens
            assert request.output_token_ids == alone(request)[:count]
            if request.deadline is not None and request.stop_reason is not None:
                assert (request.stop_reason, count) == ("deadline", 0)


TestTierMachine = TierMachine.TestCase
TestTierMachine.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)
