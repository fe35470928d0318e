"""Run a model in a Ray Data pipeline: ``dataset.map_batches(RayPredictor, ...)``.

Ray Data schedules, scales and restarts the actors. It also records the finished rows; see
``ray.data.checkpoint.CheckpointConfig``.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ....errors import UsageError
from ....plain_json import plain_json
from ....records import dataclass
from ...process.ray_cluster import ray_module, ship, unpacked
from ...types.arguments import checked_arguments
from ..inputs.files import arrow
from ..inputs.lines import EMBEDDINGS, BadLine, BatchLine, parse_row
from ..inputs.sources import SourceRow, jsonable
from ..inputs.templates import Kind, PromptTemplate
from ..jobs.journal import LineResult
from ..jobs.output import embedding_of, text_of
from .endpoints import line_seed
from .worker import WorkerSpec, open_worker

# Fields of an answer that become columns, with their Arrow types.
_FACTS = {"finish_reason": "string", "prompt_tokens": "int64", "completion_tokens": "int64"}


@dataclass(frozen=True, slots=True)
class SharedModel:
    """A model's folder in the cluster's object store; see ``share_model``.

    Args:
        name: digest of the archive.
        archive: reference to the object.
    """

    name: str
    archive: Any

    def fetch(self) -> str:
        """Return the folder on this node. All actors of a node share one unpacked copy."""
        return str(unpacked(self.name, ray_module().get(self.archive)))


@checked_arguments
def share_model(model: str | Path) -> SharedModel:
    """Put a model's folder into the object store of the connected Ray cluster, and return a reference.

    Args:
        model: a local folder: a package, or a checkpoint.

    Raises:
        UsageError: ``model`` is not a folder.
        MissingExtraError: ray is not installed.
    """
    archive = ship(str(model))
    if archive is None:
        raise UsageError(f"{model} is not a folder; pass a hub id to RayPredictor directly")
    return SharedModel(hashlib.sha256(archive).hexdigest()[:32], ray_module().put(archive))


class RayPredictor:
    """Adds answers to tables. Each Ray Data actor has one predictor, with its own copy of the model.

    A row's text does not depend on other rows or on the actor: a row without a seed gets one from ``seed``
    and its own content.

    Args:
        model: a hub id, a path that exists on every node, or the result of ``share_model``.
        template: Jinja source over the columns; None takes the columns ``prompt``, ``messages`` or ``input``.
        kind: the use of the template's text: ``prompt``, ``chat`` or ``embedding``.
        system: Jinja source of the system message, for ``chat``.
        into: the column of texts or vectors. More columns are added with this name and a suffix: ``.error``
            (the reason of a failure), ``.finish_reason``, ``.prompt_tokens`` and ``.completion_tokens``.
        sampling: sampling options of all rows, as in a request's body.
        seed: the seed of the whole job.
        loading: fields of ``ModelConfig`` and ``EngineConfig``.

    Raises:
        UsageError: the template or an option is invalid.
        CarryallError: see ``load_model``.
        MissingExtraError: pyarrow is not installed.
    """

    @checked_arguments
    def __init__(
        self,
        model: str | Path | SharedModel,
        *,
        template: str | None = None,
        kind: Kind = "prompt",
        system: str | None = None,
        into: str = "output",
        sampling: Mapping[str, Any] | None = None,
        seed: int = 0,
        loading: Mapping[str, Any] | None = None,
    ) -> None:
        self._arrow = arrow("a step of Ray Data")
        self._template = PromptTemplate(template, kind, system)
        self._template.named_columns()
        self._into = into
        self._seed = seed
        path = model.fetch() if isinstance(model, SharedModel) else str(model)
        self._engine = open_worker(WorkerSpec(model=path, loading=loading or {}, sampling=sampling or {}))

    def __call__(self, batch: Any) -> Any:
        """Return a table with the columns of ``batch`` and of the answers.

        Args:
            batch: a ``pyarrow.Table``, a pandas DataFrame, or a mapping of arrays.

        Raises:
            UsageError: ``batch`` already has a column that would be added.
            CarryallError: the device is lost.
        """
        table = self._table(batch)
        bad: dict[int, str] = {}
        lines = []
        for number, record in enumerate(table.to_pylist()):
            line = self._line(number, {name: jsonable(value) for name, value in record.items()})
            if isinstance(line, BadLine):
                bad[number] = line.message
            else:
                lines.append(line)
        answers = {answer.number: answer for answer in self._engine.run(iter(lines), threading.Event())}
        for name, column in self._columns([answers.get(n) for n in range(table.num_rows)], bad).items():
            table = table.append_column(name, column)
        return table

    def close(self) -> None:
        """Free the model."""
        self._engine.close()

    def _table(self, batch: Any) -> Any:
        table = batch
        if isinstance(batch, Mapping):
            table = self._arrow.table({name: list(values) for name, values in batch.items()})
        elif not isinstance(batch, self._arrow.Table):
            table = self._arrow.Table.from_pandas(batch, preserve_index=False)
        ours = {self._into, *(f"{self._into}.{name}" for name in ("error", *_FACTS))}
        taken = [name for name in table.column_names if name in ours]
        if taken:
            raise UsageError(f"the batch already has a column '{taken[0]}'; choose another name with into=")
        return table

    def _line(self, number: int, record: Mapping[str, Any]) -> BatchLine | BadLine:
        digest = hashlib.blake2b(plain_json(record).encode("utf-8", "surrogatepass")).digest()
        line = parse_row(SourceRow(number, dict(record), digest, number), self._template)
        if isinstance(line, BadLine) or line.url == EMBEDDINGS or line.body.get("seed") is not None:
            return line
        own = line_seed(self._seed, int.from_bytes(digest[:7], "big"))
        return replace(line, body={**line.body, "seed": own})

    def _columns(self, answers: Sequence[LineResult | None], bad: Mapping[int, str]) -> dict[str, Any]:
        pa = self._arrow
        records = [None if answer is None else json.loads(answer.record) for answer in answers]
        bodies = [None if each is None or each["error"] else each["response"]["body"] for each in records]
        if self._template.kind == "embedding":
            values = pa.array(map(embedding_of, bodies), pa.list_(pa.float32()))
        else:
            values = pa.array(map(text_of, bodies), pa.string())
        errors = [
            each["error"]["message"] if each is not None and each["error"] else bad.get(number)
            for number, each in enumerate(records)
        ]
        columns = {self._into: values, f"{self._into}.error": pa.array(errors, pa.string())}
        for fact, kind in _FACTS.items():
            found = [None if each is None else getattr(each, fact) for each in answers]
            columns[f"{self._into}.{fact}"] = pa.array(found, getattr(pa, kind)())
        return columns
