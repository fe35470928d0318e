"""Workers on a real Ray cluster of several nodes; an actor and a node fail."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from batch_kit import NULL, read_lines, spec, write_lines

from carryall.errors import MissingExtraError, UsageError
from carryall.exporter.demo import demo_path
from carryall.exporter.export import export_package
from carryall.runtime.batch.execute import execute


def test_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CARRYALL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setitem(sys.modules, "ray", None)
    source = write_lines(tmp_path / "in.jsonl", [{"prompt": "x"}])
    with pytest.raises(MissingExtraError, match=r"carryall\[ray\]"):
        execute(spec(source, tmp_path / "out.jsonl", ray="local"))
    with pytest.raises(UsageError, match="--worker cannot be used with --ray"):
        execute(spec(source, tmp_path / "out.jsonl", ray="local", providers=["cpu"]))


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Three nodes on this machine; each worker takes one unit of a resource that two nodes have."""
    pytest.importorskip("ray")
    import ray
    from ray.cluster_utils import Cluster

    monkeypatch.setenv("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    made.nodes = [made.add_node(num_cpus=1, resources={"worker": 1}) for _ in range(2)]
    ray.init(address=made.address, log_to_driver=False)
    try:
        yield made
    finally:
        ray.shutdown()
        made.shutdown()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # Ray's own
def test_a_cluster_that_loses_an_actor_and_a_node_gives_the_same_output(
    tmp_path: Path, cluster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CARRYALL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1700000000")
    monkeypatch.setattr("carryall.runtime.batch.workers.cluster._CALL_LINES", 16)
    model = tmp_path / "model"
    export_package(demo_path("pycoder"), model)
    source = write_lines(
        tmp_path / "in.jsonl", [{"prompt": f"p{n}", "max_tokens": 2 + n % 6} for n in range(300)]
    )
    alone, shared = tmp_path / "alone.jsonl", tmp_path / "shared.jsonl"
    job = {"model": str(model), "loading": {**NULL, "provider_options": {"step_seconds": 0.01}}}
    execute(spec(source, alone, **job))
    events: list[str] = []

    def tell(event: str, facts: dict[str, Any]) -> None:
        if event == "progress" and not events:
            events.append("actor")
            kill_an_actor()
        elif event == "progress" and events == ["actor"] and facts["totals"].answered > 100:
            events.append("node")
            threading.Thread(target=lose_the_node, args=(cluster,)).start()

    outcome = execute(
        spec(source, shared, ray="auto", ray_workers=2, ray_resources={"resources": {"worker": 1}}, **job),
        tell=tell,
    )
    assert outcome.finished
    assert outcome.totals.failed == 0
    assert events == ["actor", "node"]
    assert shared.read_bytes() == alone.read_bytes()
    assert len(read_lines(shared)) == 300


def kill_an_actor() -> None:
    """Kill an actor process, which Ray names after its class."""
    pids = [
        int(path.parent.name)
        for path in Path("/proc").glob("[0-9]*/cmdline")
        if path.read_bytes().startswith(b"ray::ModelActor")
    ]
    os.kill(pids[0], signal.SIGKILL)


def lose_the_node(cluster: Any) -> None:
    """Remove a node; the other node does the rest, and the lost actor waits for ever."""
    cluster.remove_node(cluster.nodes[0], allow_graceful=False)
