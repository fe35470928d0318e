"""Batch jobs from Python: ``carryall.batch``."""

from __future__ import annotations

from .job_thread import BatchJob, retry_failed, run
from .jobs.merge import merge_jobs as merge
from .jobs.report import write_report as report
from .jobs.status import ask_to_cancel as cancel
from .jobs.status import job_status as status
from .spec import BatchSpec
from .tables import map_table
from .workers.ray_data import RayPredictor, SharedModel, share_model

__all__ = [
    "BatchJob",
    "BatchSpec",
    "RayPredictor",
    "SharedModel",
    "cancel",
    "map_table",
    "merge",
    "report",
    "retry_failed",
    "run",
    "share_model",
    "status",
]
