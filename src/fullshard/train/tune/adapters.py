"""Fine-tuning of few weights beside frozen ones: LoRA by ``peft``; an optional extra."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fullshard import unshard_params
from fullshard.train.world import World

_ALPHA = 2  # times the rank: adapters of every rank get the same scale


def add_adapters(model: Any, rank: int) -> nn.Module:
    """Freeze a model of ``transformers``, and give all its linear layers but the head adapters."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(
        r=rank, lora_alpha=_ALPHA * rank, target_modules="all-linear", task_type="CAUSAL_LM"
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peft uses names that transformers will remove
        adapted: nn.Module = get_peft_model(model, config)
    return adapted


def _layers(model: nn.Module) -> list[Any]:
    from peft.tuners.tuners_utils import BaseTunerLayer

    return [module for module in model.modules() if isinstance(module, BaseTunerLayer)]


def merge_adapters(model: nn.Module) -> None:
    """Merge adapters into the frozen weights, layer by layer; all workers must call this."""
    for layer in _layers(model):
        with unshard_params(layer):
            layer.merge()


def save_adapters(
    model: Any, folder: Path, world: World, *, dtype: torch.dtype | None = None
) -> None:
    """Write the adapters alone, as ``peft`` reads them; all workers must call this.

    Args:
        model: the model with the adapters.
        folder: the folder to write.
        world: the job.
        dtype: dtype of the written weights; None: unchanged.
    """
    names = {id(module): name for name, module in model.named_modules()}
    full: dict[str, Tensor] = {}
    for layer in _layers(model):
        with unshard_params(layer, writeback=False):
            if world.is_first:
                full |= {
                    f"{names[id(layer)]}.{name}": parameter.detach().to("cpu", dtype, copy=True)
                    for name, parameter in layer.named_parameters()
                    if parameter.requires_grad
                }
    if world.is_first:
        model.save_pretrained(folder, state_dict=full)
