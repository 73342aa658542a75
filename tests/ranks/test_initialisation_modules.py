"""``reset_parameters`` of modules, and transformers' initialisation, on sharded models."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import Shard

from fullshard import PerParameter, Ragged, fully_shard, unshard_params
from fullshard.errors import FullshardError
from tests.kit.initialisation import same, whole
from tests.ranks.pool import RankPool, every_world


class TiedHead(nn.Module):
    """An embedding with a padding row, tied to the output layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 4, padding_idx=6)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embedding.weight


def transformer() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # on nested tensors, which are not used
        return nn.Transformer(4, 2, 1, 1, 5)


MODULES: dict[str, Callable[[], nn.Module]] = {
    "Linear": lambda: nn.Linear(5, 3),
    "Bilinear": lambda: nn.Bilinear(3, 4, 5),
    "Embedding": lambda: nn.Embedding(7, 4),
    "padding first": lambda: nn.Embedding(7, 4, padding_idx=0),
    "padding last": lambda: nn.Embedding(7, 4, padding_idx=-1),
    "EmbeddingBag": lambda: nn.EmbeddingBag(7, 4, padding_idx=3),
    "Conv1d": lambda: nn.Conv1d(4, 6, 3),
    "Conv2d": lambda: nn.Conv2d(4, 6, 3, groups=2),
    "Conv3d": lambda: nn.Conv3d(2, 3, 3),
    "ConvTranspose1d": lambda: nn.ConvTranspose1d(4, 6, 3),
    "ConvTranspose2d": lambda: nn.ConvTranspose2d(4, 6, 3),
    "ConvTranspose3d": lambda: nn.ConvTranspose3d(4, 6, 3),
    "BatchNorm1d": lambda: nn.BatchNorm1d(5),
    "BatchNorm2d": lambda: nn.BatchNorm2d(5),
    "BatchNorm3d": lambda: nn.BatchNorm3d(5),
    "SyncBatchNorm": lambda: nn.SyncBatchNorm(5),
    "InstanceNorm1d": lambda: nn.InstanceNorm1d(5, affine=True),
    "InstanceNorm2d": lambda: nn.InstanceNorm2d(5, affine=True),
    "InstanceNorm3d": lambda: nn.InstanceNorm3d(5, affine=True),
    "GroupNorm": lambda: nn.GroupNorm(2, 4),
    "LayerNorm": lambda: nn.LayerNorm((3, 4)),
    "RMSNorm": lambda: nn.RMSNorm(5),
    "PReLU": lambda: nn.PReLU(3),
    "RNN": lambda: nn.RNN(4, 3, 2),
    "LSTM": lambda: nn.LSTM(4, 3, 2, proj_size=2, bidirectional=True),
    "GRU": lambda: nn.GRU(4, 3),
    "RNNCell": lambda: nn.RNNCell(4, 3),
    "LSTMCell": lambda: nn.LSTMCell(4, 3),
    "GRUCell": lambda: nn.GRUCell(4, 3),
    "MultiheadAttention": lambda: nn.MultiheadAttention(4, 2, kdim=3, add_bias_kv=True),
    "Transformer": transformer,
    "AdaptiveLogSoftmaxWithLoss": lambda: nn.AdaptiveLogSoftmaxWithLoss(16, 9, [2, 5], 2.0),
    "tied": TiedHead,
    "smaller than the world": lambda: nn.Linear(1, 1),
}
REFUSED_BY_RAGGED = {"padding first", "padding last", "EmbeddingBag", "tied"}


def reset(model: nn.Module) -> None:
    for module in model.modules():
        for name in ("reset_parameters", "_reset_parameters"):
            getattr(module, name, lambda: None)()


def state(model: nn.Module, fill: Callable[[nn.Module], Any]) -> list[Tensor]:
    """Fill a model; return all its tensors and the generator's state."""
    torch.manual_seed(11)
    fill(model)
    values = (*model.parameters(), *model.buffers())
    return [*map(whole, values), torch.get_rng_state()]


def differing(how: str, names: list[str]) -> list[str]:
    """Return the modules that get other values than unsharded ones."""
    placed = (lambda p: Shard(p.dim() - 1)) if how == "last dim" else None
    layout = Ragged(how) if how in ("element", "row", "tensor") else PerParameter()
    found = []
    for name in names:
        plain = MODULES[name]()
        with torch.device("meta"):
            model = MODULES[name]()
        fully_shard(model, layout=layout, shard_placement_fn=placed)
        model.to_empty(device="cpu")
        if not same(state(model, reset), state(plain, reset)):
            found.append(name)
    return found


@pytest.mark.parametrize("how", ["first dim", "last dim"])
@every_world
def test_modules_reset_alike(pool: RankPool, world: int, how: str) -> None:
    assert pool.run(world, differing, how, list(MODULES)) == [[]] * world


@pytest.mark.parametrize("how", ["element", "row", "tensor"])
def test_modules_reset_alike_in_ragged_layouts(pool: RankPool, how: str) -> None:
    names = [name for name in MODULES if name not in REFUSED_BY_RAGGED]
    assert pool.run(3, differing, how, names) == [[]] * 3


def inside_of_unshard_params(name: str) -> bool:
    plain = MODULES[name]()
    with torch.device("meta"):
        model = MODULES[name]()
    fully_shard(model, layout=Ragged())
    model.to_empty(device="cpu")
    with pytest.raises(FullshardError, match="unshard_params"):
        reset(model)

    def fill(one: nn.Module) -> None:
        with unshard_params(one) if one is model else nullcontext():
            reset(one)

    return same(state(model, fill), state(plain, fill))


def test_what_ragged_layouts_refuse_works_on_full_parameters(pool: RankPool) -> None:
    for name in sorted(REFUSED_BY_RAGGED):
        assert pool.run(2, inside_of_unshard_params, name) == [True] * 2, name


def test_every_module_with_a_reset_is_tried() -> None:
    kinds = {cls for _, cls in inspect.getmembers(nn, inspect.isclass)}
    resets = {
        cls.__name__
        for cls in kinds
        if hasattr(cls, "reset_parameters") or hasattr(cls, "_reset_parameters")
    }
    bases = {"RNNBase", "RNNCellBase", "CrossMapLRN2d"}
    lazy = {name for name in resets if name.startswith("Lazy")}  # no size on meta
    assert resets - bases - lazy <= set(MODULES)


def families() -> dict[str, Callable[[], nn.Module]]:
    import transformers as hf

    small: dict[str, Any] = {
        "hidden_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 12,
        "vocab_size": 11,
    }
    vision: dict[str, Any] = {**small, "image_size": 8, "patch_size": 4}
    t5: dict[str, Any] = {"d_model": 8, "d_kv": 4, "d_ff": 12, "num_layers": 1, "num_heads": 2}
    return {
        "Llama": lambda: hf.LlamaForCausalLM(
            hf.LlamaConfig(**small, num_key_value_heads=1, pad_token_id=0)
        ),
        "GPT2": lambda: hf.GPT2LMHeadModel(
            hf.GPT2Config(n_embd=8, n_layer=1, n_head=2, vocab_size=11, n_positions=8)
        ),
        "BERT": lambda: hf.BertForMaskedLM(
            hf.BertConfig(**small, max_position_embeddings=8, pad_token_id=10)
        ),
        "ViT": lambda: hf.ViTForImageClassification(hf.ViTConfig(**vision)),
        "CLIP": lambda: hf.CLIPTextModelWithProjection(
            hf.CLIPTextConfig(**small, max_position_embeddings=8)
        ),
        "T5": lambda: hf.T5ForConditionalGeneration(hf.T5Config(vocab_size=11, **t5)),
        "Mixtral": lambda: hf.MixtralForCausalLM(
            hf.MixtralConfig(**small, num_key_value_heads=1, num_local_experts=2)
        ),
    }


def family(name: str) -> bool:
    make = families()[name]
    plain = make()
    with torch.device("meta"):
        model = make()
    fully_shard(model)
    model.to_empty(device="cpu")

    def fill(one: Any) -> None:
        with torch.no_grad():
            for values in (*one.parameters(), *one.buffers()):
                values.zero_()
        for module in one.modules():
            one._init_weights(module)

    return same(state(model, fill), state(plain, fill))


@pytest.mark.parametrize("name", ["Llama", "GPT2", "BERT", "ViT", "CLIP", "T5", "Mixtral"])
def test_models_of_transformers_are_initialised_alike(pool: RankPool, name: str) -> None:
    pytest.importorskip("transformers")
    assert pool.run(2, family, name, timeout_s=180) == [True] * 2
