"""Write down recordings with carryall and faster-whisper in turns; compare texts and processor time.

``python benchmarks/peers/speech.py FOLDER RECORDING ... --peer PYTHON``; FOLDER is a Whisper of CTranslate2,
and PYTHON the interpreter of an environment with faster-whisper. Each engine has 2 threads, and keeps nothing
between rounds.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

WORKER = Path(__file__).resolve().parents[1] / "workers" / "speech.py"
FORMS = ("carryall float32", "faster-whisper float32", "carryall int8", "faster-whisper int8")


def main() -> None:
    """Print a line of JSON for each engine, recording and round."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("recordings", type=Path, nargs="+")
    parser.add_argument("--peer", required=True, help="the interpreter with faster-whisper")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--beams", type=int, default=1)
    args = parser.parse_args()
    workers = {form: _started(form, args) for form in FORMS}
    for number in range(args.rounds):
        for recording in args.recordings:
            for form, worker in workers.items():
                print(json.dumps({"form": form, "round": number, **_asked(worker, recording)}), flush=True)
    for worker in workers.values():
        worker.communicate()


def _started(form: str, args: argparse.Namespace) -> subprocess.Popen[str]:
    engine, kind = form.split()
    python = sys.executable if engine == "carryall" else args.peer
    command = [python, str(WORKER), engine, kind, str(args.folder), str(args.beams)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def _asked(worker: subprocess.Popen[str], recording: Path) -> dict[str, Any]:
    print(recording, file=worker.stdin, flush=True)
    lines = (line for line in worker.stdout or () if line.startswith("{"))
    answer: dict[str, Any] = json.loads(next(lines))
    return answer


if __name__ == "__main__":
    main()
