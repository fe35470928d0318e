"""Read the state of a job from its folder, as an OpenAI batch object, and request its cancellation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ...types.arguments import checked_arguments
from .job import CANCEL_FILE, CANCELLED, FINISHED, find_folder, is_running, owner
from .journal import Journal


def open_journal(name: str | Path) -> Journal:
    """Open the journal of a job for reading.

    Raises:
        UsageError: the job does not exist.
    """
    return Journal(find_folder(name), read_only=True)


@checked_arguments
def job_status(name: str | Path) -> dict[str, Any]:
    """Return the state of a job; see https://platform.openai.com/docs/api-reference/batch/object.

    Args:
        name: the folder or the output of the job.

    Raises:
        UsageError: the job does not exist.
    """
    folder = find_folder(name)
    journal = open_journal(name)
    try:
        totals, details = journal.totals(), journal.fact("details") or {}
        state = _state(folder, journal.fact("state"))
        return {
            "id": f"batch_{(journal.fact('job') or {}).get('input', {}).get('sha256', '')[:24]}",
            "object": "batch",
            "status": state,
            "endpoint": details.get("endpoint"),
            "model": journal.fact("label") or details.get("model"),
            "input_files": details.get("inputs"),
            "output_file": details.get("output"),
            "created_at": journal.fact("created"),
            "updated_at": journal.fact("updated"),
            "completed_at": journal.fact("completed_at") if state == "completed" else None,
            "request_counts": {
                "total": journal.fact("rows"),
                "completed": totals.completed,
                "failed": totals.failed,
            },
            "errors": totals.errors,
            "usage": {
                "input_tokens": totals.prompt_tokens,
                "input_tokens_details": {"cached_tokens": totals.cached_tokens},
                "output_tokens": totals.completion_tokens,
                "total_tokens": totals.prompt_tokens + totals.completion_tokens,
            },
            "process": owner(folder) if state in ("in_progress", "cancelling") else None,
        }
    finally:
        journal.close()


def _state(folder: Path, noted: str | None) -> str:
    if is_running(folder):
        return "cancelling" if (folder / CANCEL_FILE).exists() else "in_progress"
    if noted == FINISHED:
        return "completed"
    return "cancelled" if noted == CANCELLED else "interrupted"


@checked_arguments
def ask_to_cancel(name: str | Path) -> bool:
    """Ask the process that works on a job to stop; return whether there is one.

    Raises:
        UsageError: the job does not exist.
    """
    folder = find_folder(name)
    running = is_running(folder)
    if running:
        (folder / CANCEL_FILE).touch()
    return running
