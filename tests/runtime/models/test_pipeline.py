"""Models over the nodes of a Ray cluster give the tokens of the whole model, and serve on without a node."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from socket import create_server
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from carryall import LLM, SamplingParams
from carryall.errors import MissingExtraError, ProviderRuntimeError, UsageError
from carryall.providers.base import RunnerConfig
from carryall.providers.runners.runner_process import software
from carryall.runtime.models.loading import load_model
from carryall.runtime.models.pipeline import RayPipeline
from carryall.runtime.models.ray_stages import RayStage, StageActor, StagePlace

PROMPTS = ["def add(a, b):", "class Point:\n    def __init__(self", "import os", "while True:"] * 2
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"provider": "cpu:0-0,cpu:1-2"}, "needs one provider for all stages"),
        ({"provider": "auto"}, "needs one provider for all stages"),
        ({"tensor_parallel": 2}, "cannot be combined with tensor_parallel"),
        ({"max_loras": 1}, "cannot be combined with LoRA adapters"),
        ({"pipeline_stages": 1}, "pipeline_stages"),
        ({"pipeline": None, "pipeline_stages": 2}, "has no effect without pipeline"),
    ],
)
def test_what_cannot_be_cut_is_refused(options: dict[str, Any], error: str) -> None:
    with pytest.raises(UsageError, match=error):
        load_model("draft", **{"pipeline": "local", "max_slots": 2, **options})


def test_more_stages_than_layers_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace())
    with pytest.raises(UsageError, match="has 3 layers with KV, which cannot be cut into 4 stages"):
        load_model("draft", pipeline="local", pipeline_stages=4, max_slots=2)


def test_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingExtraError, match=r"carryall\[ray\]"):
        load_model("draft", pipeline="local", max_slots=2)


class Remote:
    """An actor in this process: a call is made at once, and its reference is the result."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._actor, name)
        return SimpleNamespace(remote=method, options=lambda num_returns: SimpleNamespace(remote=method))


class FakeRay(SimpleNamespace):
    """As much of Ray as a stage needs: ``get`` of a slow call takes too long."""

    def __init__(self) -> None:
        class RayError(Exception):
            pass

        class GetTimeoutError(RayError):
            pass

        class RayTaskError(RayError):
            pass

        self.killed: list[Any] = []
        self.exceptions = SimpleNamespace(
            RayError=RayError, GetTimeoutError=GetTimeoutError, RayTaskError=RayTaskError
        )

    def get(self, reference: Any, timeout: float) -> Any:
        if reference == "late":
            raise self.exceptions.GetTimeoutError
        return reference

    def kill(self, actor: Any) -> None:
        self.killed.append(actor)


def stage(actor: Any, monkeypatch: pytest.MonkeyPatch) -> tuple[RayStage, FakeRay]:
    ray = FakeRay()
    monkeypatch.setattr(StagePlace, "actor", lambda place: Remote(actor))
    place = StagePlace(ray, None, 1, 2, {})
    return RayStage(place, "cpu", Path("absent/model.onnx"), RunnerConfig()), ray


def test_a_stage_of_another_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    other = SimpleNamespace(describe=lambda: "carryall 0.0.1, format 1")
    opened, _ = stage(other, monkeypatch)
    with pytest.raises(UsageError, match=r"stage 1 .* runs carryall 0\.0\.1, format 1, and") as error:
        opened.begin_loading()
    assert software() in str(error.value)


def test_a_stage_that_hangs_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    stuck = SimpleNamespace(compute=lambda rows, states: ("late", "late"), describe=lambda: "late")
    opened, ray = stage(stuck, monkeypatch)
    with pytest.raises(ProviderRuntimeError, match="stage 1 of 2 did not answer for 120 s; it was ended"):
        opened.end(opened.begin([], None))
    assert ray.killed == [opened.actor]
    assert not opened.alive()


def test_an_actor_that_was_not_loaded_computes_nothing() -> None:
    """A call that was meant for an earlier actor of the stage."""
    with pytest.raises(ProviderRuntimeError, match="the stage is not loaded"):
        StageActor().compute([], None)
    with pytest.raises(ProviderRuntimeError, match="has lost the lowered graph absent"):
        StageActor().open("cpu", "absent", None, RunnerConfig(), 1)


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A head without processors, and three nodes of one each."""
    pytest.importorskip("ray")
    import ray
    from ray.cluster_utils import Cluster

    monkeypatch.setenv("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    made.workers = [made.add_node(num_cpus=1) for _ in range(3)]
    ray.init(address=made.address, log_to_driver=False)
    try:
        yield made
    finally:
        ray.shutdown()
        made.shutdown()


def stage_processes() -> list[psutil.Process]:
    """The processes of stages, by the title that Ray gives them."""
    found = []
    for process in psutil.process_iter(["cmdline", "status"]):
        title = (process.info["cmdline"] or [""])[0]
        if title.startswith("ray::StageActor") and process.info["status"] != psutil.STATUS_ZOMBIE:
            found.append(process)
    return found


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # Ray's own
def test_stages_on_several_nodes_survive_the_loss_of_a_process_and_of_a_node(
    cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {"max_slots": 8, "quantize": "int4", "num_threads": 1}

    def tokens(llm: LLM) -> list[list[int]]:
        return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, GREEDY)]

    with LLM("demo", **options) as whole:
        expected = tokens(whole)
    with LLM("demo", pipeline="auto", **options) as llm:
        runner = llm.engine.runner
        assert isinstance(runner, RayPipeline)
        assert tokens(llm) == expected
        busy, begun = runner.busy_seconds, time.perf_counter()
        assert tokens(llm) == expected  # from the prefix cache
        seconds = time.perf_counter() - begun
        print("busy shares:", [(b - a) / seconds for a, b in zip(busy, runner.busy_seconds, strict=True)])
        assert len(nodes_of(runner)) == 2

        ended = stage_processes()[0]
        ended.send_signal(signal.SIGKILL)
        assert tokens(llm) == expected
        assert len(stage_processes()) == 2
        assert ended.pid not in [process.pid for process in stage_processes()]

        # Its node is lost for good: the stage moves to the third one.
        lost = next(node for node in cluster.workers if node.node_id == nodes_of(runner)[1])
        cluster.remove_node(lost, allow_graceful=False)
        until = time.monotonic() + 120
        while lost.node_id in nodes_of(runner):  # its processes end a little later
            assert tokens(llm) == expected
            assert time.monotonic() < until, "the stage did not move"
        assert tokens(llm) == expected
        assert len(set(nodes_of(runner))) == 2
        assert llm.stats().failed == 0
    until = time.monotonic() + 60
    while stage_processes():
        assert time.monotonic() < until, "the stages did not end"
        time.sleep(0.5)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # Ray's own
def test_the_client_server_of_a_cluster_is_an_address_too(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    monkeypatch.setenv("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
    with create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    head = {"num_cpus": 2, "include_dashboard": False, "ray_client_server_port": port}
    made = Cluster(initialize_head=True, head_node_args=head)
    options: dict[str, Any] = {"max_slots": 8, "num_threads": 1}
    try:
        texts = []
        for address in (None, f"ray://127.0.0.1:{port}"):
            with LLM("demo", pipeline=address, **options) as llm:
                assert isinstance(llm.engine.runner, RayPipeline) == (address is not None)
                texts.append([output.outputs[0].token_ids for output in llm.generate(PROMPTS, GREEDY)])
        assert texts[0] == texts[1]
    finally:
        made.shutdown()


def nodes_of(runner: RayPipeline) -> list[str]:
    from ray.util import placement_group_table

    table = placement_group_table(runner._group)["bundles_to_node_id"]
    return [table.get(number, "") for number in range(2)]
