"""A model as a step of a Ray Data pipeline: ``dataset.map_batches(RayPredictor, ...)``.

Ray Data feeds, scales and restarts the actors. What is finished is its own affair too: see
``ray.data.checkpoint.CheckpointConfig``, which notes the rows that were written.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ....errors import UsageError
from ....plain_json import plain_json
from ...types.arguments import checked_arguments
from ..inputs.files import arrow
from ..inputs.lines import EMBEDDINGS, BadLine, BatchLine, parse_row
from ..inputs.sources import Row, jsonable
from ..inputs.templates import Kind, PromptTemplate
from ..jobs.journal import Answer
from ..jobs.output import embedding_of, text_of
from .cluster import ray_module, ship, unpacked
from .endpoints import line_seed
from .worker import WorkerSpec, open_worker

# Fields of an answer that become columns, with their Arrow types.
_FACTS = {"finish_reason": "string", "prompt_tokens": "int64", "completion_tokens": "int64"}


@dataclass(frozen=True, slots=True)
class SharedModel:
    """A model's folder in the cluster's object store; see ``share_model``.

    Args:
        name: digest of the content.
        archive: reference to the object.
    """

    name: str
    archive: Any

    def fetch(self) -> str:
        """The folder on this node, unpacked once however many actors ask."""
        return str(unpacked(self.name, ray_module().get(self.archive)))


@checked_arguments
def share_model(model: str | Path) -> SharedModel:
    """Put the folder of a model into the object store of the cluster that this process is connected to.

    Args:
        model: a local folder: a package, or a checkpoint.

    Raises:
        UsageError: it is no folder.
        MissingExtraError: ray is not installed.
    """
    archive = ship(str(model))
    if archive is None:
        raise UsageError(f"{model} is no folder; nodes find a hub id by themselves, give it as it is")
    return SharedModel(hashlib.sha256(archive).hexdigest()[:32], ray_module().put(archive))


class RayPredictor:
    """Adds answers to tables; each actor of Ray Data makes one, which holds the model.

    A row's text does not depend on the rows beside it, nor on the actor: a row without a seed derives one
    from ``seed`` and its own content.

    Args:
        model: a hub id, a path that every node has, or what ``share_model`` gave.
        template: Jinja source over the columns; None takes the columns ``prompt``, ``messages`` or ``input``.
        kind: what the template's text is: ``prompt``, ``chat`` or ``embedding``.
        system: a message that precedes the user's, for ``chat``; Jinja too.
        into: the column of texts, or of vectors. Further columns begin with its name: ``.error``, why the
            row failed, ``.finish_reason``, ``.prompt_tokens`` and ``.completion_tokens``.
        sampling: options of all rows, as in a request's body.
        seed: of the whole job.
        loading: fields of ``ModelConfig`` and ``EngineConfig``.

    Raises:
        UsageError: the template is broken, or an option is wrong.
        CarryallError: as ``load_model``.
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
        """A table with the columns of ``batch`` and the answers.

        Args:
            batch: a ``pyarrow.Table``, a pandas DataFrame, or a mapping of arrays.

        Raises:
            UsageError: the batch has a column of the name of one that is to be added.
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
            raise UsageError(f"the batch has a column '{taken[0]}'; name another one with into=")
        return table

    def _line(self, number: int, record: Mapping[str, Any]) -> BatchLine | BadLine:
        digest = hashlib.blake2b(plain_json(record).encode("utf-8", "surrogatepass")).digest()
        line = parse_row(Row(number, dict(record), digest, number), self._template)
        if isinstance(line, BadLine) or line.url == EMBEDDINGS or line.body.get("seed") is not None:
            return line
        own = line_seed(self._seed, int.from_bytes(digest[:7], "big"))
        return replace(line, body={**line.body, "seed": own})

    def _columns(self, answers: Sequence[Answer | None], bad: Mapping[int, str]) -> dict[str, Any]:
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
