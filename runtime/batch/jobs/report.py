"""Write a report on a job: one HTML page without scripts, fonts or network access."""

from __future__ import annotations

import importlib.resources
import json
from pathlib import Path
from typing import Any

import jinja2

from ....errors import UsageError
from ....records import dataclass
from ....storage.writing import write_whole
from ...types.arguments import checked_arguments
from .journal import Journal
from .status import job_status, open_journal

_TEMPLATE = "report_page.html"
_BUCKETS = 32
_SLOWEST, _FAILED = 12, 25
_SHOWN = 160  # characters of a message or custom_id


@dataclass(frozen=True, slots=True)
class Distribution:
    """The distribution of a number over the lines that succeeded.

    Args:
        name: the name of the number.
        unit: its unit.
        quantiles: the least, median, 90 %, 99 % and greatest value.
        counts: number of lines in each bucket; the buckets have equal width.
    """

    name: str
    unit: str
    quantiles: dict[str, float]
    counts: list[int]


@checked_arguments
def write_report(name: str | Path, path: str | Path) -> None:
    """Write the report of a job to a file.

    Args:
        name: the folder or the output of the job.
        path: the file to write.

    Raises:
        UsageError: the job, or the folder of the file, does not exist.
        OSError: the page cannot be written.
    """
    path = Path(path)
    if not path.absolute().parent.is_dir():
        raise UsageError(f"the folder {path.parent} of the report does not exist; create it first")
    write_whole(path, to_html(name))


def to_html(name: str | Path) -> str:
    """Return the report of a job as HTML.

    Raises:
        UsageError: the job does not exist.
    """
    status, journal = job_status(name), open_journal(name)
    try:
        facts = journal.fact("job") or {}
        environment = jinja2.Environment(
            autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
        )
        environment.filters["number"] = _number
        source = importlib.resources.files(__package__).joinpath(_TEMPLATE).read_text(encoding="utf-8")
        return environment.from_string(source).render(
            status=status,
            options=facts.get("options", {}),
            distributions=_distributions(journal),
            reasons=_counts(journal, "finish_reason"),
            workers=_workers(journal),
            agreement=journal.fact("agreement") or {},
            errors=sorted(status["errors"].items(), key=lambda item: -item[1]),
            slowest=_slowest(journal),
            failed=_failed(journal),
        )
    finally:
        journal.close()


def _distributions(journal: Journal) -> list[Distribution]:
    wanted = [
        ("prompt length", "tokens", "prompt_tokens"),
        ("generated length", "tokens", "completion_tokens"),
        ("latency in the engine", "s", "seconds"),
    ]
    found = [_distribution(journal, *each) for each in wanted]
    return [each for each in found if each is not None]


def _distribution(journal: Journal, name: str, unit: str, column: str) -> Distribution | None:
    ((total, low, high),) = journal.query(
        f"SELECT count(*), min({column}), max({column}) FROM answers WHERE code IS NULL"  # noqa: S608 -- ours
    )
    if not total:
        return None
    shares = {"least": 0.0, "median": 0.5, "90 %": 0.9, "99 %": 0.99, "greatest": 1.0}
    quantiles = {label: _quantile(journal, column, total, share) for label, share in shares.items()}
    width = (high - low) / _BUCKETS or 1.0
    counts = [0] * _BUCKETS
    query = (
        f"SELECT min(CAST(({column} - ?) / ? AS INTEGER), ?), count(*) FROM answers "  # noqa: S608 -- ours
        "WHERE code IS NULL GROUP BY 1"
    )
    for bucket, count in journal.query(query, (low, float(width), _BUCKETS - 1)):
        counts[bucket] = count
    return Distribution(name, unit, quantiles, counts)


def _quantile(journal: Journal, column: str, total: int, share: float) -> float:
    query = f"SELECT {column} FROM answers WHERE code IS NULL ORDER BY {column} LIMIT 1 OFFSET ?"  # noqa: S608
    ((value,),) = journal.query(query, (min(total - 1, int(share * total)),))
    return float(value)


def _counts(journal: Journal, column: str) -> list[tuple[str, int]]:
    query = (
        f"SELECT {column}, count(*) FROM answers WHERE code IS NULL "  # noqa: S608 -- ours
        "GROUP BY 1 ORDER BY 2 DESC"
    )
    return [(str(value), int(count)) for value, count in journal.query(query)]


def _workers(journal: Journal) -> list[tuple[Any, ...]]:
    query = (
        "SELECT worker, count(*), sum(prompt_tokens), sum(completion_tokens), avg(seconds) FROM answers "
        "WHERE code IS NULL GROUP BY 1 ORDER BY 2 DESC"
    )
    return list(journal.query(query))


def _slowest(journal: Journal) -> list[dict[str, Any]]:
    query = (
        "SELECT number, record, prompt_tokens, completion_tokens, seconds FROM answers WHERE code IS NULL "
        "ORDER BY seconds DESC LIMIT ?"
    )
    return [
        {
            "line": number,
            "custom_id": _short(json.loads(record)["custom_id"]),
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "seconds": seconds,
        }
        for number, record, prompt, completion, seconds in journal.query(query, (_SLOWEST,))
    ]


def _failed(journal: Journal) -> list[dict[str, Any]]:
    query = "SELECT number, code, record FROM answers WHERE code IS NOT NULL ORDER BY number LIMIT ?"
    rows = []
    for number, code, data in journal.query(query, (_FAILED,)):
        record = json.loads(data)
        message = _short(record["error"]["message"])
        rows.append(
            {"line": number, "code": code, "custom_id": _short(record["custom_id"]), "message": message}
        )
    return rows


def _short(text: str) -> str:
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 1]}…"


def _number(value: float) -> str:
    if isinstance(value, int) or value == int(value):
        return f"{int(value):,}"
    return f"{value:.3g}"
