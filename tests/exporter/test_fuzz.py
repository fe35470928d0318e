"""Randomly changed input files give a result or a CarryallError, within limits of time and memory.

The slow test of each kind runs for minutes: ``pytest -m slow tests/exporter/test_fuzz.py``.
"""

from __future__ import annotations

import contextlib
import copy
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hostile_json import VALUES, changed
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny_models import CONFIGS, write_tiny

from carryall.errors import CarryallError, CheckpointError, PackageError
from carryall.exporter.export import export_model, export_package
from carryall.exporter.package import Package
from carryall.exporter.package_record import _OWN_HASH, PackageRecord, read_record
from carryall.exporter.weights import Checkpoint

FAST, SLOW = 15, 1000
SLOW_SETTINGS = settings(
    max_examples=SLOW, deadline=None, suppress_health_check=list(HealthCheck), derandomize=False
)
FAST_SETTINGS = settings(max_examples=FAST, deadline=None, suppress_health_check=list(HealthCheck))
BYTES = {"F64": 8, "I64": 8, "F32": 4, "I32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "U8": 1, "BOOL": 1}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function that makes a tiny checkpoint of a family on first use."""
    made: dict[str, Path] = {}

    def get(family: str) -> Path:
        if family not in made:
            made[family] = write_tiny(family, tmp_path_factory.mktemp(family))
        return made[family]

    return get


def check_config(data: st.DataObject, source: Path) -> None:
    """Export with a changed configuration, which must succeed or raise CarryallError; restore the file."""
    path = source / "config.json"
    original = path.read_text()
    config = data.draw(changed(json.loads(original)))
    path.write_text(json.dumps(config))
    try:
        with contextlib.suppress(CarryallError):
            model = export_model(source)
            caches = [value for value in model.graph.inputs if "past_key_values" in str(value.name)]
            assert len(caches) >= 2
    finally:
        path.write_text(original)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::carryall.exporter.weights.WeightWarning")
@pytest.mark.parametrize("family", CONFIGS)
@given(data=st.data())
@FAST_SETTINGS
def test_any_configuration_exports_or_is_refused(
    family: str, checkpoints: Callable[[str], Path], data: st.DataObject
) -> None:
    check_config(data, checkpoints(family))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::carryall.exporter.weights.WeightWarning")
@pytest.mark.parametrize("family", CONFIGS)
@given(data=st.data())
@SLOW_SETTINGS
def test_many_configurations_export_or_are_refused(
    family: str, checkpoints: Callable[[str], Path], data: st.DataObject
) -> None:
    check_config(data, checkpoints(family))


@st.composite
def safetensors_files(draw: st.DrawFn) -> bytes:
    """Draw a safetensors file of a few tensors with arbitrary errors in its header."""
    header: dict[str, Any] = {}
    offset = 0
    for number in range(draw(st.integers(0, 4))):
        dtype = draw(st.sampled_from(sorted(BYTES)))
        shape = draw(st.lists(st.integers(0, 4), max_size=3))
        size = int(np.prod(shape, dtype=int)) * BYTES[dtype]
        header[f"t{number}"] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, offset + size]}
        offset += size
    if draw(st.booleans()):
        header["__metadata__"] = {"format": "pt"}
    if draw(st.booleans()) and header:
        header = draw(changed(header))
    text = json.dumps(header)
    if header and draw(st.integers(0, 5)) == 0:
        name = next(iter(header))
        text = text[:-1] + f", {json.dumps(name)}: {json.dumps(header[name])}}}"  # twice
    length = draw(
        st.sampled_from([len(text)] * 6 + [0, 1, len(text) - 1, len(text) + 1, 10**8 + 1, 2**63, 2**64 - 1])
    )
    data = bytes(offset + draw(st.sampled_from([0] * 6 + [-1, 1, 8])) if offset else 0)
    content = (length % 2**64).to_bytes(8, "little") + text.encode() + data
    return content[: draw(st.integers(0, len(content)))] if draw(st.integers(0, 5)) == 0 else content


def check_safetensors(content: bytes, folder: Path) -> None:
    """Read every tensor of a file; the only errors allowed are CarryallError."""
    (folder / "model.safetensors").write_bytes(content)
    with contextlib.suppress(CheckpointError):
        checkpoint = Checkpoint(folder)
        checkpoint.layer_counts()
        for name in checkpoint.unused():
            with contextlib.suppress(CheckpointError):
                shape = checkpoint._tensors[name].shape
                assert checkpoint.tensor(name, shape).numpy().shape == shape


@given(content=safetensors_files())
@settings(FAST_SETTINGS, max_examples=200)
def test_any_weights_are_read_or_refused(content: bytes, tmp_path_factory: pytest.TempPathFactory) -> None:
    check_safetensors(content, tmp_path_factory.getbasetemp())


@pytest.mark.slow
@given(content=safetensors_files())
@settings(SLOW_SETTINGS, max_examples=20_000)
def test_many_weights_are_read_or_refused(content: bytes, tmp_path_factory: pytest.TempPathFactory) -> None:
    check_safetensors(content, tmp_path_factory.getbasetemp())


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("package")
    return export_package(write_tiny("llama", root / "source"), root / "package").path


def sealed(content: dict[str, Any]) -> dict[str, Any]:
    """Return ``content`` with its valid hash, as an attacker would write it."""
    facts = {key: value for key, value in content.items() if key != _OWN_HASH}
    facts["files"] = copy.deepcopy(facts.get("files"))
    try:
        record = object.__new__(PackageRecord)
        for key, value in facts.items():
            object.__setattr__(record, key, value)
        return {**facts, _OWN_HASH: record.sha256()}
    except (AttributeError, TypeError, ValueError):
        return content


def check_record(data: st.DataObject, package: Path, spare: Path) -> None:
    """Open a package with a changed record; a wrong hash must be refused whatever changed."""
    folder = spare / "package"
    if not folder.exists():
        shutil.copytree(package, folder)
    original = json.loads((package / "carryall.json").read_text())
    content = data.draw(changed(original))
    resealed = data.draw(st.booleans())
    (folder / "carryall.json").write_text(json.dumps(sealed(content) if resealed else content))
    try:
        opened = Package.open(folder)
    except PackageError as error:
        assert "\n" not in str(error)  # noqa: PT017
        return
    assert opened.record.sha256() == read_record(folder / "carryall.json").sha256()
    if not resealed:
        assert {**content, "record_sha256": None} == {**original, "record_sha256": None}


@given(data=st.data())
@settings(FAST_SETTINGS, max_examples=150)
def test_any_record_opens_or_is_refused(
    data: st.DataObject, package: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    check_record(data, package, tmp_path_factory.getbasetemp())


@pytest.mark.slow
@given(data=st.data())
@settings(SLOW_SETTINGS, max_examples=20_000)
def test_many_records_open_or_are_refused(
    data: st.DataObject, package: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    check_record(data, package, tmp_path_factory.getbasetemp())


@given(value=VALUES)
@settings(FAST_SETTINGS, max_examples=100)
def test_any_weight_map_is_read_or_refused(value: Any, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.getbasetemp() / "sharded"
    folder.mkdir(exist_ok=True)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": value}))
    with contextlib.suppress(CheckpointError):
        Checkpoint(folder)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": value}}))
    with pytest.raises(CheckpointError):
        Checkpoint(folder)
