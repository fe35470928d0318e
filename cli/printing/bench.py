"""Print the figures of ``carryall bench`` as a table."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..options import human_bytes


def show(document: dict[str, Any]) -> None:
    """Print the report of a benchmark as a table."""
    first = document["results"][0]
    where = f"{document['provider']}, {document['threads']} threads, {document['cpu']}"
    table = Table(
        "batch",
        "prefill tokens/s",
        "first token ms",
        "decode tokens/s",
        "of bandwidth",
        box=None,
        pad_edge=False,
    )
    for result in document["results"]:
        names = ("prefill_tokens_per_second", "time_to_first_token_ms", "decode_tokens_per_second")
        share = f"{100 * result['memory_bandwidth_share']:.0f} %"
        table.add_row(str(result["batch"]), *(_with_range(result[name]) for name in names), share)
    footer = [
        f"a step reads {human_bytes(document['weight_bytes_per_step'])} of weights",
        f"memory bandwidth {document['memory_bandwidth_gb_s']:.0f} GB/s",
        f"loaded in {document['load_seconds']:.2f} s",
    ]
    if document["peak_memory_bytes"] is not None:
        footer.append(f"peak memory {human_bytes(document['peak_memory_bytes'])}")
    console = Console(highlight=False)
    console.print(f"{document['model']} on {where}", markup=False)
    console.print(f"{first['prompt_tokens']} prompt tokens, {first['new_tokens']} new tokens\n")
    console.print(table)
    console.print("\n" + "; ".join(footer))


def _with_range(values: dict[str, float]) -> Text:
    digits = 0 if values["median"] >= 100 else 1
    median, low, high = (f"{values[key]:.{digits}f}" for key in ("median", "min", "max"))
    return Text(median) + Text(f" [{low}-{high}]", style="dim")
