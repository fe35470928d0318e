"""``carryall pull``, ``list`` and ``rm``, with a local server in place of the hub."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hub_stand_in import StandIn, hub_environment, hub_of
from tiny_gguf import write_gguf

from carryall.exporter.hub import choose, is_hub_id
from carryall.exporter.model_names import named_models

Carryall = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def carryall(tmp_path: Path) -> Iterator[Carryall]:
    """Return a function that runs the command, with caches of its own."""
    folder = tmp_path / "repository"
    folder.mkdir()
    for kind in ("Q8_0", "Q4_0"):
        write_gguf("llama", folder / f"Tiny-{kind}.gguf", types=kind, hidden_size=64, intermediate_size=96)
    with hub_of(folder) as endpoint:
        environment = hub_environment(endpoint, tmp_path / "home")
        environment["CARRYALL_CACHE"] = str(tmp_path / "cache")

        def run(*arguments: str) -> subprocess.CompletedProcess[str]:
            command = [sys.executable, "-m", "carryall", *arguments]
            return subprocess.run(
                command, env=environment, capture_output=True, text=True, check=False, timeout=120
            )

        yield run


@pytest.mark.long
def test_a_model_is_pulled_run_listed_and_removed(carryall: Carryall, tmp_path: Path) -> None:
    assert carryall("list", "--json").stdout == "[]\n"
    pulled = carryall("pull", "org/tiny")
    assert pulled.returncode == 0, pulled.stderr
    assert "Tiny-Q4_0.gguf: " in pulled.stdout  # the better compromise of the two
    assert not any("Q8_0" in path for path in StandIn.requested)
    assert carryall("pull", "org/tiny:Q8_0").returncode == 0
    ran = carryall("run", "org/tiny:Q4_0", "hello", "--raw", "--max-tokens", "2")
    assert ran.returncode == 0, ran.stderr
    listed = {model["name"]: model for model in json.loads(carryall("ls", "--json").stdout)}
    assert set(listed) == {"org/tiny:Q4_0", "org/tiny:Q8_0"}
    size = (StandIn.folder / "Tiny-Q4_0.gguf").stat().st_size
    assert listed["org/tiny:Q4_0"]["downloaded_bytes"] == size
    assert listed["org/tiny:Q4_0"]["prepared_bytes"] > 0
    assert listed["org/tiny:Q8_0"]["prepared_bytes"] == 0
    removed = carryall("rm", "org/tiny:Q4_0", "--json")
    assert json.loads(removed.stdout)["downloaded_bytes"] == size
    assert [model["name"] for model in json.loads(carryall("list", "--json").stdout)] == ["org/tiny:Q8_0"]
    assert carryall("rm", "org/tiny").returncode == 0
    assert carryall("list", "--json").stdout == "[]\n"
    assert not list((tmp_path / "home" / "hub").glob("models--*"))


@pytest.mark.long
def test_the_tower_of_the_only_model_comes_and_goes_with_it(carryall: Carryall, tmp_path: Path) -> None:
    for kind in ("F16", "F32"):
        (StandIn.folder / f"mmproj-Tiny-{kind}.gguf").write_bytes(b"GGUF")
    assert carryall("pull", "org/tiny").returncode == 0
    assert any("mmproj-Tiny-F16" in path for path in StandIn.requested)
    assert not any("mmproj-Tiny-F32" in path for path in StandIn.requested)
    (listed,) = json.loads(carryall("list", "--json").stdout)
    size = (StandIn.folder / "Tiny-Q4_0.gguf").stat().st_size
    assert (listed["name"], listed["downloaded_bytes"]) == ("org/tiny:Q4_0", size + len(b"GGUF"))
    assert carryall("rm", "org/tiny").returncode == 0
    assert carryall("list", "--json").stdout == "[]\n"
    assert not list((tmp_path / "home" / "hub").glob("models--*"))


@pytest.mark.long
def test_the_files_of_a_user_are_listed_and_stay(carryall: Carryall) -> None:
    path = str(StandIn.folder / "Tiny-Q4_0.gguf")
    assert carryall("run", path, "hello", "--raw", "--max-tokens", "2").returncode == 0
    assert path in carryall("list").stdout.replace("\n", "")
    assert "0 B downloaded" in carryall("rm", path).stdout
    assert carryall("list").stdout.startswith("no models yet")
    assert Path(path).is_file()
    again = carryall("rm", path)
    assert (again.returncode, again.stdout) == (2, "")
    assert "nothing is stored of" in again.stderr


@pytest.mark.long
@pytest.mark.parametrize("name", ["demo", "qwen3", "./here"])
def test_only_hub_ids_are_pulled(carryall: Carryall, name: str) -> None:
    result = carryall("pull", name)
    assert (result.returncode, result.stdout, result.stderr.count("\n")) == (2, "", 1)
    assert "is not a hub id" in result.stderr


@pytest.mark.long
def test_short_names_stand_for_hub_ids(carryall: Carryall) -> None:
    rows = json.loads(carryall("list", "--names", "--json").stdout)
    assert {"qwen3.5-4b", "gemma-4-e4b", "gpt-oss-20b"} <= {row["name"] for row in rows}
    assert all(row["bytes"] > 1e8 and row["licence"] for row in rows)
    shown = carryall("list", "--names").stdout
    assert "Apache-2.0" in shown
    pulled = carryall("pull", "Qwen3.5-4B")
    assert "unsloth/Qwen3.5-4B-GGUF" in pulled.stderr  # which the local hub does not have
    assert any(path.startswith("/api/models/unsloth/Qwen3.5-4B-GGUF") for path in StandIn.requested)
    for verb in (("pull",), ("run",), ("plan",)):
        assert "do you mean qwen3.5-4b?" in " ".join(carryall(*verb, "qwen3.5-4").stderr.split())
    assert "nothing is stored of 'unsloth/Qwen3.5-4B-GGUF:UD-Q4_K_XL'" in carryall("rm", "qwen3.5-4b").stderr


def test_every_short_name_is_of_a_file_that_is_read() -> None:
    """Their hub ids are of a form that downloads, with a part that a list of files can have."""
    for name, model in named_models().items():
        assert name == name.lower()
        assert is_hub_id(model.hub), name
        repo, _, part = model.hub.partition(":")
        stem = repo.partition("/")[2].removesuffix("-GGUF").removesuffix("_gguf")
        files = {f"{stem}-{part}.gguf": 1, f"{stem}-Q8_0.gguf": 1} if part else {f"{stem}-mxfp4.gguf": 1}
        assert choose(files, part or None, model.hub)[0] == next(iter(files))


@pytest.mark.long
def test_a_plan_downloads_headers_only(carryall: Carryall, tmp_path: Path) -> None:
    whole = StandIn.folder / "Tiny-Q8_0.gguf"
    planned = carryall("plan", "org/tiny:Q8_0", "--bandwidth", "10GB/s", "--json")
    assert planned.returncode == 0, planned.stderr
    report = json.loads(planned.stdout)
    assert report["model"] == "org/tiny:Q8_0"
    local = json.loads(carryall("plan", str(whole), "--bandwidth", "10GB/s", "--json").stdout)
    assert {**report, "model": "", "command": ""} == {**local, "model": "", "command": ""}
    assert not list((tmp_path / "home").rglob("*.gguf"))
    assert all("Q8_0" in path for path in StandIn.requested if path.endswith(".gguf"))
