"""``peft`` adapters: weights load under their own names and are saved after the merge."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fullshard
from fullshard import FullyShardedDataParallel, PerParameter, Ragged, checkpoint
from fullshard.checkpoint import Conversion
from fullshard.errors import ConfigError, UnsupportedError
from tests.kit.weights import TOKENS, built
from tests.ranks.models import shard_units
from tests.ranks.pool import RankPool, on_ranks

pytest.importorskip("peft", reason="the extra lora is not installed")

WAYS = ["per-parameter", "ragged", "flat", "unsharded"]
TARGETS = {"llama": ["q_proj", "down_proj", "embed_tokens"], "mixtral": "all-linear"}


def adapted(model: Any, kind: str, **options: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    options = {"target_modules": TARGETS[kind], **options}
    config = LoraConfig(r=3, task_type="CAUSAL_LM", **options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings of peft
        return get_peft_model(model, config)


def shard(model: Any, way: str) -> Any:
    blocks = model.base_model.model.model.layers
    if way == "flat":
        for number, block in enumerate(blocks):
            blocks[number] = FullyShardedDataParallel(block, use_orig_params=True)
        return FullyShardedDataParallel(model, use_orig_params=True)
    if way != "unsharded":
        layout = Ragged() if way == "ragged" else PerParameter()
        shard_units(model, blocks, layout=layout)
    return model


def reset(model: nn.Module, seed: int) -> None:
    """Reset the adapters of an unsharded model layer by layer, as ``load_weights`` does."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    torch.manual_seed(seed)
    for layer in model.modules():
        if isinstance(layer, BaseTunerLayer) and hasattr(layer, "reset_lora_parameters"):
            layer.reset_lora_parameters("default", True)  # type: ignore[operator]


def teach(model: Any) -> None:
    """Change the initial values of adapters so that adapters change the model's output."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter += 0.05


def merge(model: nn.Module) -> None:
    """Merge the adapters of a sharded model layer by layer."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    for layer in model.modules():
        if isinstance(layer, BaseTunerLayer):
            with fullshard.unshard_params(layer):
                layer.merge()


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(input_ids=TOKENS).logits
    return found


@on_ranks(2)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", list(TARGETS))
def test_weights_go_in_beside_adapters_and_out_with_them(
    tmp_path: Path, kind: str, way: str
) -> None:
    folder, out = tmp_path / "in", tmp_path / "out"
    base = built(kind, "cpu")
    twin = adapted(copy.deepcopy(base), kind)
    if dist.get_rank() == 0:
        base.save_pretrained(folder, max_shard_size=9_000)
    dist.barrier()
    reset(twin, seed=5)
    device = "cpu" if way == "flat" else "meta"
    with torch.device(device):
        model = adapted(built(kind, device), kind)
    if way == "flat":
        reset(model, seed=5)  # load_weights resets only adapters on the meta device
    model = shard(model, way)
    torch.manual_seed(5 if dist.get_rank() == 0 else 6)
    loaded = checkpoint.load_weights(model, folder)
    assert (loaded.missing, loaded.unexpected) == ([], [])
    torch.testing.assert_close(logits(model), logits(twin), rtol=0, atol=0)
    with fullshard.unshard_params(model):
        teach(model)
    teach(twin)
    expected = logits(twin)
    assert not torch.allclose(expected, logits(base), atol=1e-4)
    torch.testing.assert_close(logits(model), expected, rtol=1e-5, atol=1e-6)
    for save in (
        lambda: checkpoint.save_weights(model, out),
        lambda: fullshard.stream_params(model, bucket_nbytes=1 << 20),
    ):
        with pytest.raises(UnsupportedError, match="has adapters that are not merged"):
            save()
    assert not out.exists()
    merge(model)
    checkpoint.save_weights(model, out)
    again = type(base).from_pretrained(out, dtype=torch.float32).train()
    torch.testing.assert_close(logits(again), expected, rtol=1e-5, atol=1e-5)


WHOLE = {"modules_to_save": ["lm_head"], "target_modules": ["q_proj"]}
TOKENS_ALONE = {"trainable_token_indices": [1, 8, 50], "target_modules": ["q_proj"]}


def learn(model: Any) -> None:
    """Change all that ``peft`` trains: modules, token rows and the adapters of layers."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "modules_to_save" in name or "trainable_tokens_delta" in name:
                parameter += torch.linspace(-1, 1, parameter.numel()).view_as(parameter)
    teach(model)


@on_ranks(2)
@pytest.mark.parametrize("options", [WHOLE, TOKENS_ALONE], ids=["modules", "tokens"])
@pytest.mark.parametrize("way", WAYS)
def test_what_is_trained_whole_beside_adapters_goes_out_under_its_own_name(
    tmp_path: Path, way: str, options: dict[str, Any]
) -> None:
    folder, out = tmp_path / "in", tmp_path / "out"
    base = built("llama", "cpu")
    if dist.get_rank() == 0:
        base.save_pretrained(folder)
    dist.barrier()
    twin = adapted(copy.deepcopy(base), "llama", **options)
    is_whole = "modules_to_save" in options
    device = "meta" if is_whole and way != "flat" else "cpu"
    with torch.device(device):
        model = adapted(built("llama", device), "llama", **options)
    reset(twin, seed=5)
    if device == "cpu":
        reset(model, seed=5)
    model = shard(model, way)
    torch.manual_seed(5)
    if is_whole:
        loaded = checkpoint.load_weights(model, folder)
        assert (loaded.missing, loaded.unexpected) == ([], [])
    else:
        with pytest.raises(UnsupportedError, match="before get_peft_model"):
            checkpoint.load_weights(model, folder)
    torch.testing.assert_close(logits(model), logits(twin), rtol=0, atol=0)
    with fullshard.unshard_params(model):
        learn(model)
    learn(twin)
    expected = logits(twin)
    merge(model)
    checkpoint.save_weights(model, out)
    family = type(base)
    again, report = family.from_pretrained(out, dtype=torch.float32, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    torch.testing.assert_close(logits(again.train()), expected, rtol=1e-5, atol=1e-5)
    buckets = fullshard.stream_params(model, bucket_nbytes=1 << 20)
    streamed = {name for bucket in buckets for name in bucket}
    assert streamed == base.state_dict().keys()


def as_advised(folder: Path, options: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Return a sharded and an unsharded model's logits, adapted after ``from_pretrained``."""
    from transformers import AutoModelForCausalLM

    models = []
    for _ in range(2):
        torch.manual_seed(0)
        model: Any = AutoModelForCausalLM.from_pretrained(folder)
        models.append(adapted(model, "llama", target_modules=["q_proj", "down_proj"], **options))
        teach(models[-1])
    return logits(shard(models[0], "per-parameter")), logits(models[1])


@pytest.mark.parametrize("options", [{"use_dora": True}, {"init_lora_weights": "pissa"}])
def test_first_values_that_depend_on_weights_are_refused_with_advice_that_works(
    pool: RankPool, tmp_path: Path, options: dict[str, Any]
) -> None:
    base = built("llama", "cpu")
    base.save_pretrained(tmp_path / "base")
    on_meta = options if "use_dora" in options else {}  # peft needs weights for pissa
    with torch.device("meta"):
        model = adapted(built("llama", "meta"), "llama", **on_meta)
    for name, value in options.items():
        setattr(model.peft_config["default"], name, value)
        said = f"{name}={value!r} with adapters on the meta device; .* build the model with from_p"
    with pytest.raises(UnsupportedError, match=said):
        checkpoint.load_weights(model, tmp_path / "base")
    for ours, theirs in pool.run(2, as_advised, tmp_path / "base", options):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)


class Doubled(nn.Module):
    """A parameter that holds twice the stored matrix, transposed and flattened."""

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Parameter(torch.zeros(7))
        self.weight = nn.Parameter(torch.zeros(24, dtype=torch.float64), requires_grad=False)


def converted(folder: Path, way: str) -> None:
    model = Doubled()
    if way != "unsharded":
        fullshard.fully_shard(model, layout=Ragged() if way == "ragged" else PerParameter())
    stored: list[Tensor] = []

    def make(read: Tensor) -> Tensor:
        stored.append(read)
        return 2 * read.t().reshape(-1).double()

    checkpoint.load_weights(model, folder, convert={"weight": Conversion((6, 4), make)})
    expected = torch.arange(24.0).view(6, 4)
    assert len(stored) == 1 and stored[0].dtype == torch.bfloat16
    assert torch.equal(stored[0], expected.bfloat16())
    whole = checkpoint.full_state_dict(model, rank0_only=False)
    assert torch.equal(whole["weight"], 2 * expected.t().reshape(-1).double())
    assert torch.equal(whole["other"], torch.arange(7.0))
    before = checkpoint.full_state_dict(model, rank0_only=False)
    for name, shape, changed, message in (
        ("weight", (4, 6), make, r"weight has shape \(6, 4\) in the files and \(4, 6\) here"),
        ("wait", (6, 4), make, "convert names wait, which the model lacks"),
        ("weight", (6, 4), lambda read: read, r"convert made torch.bfloat16 \(6, 4\) of weight"),
    ):
        with pytest.raises(ConfigError, match=message):
            checkpoint.load_weights(model, folder, convert={name: Conversion(shape, changed)})
    after = checkpoint.full_state_dict(model, rank0_only=False)
    assert torch.equal(before["weight"], after["weight"])


@pytest.mark.parametrize("way", ["per-parameter", "ragged", "unsharded"])
def test_what_is_stored_otherwise_is_converted(pool: RankPool, tmp_path: Path, way: str) -> None:
    from safetensors.torch import save_file

    weight = torch.arange(24.0).view(6, 4).bfloat16()
    save_file({"weight": weight, "other": torch.arange(7.0)}, tmp_path / "model.safetensors")
    for world in (1, 3):
        pool.run(world, converted, tmp_path, way)
