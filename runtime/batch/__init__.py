"""Offline jobs: JSONL in, JSONL out, in the shape of OpenAI's batch files.

`lines` reads requests, `run` sends a bounded number of them at a time through the engine, `output` keeps the
results so that an interrupted run can be resumed.
"""
