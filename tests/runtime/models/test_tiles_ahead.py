"""Tiles that a thread packs ahead are those that are packed when they are written."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from tiny_gguf import write_gguf

from carryall.errors import CheckpointError
from carryall.exporter.gguf.file import GgufFile, GgufTensor
from carryall.graph_opt.lower.kernels import StoredMatrix, TilePacker
from carryall.graph_opt.lower.products.stored_tiles import stored_tiles
from carryall.graph_opt.lower.products.tiles import COLUMNS
from carryall.runtime.models import tiles_ahead
from carryall.runtime.models.loading import load_model
from carryall.runtime.models.model_source import GgufModel
from carryall.runtime.models.tiles_ahead import TilesAhead
from carryall.storage.stored_tensor import StoredBlocks

Bytes = npt.NDArray[np.uint8]
WIDE: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64}
MOST = 1 << 30


@pytest.fixture(params=[2 << 20, 4096])
def file(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> GgufFile:
    """A file of groups with many matrices, or of several groups for a matrix."""
    monkeypatch.setattr(tiles_ahead, "_GROUP_BYTES", request.param)
    write_gguf("llama", tmp_path / "m.gguf", types={"v_proj": "Q6_K", "": "Q4_K"}, vocab_size=250, **WIDE)
    return GgufFile(tmp_path / "m.gguf")


def pack(matrices: Sequence[StoredMatrix]) -> list[Bytes]:
    """Return the bytes of each 16 rows as a tile; missing rows are zeros."""
    return [tiles_of(np.concatenate(matrix.parts)) for matrix in matrices]


def tiles_of(rows: Bytes) -> Bytes:
    missing = -len(rows) % COLUMNS
    return np.pad(rows, ((0, missing), (0, 0))).reshape(-1, COLUMNS * rows.shape[1])


def blocks_of(*tensors: GgufTensor) -> StoredBlocks:
    stored = [tensor.packed.stored for tensor in tensors if tensor.packed is not None]
    parts = [part for each in stored if each is not None for part in each.parts]
    return StoredBlocks(tensors[0].type_name, tuple(parts))


def written(blocks: StoredBlocks, packer: TilePacker = pack) -> Bytes:
    outputs = sum(len(part.order) for part in blocks.parts)
    return np.concatenate(list(stored_tiles(blocks, 256, outputs, packer).slabs()))


def refuse(matrices: Sequence[StoredMatrix]) -> list[Bytes]:
    raise AssertionError("packed again")


def join(ahead: TilesAhead) -> None:
    ahead._thread.join(60)
    assert not ahead._thread.is_alive()


def test_matrices_are_packed_ahead_as_they_are_written(file: GgufFile) -> None:
    expected = [written(blocks_of(tensor)) for tensor in file.matrices]
    with TilesAhead(file.matrices, pack, MOST) as ahead:
        join(ahead)
        for tensor, tiles in zip(file.matrices, expected, strict=True):
            whole = tensor.shape[0] % COLUMNS == 0
            found = written(blocks_of(tensor), refuse if whole else pack)
            np.testing.assert_array_equal(found, tiles)
        again = written(blocks_of(file.matrices[0]))  # tiles are given once
        np.testing.assert_array_equal(again, expected[0])


def test_matrices_that_are_written_as_one_may_each_be_packed_ahead(file: GgufFile) -> None:
    queries, keys = (file.tensors[f"model.layers.0.self_attn.{name}_proj.weight"] for name in "qk")
    assert isinstance(queries, GgufTensor)
    assert isinstance(keys, GgufTensor)
    assert not queries.in_order
    expected = np.concatenate([written(blocks_of(tensor)) for tensor in (queries, keys)])
    for ready in ([queries, keys], [keys]):
        with TilesAhead(ready, pack, MOST) as ahead:
            join(ahead)
            np.testing.assert_array_equal(written(blocks_of(queries, keys)), expected)


def test_another_order_of_rows_is_packed_when_it_is_written(file: GgufFile) -> None:
    tensor = file.matrices[0]
    with TilesAhead([tensor], pack, MOST) as ahead:
        join(ahead)
        assert tensor.take_tiles(tensor.order[::-1]) == []


def test_whoever_asks_waits_for_tiles_that_were_begun_only(file: GgufFile) -> None:
    begun, goes_on, packed = threading.Event(), threading.Event(), list[int]()

    def slow(matrices: Sequence[StoredMatrix]) -> list[Bytes]:
        begun.set()
        assert goes_on.wait(60)
        packed.append(len(matrices))
        return pack(matrices)

    first, *_, last = file.matrices
    with TilesAhead(file.matrices, slow, MOST):
        assert begun.wait(60)
        if tiles_ahead._GROUP_BYTES == 4096:
            assert last.take_tiles(last.order) == []
        threading.Timer(0.05, goes_on.set).start()
        tiles = first.take_tiles(first.order)
        assert goes_on.is_set()
        np.testing.assert_array_equal(
            tiles[0], tiles_of(blocks_of(first).parts[0].read(0, COLUMNS * len(tiles[0])))
        )
    assert packed


@pytest.mark.parametrize("reason", ["memory", "a damaged block"])
def test_a_thread_that_stops_leaves_the_rest_to_the_writer(file: GgufFile, reason: str) -> None:
    def damaged(matrices: Sequence[StoredMatrix]) -> list[Bytes]:
        raise CheckpointError("a scale is infinite")

    with TilesAhead(
        file.matrices, damaged if reason != "memory" else refuse, 0 if reason == "memory" else MOST
    ) as ahead:
        join(ahead)
        assert all(tensor.take_tiles(tensor.order) == [] for tensor in file.matrices)


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "qwen3_moe"])
def test_a_prepared_model_is_the_same_with_and_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    experts: dict[str, Any] = (
        {} if family != "qwen3_moe" else {"moe_intermediate_size": 256, "mlp_only_layers": []}
    )
    write_gguf(family, tmp_path / "m.gguf", types={"v_proj": "Q6_K", "": "Q4_K"}, **WIDE, **experts)
    counts = list[int]()

    def without(self: GgufModel, packer: TilePacker | None) -> AbstractContextManager[object]:
        return nullcontext()

    original: Callable[..., list[Bytes]] = TilesAhead._take

    def take(self: TilesAhead, tensor: GgufTensor, order: npt.NDArray[np.int64]) -> list[Bytes]:
        counts.append(len(found := original(self, tensor, order)))
        return found

    monkeypatch.setattr(TilesAhead, "_take", take)
    contents = []
    for name in ("with", "without"):
        monkeypatch.setenv("CARRYALL_CACHE", str(tmp_path / name))
        if name == "without":
            monkeypatch.setattr(GgufModel, "packed_ahead", without)
        load_model(tmp_path / "m.gguf").close()
        (folder,) = (tmp_path / name / "lowered").iterdir()
        contents.append([(folder / part).read_bytes() for part in ("model.onnx", "model.onnx.data")])
    assert counts
    assert contents[0] == contents[1]
