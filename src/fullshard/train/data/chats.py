"""Chats as tokens of a model, by the chat template of its tokenizer, with answers marked."""

from __future__ import annotations

import copy
import json
import re
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from fullshard.errors import ConfigError
from fullshard.train.data.documents import Document
from fullshard.train.data.tokenizer import PretrainedTokenizer

_ANSWERS = re.compile(r"{%-?\s*generation")  # templates may mark answers themselves


class Sample(NamedTuple):
    """The part of a chat that a model reads.

    Attributes:
        tokens: the tokens.
        learned: for each token, whether it belongs to an answer.
        nbytes: size of the answers in bytes of UTF-8, without special tokens such as end marks.
    """

    tokens: list[int]
    learned: list[bool]
    nbytes: int


class ChatTokenizer:
    """A tokenizer that knows how its model reads chats.

    Raises:
        ConfigError: it has no chat template.
    """

    def __init__(self, tokenizer: PretrainedTokenizer) -> None:
        self._tokenizer = tokenizer
        self._special = {
            number
            for number, token in tokenizer.plain.get_added_tokens_decoder().items()
            if token.special or number == tokenizer.end
        }
        if not tokenizer.source.chat_template:
            raise ConfigError(
                f"--init {tokenizer.folder}: its tokenizer has no chat template, which --data "
                "needs; add chat_template.jinja"
            )

    def samples(self, document: Document) -> Iterator[Sample]:
        """Yield the samples of a chat: one for the whole chat, or one for each answer.

        A chat gives several samples if its template renders an answer differently once more
        messages follow, for example without its reasoning. Answers whose ``weight`` is 0 are not
        learned. A first message of the assistant is learned only if the template marks it.

        Raises:
            ConfigError: the chat has no answer to learn, the template refuses the chat, or the
                start of an answer is unknown.
        """
        chat = json.loads(document.text)
        try:
            yield from self._samples(chat["messages"], chat.get("tools"))
        except ConfigError as error:
            raise ConfigError(f"--data: {document.name} {error}") from error
        except Exception as error:  # jinja2's, or any that template code raises
            reason = textwrap.shorten(str(error) or repr(error), width=300)
            raise ConfigError(
                f"--data: {document.name}: the chat template cannot write it ({reason})"
            ) from error

    def _samples(self, messages: Sequence[Any], tools: Any) -> Iterator[Sample]:
        answers = [n for n, message in enumerate(messages) if message["role"] == "assistant"]
        if not answers:
            raise ConfigError('has no answer: no message has the role "assistant"')
        wanted = [n for n in answers if messages[n].get("weight") != 0]
        if not wanted:
            raise ConfigError('has no answer to learn: all have the "weight" 0')
        write = _Writer(self._tokenizer.source, tools)
        messages = write.once_encoded(messages)
        if write.marks_answers:
            text, marks = write.marked(messages)
            if len(wanted) < len(answers):
                if len(marks) != len(answers):
                    raise ConfigError(
                        f"has {len(answers)} answers, some with the weight 0, and the template "
                        f"marks {len(marks)}: which ones to learn is not known"
                    )
                marks = [mark for n, mark in zip(answers, marks, strict=True) if n in wanted]
            yield self._sample(text, marks)
            return
        wanted = [n for n in wanted if n > 0]
        if not wanted:
            raise ConfigError(
                "has no answer to learn: only the first message is left, which answers no question"
            )
        text = write(messages)
        spans = [_span(write, messages, answer) for answer in wanted]
        if all(text.startswith(until) for until, _ in spans):
            yield self._sample(text, [self._bounds(*span) for span in spans])
            return
        for span in spans:
            yield self._sample(span[0], [self._bounds(*span)])

    def _bounds(self, text: str, start: int) -> tuple[int, int]:
        """Return where an answer begins and ends in the text that ends with it."""
        # Many templates write a line break after an answer. The answer does not include it.
        end = self._tokenizer.source.eos_token
        last = text.rfind(end, start)
        return start, len(text) if last < 0 else last + len(end)

    def _sample(self, text: str, bounds: Sequence[tuple[int, int]]) -> Sample:
        """Return the sample of a text, whose tokens are learned if they overlap ``bounds``."""
        encoded = self._tokenizer.plain.encode(text, add_special_tokens=False)
        learned = [
            any(start < until and begin < stop for begin, until in bounds)
            for start, stop in encoded.offsets
        ]
        if not any(learned):
            raise ConfigError(
                "has no answer to learn: the chat template renders its answers as empty text"
            )
        nbytes, counted = 0, 0
        for token, (start, stop), is_learned in zip(
            encoded.ids, encoded.offsets, learned, strict=True
        ):
            if is_learned and token not in self._special:
                nbytes += len(text[max(start, counted) : stop].encode())
            counted = max(counted, stop)  # several tokens may share a character
        return Sample(encoded.ids, learned, nbytes)


class _Writer:
    """Writes messages by the template."""

    def __init__(self, tokenizer: Any, tools: Any) -> None:
        self._tokenizer = tokenizer
        self._tools = tools
        self._template: str = tokenizer.get_chat_template(None, tools)  # there may be several
        self.marks_answers = _ANSWERS.search(self._template) is not None

    def __call__(self, messages: Sequence[Any], *, ask: bool = False) -> str:
        """Return messages as text, followed by the generation prompt if ``ask``."""
        text: str = self._tokenizer.apply_chat_template(
            messages, tools=self._tools, tokenize=False, add_generation_prompt=ask
        )
        return _valid(text)

    def marked(self, messages: Sequence[Any]) -> tuple[str, list[tuple[int, int]]]:
        """Return messages as text, and the bounds of the answers that the template marks."""
        from transformers.utils.chat_template_utils import render_jinja_template

        # ``apply_chat_template`` gives marks of tokens, which are wrong where it finds no token.
        given = [
            {key: value for key, value in one.items() if value is not None} for one in messages
        ]
        written: Any = render_jinja_template(
            [given],
            tools=self._tools,
            chat_template=self._template,
            return_assistant_tokens_mask=True,
            **self._tokenizer.special_tokens_map,
        )
        (text,), (marks,) = written
        text = _valid(text)
        if text != self(messages):
            raise ConfigError(
                "is rendered differently by the chat template if its {% generation %} marks are "
                "read; the template must render both alike"
            )
        return text, list(marks)

    def once_encoded(self, messages: Sequence[Any]) -> Sequence[Any]:
        """Return messages with arguments of tools as objects, if the template encodes arguments.

        Many files have arguments as JSON text, which such a template would encode again.
        """
        functions = list(_functions(messages))
        given = [one["arguments"] for one in functions if isinstance(one.get("arguments"), str)]
        if not given:
            return messages
        text = self(messages)
        if not any(json.dumps(one, ensure_ascii=e) in text for one in given for e in (True, False)):
            return messages
        decoded = copy.deepcopy(list(messages))
        for one in _functions(decoded):
            if isinstance(one.get("arguments"), str):
                with suppress(ValueError):  # plain text, not JSON
                    one["arguments"] = json.loads(one["arguments"])
        return decoded


def _functions(messages: Sequence[Any]) -> Iterator[dict[str, Any]]:
    """Yield the functions that messages call."""
    for message in messages:
        for call in message.get("tool_calls") or ():
            if isinstance(call, dict):
                found = call.get("function", call)
                if isinstance(found, dict):
                    yield found


def _valid(text: str) -> str:
    return text.encode(errors="replace").decode()  # JSON may hold half a surrogate pair


def _span(write: _Writer, messages: Sequence[Any], answer: int) -> tuple[str, int]:
    """Return the chat as far as the message ``answer``, and the start of the answer in it.

    Raises:
        ConfigError: the text of the chat does not begin with the text of the question.
    """
    text, question = write(messages[: answer + 1]), write(messages[:answer], ask=True)
    if not text.startswith(question):
        raise ConfigError(
            f"cannot be marked: the chat template does not render message {answer} after its "
            "generation prompt, so the start of the answer is unknown; mark answers in the "
            "template with {% generation %}"
        )
    return text, len(question)
