"""What a user asks of a batch job."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...errors import UsageError
from .inputs.files import STREAM, is_remote
from .inputs.lines import URLS
from .inputs.sources import Content, Source
from .inputs.templates import Kind, PromptTemplate
from .jobs.job import Facts, JobPaths
from .jobs.output import check_output
from .workers.offline import WINDOW_LINES
from .workers.worker import WorkerSpec

# How a model is loaded, as far as its answers depend on it. The others say where and how fast it runs.
_DECISIVE = (
    *("context_length", "kv_cache_dtype", "chat_template"),
    *("context_shift", "attention_sinks", "kv_eviction_tokens"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSpec:
    """A batch job, in values that JSON holds.

    Args:
        inputs: files, globs and URLs of JSON lines, CSV or Parquet; ``-`` is stdin.
        output: file or URL of the results: JSON lines, or Parquet if it ends so.
        model: as for ``load_model``.
        errors: file or URL of the errors; None derives it from ``output``.
        job: folder of the journal; None is ``OUTPUT.job``.
        loading: fields of ``ModelConfig`` and ``EngineConfig``, in values that JSON holds.
        providers: where workers run, each in a process of its own; none is one worker in this process, on
            the provider of ``loading``.
        endpoint: the only url that lines may ask; None allows all.
        template: Jinja source that makes a prompt of a record.
        kind: what the template's text is.
        system: see ``PromptTemplate``.
        id_column: see there.
        keep: columns of the input that the output repeats.
        sampling: options of lines that do not state them, as in a request's body.
        seed: from which the seeds of lines are derived that state none.
        ray: address of a Ray cluster that runs the lines; ``local`` starts one.
        ray_workers: how many workers there.
        ray_resources: what each of them takes, such as ``{"num_gpus": 1}``; None is one CPU.
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
    sampling: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0
    ray: str | None = None
    ray_workers: int = 1
    ray_resources: Mapping[str, float] | None = None

    def __post_init__(self) -> None:
        if self.endpoint is not None and self.endpoint not in URLS:
            raise UsageError(f"the endpoint must be one of {', '.join(URLS)}, not {self.endpoint!r}")
        if self.template is None and (self.system is not None or self.kind != "prompt"):
            raise UsageError("a system message and the kind of prompt need a template")
        if self.system is not None and self.kind != "chat":
            raise UsageError("a system message needs the template to make a chat")
        for text in (self.template, self.system, self.id_column, *self.keep):
            if text is not None and not text.isascii() and not _is_unicode(text):
                raise UsageError(f"{text!r} is no Unicode text: it has half a surrogate pair")

    @property
    def paths(self) -> JobPaths:
        """Where the job keeps what."""
        return JobPaths.of(self.output, self.errors, self.job)

    def prompt_template(self) -> PromptTemplate:
        """What makes requests of records."""
        return PromptTemplate(self.template, self.kind, self.system, self.id_column, tuple(self.keep))

    def facts(self, content: Content | None, identity: Mapping[str, str]) -> Facts:
        """What the job's answers depend on."""
        options: Facts = {
            "endpoint": self.endpoint,
            "template": self.template,
            "kind": self.kind,
            "system": self.system,
            "id_column": self.id_column,
            "keep": list(self.keep),
            "seed": self.seed,
            **{name: self.loading.get(name) for name in _DECISIVE},
            **self.sampling,
        }
        return {
            "input": {} if content is None else dataclasses.asdict(content),
            "model": dict(identity),
            "options": {name: value for name, value in options.items() if value not in (None, [])},
        }

    def details(self) -> Facts:
        """All of it, to do the job again later, from any folder; callbacks do not travel."""
        found = dataclasses.asdict(self)
        found["inputs"] = [_absolute(name) for name in self.inputs]
        for name in ("output", "errors", "job"):
            found[name] = None if found[name] is None else _absolute(found[name])
        if Path(self.model).exists():
            found["model"] = _absolute(self.model)
        return found

    @classmethod
    def from_details(cls, details: Facts) -> BatchSpec:
        """What ``details`` gave."""
        known = {each.name for each in dataclasses.fields(cls)}
        given = {name: value for name, value in details.items() if name in known}
        return cls(**given)

    def worker(self, label: str, created: int) -> WorkerSpec:
        """What workers of the job need to know."""
        return WorkerSpec(
            model=self.model,
            loading=self.loading,
            label=label,
            sampling=self.sampling,
            seed=self.seed,
            created=created,
            # Lines of a pipe are answered as they come, instead of waiting for a window of them.
            window=1 if STREAM in self.inputs else WINDOW_LINES,
        )

    def source(self) -> Source:
        """The rows of the inputs, which are looked at.

        Raises:
            UsageError: an input does not exist, or its columns do not suffice.
            MissingExtraError: one needs a package that is not installed.
        """
        source, template = Source(self.inputs), self.prompt_template()
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
