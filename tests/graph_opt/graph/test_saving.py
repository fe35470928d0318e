"""Written files are known by their sums without being read again."""

from __future__ import annotations

import mmap
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
import pytest

from carryall.graph_opt.graph import saving
from carryall.graph_opt.graph.lazy import SlabTensor, lazy
from carryall.graph_opt.graph.saving import save_model
from carryall.storage import hashes
from carryall.storage.hashes import FolderHashes

RNG = np.random.default_rng(0)


def model() -> ir.Model:
    slabs = [RNG.integers(0, 256, (rows, 100), np.uint8) for rows in (70, 1, 300)]
    floats = RNG.standard_normal((300, 1000)).astype(np.float32)
    odd = RNG.integers(0, 256, 777, np.uint8)
    tensors = {
        "a": SlabTensor(lambda: iter(slabs), (371, 100)),
        "b": lazy(lambda: odd, ir.DataType.UINT8, (777,)),
        "c": lazy(lambda: floats, ir.DataType.FLOAT, floats.shape),
        "d": lazy(lambda: odd[:500], ir.DataType.UINT4, (1000,)),
        "e": ir.tensor(odd[:300]),
    }
    values = [ir.val(name, const_value=tensor) for name, tensor in tensors.items()]
    nodes = [ir.node("Identity", [value]) for value in values]
    outputs = [node.outputs[0] for node in nodes]
    graph = ir.Graph([], outputs, nodes=nodes, initializers=values, opset_imports={"": 23}, name="g")
    return ir.Model(graph, ir_version=11)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CARRYALL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(hashes, "_in_process", {})
    monkeypatch.setattr(saving, "LARGE_BYTES", 1000)


def test_the_sums_of_what_is_written_are_those_of_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_model(model(), tmp_path / "m.onnx")
    (digest,) = hashes._in_process.values()
    with monkeypatch.context() as refusing:
        refusing.setattr(hashes, "_hash", refused)
        with FolderHashes(tmp_path) as known:
            assert known.sums("m.onnx.data") == digest
    with FolderHashes(tmp_path) as known:
        assert known.sums("m.onnx.data", reread=True) == digest


def refused(*_: object) -> None:
    raise AssertionError("the file is read")


def test_a_file_that_something_else_writes_to_is_read(tmp_path: Path) -> None:
    save_model(model(), tmp_path / "m.onnx")
    hashes._in_process.clear()
    save_model(ir.load(tmp_path / "m.onnx"), tmp_path / "n.onnx")  # the kernel copies the weights
    assert not hashes._in_process
    with FolderHashes(tmp_path) as known:
        assert known.sums("m.onnx.data") == known.sums("n.onnx.data")


BLOCK = 2 << 20  # of a huge page


def huge_bytes(file: Path) -> int:
    """Return how much of a file Linux maps in huge pages."""
    with (
        file.open("rb") as opened,
        mmap.mmap(opened.fileno(), 0, mmap.MAP_PRIVATE, mmap.PROT_READ) as content,
    ):
        np.frombuffer(content, np.uint8)[:: mmap.PAGESIZE].sum()
        mapped = re.search(r"FilePmdMapped: +(\d+) kB", Path("/proc/self/smaps_rollup").read_text())
    return int(mapped[1]) * 1024 if mapped else 0


@pytest.mark.parametrize("rows", [1, 1000])
def test_slabs_of_any_size_are_in_huge_pages(tmp_path: Path, rows: int) -> None:
    """All but the last block and one more, where the system has huge pages for a file of one write."""

    def require_huge_pages() -> None:
        whole = tmp_path / "whole"
        whole.write_bytes(bytes(8 * BLOCK))
        if huge_bytes(whole) < 8 * BLOCK:
            pytest.skip("this system maps no files in huge pages, or has none left")

    require_huge_pages()
    content = RNG.integers(0, 256, (4000, 4200), np.uint8)

    def slabs() -> Iterator[npt.NDArray[np.uint8]]:
        yield content[:7]
        yield from (content[first : first + rows] for first in range(7, len(content), rows))

    value = ir.val("a", const_value=SlabTensor(slabs, content.shape))
    node = ir.node("Identity", [value])
    graph = ir.Graph([], node.outputs, nodes=[node], initializers=[value], opset_imports={"": 23}, name="g")
    save_model(ir.Model(graph, ir_version=11), tmp_path / "m.onnx")
    file = tmp_path / "m.onnx.data"
    assert file.read_bytes() == content.tobytes()
    found = huge_bytes(file)
    require_huge_pages()
    assert found >= content.nbytes // BLOCK * BLOCK - BLOCK
