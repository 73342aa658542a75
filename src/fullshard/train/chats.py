"""Chats in the tokens of a model: written by its tokenizer's template, answers marked."""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fullshard.errors import ConfigError

from .documents import Document

_ANSWERS = re.compile(r"{%-?\s*generation")  # templates may mark answers themselves


class Sample(NamedTuple):
    """The part of a chat that a model reads.

    Attributes:
        tokens: the tokens.
        learned: for each, whether it belongs to an answer.
        nbytes: size of the answers, in bytes of UTF-8.
    """

    tokens: list[int]
    learned: list[bool]
    nbytes: int


class ChatTokenizer:
    """The tokenizer in a folder of ``transformers``, which knows how its model reads chats.

    Attributes:
        template: its template, in Jinja.

    Raises:
        ConfigError: transformers is not installed, or the folder has no chat template.
    """

    def __init__(self, folder: Path) -> None:
        self._tokenizer = _read_tokenizer(folder)
        template = self._tokenizer.chat_template
        if not isinstance(template, str):
            raise ConfigError(
                f"--init {folder}: its tokenizer has no chat template, which --data needs; add "
                "chat_template.jinja"
            )
        self.template: str = template

    def samples(self, document: Document) -> Iterator[Sample]:
        """Yield what is to be read of a chat: the whole of it, or one sample for each answer.

        Several are made if the template writes an answer otherwise as soon as more follows, as
        those do that leave out earlier reasoning.

        Raises:
            ConfigError: the chat has no answer, the template refuses it, or where answers begin
                cannot be told.
        """
        chat = json.loads(document.text)
        messages = chat["messages"]
        answers = [n for n, message in enumerate(messages) if message["role"] == "assistant"]
        if not answers:
            raise ConfigError(
                f'--data: {document.name} has no answer: no message has the role "assistant"'
            )
        try:
            write = _Writer(self._tokenizer, chat.get("tools"))
            if _ANSWERS.search(self.template):
                yield write.marked(messages)
                return
            text = write(messages)
            spans = [_span(write, messages, answer) for answer in answers]
            if all(text.startswith(span.text) for span in spans):
                yield self._sample(text, spans)
                return
        except ConfigError as error:
            raise ConfigError(f"--data: {document.name}: {error}") from error
        except Exception as error:  # jinja2's, or any of those that templates lead to
            reason = textwrap.shorten(str(error) or repr(error), width=300)
            raise ConfigError(
                f"--data: {document.name}: the chat template cannot write it ({reason})"
            ) from error
        for span in spans:
            yield self._sample(span.text, [span])

    def _sample(self, text: str, spans: Sequence[_Span]) -> Sample:
        """Return a text whose tokens are learned where they overlap with the spans."""
        encoded = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        end = self._tokenizer.eos_token
        bounds = []
        for span in spans:
            # Behind the end of an answer, many templates write a line break that nobody answers.
            last = span.text.rfind(end, span.start) if end else -1
            bounds.append((span.start, len(span.text) if last < 0 else last + len(end)))
        learned = [
            any(start < until and begin < stop for begin, until in bounds)
            for start, stop in encoded["offset_mapping"]
        ]
        nbytes = sum(len(text[begin:until].encode()) for begin, until in bounds)
        return Sample(encoded["input_ids"], learned, nbytes)


class _Span(NamedTuple):
    """A chat as far as an answer, as text, and where in it the answer begins."""

    text: str
    start: int


class _Writer:
    """Writes messages by the template."""

    def __init__(self, tokenizer: Any, tools: Any) -> None:
        self._tokenizer = tokenizer
        self._tools = tools

    def __call__(self, messages: Sequence[Any], *, ask: bool = False) -> str:
        """Return messages as text, followed by the beginning of an answer if ``ask``."""
        text: str = self._tokenizer.apply_chat_template(
            messages, tools=self._tools, tokenize=False, add_generation_prompt=ask
        )
        return text.encode(errors="replace").decode()  # JSON may hold half a surrogate pair

    def marked(self, messages: Sequence[Any]) -> Sample:
        """Return a sample whose answers the template itself marks."""
        found = self._tokenizer.apply_chat_template(
            messages,
            tools=self._tools,
            tokenize=True,
            return_dict=True,
            return_assistant_tokens_mask=True,
        )
        tokens, marks = found["input_ids"], found["assistant_masks"]
        learned = [bool(mark) for mark in marks]
        answers = [token for token, mark in zip(tokens, learned, strict=True) if mark]
        return Sample(tokens, learned, len(self._tokenizer.decode(answers).encode()))


def _span(write: _Writer, messages: Sequence[Any], answer: int) -> _Span:
    """Return the chat as far as the message ``answer``.

    Raises:
        ConfigError: the question is not the beginning of it.
    """
    text, question = write(messages[: answer + 1]), write(messages[:answer], ask=True)
    if not text.startswith(question):
        raise ConfigError(
            f"the chat template writes message {answer} not behind what asks for it, so where the "
            "answer begins is not known; mark answers in it with {% generation %}"
        )
    return _Span(text, len(question))


def _read_tokenizer(folder: Path) -> Any:
    try:
        import jinja2  # noqa: F401 - transformers asks for it late, in words of its own
        from transformers import AutoTokenizer
    except ImportError as error:
        raise ConfigError(
            "chats need transformers: pip install -e '.[hf]' in a clone of fullshard"
        ) from error
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # OSError, ValueError, KeyError and more
        reason = textwrap.shorten(str(error), width=300)
        raise ConfigError(f"--init {folder}: its tokenizer cannot be read ({reason})") from error
