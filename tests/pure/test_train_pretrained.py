"""Tokenizers of pretrained models give the tokens of ``transformers``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, processors

from fullshard.errors import ConfigError
from fullshard.train.data.text import load_text
from fullshard.train.data.tokenizer import PretrainedTokenizer
from tests.kit.train_chats import (
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

transformers = pytest.importorskip("transformers", reason="the extra hf is not installed")


pytestmark = pytest.mark.usefixtures("own_cache")


def change(folder: Path, **facts: Any) -> None:
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | facts))


def rewrite(folder: Path, end: str = "", **settings: Any) -> None:
    """Change the settings of the tokenizer, and its end mark if ``end`` is given."""
    path = folder / "tokenizer.json"
    text = path.read_text()
    if end:
        text = text.replace("<|im_end|>", end)
        change(folder, eos_token=end)
        template = folder / "chat_template.jinja"
        template.write_text(template.read_text().replace("<|im_end|>", end))
    path.write_text(json.dumps(json.loads(text) | settings))


TRUNCATION = {"max_length": 16, "strategy": "LongestFirst", "direction": "Right", "stride": 0}
PADDING = {
    "strategy": {"Fixed": 40},
    "direction": "Right",
    "pad_to_multiple_of": None,
    "pad_id": 0,
    "pad_type_id": 0,
    "pad_token": "<s>",
}


@pytest.mark.parametrize("kept", [{"truncation": TRUNCATION}, {"padding": PADDING}])
def test_what_an_earlier_call_asked_for_does_not_cut_or_pad(
    tmp_path: Path, kept: dict[str, Any]
) -> None:
    folder = write_tokenizer(tmp_path / "model")
    path = tmp_path / "data.jsonl"
    texts = [f"the answer {n} " + "is of to and " * 9 for n in range(100)]
    path.write_text("\n".join(json.dumps({"text": text}) for text in texts))
    rewrite(folder, **kept)
    found = load_text(str(path), vocab_size=300, pretrained=folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    wanted = tokenizer(texts, add_special_tokens=False)["input_ids"]
    assert len(found.train.tokens) + len(found.held_out.tokens) == sum(map(len, wanted)) + 100
    rewrite(folder, truncation=None, padding=None)
    assert load_text(str(path), vocab_size=300, pretrained=folder).key == found.key


def test_tokens_that_only_the_configuration_adds_are_tokens(tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path)
    added = {"290": vars_of("<|tool|>")}
    change(folder, added_tokens_decoder=added, additional_special_tokens=["<|tool|>"])
    source = transformers.AutoTokenizer.from_pretrained(folder)
    tokenizer = PretrainedTokenizer(folder)
    text = "the <|tool|> answer"
    wanted = source(text, add_special_tokens=False)["input_ids"]
    assert source.convert_tokens_to_ids("<|tool|>") in wanted
    assert tokenizer.plain.encode(text, add_special_tokens=False).ids == wanted


def vars_of(content: str) -> dict[str, Any]:
    token = AddedToken(content, special=True)
    names = ("lstrip", "rstrip", "normalized", "single_word", "special")
    return {"content": content, **{name: getattr(token, name) for name in names}}


def test_the_end_mark_may_be_that_of_the_class(tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path)
    rewrite(folder, end="<|endoftext|>")
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "GPT2Tokenizer"}')
    tokenizer = PretrainedTokenizer(folder)
    assert tokenizer.plain.id_to_token(tokenizer.end) == "<|endoftext|>"
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    with pytest.raises(ConfigError, match="has no eos_token"):
        PretrainedTokenizer(folder)


def test_a_changed_special_token_gives_new_tokens(tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path / "model", "{{ bos_token }}" + CHATML)
    data = str(write_chats(tmp_path / "chats.jsonl", 40))
    found = []
    for token in ("<s>", "<|im_start|>"):
        change(folder, bos_token=token)
        text = load_text(data, vocab_size=300, pretrained=folder)
        found.append((text.key, text.tokenizer.id_to_token(int(text.train.tokens[0]))))
    assert [token for _, token in found] == ["<s>", "<|im_start|>"]
    assert found[0][0] != found[1][0]


@pytest.mark.parametrize("template", [CHATML, MARKED], ids=["prefixes", "marked"])
@pytest.mark.parametrize("answer", ["the sun ", " the sun", "  ", "the  sun \n"])
def test_spaces_around_an_answer_are_learned_though_offsets_are_trimmed(
    tmp_path: Path, template: str, answer: str
) -> None:
    folder = write_tokenizer(tmp_path, template)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    chat = said("What shines?", answer, "And at night?", "the moon", "Thanks")
    (sample,) = samples(folder, chat)
    assert answers(folder, sample) == [f"{answer}<|im_end|>", "the moon<|im_end|>"]


def test_the_size_of_answers_does_not_depend_on_how_their_end_is_spelled(tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path)
    (long,) = samples(folder, QUESTIONS)
    rewrite(folder, end="<|e|>")
    (short,) = samples(folder, QUESTIONS)
    assert short == long


def test_an_answer_of_weight_0_is_read_but_not_learned(tmp_path: Path) -> None:
    chat = [dict(one) for one in QUESTIONS]
    chat[1]["weight"] = 0  # type: ignore[assignment]
    for template in (CHATML, MARKED):
        folder = write_tokenizer(tmp_path, template)
        (sample,) = samples(folder, chat)
        assert answers(folder, sample) == [" 4<|im_end|>"]
        assert "2, naïve" in whole(folder, sample)


def test_a_greeting_is_read_but_not_learned(tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path)
    (sample,) = samples(folder, [{"role": "assistant", "content": "Hello!"}, *said("1?", "2")])
    assert answers(folder, sample) == ["2<|im_end|>"]
    assert "Hello!" in whole(folder, sample)


def test_of_several_templates_the_one_for_the_chat_is_taken(tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path, None)
    named = {"default": CHATML, "tool_use": "tools:" + CHATML}
    change(folder, chat_template=[{"name": k, "template": v} for k, v in named.items()])
    chat = said("1?", "2")
    (plain,) = samples(folder, chat)
    (with_tools,) = samples(folder, chat, tools=[{"name": "add"}])
    assert whole(folder, with_tools) == "tools:" + whole(folder, plain)


def test_arguments_that_are_json_already_are_encoded_once(tmp_path: Path) -> None:
    calls = "{% for c in m.tool_calls or [] %}{{ c.function.arguments FILTER }}{% endfor %}"
    arguments = {"city": "Köln", "days": 2}
    for filtered, content in (("| tojson", ""), ("", "so: ")):
        template = CHATML.replace(
            "{{ m.content }}", "{{ m.content }}" + calls.replace("FILTER", filtered)
        )
        folder = write_tokenizer(tmp_path, template)
        call = {"function": {"name": "weather", "arguments": json.dumps(arguments)}}
        chat = [*said("Weather?"), {"role": "assistant", "content": content, "tool_calls": [call]}]
        (sample,) = samples(folder, chat)
        (answer,) = answers(folder, sample)
        text = answer.removeprefix(content).removesuffix("<|im_end|>")
        assert json.loads(text) == arguments
