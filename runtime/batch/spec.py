"""The specification of a batch job."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import field
from pathlib import Path
from typing import Any

from ...errors import UsageError
from ...records import dataclass
from .inputs.files import STREAM, is_remote
from .inputs.lines import URLS
from .inputs.sources import Content, Source
from .inputs.templates import Kind, PromptTemplate
from .jobs.job import Facts, JobPaths
from .jobs.output import check_output
from .workers.offline import WINDOW_LINES
from .workers.worker import WorkerSpec

# Loading options that the answers depend on. The other options change where and how fast the model runs.
_ANSWER_OPTIONS = (
    *("context_length", "kv_cache_dtype", "chat_template", "tool_prompt"),
    *("context_shift", "attention_sinks", "kv_eviction_tokens"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSpec:
    """A batch job; all values are JSON values.

    Args:
        inputs: files, globs and URLs of JSON lines, CSV or Parquet; ``-`` is stdin.
        output: file or URL of the results: Parquet if it ends in ``.parquet``, else JSON lines.
        model: as for ``load_model``.
        errors: file or URL of the errors; None derives it from ``output``.
        job: folder of the journal; None is ``OUTPUT.job``.
        loading: fields of ``ModelConfig`` and ``EngineConfig``, as JSON values.
        providers: the provider of each worker process. Empty: one worker in this process, on the provider
            of ``loading``.
        endpoint: the only url that lines may use; None allows all.
        template: Jinja source that makes a prompt from a record.
        kind: what the template's text is.
        system: see ``PromptTemplate``.
        id_column: see ``PromptTemplate``.
        keep: columns of the input that are copied to the output.
        image_columns: columns of the input with pictures: paths beside the input, or contents; see
            ``record_pictures``.
        sampling: defaults of the sampling options, named as in a request's body.
        seed: the seed of the job; lines without a seed derive theirs from it and from their number.
        ray: address of a Ray cluster that runs the lines; ``local`` starts one.
        ray_workers: number of workers on the cluster.
        ray_resources: resources of each of these workers, such as ``{"num_gpus": 1}``; None is one CPU.
    """

    inputs: Sequence[str]
    output: str
    model: str
    errors: str | None = None
    job: str | None = None
    loading: Mapping[str, Any] = field(default_factory=dict)
    providers: Sequence[str] = ()
    endpoint: str | None = None
    template: str | None = None
    kind: Kind = "prompt"
    system: str | None = None
    id_column: str | None = None
    keep: Sequence[str] = ()
    image_columns: Sequence[str] = ()
    sampling: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0
    ray: str | None = None
    ray_workers: int = 1
    ray_resources: Mapping[str, float] | None = None

    def __post_init__(self) -> None:
        if self.endpoint is not None and self.endpoint not in URLS:
            raise UsageError(f"the endpoint must be one of {', '.join(URLS)}, not {self.endpoint!r}")
        if self.template is None and (self.system is not None or self.kind != "prompt"):
            raise UsageError("'system' and 'kind' need a template")
        if self.system is not None and self.kind != "chat":
            raise UsageError(f"a system message needs the kind chat, not {self.kind}")
        if self.image_columns and self.kind != "chat":
            raise UsageError(f"columns of images need the kind chat, not {self.kind}")
        for text in (self.template, self.system, self.id_column, *self.keep, *self.image_columns):
            if text is not None and not text.isascii() and not _is_unicode(text):
                raise UsageError(f"{text!r} is not Unicode text: it has half a surrogate pair")

    @property
    def paths(self) -> JobPaths:
        """The files and the folder of the job."""
        return JobPaths.of(self.output, self.errors, self.job)

    def prompt_template(self) -> PromptTemplate:
        """Return the template that makes requests from records."""
        return PromptTemplate(
            self.template, self.kind, self.system, self.id_column, tuple(self.keep), tuple(self.image_columns)
        )

    def facts(self, content: Content | None, identity: Mapping[str, str]) -> Facts:
        """Return everything that the job's answers depend on: input, model and options."""
        options: Facts = {
            "endpoint": self.endpoint,
            "template": self.template,
            "kind": self.kind,
            "system": self.system,
            "id_column": self.id_column,
            "keep": list(self.keep),
            "image_columns": list(self.image_columns),
            "seed": self.seed,
            **{name: self.loading.get(name) for name in _ANSWER_OPTIONS},
            **self.sampling,
        }
        return {
            "input": {} if content is None else dataclasses.asdict(content),
            "model": dict(identity),
            "options": {name: value for name, value in options.items() if value not in (None, [])},
        }

    def details(self) -> Facts:
        """Return all fields as JSON values with absolute paths, for ``from_details``."""
        facts = dataclasses.asdict(self)
        facts["inputs"] = [_absolute(name) for name in self.inputs]
        for name in ("output", "errors", "job"):
            facts[name] = None if facts[name] is None else _absolute(facts[name])
        if Path(self.model).exists():
            facts["model"] = _absolute(self.model)
        return facts

    @classmethod
    def from_details(cls, details: Facts) -> BatchSpec:
        """Return the job of these ``details``; unknown names are ignored."""
        known = {each.name for each in dataclasses.fields(cls)}
        given = {name: value for name, value in details.items() if name in known}
        return cls(**given)

    def worker(self, label: str, created: int) -> WorkerSpec:
        """Return the specification of the job's workers."""
        return WorkerSpec(
            model=self.model,
            loading=self.loading,
            label=label,
            sampling=self.sampling,
            seed=self.seed,
            created=created,
            # Lines of a pipe are answered as they arrive, without waiting for a full window.
            window=1 if STREAM in self.inputs else WINDOW_LINES,
        )

    def source(self) -> Source:
        """Open the inputs, check their columns and return their rows.

        Raises:
            UsageError: an input does not exist, or lacks a column.
            MissingExtraError: an input or the output needs a package that is not installed.
        """
        # Fields of records for a template are its own, whatever they are named.
        source, template = (
            Source(self.inputs, attachments=self.template is None, picture_columns=self.image_columns),
            self.prompt_template(),
        )
        check_output(self.output, self.keep)
        if source.is_table:
            template.check(source.columns())
        else:
            template.named_columns()
        return source


def _absolute(name: str) -> str:
    return name if is_remote(name) or name == STREAM else str(Path(name).absolute())


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
