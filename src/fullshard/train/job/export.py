"""The trained model in a folder, as ``transformers`` or ``peft`` reads it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import nn

from fullshard.checkpoint import save_weights
from fullshard.train.config import SaveDtype, TrainConfig
from fullshard.train.data import END
from fullshard.train.hf import caching
from fullshard.train.tune import merge_adapters, save_adapters
from fullshard.train.world import World

_BESIDE_WEIGHTS = (
    "tokenizer*",
    "*.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
    "vocab.*",
    "merges.txt",
    "generation_config.json",
    "*processor_config.json",
)
"""Files of ``--init`` that the exported model needs too: tokenizer, templates, generation."""

_DTYPES = {
    SaveDtype.FP32: torch.float32,
    SaveDtype.BF16: torch.bfloat16,
    SaveDtype.FP16: torch.float16,
}


def export(
    model: nn.Module, config: TrainConfig, tokenizer: Tokenizer, world: World, folder: Path
) -> None:
    """Write the model, or its adapters alone, with tokenizer and similar files of ``--init``.

    All workers must call this. With ``config.merge``, the adapters are merged into the weights of
    ``model`` itself.
    """
    dtype = None if config.save_dtype is None else _DTYPES[config.save_dtype]
    if config.lora is not None and not config.merge:
        save_adapters(model, folder, world, dtype=dtype)
    else:
        if config.lora is not None:
            merge_adapters(model)
        with caching(model, config.model):
            save_weights(model, folder, dtype=dtype)
    if world.is_first:
        _write_others(folder, config, tokenizer)


def _write_others(folder: Path, config: TrainConfig, tokenizer: Tokenizer) -> None:
    if config.init is not None:
        files = [file for pattern in _BESIDE_WEIGHTS for file in Path(config.init).glob(pattern)]
        for file in files:
            if file.is_file():
                shutil.copyfile(file, folder / file.name)
        return
    tokenizer.save(str(folder / "tokenizer.json"))
    facts = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END}
    (folder / "tokenizer_config.json").write_text(json.dumps(facts, indent=2) + "\n")
    end = tokenizer.token_to_id(END)
    for path in (folder / "config.json", folder / "generation_config.json"):
        if path.exists():  # the configuration names tokens of another tokenizer
            fields = json.loads(path.read_text()) | {"bos_token_id": end, "eos_token_id": end}
            path.write_text(json.dumps(fields, indent=2) + "\n")
