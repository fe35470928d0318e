"""Make engine requests from prompts and options, for ``LLM`` and ``AsyncLLM``."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import itertools
import threading
import time
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence, Sized
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, cast

from ...errors import ChatTemplateError, InvalidSamplingError, PromptTooLongError, RequestError, UsageError
from ...options import shown
from ..engine.adapters import AdapterSet
from ..engine.config import EngineConfig
from ..engine.requests.output_text import OutputText
from ..engine.requests.pooled_states import Pooling
from ..engine.requests.request import Grammar, Request
from ..engine.requests.request_group import RequestGroup, sample_params
from ..engine.sampling.logits_processors import ThoughtMarks
from ..engine.schedule.admission import check_token_ids
from ..text.chat_template import ChatTemplate, Message, check_variables
from ..text.parsers.answer_grammar import AnswerFrame, answer_frame
from ..text.parsers.base import MessageParser, ParsedMessage
from ..text.parsers.locations import LocationParser
from ..text.parsers.registry import AnswerFormats, message_parser
from ..text.parsers.tags import TagParser, has_tags
from ..text.tokenizer import Tokenizer
from ..types.sampling_params import SamplingParams
from .encoder import Encoder
from .hearing import Hearing
from .prompts import ChatPrompt as ChatPrompt
from .prompts import EncodedPrompt, PromptReader, encoder_of, images_of, plain_prompt
from .prompts import PooledPrompt as PooledPrompt
from .prompts import Prompt as Prompt
from .resumption import Resumption
from .sight import SeenPicture, Sight

if TYPE_CHECKING:
    from ..models.loading import LoadedModel
    from ..text.grammars import GrammarCompiler, LateMatcher


# Maximum characters that are tokenized in the caller's thread, which blocks its event loop meanwhile.
_QUICK_TEXT = 4096


class RequestFactory:
    """Makes requests for one model, within the limits of an engine. Thread-safe."""

    def __init__(self, model: LoadedModel, config: EngineConfig) -> None:
        self._model = model
        self._lock = threading.Lock()
        self.grammars: GrammarCompiler | None = None
        info = model.runner.info
        self._reader = PromptReader(lambda: self.tokenizer, info.vocab_size, info.context_length)
        self.encoder = Encoder(model.open_encoder)
        special = None if model.tokenizer is None else model.tokenizer.special_texts
        self.sight = Sight(model.open_sight, config.max_images, config.max_image_pixels)
        self.hearing = Hearing(
            model.open_hearing,
            lambda: self.tokenizer,
            info.context_length,
            info.vocab_size,
            config.max_audio_seconds,
        )
        if model.tokenizer is not None:
            self._texts_apart = functools.lru_cache(maxsize=16)(model.tokenizer.texts_apart)
        stated = None if model.tokenizer is None else model.tokenizer.config.get("response_template")
        # Only states are kept at some lengths; KV can be cut at any.
        self._resumption = Resumption(self._rendered_tokens) if info.state_bytes else None
        self._formats = AnswerFormats(model.chat_template, special, stated)

    @property
    def has_tokenizer(self) -> bool:
        """Whether the model has a tokenizer."""
        return self._model.tokenizer is not None

    @property
    def adapters(self) -> AdapterSet:
        """The LoRA adapters of the model."""
        return self._model.adapters

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer.

        Raises:
            UsageError: the model has no tokenizer.
        """
        if self._model.tokenizer is None:
            raise UsageError(
                f"{self._model.name} has no tokenizer.json: add the file, or pass prompts as token ids "
                "(batch, serve, LLM)"
            )
        return self._model.tokenizer

    def group(
        self,
        prompt: Prompt,
        params: SamplingParams,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        tenant: str | None = None,
        timeout: float | None = None,
        lora: str | None = None,
        pin_seconds: float = 0.0,
        streamed: bool = True,
    ) -> RequestGroup:
        """Return the requests for all outputs of one prompt.

        ``streamed`` is an argument of ``Request``; for the others see ``AsyncLLM.generate``.

        Raises:
            UsageError: the prompt is text, and the model has no tokenizer.
            RequestError: the prompt has a wrong type, is too long or has token ids outside the vocabulary; or
                another argument is invalid.
            RequestFailedError: the tokenizer failed.
            UnknownModelError: there is no LoRA adapter of this name.
        """
        _check_texts(request_id=request_id, cache_salt=cache_salt, tenant=tenant)
        _check_options(params, priority, timeout, lora)
        adapter = None if lora is None else self.adapters.get(lora)
        prompt, params = _parsed_to_json(plain_prompt(prompt), params)
        token_ids = self.token_ids(prompt)
        check_token_ids(token_ids, params, self._model.runner.info.vocab_size)
        if self._model.tokenizer is None:
            _check_without_tokenizer(params)
        name = request_id or uuid.uuid4().hex
        shared: dict[str, Any] = {
            **self._token_rules(params, prompt.frame if isinstance(prompt, ChatPrompt) else None),
            "prompt": prompt if isinstance(prompt, str) else None,
            "priority": priority,
            "cache_salt": cache_salt,
            "tenant": tenant,
            "pooling": prompt.pooling if isinstance(prompt, PooledPrompt) else None,
            "adapter": adapter,
            "streamed": streamed,
            "pin_seconds": pin_seconds,
            "images": images_of(prompt),
            "resumption": prompt.resumption if isinstance(prompt, ChatPrompt) else (),
            "encoder": encoder_of(prompt),
            "deadline": None if timeout is None else time.monotonic() + timeout,
        }
        requests = [
            Request(
                f"{name}-{i}" if i else name,
                token_ids,
                own_params,
                text=self._output_text(prompt, token_ids, params),
                first_sample=name if i else None,
                **shared,
            )
            for i, own_params in enumerate(sample_params(params))
        ]
        return RequestGroup(params, requests)

    @property
    def end_token_ids(self) -> frozenset[int]:
        """The end tokens of the model."""
        return self._model.defaults.end_token_ids

    def token_ids(self, prompt: Prompt) -> list[int]:
        """Return the tokens of a prompt; see ``PromptReader.token_ids``."""
        return self._reader.token_ids(prompt)

    def cut_token_ids(self, prompt: Prompt) -> list[int]:
        """Return the tokens of a text or of a list, at most as many as a prompt may have; see ``token_ids``.

        Special tokens that the tokenizer writes behind a text stay, since their state may be its vector.
        """
        most = self._model.runner.info.context_length - 1  # a prompt leaves room for a token
        plain = plain_prompt(prompt)
        if not isinstance(plain, str):
            if isinstance(plain, ChatPrompt | PooledPrompt | EncodedPrompt):
                return self.token_ids(plain)
            return self.token_ids(plain[:most])
        tokens = self.encode(plain)
        if len(tokens) > most:
            bare = self.encode(plain, add_special_tokens=False)
            places = range(len(tokens) - len(bare) + 1)
            first = next((at for at in places if tokens[at : at + len(bare)] == bare), None)
            behind = [] if first is None else tokens[first + len(bare) :]
            tokens = [*tokens[: most - len(behind)], *behind]
        return self.token_ids(tokens)

    def pooled(self, prompt: Prompt, pooling: Pooling) -> PooledPrompt:
        """Return a prompt to embed, with its pictures; see ``token_ids``."""
        return PooledPrompt(self.token_ids(prompt), pooling, images_of(prompt))

    def encode(self, text: str, *, add_special_tokens: bool = True, salt: str = "") -> list[int]:
        """Return the tokens of a text; see ``PromptReader.encode``."""
        return self._reader.encode(text, add_special_tokens=add_special_tokens, salt=salt)

    def _rendered_tokens(self, text: str, salt: str) -> list[int]:
        return self.encode(text, add_special_tokens=False, salt=salt)

    def is_quick(self, prompt: Prompt, params: SamplingParams) -> bool:
        """Whether making the request takes at most a few milliseconds, so that an event loop may do it."""
        if params.structured_output is not None or isinstance(prompt, Mapping):
            return False
        texts = [word for word in params.bad_words if isinstance(word, str)]
        texts += [*params.stop, *params.dry_sequence_breakers]
        outputs = params.best_of or params.n  # each looks for the stop strings
        size = outputs * sum(map(len, texts)) + (len(prompt) if isinstance(prompt, Sized) else 0)
        return size <= _QUICK_TEXT

    def default_params(self, max_tokens: int | None) -> SamplingParams:
        """Return the checkpoint's own sampling options; see ``GenerationDefaults.params``."""
        return self._model.defaults.params(max_tokens)

    @property
    def served_defaults(self) -> dict[str, Any]:
        return self._model.defaults.served

    def chat_prompt(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        tool_style: str | None = None,
        called: Collection[str] = (),
        parallel_calls: bool = True,
        begun: str = "",
        cache_salt: str = "",
        **variables: Any,
    ) -> ChatPrompt:
        """Render a conversation to a prompt.

        Args:
            messages: see ``ChatTemplate.render``.
            tools: see there.
            add_generation_prompt: see there.
            continue_final_message: see there.
            chat_template: see ``template`` there.
            tool_style: the format of tool calls, a name from ``parsers.registry.STYLES``; None derives it
                from the chat template.
            called: the names of tools; the answer calls one of them and holds nothing else but a thought. If
                empty, the model may call any.
            parallel_calls: whether an answer that must call may hold several calls.
            begun: text at the end of the prompt, with which the answer begins.
            cache_salt: only prompts with the same salt share computed pictures and known tokens.
            **variables: see there.

        Raises:
            ChatTemplateError: the template is missing, fails, or tries something forbidden; or the name of a
                variable is reserved.
            UsageError: there is no such ``tool_style``.
            PromptTooLongError: the prompt is too long.
            RequestError: a picture is damaged, too large or not supported, or the model reads text only.
        """
        check_variables(variables, _RENDERING)
        if self._model.runner.info.encoder_width:
            return self._seen_prompt(messages, cache_salt, tools)
        template = self._model.chat_template
        messages, pictures = self.sight.take(messages, cache_salt)
        if isinstance(messages, Sized):
            self._reader.check_messages(len(messages))
        most = self._reader.most_bytes
        source = template.source(chat_template, with_tools=bool(tools))
        marked_messages, marked_tools, marked_variables, mark = self._marked(
            source, messages, tools, variables
        )

        def render(turns: Sequence[Message]) -> str:
            return template.render(
                turns,
                tools=marked_tools,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                template=chat_template,
                max_size=most,
                **marked_variables,
            )

        try:
            try:
                rendered = render(marked_messages)
            except ChatTemplateError:
                # Arguments that are no JSON are texts, and some templates read only objects.
                if (with_objects := _with_object_arguments(marked_messages)) is None:
                    raise
                rendered = render(with_objects)
        except PromptTooLongError:
            self._reader.check_bytes(most + 1)
            raise
        pieces = rendered.split(mark) if mark else [rendered]
        pieces = self.sight.placed(pieces, pictures)
        pieces[-1] += begun
        text = "".join(pieces)
        answer = self._formats.of(chat_template, with_tools=bool(tools), style=tool_style)
        if called and answer.calls is None:
            answer = self._formats.of(chat_template, with_tools=bool(tools), style="hermes")
        new_parser = functools.partial(message_parser, answer, text, tools=tools or ())
        frame = None
        if not continue_final_message:
            frame = answer_frame(answer, text, tools or (), called, parallel=parallel_calls)
        # The template itself writes the special tokens.
        tokens = [self.encode(piece, add_special_tokens=False, salt=cache_salt) for piece in pieces]
        whole = tokens[0] if len(tokens) == 1 else [*itertools.chain(*tokens)]
        prompt = ChatPrompt(whole, new_parser, frame)
        if self._resumption is not None and isinstance(messages, Sequence):
            placed = functools.partial(self.sight.placed_beginning, pictures=pictures)
            lengths = self._resumption.lengths(
                marked_messages, rendered, mark, whole, render, placed, cache_salt
            )
            prompt = dataclasses.replace(prompt, resumption=lengths)
        if not pictures:
            return prompt
        self.token_ids(prompt)  # a prompt that is too long is refused before its pictures are computed
        return dataclasses.replace(prompt, images=self.sight.images(prompt.token_ids, pictures, cache_salt))

    def _seen_prompt(
        self, messages: Sequence[Message], salt: str, tools: Sequence[Mapping[str, Any]] | None
    ) -> ChatPrompt:
        """Return the prompt of a model that writes down what its encoder sees: the token that begins.

        Raises:
            RequestError: see ``Sight.encoded``; or there are tools, or the checkpoint states no such token.
        """
        if self._model.hears:
            raise RequestError(
                "this model writes down recordings, and reads neither texts nor images; give it one: "
                "carryall run --audio, LLM.transcribe, /v1/audio/transcriptions"
            )
        if tools:
            raise RequestError("this model writes down pictures and calls no tools; leave them out")
        encode = functools.partial(self.encode, add_special_tokens=False)
        seen = self.sight.encoded(messages, encode, salt)
        tokens = encode(seen.begun) if seen.begun else list(self._model.defaults.start_token_ids)
        if not tokens:
            raise RequestError(
                "neither generation_config.json nor config.json states the 'decoder_start_token_id' with "
                "which this model begins; add it"
            )
        parser = self._json_parser(seen, tokens)
        return ChatPrompt(tokens, lambda: None, encoder=seen.output, new_json_parser=parser)

    def _json_parser(self, seen: SeenPicture, tokens: Sequence[int]) -> Callable[[], MessageParser] | None:
        """Return what makes parsers of answers with places or tags; None if the model writes neither."""
        places, tokenizer = seen.places, self._model.tokenizer
        if places is not None:
            return lambda: LocationParser(ParsedMessage(), places)
        if tokenizer is None or not has_tags(tokenizer.added_texts):
            return None
        begun = seen.begun or tokenizer.decode(list(tokens), skip_special_tokens=False)
        return lambda: TagParser(ParsedMessage(), begun, tokenizer.added_texts)

    def _marked(
        self,
        source: str,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None,
        variables: Mapping[str, Any],
    ) -> tuple[Sequence[Message], Sequence[Mapping[str, Any]] | None, Mapping[str, Any], str]:
        """Return what a template renders with marks in texts of special tokens; see ``SpecialTexts``."""
        if self._model.tokenizer is None or not isinstance(messages, Sequence):
            return messages, tools, variables, ""
        return self._texts_apart(source).marked(messages, tools, variables)

    def _output_text(self, prompt: Prompt, token_ids: list[int], params: SamplingParams) -> OutputText | None:
        """Return what makes the text of one output; None without a tokenizer."""
        if self._model.tokenizer is None:
            return None
        parser = prompt.new_parser() if isinstance(prompt, ChatPrompt) else None
        return OutputText(self._model.tokenizer, token_ids, params, parser)

    def _token_rules(self, params: SamplingParams, frame: AnswerFrame | None) -> dict[str, Any]:
        """Return the arguments of ``Request`` that end or restrict an output by its tokens."""
        own = frozenset() if params.ignore_eos else self._model.defaults.end_token_ids
        return {
            "end_token_ids": own.union(params.stop_token_ids),
            "bad_words": self._bad_words(params),
            "dry_breakers": self._dry_breakers(params),
            "thought": self._thought(params, frame),
            "grammar": self._grammar(params, frame),
            "late_grammar": self._late_grammar(params, frame),
        }

    def _thought(self, params: SamplingParams, frame: AnswerFrame | None) -> ThoughtMarks | None:
        """Return the marks of a thought whose length is limited; None if there is none."""
        tokenizer = self._model.tokenizer
        if params.reasoning_budget is None or frame is None or frame.thought == "none" or tokenizer is None:
            return None
        thought = frame.answer.thought
        if thought is None:
            return None
        return ThoughtMarks(
            frame.thought == "begun",
            thought.open,
            thought.close,
            tuple(self.encode(thought.close, add_special_tokens=False)),
            lambda token: tokenizer.decode([token], skip_special_tokens=False),
            tuple(self.encode(params.reasoning_budget_message, add_special_tokens=False)),
        )

    def _grammar(self, params: SamplingParams, frame: AnswerFrame | None) -> Future[Grammar] | None:
        """Return the future of the compiled grammar of an answer, None if it is free."""
        wanted = params.structured_output
        if wanted is None and (frame is None or not frame.is_needed):
            return None
        if frame is not None and frame.must_call:
            wanted = None  # an answer of calls has no other form
        held = None if frame is None else dataclasses.replace(frame, offered="")
        return cast("Future[Grammar]", self._compiler().compile(wanted, held))

    def _late_grammar(self, params: SamplingParams, frame: AnswerFrame | None) -> LateMatcher | None:
        """Return what holds calls of tools that the model may call or not; None if nothing does."""
        call_frame = None if frame is None else frame.call_frame
        calls = None if frame is None else frame.answer.calls
        tokenizer = self._model.tokenizer
        if params.structured_output is not None or call_frame is None or calls is None or tokenizer is None:
            return None
        from ..text.grammars import LateMatcher  # as above

        compiled = self._compiler().compile(None, call_frame)
        return LateMatcher(
            compiled, calls.marker, lambda token: tokenizer.decode([token], skip_special_tokens=False)
        )

    def _compiler(self) -> GrammarCompiler:
        from ..text.grammars import GrammarCompiler  # loaded on demand: few requests need it

        with self._lock:
            if self.grammars is None:
                self.grammars = GrammarCompiler(
                    self.tokenizer, self._model.defaults.end_token_ids, self._model.runner.info.vocab_size
                )
        return self.grammars

    def _bad_words(self, params: SamplingParams) -> set[tuple[int, ...]]:
        """Return the token sequences of the bad words; a text is encoded with and without a leading space."""
        words = set[tuple[int, ...]]()
        for word in params.bad_words:
            if isinstance(word, str):
                spellings = (word, f" {word.lstrip()}")
                words.update(tuple(self.encode(s, add_special_tokens=False)) for s in spellings)
            else:
                words.add(word)
        vocab_size = self._model.runner.info.vocab_size  # the tokenizer may have more tokens than the model
        return {word for word in words if word and max(word) < vocab_size}

    def _dry_breakers(self, params: SamplingParams) -> set[int]:
        """Return the last token of each sequence breaker, encoded alone and after a letter."""
        if not params.dry_multiplier or self._model.tokenizer is None:
            return set()
        texts = [prefix + text for text in params.dry_sequence_breakers for prefix in ("", "a")]
        encoded = [self.encode(text, add_special_tokens=False) for text in texts]
        return {token for token_ids in encoded for token in token_ids[-1:]}


# Names that template variables of a request must not have: parameters of the rendering functions.
_RENDERING = frozenset(inspect.signature(ChatTemplate.render).parameters)
RENDER_OPTIONS = _RENDERING | frozenset(inspect.signature(RequestFactory.chat_prompt).parameters)


def _with_object_arguments(messages: Sequence[Any]) -> list[Any] | None:
    """Return messages whose arguments of tool calls are objects, also those that are texts.

    None if no arguments are texts.
    """
    changed = False

    def with_object(call: Any) -> Any:
        nonlocal changed
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
            return call
        changed = True
        return {**call, "function": {**function, "arguments": {"arguments": function["arguments"]}}}

    rewritten = [
        {**message, "tool_calls": [with_object(call) for call in message["tool_calls"]]}
        if isinstance(message, Mapping) and isinstance(message.get("tool_calls"), list)
        else message
        for message in messages
    ]
    return rewritten if changed else None


def _parsed_to_json(prompt: Prompt, params: SamplingParams) -> tuple[Prompt, SamplingParams]:
    """Return prompt and options of an answer that a parser makes JSON of, without a grammar.

    Raises:
        InvalidSamplingError: the answer shall have another form.
    """
    wanted = params.structured_output
    if wanted is None or not isinstance(prompt, ChatPrompt) or prompt.new_json_parser is None:
        return prompt, params
    if not wanted.json_object:
        raise InvalidSamplingError(
            "this model writes tags and places, which a structured output 'json_object' makes JSON of; "
            f"'{wanted.key[0]}' is not supported"
        )
    parsed = dataclasses.replace(prompt, new_parser=prompt.new_json_parser)
    return parsed, dataclasses.replace(params, structured_output=None)


# Arguments are checked here, in the caller's thread, and not in the engine's.


def _check_texts(**texts: Any) -> None:
    """Raise RequestError unless all values are strings or None."""
    for name, value in texts.items():
        if not isinstance(value, str | None):
            raise RequestError(f"{name} must be a string, not {value!r}")


def _check_options(params: Any, priority: Any, timeout: Any, lora: Any) -> None:
    """Raise RequestError if an argument of ``RequestFactory.group`` has a wrong type."""
    if not isinstance(priority, int):
        raise RequestError(f"the priority must be a whole number, not {priority!r}")
    if timeout is not None and not (isinstance(timeout, int | float) and timeout >= 0.0):
        raise RequestError(f"the timeout must be a number of seconds, not {timeout!r}")
    if not isinstance(params, SamplingParams):
        raise RequestError(f"sampling parameters must be SamplingParams, not {shown(params)}")
    if not isinstance(lora, str | None):
        raise RequestError(f"lora must be the name of an adapter, not {shown(lora)}")


def _check_without_tokenizer(params: SamplingParams) -> None:
    """Raise InvalidSamplingError if an option needs a tokenizer."""
    if params.stop:
        raise InvalidSamplingError("stop strings need a tokenizer; use stop_token_ids")
    if any(isinstance(word, str) for word in params.bad_words):
        raise InvalidSamplingError("bad words as text need a tokenizer; pass their token ids")
