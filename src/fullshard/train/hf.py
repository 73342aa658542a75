"""Causal language models of ``transformers``, from their configuration files; an optional extra."""

from __future__ import annotations

import logging
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fullshard.errors import ConfigError

# What says nothing of the model, or names where and by whom it was written.
_NOT_THE_MODEL = ("transformers_version", "_name_or_path", "architectures", "dtype", "use_cache")


@dataclass(frozen=True, slots=True)
class HfArchitecture:
    """A configuration of ``transformers``; see ``Architecture`` for its properties."""

    path: str
    config: Any  # a PretrainedConfig

    @property
    def vocab_size(self) -> int:
        """Rows of the embedding."""
        size: int = self.config.get_text_config().vocab_size
        return size

    @property
    def max_seq(self) -> int | None:
        """``max_position_embeddings``, whatever the model calls it; some have none."""
        limit: int | None = getattr(self.config.get_text_config(), "max_position_embeddings", None)
        return limit

    def description(self) -> dict[str, Any]:
        """What the configuration says beyond its class's defaults, and its class."""
        fields: dict[str, Any] = self.config.to_diff_dict()
        return {key: value for key, value in fields.items() if key not in _NOT_THE_MODEL}

    def build(self, *, seq: int, checkpoint_activations: bool) -> nn.Module:
        """The model with new weights; raises ``ConfigError`` if the configuration has none."""
        from transformers import AutoModelForCausalLM

        family: Any = AutoModelForCausalLM  # typed in part only
        try:
            # A configuration names the dtype of weights that were published; ours start in fp32.
            model = family.from_config(self.config, dtype=torch.float32)
            if checkpoint_activations:
                _enable_checkpoints(model)
        except Exception as error:  # sizes that do not fit fail anywhere in a model's own code
            raise _refusal(self.path, error) from error
        built: nn.Module = model.train()
        return built


def load_hf(path: str) -> HfArchitecture:
    """Reads the configuration at ``path``, a JSON file or a folder with ``config.json``.

    Raises:
        ConfigError: if transformers is not installed, or knows no model for it.
    """
    if not Path(path).exists():
        raise ConfigError(f"--model hf:{path}: there is no such file or folder")
    try:
        from transformers import AutoConfig
    except ImportError as error:
        raise ConfigError(
            f"--model hf:{path} needs transformers: pip install 'fullshard[hf]'"
        ) from error
    # Every worker would say what the first says.
    logging.getLogger("transformers").setLevel(logging.ERROR)
    try:
        config = AutoConfig.from_pretrained(path, local_files_only=True)
    except Exception as error:  # transformers raises OSError, ValueError, KeyError and more
        raise _refusal(path, error) from error
    if not hasattr(config.get_text_config(), "vocab_size"):
        raise ConfigError(f"--model hf:{path}: a {config.model_type} is no language model")
    config.use_cache = False  # keys and values of earlier calls, which training has no use for
    return HfArchitecture(path, config)


def _enable_checkpoints(model: Any) -> None:
    """Recomputes the layers in backward; the method got another name in transformers 5."""
    enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
    enable({"use_reentrant": False})


def _refusal(path: str, error: Exception) -> ConfigError:
    reason = textwrap.shorten(str(error) or repr(error), width=300)  # in one line
    return ConfigError(f"--model hf:{path}: transformers cannot build it ({reason})")
