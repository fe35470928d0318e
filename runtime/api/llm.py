"""``LLM``: load a model and generate text."""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Generator, Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar, cast

import numpy as np
import numpy.typing as npt

from ...errors import CarryallWarning, EngineClosedError, RequestError, UsageError
from ...options import shown
from ..audio.transcription import Question, Transcription, next_questions
from ..engine.engine import EngineConfig
from ..engine.requests.request_group import GrowingOutput, RequestGroup
from ..engine.sampling.beam_search import BeamSearchOptions
from ..engine.stats import EngineStats
from ..process.at_exit import NATIVE
from ..process.fair_lock import FairLock
from ..process.stop_signals import uninterrupted
from ..text.chat_template import Message
from ..types.arguments import checked_arguments, fits
from ..types.outputs import RequestOutput
from ..types.sampling_params import SamplingParams
from .beam_search import beam_search
from .embedding import Pooling, check_pooling, embedding_questions, encoded_tokens
from .prompts import EncodedPrompt, Prompt, encoder_of, images_of, listed_prompts
from .requests import RequestFactory
from .scoring import (
    RERANK_INSTRUCTION,
    ContinuationScore,
    Questions,
    chat_score_questions,
    rerank_questions,
    score_questions,
)
from .text_model import TextModel
from .vectors import stacked

if TYPE_CHECKING:
    from ...progress import Progress
    from ..models.config import ModelConfig
    from ..models.loading import LoadedModel

_DEFAULT_MAX_TOKENS = 16

T = TypeVar("T")
Params = SamplingParams | Sequence[SamplingParams] | None
Loras = str | Sequence[str | None] | None


class LLM(TextModel):
    """A loaded model. Thread-safe: requests of several threads run in one batch.

    There is no background thread: a thread that waits for a result runs the steps, for all requests.

    Args:
        model: ``demo``, a package, a Hugging Face folder or hub id, an ONNX file, a ``ModelConfig``, or the
            result of ``load_model``.
        engine_config: options of the engine; None takes the defaults.
        progress: called for every tensor written, as (done, total, name).
        **fields: fields of ``ModelConfig`` (``provider``, ``quantize``, ``context_length``, ...) and
            ``EngineConfig`` (``max_slots``, ``kv_bytes``, ``prefix_cache``, ...).

    Attributes:
        engine: runs the requests; it is not thread-safe, so only look at it while no call is under way.
        requests: makes requests of prompts.

    Raises:
        UsageError: the model or an option is invalid; see the subclasses.
        ProviderUnavailableError: the provider is not available on this machine.
        CheckpointError: the checkpoint is damaged.
        PackageError: the package is damaged.
    """

    def __init__(
        self,
        model: str | Path | ModelConfig | LoadedModel,
        *,
        engine_config: EngineConfig | None = None,
        progress: Progress | None = None,
        **fields: Any,
    ) -> None:
        from ..models.loading import open_engine  # slow to import: it imports the optimizer

        loaded, self.engine = open_engine(model, engine_config, fields, owner="LLM", progress=progress)
        self.name = loaded.name
        self.fallbacks = loaded.fallbacks
        self.requests = RequestFactory(loaded, self.engine.config)
        self._turn = FairLock()
        self._dropped = deque[RequestGroup]()  # to be cancelled
        self._closed = False

    def generate(
        self,
        prompts: Prompt | Iterable[Prompt],
        sampling_params: Params = None,
        *,
        lora: Loras = None,
    ) -> list[RequestOutput]:
        """Generate from prompts, all in one batch.

        Args:
            prompts: one or several; each a text, token ids, ``{"prompt": text}``,
                ``{"prompt_token_ids": ids}``, or the result of ``render_chat``.
            sampling_params: one for all prompts, or one for each. None takes the checkpoint's own options,
                and 16 tokens unless it sets ``max_new_tokens``.
            lora: the name of a LoRA adapter for all prompts, or one or None for each.

        Returns:
            One result per prompt, in order. If a request failed while running, its ``error`` is set, and a
            CarryallWarning says so.

        Raises:
            RequestError: a prompt or an option is invalid, or there is no such adapter; nothing was run.
            EngineClosedError: ``close`` was called.
        """
        listed = listed_prompts(prompts)
        params = self._params(sampling_params, len(listed), _DEFAULT_MAX_TOKENS)
        return _told(self._run(listed, params, lora))

    @checked_arguments
    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: Params = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        chat_template: str | None = None,
        tool_style: str | None = None,
        lora: Loras = None,
        **variables: Any,
    ) -> list[RequestOutput]:
        """Answer conversations, rendered with the checkpoint's chat template.

        Args:
            messages: one or several conversations, each a list of objects with ``role`` and ``content``.
            sampling_params: as in ``generate``, but None sets no token limit.
            tools: JSON schemas of functions that the model may call.
            add_generation_prompt: append the header of the assistant's answer to the prompt.
            chat_template: the name of another template, or Jinja source.
            tool_style: the format of tool calls, such as ``hermes``; None derives it from the template.
            lora: the name of a LoRA adapter for all conversations, or one or None for each.
            variables: further variables of the template, such as ``enable_thinking``.

        Returns:
            One result per conversation. ``text`` of its outputs is the answer without reasoning and tool
            calls, which are in ``reasoning_content`` and ``tool_calls``.

        Raises:
            ChatTemplateError: the template is missing, fails, or tries something forbidden.
            RequestError: as for ``generate``.
        """
        listed = [messages] if messages and isinstance(messages[0], Mapping) else messages
        options: dict[str, Any] = {
            "add_generation_prompt": add_generation_prompt,
            "chat_template": chat_template,
            "tool_style": tool_style,
        }
        prompts = [
            self.render_chat(cast(Sequence[Message], conversation), tools=tools, **options, **variables)
            for conversation in listed
        ]
        return _told(self._run(prompts, self._params(sampling_params, len(prompts), None), lora))

    def transcribe(self, audio: Any, **options: Any) -> Transcription:
        """Write down what is said in a recording of up to 2 hours.

        Args:
            audio: the path or the bytes of a file, an array float [samples] of 16,000 samples of a second, or
                (array, rate).
            **options: fields of ``TranscriptionOptions``: ``language``, ``task``, ``prompt``,
                ``temperature``, ...

        Raises:
            RequestError: the model hears nothing, the recording cannot be opened, or an option is invalid.
            MissingExtraError: PyAV is not installed (the extra ``video``).
            ProviderRuntimeError: the model failed to run.
        """
        return self.transcribe_several([audio], **options)[0]

    def transcribe_several(self, audio: Sequence[Any], **options: Any) -> list[Transcription]:
        """Write down several recordings, in one batch; see ``transcribe``.

        Raises:
            RequestError: as for ``transcribe``; nothing was run.
        """
        if not isinstance(audio, list | tuple):
            raise RequestError(f"the recordings must be a list, not {shown(audio)}")
        running = {
            number: self.requests.hearing.steps(source, options) for number, source in enumerate(audio)
        }
        answers: dict[int, list[RequestOutput] | None] = dict.fromkeys(running)
        finished: dict[int, Transcription] = {}
        while running:
            asked: dict[int, Sequence[Question]] = {}
            for number, steps in list(running.items()):
                questions = next_questions(steps, answers[number])
                if isinstance(questions, Transcription):
                    finished[number] = questions
                    del running[number]
                else:
                    asked[number] = questions
            listed = [question for questions in asked.values() for question in questions]
            prompts = [EncodedPrompt(question.token_ids, question.encoder) for question in listed]
            outputs = iter(self._run(prompts, [question.params for question in listed]))
            answers = {number: [next(outputs) for _ in questions] for number, questions in asked.items()}
        return [finished[number] for number in range(len(audio))]

    def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        lora: str | None = None,
        read_live: bool = True,
    ) -> Generator[RequestOutput, None, None]:
        """Generate from one prompt; yield the whole output each time it has grown.

        Closing the generator cancels the request.

        Args:
            prompt: as for ``generate``.
            sampling_params: as for ``generate``.
            lora: the name of a LoRA adapter.
            read_live: whether somebody reads the text while it grows; prompts of other requests then yield
                to it, which costs them time.
        """
        params = sampling_params
        if params is None:
            params = self.requests.default_params(_DEFAULT_MAX_TOKENS)
        group = self.requests.group(prompt, params, lora=lora, streamed=read_live)
        try:
            self._add([group])
            output, seen = GrowingOutput(group), 0
            while not group.finished:
                self._step_for(group, seen)
                if group.fault is not None:
                    break
                if group.finished or group.num_generated > seen:
                    seen = group.num_generated
                    yield output.add(group.read())
                    if group.read_whole:
                        break
        finally:
            self._cancel([group])
        self._raise_if_cut_off(group)

    def beam_search(
        self, prompts: Prompt | Iterable[Prompt], options: BeamSearchOptions | None = None
    ) -> list[RequestOutput]:
        """Return the ``num_beams`` most likely outputs of each prompt, the best first.

        Raises:
            RequestError: a prompt or an option is invalid.
            UsageError: the prefix cache is off; beams share KV through it.
            ProviderRuntimeError: the model failed to run.
        """
        if not isinstance(options, BeamSearchOptions | None):
            raise UsageError(f"options must be BeamSearchOptions, not {shown(options)}")
        if not self.engine.config.prefix_cache:
            raise UsageError("beam search needs the prefix cache; load the model without prefix_cache=False")
        listed = listed_prompts(prompts)
        return beam_search(
            self.generate,
            [self.requests.token_ids(prompt) for prompt in listed],
            [(images_of(prompt), encoder_of(prompt)) for prompt in listed],
            options or BeamSearchOptions(),
            self.requests.end_token_ids,
            self.context_length,
            self.requests.tokenizer if self.requests.has_tokenizer else None,
        )

    @checked_arguments
    def score(
        self, texts: str | Sequence[str], continuations: str | Sequence[str]
    ) -> list[ContinuationScore]:
        """Return the log-probability of each continuation of its text; one text may serve all continuations.

        Raises:
            RequestError: a text or a continuation is invalid.
            UsageError: there are not as many texts as continuations.
            ProviderRuntimeError: the model failed to run.
        """
        return self._ask(score_questions(self.requests, texts, continuations))

    @checked_arguments
    def score_chat(
        self,
        messages: Sequence[Message],
        continuations: Sequence[str],
        *,
        continue_final_message: bool = False,
        **variables: Any,
    ) -> list[ContinuationScore]:
        """Return the log-probability of each of several answers to a conversation, as one batch.

        Args:
            messages: objects with ``role`` and ``content``, as for ``chat``.
            continuations: the answers.
            continue_final_message: they continue the last message, which is one of the assistant.
            **variables: further variables of the template, such as ``enable_thinking``.

        Raises:
            ChatTemplateError: the template is missing, fails, or tries something forbidden.
            RequestError: the conversation or an answer is invalid.
            ProviderRuntimeError: the model failed to run.
        """
        return self._ask(
            chat_score_questions(
                self.requests,
                messages,
                continuations,
                continue_final_message=continue_final_message,
                **variables,
            )
        )

    @checked_arguments
    def rerank(
        self,
        query: str,
        documents: Sequence[str],
        *,
        instruction: str = RERANK_INSTRUCTION,
        answers: Sequence[str] = ("yes", "no"),
    ) -> list[float]:
        """Return for each document the probability that it answers the query, asked as for Qwen3-Reranker.

        Args:
            query: the question.
            documents: texts that may answer it.
            instruction: describes the search task to the model.
            answers: the model's possible answers, the one for yes first.

        Raises:
            RequestError: the prompt is invalid, or two answers begin with the same token.
            ProviderRuntimeError: the model failed to run.
        """
        return self._ask(rerank_questions(self.requests, query, documents, instruction, answers))

    def embed(
        self, prompts: Prompt | Iterable[Prompt], *, pooling: Pooling = "last", normalize: bool = True
    ) -> npt.NDArray[np.float32]:
        """Return embeddings, float32 [prompts, hidden_size], from the model's last hidden states.

        If the provider has no hidden states beside the logits, the first call opens the model a second time.

        Args:
            prompts: one or several.
            pooling: ``last`` takes the hidden state of the last token, ``mean`` the mean over all tokens.
            normalize: scale each embedding to length 1.

        Raises:
            RequestError: a prompt is empty or too long.
            UsageError: the model was not lowered here, so it cannot return hidden states.
            ProviderRuntimeError: the model failed to run.
        """
        check_pooling(pooling)
        asked = [self.requests.pooled(prompt, pooling) for prompt in listed_prompts(prompts)]
        if not (size := self.engine.info.embedding_size):
            found = self.requests.encoder.embed(encoded_tokens(asked), pooling)
            return stacked(*found, normalize=normalize)
        return stacked(self._ask(embedding_questions(asked)), size, normalize=normalize)

    def clear_prefix_cache(self) -> None:
        """Forget the KV of finished requests, so that no later request reuses it."""
        with uninterrupted(), self._turn:
            self._check_open()
            self.engine.clear_prefix_cache()

    def stats(self) -> EngineStats:
        """Return counters and gauges of the engine."""
        with self._turn:
            return self.engine.stats()

    def close(self) -> None:
        """Free the model. Requests of other threads end with EngineClosedError."""
        with uninterrupted(), self._turn:
            if not self._closed:
                self._closed = True
                self.engine.close()
                self.requests.encoder.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _ask(self, questions: Questions[T]) -> list[T]:
        return questions.read(self._run(questions.prompts, questions.params))

    def _run(
        self, prompts: Sequence[Prompt], params: Sequence[SamplingParams], lora: Loras = None
    ) -> list[RequestOutput]:
        if not fits(lora, Loras):
            raise UsageError(
                f"lora must be the name of an adapter, or a list of names and None, not {shown(lora)}"
            )
        loras = [lora] * len(prompts) if lora is None or isinstance(lora, str) else list(lora)
        if len(loras) != len(prompts):
            raise UsageError(f"{len(loras)} loras for {len(prompts)} prompts; pass one, or one for each")
        groups = [
            self.requests.group(prompt, own, lora=name, streamed=False)
            for prompt, own, name in zip(prompts, params, loras, strict=True)
        ]
        try:
            self._add(groups)
            for group in groups:
                while not group.finished:
                    self._step_for(group, group.num_generated)
        finally:
            self._cancel(groups)
        for group in groups:
            self._raise_if_cut_off(group)
        return [group.output() for group in groups]

    def _params(self, params: Params, count: int, max_tokens: int | None) -> list[SamplingParams]:
        if params is None:
            params = self.requests.default_params(max_tokens)
        if not isinstance(params, SamplingParams | Iterable) or isinstance(params, str | bytes | Mapping):
            raise UsageError(
                f"sampling_params must be SamplingParams, or a list of them, not {shown(params)}"
            )
        listed = [params] * count if isinstance(params, SamplingParams) else list(params)
        if len(listed) != count:
            raise UsageError(f"{len(listed)} sampling_params for {count} prompts; pass one, or one for each")
        return listed

    def _add(self, groups: Sequence[RequestGroup]) -> None:
        with uninterrupted(), self._turn:
            self._check_open()
            for group in groups:
                for request in group.requests:
                    self.engine.add(request)

    def _cancel(self, groups: Sequence[RequestGroup]) -> None:
        """Cancel requests; if garbage collection closes a stream during a step, cancel after the step."""
        self._dropped.extend(groups)
        if not self._turn.is_ours:
            with uninterrupted(), self._turn:
                self._cancel_dropped()

    def _cancel_dropped(self) -> None:
        while self._dropped:
            for request in self._dropped.popleft().requests:
                self.engine.cancel(request.request_id)

    def _step_for(self, group: RequestGroup, seen: int) -> None:
        """Run a step, unless another thread's step has already generated more than ``seen`` tokens."""
        with NATIVE, uninterrupted(), self._turn:
            if not group.finished and group.num_generated == seen:
                self.engine.step()
            self._cancel_dropped()

    def _check_open(self) -> None:
        if self._closed:
            raise EngineClosedError(f"this LLM of {self.name} is closed; create a new one")

    def _raise_if_cut_off(self, group: RequestGroup) -> None:
        if group.cancelled:
            self._check_open()
        if group.fault is not None:
            raise group.fault


def _told(outputs: list[RequestOutput]) -> list[RequestOutput]:
    """Return outputs; warn of those that failed, whose texts would look like short answers.

    Warnings may be logged, and the reason may hold a part of a text.
    """
    for place, output in enumerate(outputs):
        if output.error is not None:
            text = f"the request of prompt {place} failed, so its text ends early; its 'error' says why"
            warnings.warn(text, CarryallWarning, stacklevel=3)
    return outputs
