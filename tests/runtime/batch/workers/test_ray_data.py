"""A step of Ray Data: tables with answers, also on a real cluster that loses an actor and a node."""

from __future__ import annotations

import os
import signal
import threading
import time
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


def test_invalid_arguments_are_reported(predictor: RayPredictor, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"the batch already has a column 'output\.error'"):
        predictor(pa.table({"text": ["a"], "output.error": ["b"]}))
    with pytest.raises(UsageError, match="the template has a syntax error"):
        RayPredictor("demo", template="{{ text ")
    with pytest.raises(UsageError, match="is not a folder"):
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


def write_parts(source: Path, first: int, last: int) -> list[dict[str, Any]]:
    """Files of ten rows each."""
    source.mkdir(exist_ok=True)
    rows = [{"id": number, "text": f"text {number}"} for number in range(first * 10, last * 10)]
    for part in range(first, last):
        start = (part - first) * 10
        pq.write_table(pa.Table.from_pylist(rows[start : start + 10]), source / f"{part:02}.parquet")
    return rows


def answer_rows(source: Path, model: Any, out: Path, seen: Path, step_seconds: float) -> None:
    """Write the rows of ``source`` with answers; ids of the rows that actors were given go to ``seen``."""
    import ray

    class Noted(RayPredictor):  # within a function: it travels to the nodes by value
        def __call__(self, batch: Any) -> Any:
            found = super().__call__(batch)
            with (seen / f"{os.getpid()}").open("a") as stream:
                stream.write("".join(f"{number}\n" for number in batch["id"].to_pylist()))
            return found

    seen.mkdir()
    options = {**OPTIONS, "loading": {**NULL, "provider_options": {"step_seconds": step_seconds}}}
    rows = ray.data.read_parquet(str(source)).map_batches(
        Noted,
        fn_constructor_kwargs={"model": model, **options},
        batch_size=5,
        batch_format="pyarrow",
        compute=ray.data.ActorPoolStrategy(min_size=1, max_size=2),
        num_cpus=0,
        resources={"worker": 1},
    )
    rows.write_parquet(str(out))


def seen_ids(seen: Path) -> list[int]:
    return sorted(int(line) for path in seen.iterdir() for line in path.read_text().split())


def sorted_rows(out: Path) -> list[dict[str, Any]]:
    return sorted(pq.read_table(out).to_pylist(), key=lambda row: row["id"])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # Ray's own
def test_a_pipeline_loses_an_actor_and_a_node_and_goes_on_with_what_was_not_written(
    tmp_path: Path, cluster: Any
) -> None:
    import ray
    from ray.data.checkpoint import CheckpointConfig

    model = tmp_path / "model"
    export_package(demo_path("pycoder"), model)
    shared = share_model(model)
    source, out = tmp_path / "in", tmp_path / "out"
    first = write_parts(source, 0, 12)
    ray.data.DataContext.get_current().checkpoint_config = CheckpointConfig(
        id_column="id", checkpoint_path=str(tmp_path / "checkpoint"), delete_checkpoint_on_success=False
    )
    troubles: list[str] = []

    def trouble() -> None:
        """Kill the actor, then a node, while rows are answered."""
        wait_for_rows(tmp_path / "seen1", 5)
        kill_an_actor()
        troubles.append("actor")
        wait_for_rows(tmp_path / "seen1", 25)
        cluster.remove_node(cluster.nodes[0], allow_graceful=False)
        troubles.append("node")

    thread = threading.Thread(target=trouble)
    thread.start()
    answer_rows(source, shared, out, tmp_path / "seen1", 0.2)
    thread.join()
    assert troubles == ["actor", "node"]
    alone = RayPredictor(str(model), **OPTIONS)
    expected = alone(pa.Table.from_pylist(first)).to_pylist()
    assert sorted_rows(out) == expected

    second = write_parts(source, 12, 16)
    answer_rows(source, shared, out, tmp_path / "seen2", 0.0)
    assert seen_ids(tmp_path / "seen2") == [row["id"] for row in second]
    assert sorted_rows(out) == expected + alone(pa.Table.from_pylist(second)).to_pylist()
    alone.close()


def wait_for_rows(seen: Path, count: int) -> None:
    end = time.monotonic() + 300
    while not seen.exists() or len(seen_ids(seen)) < count:
        assert time.monotonic() < end
        time.sleep(0.1)


def kill_an_actor() -> None:
    """Ray names its processes after what they run."""
    commands = ((path.parent.name, path.read_bytes()) for path in Path("/proc").glob("[0-9]*/cmdline"))
    pids = [int(pid) for pid, line in commands if line.startswith(b"ray::MapWorker(MapBatches(Noted")]
    os.kill(pids[0], signal.SIGKILL)
