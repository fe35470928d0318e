"""Batch jobs: read files of requests, write files of results, and answer every line exactly once.

`inputs` reads rows and parses them into requests. `workers` answer the requests. `jobs` stores the answers
in a journal and writes the output files from it. `execute` runs a `BatchSpec`, and `job_thread` does so in a
thread; `api` is `carryall.batch`.
"""
