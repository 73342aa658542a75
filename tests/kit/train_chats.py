"""Chats, tokenizers with templates, and learned tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from fullshard.train.data.chats import ChatTokenizer, Sample
from fullshard.train.data.documents import Document
from fullshard.train.data.tokenizer import PretrainedTokenizer

pytest.importorskip("transformers", reason="the extra hf is not installed")


TURNS = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"


ASK = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"


CHATML = TURNS + ASK


MARKED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}"
    "{{ '\n' }}{% else %}{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}" + ASK
)


def write_tokenizer(folder: Path, template: str | None = CHATML) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=290,
        special_tokens=["<s>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["user assistant the answer is of to and"] * 9, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    facts = {"eos_token": "<|im_end|>", "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(facts))
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return folder


def said(*contents: str) -> list[dict[str, str]]:
    return [
        {"role": "user" if n % 2 == 0 else "assistant", "content": content}
        for n, content in enumerate(contents)
    ]


def samples(folder: Path, messages: Any, **more: Any) -> list[Sample]:
    text = json.dumps({"messages": messages, **more})
    tokenizer = ChatTokenizer(PretrainedTokenizer(folder))
    return list(tokenizer.samples(Document("chats.jsonl:000000001", text, True)))


def answers(folder: Path, sample: Sample) -> list[str]:
    """Return the texts of the runs of learned tokens."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    runs: list[list[int]] = []
    for n, (token, is_learned) in enumerate(zip(sample.tokens, sample.learned, strict=True)):
        if is_learned:
            if n == 0 or not sample.learned[n - 1]:
                runs.append([])
            runs[-1].append(token)
    return [tokenizer.decode(run, skip_special_tokens=False) for run in runs]


def whole(folder: Path, sample: Sample) -> str:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    return str(tokenizer.decode(sample.tokens, skip_special_tokens=False))


QUESTIONS = said("What is 1 + 1?", "2, naïve 字", "And 2 + 2?", " 4", "Thanks")


def write_chats(path: Path, number: int) -> Path:
    chats = [{"messages": said(f"What is {n}?", f"It is {n}.")} for n in range(number)]
    path.write_text("\n".join(json.dumps(chat) for chat in chats))
    return path
