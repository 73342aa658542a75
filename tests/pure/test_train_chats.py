"""Chats as samples: the rendered template, and the tokens of answers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fullshard.errors import ConfigError
from fullshard.train.data.documents import Document, split
from fullshard.train.data.rows import IGNORED, Packed
from fullshard.train.data.text import load_text
from tests.kit.train_chats import (
    ASK,
    CHATML,
    MARKED,
    QUESTIONS,
    answers,
    said,
    samples,
    whole,
    write_chats,
    write_tokenizer,
)

pytest.importorskip("transformers", reason="the extra hf is not installed")

REASONS = (  # as Qwen3's: an empty thought only before the last answer
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.last %}<think>\n\n</think>\n\n{% endif %}"
    "{{ m.content }}<|im_end|>\n{% endfor %}" + ASK
)
FIRST = "{% for m in messages %}{{ m.content }}{% if not loop.last %} {% endif %}{% endfor %}"
BARE = "{% for m in messages %}{{ m.content }}{% endfor %}"
BEHIND = FIRST + "{% if add_generation_prompt %} So:{% endif %}"  # only in a generation prompt


@pytest.mark.parametrize("template", [CHATML, MARKED], ids=["prefixes", "marked"])
def test_the_answers_are_learned_and_the_end_of_each(tmp_path: Path, template: str) -> None:
    folder = write_tokenizer(tmp_path, template)
    (sample,) = samples(folder, QUESTIONS)
    assert answers(folder, sample) == ["2, naïve 字<|im_end|>", " 4<|im_end|>"]
    written = "".join(
        f"<|im_start|>{one['role']}\n{one['content']}<|im_end|>\n" for one in QUESTIONS
    )
    assert whole(folder, sample) == written
    assert sample.nbytes == len("2, naïve 字 4".encode())


def test_a_template_that_forgets_reasoning_gives_a_sample_for_each_answer(tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path, REASONS)
    first, second = samples(folder, QUESTIONS)
    thought = "<think>\n\n</think>\n\n"
    assert answers(folder, first) == [f"{thought}2, naïve 字<|im_end|>"]
    assert answers(folder, second) == [f"{thought} 4<|im_end|>"]
    assert "And 2 + 2?" not in whole(folder, first)
    assert f"{thought}2" not in whole(folder, second) and "2, naïve 字" in whole(folder, second)
    (alone,) = samples(folder, QUESTIONS[:2])
    assert alone == first


def test_tools_and_system_messages_reach_the_template(tmp_path: Path) -> None:
    template = "{% if tools %}{{ tools[0].name }}|{% endif %}" + CHATML
    folder = write_tokenizer(tmp_path, template)
    system = [{"role": "system", "content": "Be short."}, *said("1?", "2")]
    (sample,) = samples(folder, system, tools=[{"name": "add"}])
    assert whole(folder, sample).startswith("add|<|im_start|>system\nBe short.<|im_end|>")
    assert answers(folder, sample) == ["2<|im_end|>"]


def test_half_a_surrogate_pair_is_replaced(tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path)
    (sample,) = samples(folder, said("a", "b\ud83d"))
    assert answers(folder, sample) == ["b?<|im_end|>"]


@pytest.mark.parametrize(
    ("template", "messages", "message"),
    [
        (CHATML, said("only a question"), "chats.jsonl:000000001 has no answer"),
        (CHATML, [*said("a"), dict(said("a", "b")[1], weight=0)], 'all have the "weight" 0'),
        (CHATML, said("", "a")[1:], "only the first message is left"),
        (BARE, said("a", ""), "renders its answers as empty text"),
        (
            BEHIND,
            said("a", "b"),
            "does not render message 1 after its.*mark answers in the template",
        ),
        ("{{ raise_exception('roles must alternate') }}", said("a", "b"), "roles must alternate"),
        ("{{ messages[0].content + 1 }}", said("a", "b"), "cannot write it"),
        ("{% for %}", said("a", "b"), "cannot write it"),
        (None, said("a", "b"), "has no chat template"),
    ],
)
def test_what_cannot_be_told_apart_is_refused(
    tmp_path: Path, template: str | None, messages: Any, message: str
) -> None:
    folder = write_tokenizer(tmp_path, template)
    with pytest.raises(ConfigError, match=message):
        samples(folder, messages)


def test_chats_become_rows_of_which_only_answers_are_learned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = write_tokenizer(tmp_path / "model")
    data = str(write_chats(tmp_path / "chats.jsonl", 40))
    text = load_text(data, vocab_size=300, pretrained=folder)
    again = load_text(data, vocab_size=300, pretrained=folder)
    assert again.key == text.key
    rows = text.train.rows(64)
    assert isinstance(rows, Packed) and 1 <= len(text.held_out.rows(64)) < len(rows)
    batch = rows.read(np.arange(len(rows)))
    labels = batch.labels[batch.labels != IGNORED].tolist()
    learned = text.tokenizer.decode(labels, skip_special_tokens=False)
    ends = [answer for answer in learned.split("<|im_end|>") if answer]
    held_out = text.tokenizer.decode(np.array(text.held_out.tokens), skip_special_tokens=False)
    kept = [f"It is {n}." for n in range(40) if f"It is {n}." not in held_out]
    assert sorted(ends) == sorted(kept) and 30 < len(kept) < 40
    per_token = text.bytes_per_token()[0] * text.held_out.learned.sum()  # type: ignore[union-attr]
    assert per_token == pytest.approx(text.held_out.nbytes)
    write_tokenizer(folder, MARKED)  # renders and marks the same
    assert load_text(data, vocab_size=300, pretrained=folder).key == text.key
    write_tokenizer(folder, CHATML.replace("<|im_start|>", "<s><|im_start|>"))
    assert load_text(data, vocab_size=300, pretrained=folder).key != text.key


def test_a_long_chat_is_cut_and_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = write_tokenizer(tmp_path / "model")
    path = write_chats(tmp_path / "chats.jsonl", 40)
    path.write_text(path.read_text() + "\n" + json.dumps({"messages": said("a", "b" * 500)}))
    rows = load_text(str(path), vocab_size=300, pretrained=folder).train.rows(64)
    assert isinstance(rows, Packed) and rows.num_cut == 1


def test_chats_without_an_answer_are_counted_and_left_out_if_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = write_tokenizer(tmp_path / "model")
    path = write_chats(tmp_path / "chats.jsonl", 40)
    good = load_text(str(path), vocab_size=300, pretrained=folder)
    question = json.dumps({"messages": said("a", "b")[:1]})
    path.write_text("\n".join([path.read_text(), question, "{", question]))
    for _ in range(2):  # the second time from the cache
        found = load_text(str(path), vocab_size=300, pretrained=folder, skip_bad=True)
        assert found.bad.count == 3
        for part, before in ((found.train, good.train), (found.held_out, good.held_out)):
            assert np.array_equal(part.tokens, before.tokens)
    path.write_text("\n".join(line for line in path.read_text().split("\n") if line != "{"))
    with pytest.raises(ConfigError, match=r"2 bad records, .*000000041 has no answer: no message"):
        load_text(str(path), vocab_size=300, pretrained=folder)


def test_texts_beside_chats_and_chats_without_a_template_are_refused(tmp_path: Path) -> None:
    path = write_chats(tmp_path / "chats.jsonl", 3)
    with pytest.raises(ConfigError, match="need a tokenizer with a chat template: give --init"):
        load_text(str(path), vocab_size=300)
    path.write_text(path.read_text() + '\n{"text": "a"}')
    with pytest.raises(ConfigError, match=r"is a chat and .* is a text"):
        load_text(str(path), vocab_size=300)


def test_one_chat_cannot_be_split() -> None:
    with pytest.raises(ConfigError, match="holds one chat; one is held out"):
        split([Document("0", "x", is_chat=True)])


def test_few_chats_hold_out_the_smallest_hashes_whole() -> None:
    chats = [Document(f"{n}", "x" * 9, is_chat=True) for n in range(5)]
    train, held_out = split(chats)
    assert len(held_out) == 1 and sorted([*train, *held_out], key=lambda d: d.name) == chats
