"""The examples run and print the expected output."""

from __future__ import annotations

import base64
import html
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from pyarrow import parquet
from tiny_vlms import write_vlm

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
PROMISES = {
    "batch_table.py": "3 of 3 rows answered",
    "chat.py": "assistant:",
    "custom_pass.py": "next tokens:",
    "generate.py": "log probability",
    "stream.py": "tokens generated",
}


ELSEWHERE = {
    "batch_ray_data.py",  # its pipeline is tests/runtime/batch/workers/test_ray_data.py
    "scanned_forms.py",  # below, with a model that is not trained
}


def test_every_example_is_tested() -> None:
    assert sorted(path.name for path in EXAMPLES.glob("*.py")) == sorted({*PROMISES, *ELSEWHERE})


def test_the_slurm_script_is_a_shell_script() -> None:
    subprocess.run(["sh", "-n", EXAMPLES / "deploy" / "slurm_array.sh"], check=True)


def test_the_kubernetes_job_is_one() -> None:
    yaml = pytest.importorskip("yaml")
    schemas = pytest.importorskip("kubernetes_validate", reason="needs pip install kubernetes-validate")
    job = yaml.safe_load((EXAMPLES / "deploy" / "kubernetes_job.yaml").read_text(encoding="utf-8"))
    schemas.validate(job, schemas.latest_version(), strict=True)
    container = job["spec"]["template"]["spec"]["containers"][0]
    assert container["args"][0].startswith("carryall batch run /data/in.jsonl -o /data/out.jsonl ")


@pytest.mark.long
@pytest.mark.parametrize("name", sorted(PROMISES))
def test_example(name: str, tmp_path: Path) -> None:
    assert PROMISES[name] in output(tmp_path, name)


@pytest.mark.long
def test_the_page_of_scanned_forms_shows_each_beside_its_result(tmp_path: Path) -> None:
    model = write_vlm(tmp_path / "checkpoint")
    text = output(tmp_path, "scanned_forms.py", EXAMPLES / "forms", "--model", model)
    assert "24 of 24 forms answered" in text
    rows = parquet.read_table(tmp_path / "forms.parquet").to_pylist()
    page = (tmp_path / "forms.html").read_text(encoding="utf-8")
    written = json.loads((EXAMPLES / "forms" / "written.json").read_text(encoding="utf-8"))
    assert [row["page"] for row in rows] == [*written]
    shown = [html.unescape(part) for part in page.split("<section>")[1:]]
    for row, part in zip(rows, shown, strict=True):
        content = base64.b64encode((EXAMPLES / "forms" / row["page"]).read_bytes()).decode()
        assert f"data:;base64,{content}" in part
        for name, value in written[row["page"]].items():
            assert (row[f"output.{name}"] or "") in part
            assert f"is {value}" in part  # which a model of random weights does not read


def output(folder: Path, name: str, *arguments: str | Path) -> str:
    """Return what an example prints that runs in a folder."""
    done = subprocess.run(
        [sys.executable, EXAMPLES / name, *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        cwd=folder,
        env={**os.environ, "CARRYALL_CACHE": str(folder / "cache")},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
