"""torchtitan's own ``Trainer`` on its Llama debug model, saved by DCP and resumed.

torchtitan expects an accelerator. To run it on CPUs, this program adds functions to ``torch.cpu``
that torchtitan's monitors call, and replaces flex attention, which has no backward on CPUs, with
PyTorch's scaled dot product attention.
"""

import functools
import json
import os
import shutil
import sys
import types
from pathlib import Path

import torch
import torch._utils
import torch.distributed as dist
from told import tell

torch._utils._get_available_device_type = lambda: "cpu"
for name, value in {
    "get_device_name": "CPU",
    "get_device_properties": types.SimpleNamespace(total_memory=1 << 34, name="CPU"),
    "memory_stats": {},
    "reset_peak_memory_stats": None,
    "empty_cache": None,
    "device_count": int(os.environ["LOCAL_WORLD_SIZE"]),
    "set_device": None,
}.items():
    setattr(torch.cpu, name, lambda *_, value=value, **__: value)
torch.cpu.current_device = lambda: 0
if not hasattr(dist, "set_timeout"):  # new in PyTorch 2.15
    dist.set_timeout = lambda *_, **__: None

import spmd_types  # noqa: E402
from tokenizers import Tokenizer, models, pre_tokenizers  # noqa: E402
from torch.distributed.fsdp import FSDPModule  # noqa: E402
from torch.distributed.tensor import distribute_tensor  # noqa: E402
from torchtitan.distributed import ParallelDims  # noqa: E402
from torchtitan.distributed import utils as distributed  # noqa: E402
from torchtitan.models.common import attention  # noqa: E402
from torchtitan.models.llama3.config_registry import llama3_debugmodel  # noqa: E402

ways = sys.argv[1:-1]
dist.init_process_group("gloo")
rank = dist.get_rank()
distributed.set_pg_timeouts = lambda *_, **__: None
made = ParallelDims.from_config
ALL = functools.cache(lambda: made(configured(-1).parallelism, dist.get_world_size()))
# PyTorch's FSDP2 refuses a mesh that is equal but another object, so both trainers share one.
ParallelDims.from_config = lambda *_: ALL()
ROOT = Path.cwd()
WORDS = [f"word{number}" for number in range(256)]


def causal(q, k, v, *, block_mask=None, scale=None, enable_gqa=False, **_):
    with spmd_types.no_typecheck():  # the type checker does not know this function
        out = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=scale, enable_gqa=enable_gqa
        )
    if spmd_types.is_type_checking():
        spmd_types.assert_type_like(out, q)
    return out


def without_mean_of_gloo(module):
    """Force sum reductions: with a divide factor, FSDP2 asks for a reduction that gloo lacks."""
    for inner in module.modules():
        if isinstance(inner, FSDPModule):
            inner.set_force_sum_reduction_for_comms(True)


def make_assets():
    """Write a tokenizer and texts, in the places where torchtitan's repository has them."""
    (ROOT / "tests/assets/tokenizer").mkdir(parents=True)
    (ROOT / "tests/assets/c4_test").mkdir()
    vocabulary = {word: number for number, word in enumerate([*WORDS, "<s>", "</s>", "<u>"])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<u>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save("tests/assets/tokenizer/tokenizer.json")
    settings = {"bos_token": "<s>", "eos_token": "</s>"}
    Path("tests/assets/tokenizer/tokenizer_config.json").write_text(json.dumps(settings))
    generator = torch.Generator().manual_seed(0)
    with open("tests/assets/c4_test/data.json", "w") as file:
        for _ in range(64):
            chosen = torch.randint(len(WORDS), (40,), generator=generator).tolist()
            file.write(json.dumps({"text": " ".join(WORDS[one] for one in chosen)}) + "\n")


def configured(load_step):
    config = llama3_debugmodel()
    config.dump_folder = str(ROOT / "outputs")
    config.training.local_batch_size = 2
    config.training.seq_len = 32
    config.training.steps = 6
    config.training.disable_cuda_graphs = True
    config.training.mixed_precision_param = "bfloat16" if "bf16" in ways else "float32"
    if "accumulates" in ways:
        config.training.global_batch_size = 8
    if "bf16" not in ways:
        config.activation_checkpoint = None
    if "spmd_types" not in ways:  # "spmd_types" is torchtitan's default
        config.parallelism.spmd_backend = "partial_dtensor"
    config.debug.spmd_typechecking = "checked" in ways
    if "hsdp" in ways:
        config.parallelism.data_parallel_replicate_degree = 2
    if "tp" in ways:
        config.parallelism.tensor_parallel_degree = 2
    config.checkpoint.enable = True
    config.checkpoint.interval = 3
    config.checkpoint.load_step = load_step
    config.validator.enable = False
    return config


def fill(model):
    """Set equal values on both engines, whose own initialisations draw different numbers."""
    with torch.no_grad():
        for seed, param in enumerate(model.parameters()):
            generator = torch.Generator().manual_seed(seed)
            values = torch.randn(param.shape, generator=generator).mul_(0.02)
            values = values + 1 if param.dim() == 1 else values
            there = distribute_tensor(values, param.device_mesh, param.placements)
            param.to_local().copy_(there.to_local())


def train(load_step):
    trainer = configured(load_step).build()
    (model,) = trainer.model_parts
    without_mean_of_gloo(model)
    for module in model.modules():
        if isinstance(module, attention.FlexAttention):
            module.forward = causal
    fill(model)
    losses = []
    trainer.metrics_processor.log = lambda step, loss, *_, **__: losses.append(loss)
    trainer.train()
    trainer.close()
    return model, losses


if rank == 0:
    make_assets()
dist.barrier()
_, losses = train(-1)
if rank == 0:
    shutil.rmtree("outputs/checkpoint/step-6")
dist.barrier()
model, again = train(3)
os.chdir(ROOT)
weights = {name: param.full_tensor() for name, param in model.named_parameters()}
tell(losses, again, None, weights)
