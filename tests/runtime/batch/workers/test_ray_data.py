"""A step of Ray Data: tables with answers, also on a real cluster that loses an actor and a node."""

from __future__ import annotations

import os
import signal
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from batch_kit import NULL

from carryall import LLM
from carryall.errors import UsageError
from carryall.exporter.demo import demo_path
from carryall.exporter.export import export_package
from carryall.runtime.batch.workers.ray_data import RayPredictor, share_model

OPTIONS: dict[str, Any] = {
    "loading": NULL,
    "template": "{{ text }}",
    "sampling": {"temperature": 1.0, "max_tokens": 6, "ignore_eos": True},
}
ROWS = [{"id": number, "text": f"text {number}"} for number in range(12)]


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CARRYALL_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))


@pytest.fixture
def predictor() -> Iterator[RayPredictor]:
    made = RayPredictor("demo", **OPTIONS)
    yield made
    made.close()


def test_a_row_is_answered_alike_whatever_stands_beside_it(predictor: RayPredictor) -> None:
    table = pa.Table.from_pylist(ROWS)
    whole = predictor(table).to_pylist()
    assert [row["id"] for row in whole] == list(range(12))
    assert len({row["output"] for row in whole}) > 6  # rows have seeds of their own
    assert {row["output.completion_tokens"] for row in whole} == {6}
    assert {(row["output.error"], row["output.finish_reason"]) for row in whole} == {(None, "length")}
    pieces = [predictor(table.slice(start, 5)).to_pylist() for start in (10, 5, 0)]
    assert sorted((row for piece in pieces for row in piece), key=lambda row: row["id"]) == whole
    arrays = {"id": np.arange(12), "text": np.array([row["text"] for row in ROWS])}
    assert predictor(arrays).to_pylist() == whole
    assert predictor(pa.Table.from_pylist([ROWS[3], ROWS[3]])).to_pylist() == [whole[3], whole[3]]
    pandas = pytest.importorskip("pandas")
    assert predictor(pandas.DataFrame(ROWS)).to_pylist() == whole


def test_a_row_fails_alone(predictor: RayPredictor) -> None:
    found = predictor(pa.table({"text": ["a", "x" * 100_000, None, "b"]}))
    assert found["output.error"].null_count == 3  # None is the text "None"
    assert "the context holds" in found["output.error"].to_pylist()[1]
    assert [text is None for text in found["output"].to_pylist()] == [False, True, False, False]
    assert found.schema.field("output").type == pa.string()
    empty = predictor(pa.table({"text": pa.array([], pa.string())}))
    assert (empty.num_rows, empty.schema) == (0, found.schema)


def test_vectors_are_a_column_of_lists() -> None:
    predictor = RayPredictor("demo", kind="embedding", template="{{ text }}", loading={"max_slots": 4})
    found = predictor(pa.table({"text": ["a = 1", "b"]}))
    predictor.close()
    with LLM("demo", max_slots=4) as llm:
        np.testing.assert_allclose(
            found["output"].to_pylist(), llm.embed(["a = 1", "b"]), rtol=1e-5, atol=1e-6
        )


def test_what_cannot_be_is_said(predictor: RayPredictor, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"the batch has a column 'output\.error'"):
        predictor(pa.table({"text": ["a"], "output.error": ["b"]}))
    with pytest.raises(UsageError, match="the template is broken"):
        RayPredictor("demo", template="{{ text ")
    with pytest.raises(UsageError, match="is no folder"):
        share_model(tmp_path / "none")


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Four nodes on this machine; the model runs on two of them."""
    pytest.importorskip("ray")
    import ray
    from ray.cluster_utils import Cluster

    monkeypatch.setenv("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 3, "include_dashboard": False})
    made.nodes = [made.add_node(num_cpus=1, resources={"worker": 1}) for _ in range(2)]
    ray.init(address=made.address, log_to_driver=False)
    try:
        yield made
    finally:
        ray.shutdown()
        made.shutdown()


def pipeline(source: Path, model: Any, step_seconds: float) -> Any:
    """The rows of ``source`` with answers, by actors on the nodes for workers."""
    import ray

    options = {**OPTIONS, "loading": {**NULL, "provider_options": {"step_seconds": step_seconds}}}
    return ray.data.read_parquet(str(source), override_num_blocks=24).map_batches(
        RayPredictor,
        fn_constructor_kwargs={"model": model, **options},
        batch_size=5,
        batch_format="pyarrow",
        compute=ray.data.ActorPoolStrategy(min_size=1, max_size=2),
        num_cpus=0,
        resources={"worker": 1},
    )


def sorted_rows(table: Any) -> list[dict[str, Any]]:
    return sorted(table.to_pylist(), key=lambda row: row["id"])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # Ray's own
def test_a_pipeline_that_loses_an_actor_and_a_node_and_is_stopped_writes_every_row_once(
    tmp_path: Path, cluster: Any
) -> None:
    import ray
    from ray.data.checkpoint import CheckpointConfig

    model = tmp_path / "model"
    export_package(demo_path("pycoder"), model)
    rows = [{"id": number, "text": f"text {number}"} for number in range(240)]
    source = tmp_path / "in"
    source.mkdir()
    for part in range(24):
        pq.write_table(pa.Table.from_pylist(rows[part * 10 : part * 10 + 10]), source / f"{part:02}.parquet")
    alone = RayPredictor(str(model), **OPTIONS)
    expected = alone(pa.Table.from_pylist(rows)).to_pylist()
    alone.close()

    context = ray.data.DataContext.get_current()
    context.target_max_block_size = 500  # bytes, so that the output is many files
    context.checkpoint_config = CheckpointConfig(
        id_column="id", checkpoint_path=str(tmp_path / "checkpoint"), delete_checkpoint_on_success=False
    )
    out, trouble_over, fuse = tmp_path / "out", tmp_path / "over", tmp_path / "fuse"

    def trouble() -> None:
        """Kill the actor, then a node; both once something is written."""
        written(out, 2)
        kill_an_actor()
        written(out, 5)
        cluster.remove_node(cluster.nodes[0], allow_graceful=False)
        trouble_over.touch()

    def blow(table: Any) -> Any:
        if not fuse.exists() and 239 in table["id"].to_pylist():
            end = time.monotonic() + 240
            while not trouble_over.exists() and time.monotonic() < end:
                time.sleep(0.1)
            raise RuntimeError("the fuse has blown")
        return table

    threading.Thread(target=trouble, daemon=True).start()
    shared = share_model(model)
    with pytest.raises(Exception, match="the fuse has blown"):
        pipeline(source, shared, 0.02).map_batches(blow, batch_format="pyarrow").write_parquet(str(out))
    assert trouble_over.exists()
    before = pq.read_table(out)
    assert 0 < before.num_rows < 240
    fuse.touch()
    pipeline(source, shared, 0.0).map_batches(blow, batch_format="pyarrow").write_parquet(str(out))
    assert sorted_rows(pq.read_table(out)) == expected
    assert set(before["id"].to_pylist()) <= {row["id"] for row in expected}


def written(out: Path, files: int) -> None:
    """Wait until so many files of the output are there."""
    end = time.monotonic() + 240
    while len(list(out.glob("*.parquet"))) < files:
        if time.monotonic() > end:
            warnings.warn("nothing was written", stacklevel=1)
            return
        time.sleep(0.05)


def kill_an_actor() -> None:
    """Ray names its processes after what they run."""
    pids = [
        int(path.parent.name)
        for path in Path("/proc").glob("[0-9]*/cmdline")
        if b"RayPredictor" in path.read_bytes() and path.read_bytes().startswith(b"ray::")
    ]
    os.kill(pids[0], signal.SIGKILL)
