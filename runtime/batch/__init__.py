"""Offline jobs: files of requests in, files of results out, every line answered exactly once.

A job's rows come from `inputs`, become `lines`, are answered by `workers`, and go to the journal of `jobs`,
from which `output` writes the files. `execute` does all that for a `spec`; `api` is `carryall.batch`.
"""
