"""Causal language models of ``transformers`` from configuration files; an optional extra."""

from __future__ import annotations

import inspect
import logging
import os
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fullshard import unshard_params
from fullshard.errors import ConfigError
from fullshard.train.config import HF
from fullshard.train.extras import imported
from fullshard.train.published import PUBLISHED

_IMPLEMENTATIONS = {
    "attn_implementation": ("eager", "sdpa", "flex_attention"),
    "experts_implementation": ("eager", "grouped_mm", "batched_mm"),
}
"""The values that a configuration may choose: kernels of PyTorch's."""

# Fields that do not describe the model: origin, version, dtype, caching.
_NOT_THE_MODEL = ("transformers_version", "_name_or_path", "architectures", "dtype", "use_cache")


@dataclass(frozen=True, slots=True)
class HfArchitecture:
    """A causal language model from a configuration of ``transformers``, before it is built."""

    path: str
    config: Any  # a PretrainedConfig
    caches: Any = True  # its ``use_cache`` in the file

    @property
    def vocab_size(self) -> int:
        """Number of rows of the embedding."""
        return int(self.config.get_text_config().vocab_size)

    @property
    def max_seq(self) -> int | None:
        """Longest sequence, ``max_position_embeddings`` by any name; None if there is no limit."""
        limit: int | None = getattr(self.config.get_text_config(), "max_position_embeddings", None)
        return limit

    @property
    def takes_positions(self) -> bool:
        """True if ``forward`` names ``position_ids``, which separate the samples of a row."""
        from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

        models: Any = MODEL_FOR_CAUSAL_LM_MAPPING
        model = models.get(type(self.config), None)
        # If there is none, building the model raises the error.
        return model is None or "position_ids" in inspect.signature(model.forward).parameters

    def description(self) -> dict[str, Any]:
        """Return the class, and the fields that differ from its defaults.

        The description identifies the model; checkpoints store it as JSON.
        """
        fields: dict[str, Any] = self.config.to_diff_dict()
        return {key: value for key, value in fields.items() if key not in _NOT_THE_MODEL}

    def build(self, *, seq: int, checkpoint_activations: bool) -> nn.Module:
        """Return the model with new fp32 weights, drawn from torch's default generator.

        Raises:
            ConfigError: the model cannot be built.
        """
        from transformers import AutoModelForCausalLM

        family: Any = AutoModelForCausalLM  # only partly typed
        try:
            # A configuration names the dtype of the published weights; new weights are fp32.
            model = family.from_config(self.config, dtype=torch.float32, trust_remote_code=False)
            if checkpoint_activations:
                _enable_checkpoints(model)
            model.loss_function = _no_cross_entropy
        except Exception as error:  # inconsistent sizes fail anywhere in the model's code
            raise _refusal(self.path, error) from error
        built: nn.Module = model.train()
        return built

    def initialise(self, model: nn.Module) -> None:
        """Initialise all tensors of a model that was built on the meta device, as its class does.

        A class may index rows of a weight, which a ragged shard may lack. So the parameters of one
        module at a time are unsharded.
        """
        of_models: dict[str, Any] = {}  # initialisers by path, inherited from enclosing models
        for path, module in model.named_modules():
            around = of_models.get(path.rpartition(".")[0])
            initialise: Any = getattr(module, "_init_weights", around)
            of_models[path] = initialise
            has_own = any(True for _ in module.parameters(recurse=False))
            with unshard_params(module, recurse=False) if has_own else nullcontext():
                initialise(module)


def load_hf(path: str) -> HfArchitecture:
    """Read the configuration at ``path``, a JSON file or a folder with ``config.json``.

    Raises:
        ConfigError: no file at ``path``, no transformers installed, or no language model for it.
    """
    if not os.path.exists(path):
        raise ConfigError(f"--model hf:{path}: there is no such file or folder")
    auto_config = _auto_config(f"hf:{path}")
    try:
        # Unless it is told not to, transformers asks at a terminal whether to run a folder's code.
        config = auto_config.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # transformers raises OSError, ValueError, KeyError and more
        raise _refusal(path, error) from error
    _check_kernels(path, config)
    if not hasattr(config.get_text_config(), "vocab_size"):
        raise ConfigError(f"--model hf:{path}: a {config.model_type} is no language model")
    caches = getattr(config, "use_cache", None)
    config.use_cache = False  # the key-value cache is useless in training
    return HfArchitecture(path, config, caches)


def load_published(name: str) -> HfArchitecture:
    """Return a model of ``PUBLISHED``; raise ``ConfigError`` without transformers."""
    fields = dict(PUBLISHED[name])
    config = _auto_config(name).for_model(fields.pop("model_type"), **fields)
    config.use_cache = False
    return HfArchitecture(name, config)


def _auto_config(model: str) -> Any:
    auto_config = imported("transformers", f"--model {model}", extra="hf").AutoConfig
    # Otherwise every worker would repeat the same messages.
    logging.getLogger("transformers").setLevel(logging.ERROR)
    return auto_config


def logits_and_loss(
    model: nn.Module, tokens: Tensor, **options: Any
) -> tuple[Tensor, Tensor | None]:
    """Return logits, and the loss that the model adds to its cross entropy (0 if it adds none).

    Mixtures of experts add a loss that balances experts, if their configuration says so. The loss
    is None if the model computes its cross entropy by itself, so that the rest cannot be separated.
    """
    _asked.clear()
    output = model(tokens, labels=tokens, **options)
    return output.logits, output.loss if _asked else None


_asked: list[bool] = []  # filled when a model asks for its cross entropy


def _no_cross_entropy(logits: Tensor, *_: object, **__: object) -> Tensor:
    """Replace the cross entropy of a model, which ``training_loss`` computes."""
    _asked.append(True)
    return logits.new_zeros((), dtype=torch.float32)


@contextmanager
def caching(model: nn.Module, path: str) -> Iterator[None]:
    """Give ``model.config`` the ``use_cache`` of the file at ``path`` in the block."""
    config: Any = model.config
    own, config.use_cache = config.use_cache, load_hf(path.removeprefix(HF)).caches
    try:
        yield
    finally:
        config.use_cache = own


def _check_kernels(path: str, config: Any) -> None:
    """Raise ``ConfigError`` if a file chooses code that transformers would fetch and run."""
    inner = (getattr(config, name, None) for name in getattr(config, "sub_configs", ()))
    for one in (config, *inner):
        for option, known in _IMPLEMENTATIONS.items():
            named = getattr(one, f"_{option}", None)
            if named not in (None, *known):
                raise ConfigError(
                    f"--model hf:{path}: its {option} is {named!r}, whose code transformers may "
                    f"fetch from a hub; expected {', '.join(known)}, or none"
                )


def _enable_checkpoints(model: Any) -> None:
    """Enable activation checkpointing; transformers 5 renamed the method."""
    enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
    enable({"use_reentrant": False})


def _refusal(path: str, error: Exception) -> ConfigError:
    reason = textwrap.shorten(str(error) or repr(error), width=300)  # in one line
    return ConfigError(f"--model hf:{path}: transformers cannot build it ({reason})")
