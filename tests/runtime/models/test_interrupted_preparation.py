"""A first start that is killed, interrupted or run twice at once leaves whole cache entries, or none."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tiny_gguf import write_gguf

SIZES: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64}
PREPARE = """
import os, shutil, signal, sys, threading
from pathlib import Path
from carryall.graph_opt.graph import saving
from carryall.providers import get_provider
from carryall.providers.base import RunnerConfig
from carryall.runtime.models import lowered_graph, lowering
from carryall.runtime.models.lowering import lowered_model, with_context
from carryall.runtime.models.model_source import resolve_model
from carryall.storage import cache, hashes, remembered
from carryall.storage.cache import intact_folder

model, root, how = sys.argv[1], Path(sys.argv[2]), sys.argv[3]
provider = get_provider("cpu")
places = {Path(module.__file__).parent for module in (cache,)}
files = {module.__file__ for module in (saving, lowering, lowered_graph)}

def prepare():
    for length in (32, 48):
        source = resolve_model(model)
        config = with_context(RunnerConfig(max_slots=1, context_length=length), source)
        lowered_model(source, provider, provider.resolve_options(config))

def child(name, last=None):
    os.environ["CARRYALL_CACHE"] = str(root / name)
    hashes._in_process.clear()
    seen = 0
    def trace(frame, event, argument):
        nonlocal seen
        name = frame.f_code.co_filename
        if name not in files and Path(name).parent not in places:
            return None
        seen += event == "line"
        if last is not None and seen > last:
            if how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            sys.settrace(None)
            raise KeyboardInterrupt
        return trace
    process = os.fork()
    if process:
        return process
    try:
        if how == "kill":
            threading.settrace(trace)
        sys.settrace(trace)
        prepare()
        sys.settrace(None)
        (root / f"{name}.lines").write_text(str(seen))
        os._exit(0)
    except KeyboardInterrupt:
        os._exit(9)

def end(process):
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])

def left(name):
    os.environ["CARRYALL_CACHE"] = str(root / name)
    entries = [path for kind in ("lowered", "gguf") for path in (root / name / kind).glob("[!.]*")]
    assert all(intact_folder(path.parent.name, path.name) for path in entries), entries
    return len(entries)

assert end(child("whole")) == 0 and left("whole") == 3
lines = int((root / "whole.lines").read_text())
turns, partial = int(sys.argv[4]), 0
for turn in range(turns):
    last = lines * (2 * turn + 1) // (2 * turns)
    assert end(child("cut", last)) in (-9, 9), last
    partial += left("cut") < 3
    if how != "kill":
        scratch = [path for kind in ("lowered", "gguf") for path in (root / "cut" / kind).glob(".*")]
        assert not scratch, (last, scratch)
    assert end(child("cut")) == 0 and left("cut") == 3, last
    shutil.rmtree(root / "cut")
assert partial > turns // 3
both = [child("twice"), child("twice")]
assert [end(process) for process in both] == [0, 0] and left("twice") == 3
"""


@pytest.mark.long
@pytest.mark.skipif(not hasattr(os, "fork"), reason="kills forks")
@pytest.mark.parametrize("turns", [3, pytest.param(24, marks=pytest.mark.slow)])
@pytest.mark.parametrize("how", ["kill", "interrupt"])
def test_what_a_first_start_leaves_is_whole(tmp_path: Path, how: str, turns: int) -> None:
    """The process ends before line N of what prepares and stores, in any thread, for some N."""
    write_gguf("llama", tmp_path / "m.gguf", types="Q4_K", **SIZES)
    root = tmp_path / "caches"
    root.mkdir()
    done = subprocess.run(
        [sys.executable, "-c", PREPARE, str(tmp_path / "m.gguf"), str(root), how, str(turns)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
