"""Headers of files that are on the hub: what reads headers finds in them what the whole file tells."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tiny_gguf import write_gguf
from tiny_models import write_tiny

from carryall.errors import CheckpointError
from carryall.exporter.gguf.file import GgufFile
from carryall.exporter.header_files import write_header
from carryall.exporter.safetensors_files import safetensors_in


class Remote:
    """A file elsewhere; ``read`` notes how many bytes were asked for."""

    def __init__(self, path: Path) -> None:
        self.content, self.bytes = path.read_bytes(), 0

    def read(self, begin: int, size: int) -> bytes:
        self.bytes += size
        return self.content[begin : begin + size]


def test_a_gguf_file_of_headers_has_the_configuration_of_the_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("carryall.exporter.header_files._FIRST", 1000)  # so that more must be asked for
    extra = {"rope_freqs.weight": np.linspace(1, 3, 4, dtype=np.float32)}
    write_gguf("llama", tmp_path / "m.gguf", extra=extra, hidden_size=256, intermediate_size=512)
    remote = Remote(tmp_path / "m.gguf")
    write_header(tmp_path / "there" / "m.gguf", len(remote.content), remote.read)
    whole, headers = GgufFile(tmp_path / "m.gguf"), GgufFile(tmp_path / "there" / "m.gguf")
    assert headers.config == whole.config
    assert headers.config["rope_scaling"]["rope_type"] == "longrope"
    assert {name: tensor.shape for name, tensor in headers.tensors.items()} == {
        name: tensor.shape for name, tensor in whole.tensors.items()
    }
    assert (tmp_path / "there" / "m.gguf").stat().st_size == len(remote.content)
    assert remote.bytes < len(remote.content) / 10


def test_a_checkpoint_of_headers_has_the_tensors_of_the_whole(tmp_path: Path) -> None:
    folder = write_tiny("llama", tmp_path / "whole", hidden_size=256, intermediate_size=512)
    for file in folder.iterdir():
        remote = Remote(file)
        write_header(tmp_path / "headers" / file.name, len(remote.content), remote.read)
        if file.suffix != ".safetensors":
            assert (tmp_path / "headers" / file.name).read_bytes() == remote.content
    whole, headers = (safetensors_in(where / "model.safetensors") for where in (folder, tmp_path / "headers"))
    assert {name: tensor.shape for name, tensor in headers.items()} == {
        name: tensor.shape for name, tensor in whole.items()
    }


def test_a_damaged_length_is_told(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"m\.safetensors is damaged: its header has"):
        write_header(tmp_path / "m.safetensors", 100, lambda begin, size: b"\xff" * size)
    assert not (tmp_path / "m.safetensors").exists()
