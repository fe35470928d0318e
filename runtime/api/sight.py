"""The pictures of a conversation: taken from its messages, placed in its prompt, and computed."""

from __future__ import annotations

import functools
import hashlib
import itertools
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from ...errors import ChatTemplateError, RequestError
from ...options import shown
from ...providers.base import EncoderOutput
from ...records import dataclass
from ..engine.requests.prompt_images import PromptImages
from ..images.data_url import is_data_url, read_data_url
from ..images.encoding import ImageEncoder, Picture
from ..images.pdf import pictures_of
from ..images.sizes import processor_of
from ..images.video import Video, open_video
from ..text.chat_template import Message
from ..text.parsers.locations import Places
from ..types.outputs import PictureUsage

_TEXTS = ("text", "thinking", "reasoning")  # types of parts; some templates write past thoughts so


@dataclass(frozen=True, slots=True)
class SeenPicture:
    """A picture for a decoder that attends to its rows.

    Args:
        output: the rows.
        begun: the text that begins the answer; empty if there is none.
        places: how the answer is read if it holds places in the picture; None if it does not.
    """

    output: EncoderOutput
    begun: str = ""
    places: Places | None = None


class Sight:
    """What a model sees with; opened when the first picture comes. Thread-safe.

    Args:
        open_encoder: see ``LoadedModel.open_sight``.
        most_pictures: of a conversation; a page of a PDF file is one.
        most_pixels: of all pictures of a conversation, since each takes time to be opened.
    """

    def __init__(
        self, open_encoder: Callable[[], ImageEncoder], most_pictures: int, most_pixels: int
    ) -> None:
        self._open, self._lock = open_encoder, threading.Lock()
        self._most_pictures, self._most_pixels = most_pictures, most_pixels

    @functools.cached_property
    def _encoder(self) -> ImageEncoder:
        with self._lock:
            return self._open()

    def take(self, messages: Sequence[Message], salt: str = "") -> tuple[Sequence[Message], list[Picture]]:
        """Return messages whose pictures are parts ``{"type": "image"}``, and the pictures in order.

        Args:
            messages: a part of a content is a picture if it is ``{"type": "image", "image": ...}``, with what
                ``open_picture`` takes, or ``{"type": "image_url", "image_url": {"url": ...}}``; both may be
                ``data:`` addresses. A PDF file is a picture for each of its pages, or for that of its field
                ``page``, counted from 1. Its ``detail``, ``min_pixels`` and ``max_pixels`` are those of
                ``processor_of``. ``{"type": "video", "video": ..., "fps": ...}`` is a video, with
                what ``open_video`` takes, or a ``data:`` address; ``video_url`` as ``image_url``.
            salt: only pictures of prompts with the same salt are known to be open.

        Raises:
            RequestError: the model reads text only, a picture cannot be opened, or a part of a content is
                neither a picture, a video nor a text; see ``processor_of``.
        """
        _check_parts(messages)
        if not isinstance(messages, Sequence) or not any(map(_has_pictures, messages)):
            return messages, []
        encoder, pictures, taken = self._encoder, list[Picture](), list[Message]()
        parts_of = [message["content"] for message in messages if _has_pictures(message)]
        shown_parts = [part for parts in parts_of for part in parts if is_picture(part) or is_video(part)]
        sources, most = list[Sequence[Any]](), len(shown_parts)
        for number, part in enumerate(shown_parts, 1):
            if is_picture(part):
                with _naming("picture", number, most):
                    sources.append(picture_sources(part))
        if (count := sum(map(len, sources))) > self._most_pictures:
            raise RequestError(f"a conversation has {count} pictures; the limit is {self._most_pictures}")
        several, opened, numbers = count > 1, iter(sources), itertools.count(1)
        for message in messages:
            if not _has_pictures(message):
                taken.append(message)
                continue
            parts = []
            for part in message["content"]:
                if is_video(part):
                    with _naming("video", next(numbers), most):
                        pictures.append(encoder.prepare_video(_video(part)))
                    parts.append({"type": "video"})
                    self._check_all(pictures)
                elif is_picture(part):
                    number = next(numbers)
                    with _naming("picture", number, most):
                        processor = processor_of(part, encoder.processor)
                    for source in next(opened):
                        with _naming("picture", number, most):
                            picture = encoder.prepare(source, several=several, salt=salt, processor=processor)
                        pictures.append(picture)
                        parts.append({"type": "image"})
                        self._check_all(pictures)
                else:
                    parts.append(part)
            taken.append({**message, "content": parts})
        return taken, pictures

    def _check_all(self, pictures: Sequence[Picture]) -> None:
        """Raise RequestError for pictures with too many pixels in all."""
        if sum(picture.num_pixels for picture in pictures) > self._most_pixels:
            raise RequestError(
                f"the pictures of a conversation have more than {self._most_pixels} pixels in all; make them "
                "smaller, or send fewer"
            )

    def placed(self, pieces: Sequence[str], pictures: Sequence[Picture]) -> list[str]:
        """Return the pieces of a rendered text with all tokens of each picture in its place.

        The template writes a place for a picture; what a user types like one was cut before, and stays text.

        Raises:
            ChatTemplateError: the template did not write one place for each picture.
        """
        if not pictures:
            return list(pieces)
        places = _places(pictures)
        found = [match.group() for piece in pieces for match in places.finditer(piece)]
        wanted = [picture.place for picture in pictures]
        video = self._encoder.processor.texts.get("video")
        if video in wanted and video not in found:
            raise ChatTemplateError(
                f"the chat template writes 0 places '{video}' for a video: the model reads pictures, not "
                "videos, or the template is not its own; send frames as pictures, or take the model's own"
            )
        if found != wanted:
            names = " or ".join(sorted({f"'{picture.place}'" for picture in pictures}))
            raise ChatTemplateError(
                f"the chat template writes {len(found)} places {names} for {len(pictures)} pictures and "
                "videos; take the model's own template, and no such text in answers of the assistant"
            )
        left = iter(pictures)
        return [places.sub(lambda _: next(left).text, piece) for piece in pieces]

    def placed_beginning(self, text: str, pictures: Sequence[Picture]) -> str:
        """Return a text with which a rendered one begins, with all tokens of its pictures in their places."""
        left = iter(pictures)
        return _places(pictures).sub(lambda _: next(left).text, text) if pictures else text

    def images(self, token_ids: Sequence[int], pictures: Sequence[Picture], salt: str = "") -> PromptImages:
        """Compute the pictures of a prompt; results are shared with prompts of the same salt.

        Raises:
            RequestError: the tokenizer has no token for a place of a picture, or makes other ones.
            ProviderRuntimeError: the computation failed.
        """
        encoder = self._encoder
        tokens = encoder.processor.token_ids
        wanted = sum(picture.num_tokens for picture in pictures)
        if (found := sum(map(token_ids.count, tokens))) != wanted:
            raise RequestError(
                f"the prompt has {found} tokens {', '.join(map(str, tokens))} for pictures, which need "
                f"{wanted}; the tokenizer does not belong to this model"
            )
        states = [(picture.key, encoder.states(picture, salt)) for picture in pictures]
        places = [place for picture in pictures for place in picture.places]
        sizes = [(picture.seen_size, picture.num_tokens) for picture in pictures]
        usage = [PictureUsage(width, height, count) for (height, width), count in sizes]
        return PromptImages.of(token_ids, tokens, states, places, usage)

    def encoded(
        self, messages: Sequence[Message], encode: Callable[[str], list[int]], salt: str = ""
    ) -> SeenPicture:
        """Return a conversation's one picture, for a decoder that attends to its rows.

        Args:
            messages: as for ``take``.
            encode: returns the tokens of a text, of special ones too.
            salt: as for ``images``.

        Raises:
            RequestError: see ``take``; or there is a text that the model does not read, no picture, or more
                than one.
            ProviderRuntimeError: the computation failed.
        """
        encoder = self._encoder
        use = encoder.processor.text_use
        texts = _texts(messages) if isinstance(messages, Sequence) else [""]
        if use == "refused" and (texts or not isinstance(messages, Sequence)):
            raise RequestError(
                "this model writes down what its encoder hears or sees, and reads no text; send a message "
                "with one picture and no text"
            )
        if len(texts) > 1 or not isinstance(messages, Sequence):
            raise RequestError(
                f"this model reads one text beside a picture, not {len(texts)}; send one message with a "
                "picture and a text"
            )
        _, pictures = self.take(messages, salt)
        if len(pictures) != 1:
            raise RequestError(
                f"this model writes down one picture, not {len(pictures)}; send each in a request "
                "of its own, and of a PDF file one 'page'"
            )
        picture, text = pictures[0], "".join(texts)
        asked = encode(encoder.geometry.question(encoder.processor, text)) if use == "asks" else []
        if asked and len(asked) > encoder.processor.longest:
            raise RequestError(
                f"the text has {len(asked)} tokens; beside a picture this model reads at most "
                f"{encoder.processor.longest}"
            )
        key = hashlib.blake2b(f"{len(salt)} {salt} {asked}".encode(), digest_size=32)
        key.update(picture.key)
        states = encoder.read(picture, asked, salt) if use == "asks" else encoder.states(picture, salt)
        output = EncoderOutput(key.digest(), states, len(states))
        if use == "asks":
            rules, (height, width) = encoder.geometry.places(encoder.processor, text), picture.size
            return SeenPicture(output, places=Places(width=width, height=height, **rules))
        return SeenPicture(output, text)


@contextmanager
def _naming(kind: str, number: int, most: int) -> Iterator[None]:
    """Say in a RequestError of the block which of several pictures and videos it is about."""
    try:
        yield
    except RequestError as error:
        if most == 1:
            raise
        raise RequestError(f"{kind} {number} of {most}: {error}") from error


def _places(pictures: Sequence[Picture]) -> re.Pattern[str]:
    """Return what matches the places that the template writes for these pictures."""
    return re.compile("|".join(sorted({re.escape(picture.place) for picture in pictures})))


def _check_parts(messages: Any) -> None:
    """Raise RequestError for a part that is not read: a template leaves it out, or writes an empty place."""
    for message in messages if isinstance(messages, Sequence) else ():
        content = message.get("content") if isinstance(message, Mapping) else None
        for part in content if isinstance(content, list | tuple) else ():
            kind = part.get("type", "text") if isinstance(part, Mapping) else "text"
            if kind in _TEXTS or is_picture(part) or is_video(part):
                continue
            raise RequestError(
                "a part of a content must be {'type': 'text', 'text': ...} or {'type': 'image', 'image': ...}"
                f" with a path, bytes, an image of Pillow or an array, not {shown(part)}"
            )


def is_picture(part: Any) -> bool:
    """Return whether a part of a content is a picture; see ``Sight.take``."""
    if not isinstance(part, Mapping):
        return False
    return part.get("type") in ("image", "image_url") and not part.keys().isdisjoint({"image", "image_url"})


def is_video(part: Any) -> bool:
    """Return whether a part of a content is a video; see ``Sight.take``."""
    if not isinstance(part, Mapping):
        return False
    return part.get("type") in ("video", "video_url") and not part.keys().isdisjoint({"video", "video_url"})


def _has_pictures(message: Any) -> bool:
    content = message.get("content") if isinstance(message, Mapping) else None
    return isinstance(content, list | tuple) and any(is_picture(part) or is_video(part) for part in content)


def _texts(messages: Sequence[Any]) -> list[str]:
    """Return the texts of messages that are not empty."""
    texts = []
    for message in messages:
        content = message.get("content") if isinstance(message, Mapping) else message
        parts = content if isinstance(content, list | tuple) else [content]
        texts += [part.get("text") if isinstance(part, Mapping) else part for part in parts]
    return [text for text in texts if isinstance(text, str) and text.strip()]


def _video(part: Mapping[str, Any]) -> Video:
    """Return the frames of a part.

    Raises:
        RequestError: see ``open_video`` and ``_source``.
    """
    source = _source(part, "video")
    if isinstance(source, list | tuple):
        source = [_source(frame) if is_picture(frame) else _opened(frame) for frame in source]
    return open_video(source, part.get("fps"))


def picture_sources(part: Mapping[str, Any]) -> Sequence[Any]:
    """Return the pictures of a part, for ``open_picture``: that of a file, or the pages of a PDF file.

    Raises:
        RequestError: see ``_source``; or the PDF file cannot be read.
        MissingExtraError: pypdfium2 is not installed.
    """
    page = part.get("page")
    if page is not None and (type(page) is not int or page < 1):
        raise RequestError(f"'page' of a picture must be an integer of at least 1, not {shown(page)}")
    return pictures_of(_source(part), page)


def _source(part: Mapping[str, Any], kind: str = "image") -> Any:
    """Return what ``open_picture`` takes, or with the kind ``video`` what ``open_video`` takes.

    Raises:
        RequestError: it is given by an address, or its base64 is damaged.
    """
    if kind in part:
        return _opened(part[kind])
    name = f"{kind}_url"
    given = part[name]
    url = given.get("url") if isinstance(given, Mapping) else given
    if not isinstance(url, str):
        raise RequestError(f"'{name}' must be an address or an object with a 'url', not {shown(given)}")
    return read_data_url(url)[1]


def _opened(source: Any) -> Any:
    """Return a source, of a ``data:`` address its content."""
    is_address = isinstance(source, str) and (is_data_url(source) or "://" in source)
    return read_data_url(source)[1] if is_address else source
