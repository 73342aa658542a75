"""Make a small Llama and questions about Python's library, and fine-tune it on the answers.

    python examples/finetune.py [--lora 8 --lr 0.01] [--steps 400]
    torchrun --nproc-per-node 2 examples/finetune.py

The folder ``small`` then has ``base`` (weights, tokenizer, chat template: what one would download),
``chats.jsonl``, the run, and what it exported. Options are those of ``fullshard train``.
"""

from __future__ import annotations

import importlib
import inspect
import json
import os
import sys
import time
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed

from fullshard.cli import main

MODULES = (
    "argparse ast asyncio calendar codecs collections csv datetime decimal difflib email functools "
    "glob gzip inspect io json locale logging math os os.path pathlib pickle random re shutil "
    "socket statistics string subprocess textwrap threading types typing unittest uuid warnings"
)
TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def chats() -> list[list[dict[str, str]]]:
    """Ask of each function and class what it does; the answer begins its documentation."""
    found = []
    for module in map(importlib.import_module, MODULES.split()):
        for name, thing in sorted(vars(module).items()):
            lines = (inspect.getdoc(thing) or "").splitlines()
            if not name.startswith("_") and callable(thing) and lines:
                question = f"What is {module.__name__}.{name}?"
                said = {"user": question, "assistant": lines[0]}
                found.append([{"role": role, "content": said[role]} for role in said])
    return found


def make(folder: Path) -> None:
    """Write a model that has learned nothing, and the chats."""
    asked = chats()
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|end|>", "<|user|>", "<|assistant|>"]
    trainer = trainers.BpeTrainer(vocab_size=2048, special_tokens=special)
    tokenizer.train_from_iterator((one["content"] for chat in asked for one in chat), trainer)
    sizes = {"hidden_size": 192, "intermediate_size": 512, "num_hidden_layers": 4}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 2048}
    config = LlamaConfig(**sizes, **heads, bos_token_id=None, eos_token_id=0, pad_token_id=0)
    set_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder / "base")
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>")
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder / "base")
    lines = (json.dumps({"messages": chat}) for chat in asked)
    (folder / "chats.jsonl").write_text("\n".join(lines))


if __name__ == "__main__":
    data = Path("small/chats.jsonl")
    if not data.exists() and os.environ.get("RANK", "0") == "0":
        make(data.parent)  # the chats are written last
    while not data.exists():
        time.sleep(0.1)
    options = "--init small/base --data small/chats.jsonl --out small/run --export small/tuned"
    defaults = "--seq 128 --steps 200 --lr 0.003 --batch 4"
    sys.exit(main(["train", *f"{options} {defaults}".split(), *sys.argv[1:]]))
