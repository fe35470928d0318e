"""The examples run and print the expected output."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
PROMISES = {
    "batch_table.py": "3 of 3 rows answered",
    "chat.py": "assistant:",
    "custom_pass.py": "next tokens:",
    "generate.py": "log probability",
    "stream.py": "tokens generated",
}


ELSEWHERE = {"batch_ray_data.py"}  # its pipeline is tests/runtime/batch/workers/test_ray_data.py


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
    done = subprocess.run(
        [sys.executable, EXAMPLES / name],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        cwd=tmp_path,
        env={**os.environ, "CARRYALL_CACHE": str(tmp_path / "cache")},
    )
    assert done.returncode == 0, done.stderr
    assert PROMISES[name] in done.stdout
