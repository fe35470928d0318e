"""Answer a CSV table with JSON of a schema, and write the answers as a Parquet table."""

import csv
from pathlib import Path

import pyarrow.parquet

import carryall

SCHEMA = {
    "type": "object",
    "properties": {"kind": {"enum": ["function", "class"]}, "lines": {"type": "integer", "maximum": 99}},
    "required": ["kind", "lines"],
    "additionalProperties": False,
}


def main() -> None:
    """Ask about three names and print the table of answers."""
    with Path("names.csv").open("w", newline="", encoding="utf-8") as stream:
        writer = csv.writer(stream)
        writer.writerows([["name"], ["read_lines"], ["Stack"], ["parse"]])
    job = carryall.batch.run(
        "names.csv",
        "kinds.parquet",
        model="demo",
        template="# What {{ name }} is, as JSON:\n",
        keep=["name"],
        sampling={"structured_output": {"json_schema": SCHEMA}, "temperature": 0, "max_tokens": 64},
    )
    outcome = job.wait()
    table = pyarrow.parquet.read_table("kinds.parquet", columns=["name", "output.kind", "output.lines"])
    print(table.to_pylist())
    print(f"{outcome.totals.completed} of {len(table)} rows answered")


if __name__ == "__main__":
    main()
