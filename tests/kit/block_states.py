"""Optimizers with one state per block of rows."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.optim import Optimizer

from fullshard import FullyShardedDataParallel as FSDP
from fullshard import Ragged, checkpoint, fully_shard
from fullshard.optim import OwnedOptimizer
from fullshard.optim.probe.subclasses import unwrapped
from tests.kit.owned import give, named
from tests.ranks.block_states import Net, kind_of
from tests.ranks.models import noise

EAGER = torch.compiler.set_stance("force_eager")  # compilation takes ten times as long


def sharded(net: nn.Module, face: str, block: int) -> nn.Module:
    world = dist.get_world_size()
    if face == "flat":
        return FSDP(net, use_orig_params=True)
    mesh = init_device_mesh("cpu", (world,))
    if face == "hsdp":
        mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "shard"))
    layout = {"ragged": Ragged(), "per_parameter": None}.get(face, Ragged(block))
    return fully_shard(net, mesh=mesh, **({} if layout is None else {"layout": layout}))


def give_grads(step: int, *models: nn.Module) -> None:
    """Give gradients to all parameters but one; another has none in the second step."""
    grads = {
        name: noise(*param.shape, seed=10 * step + number).to(param.dtype)
        for number, (name, param) in enumerate(Net().named_parameters())
        if name != "w4" and not (name == "w2" and step == 1)
    }
    dtype = next(models[0].parameters()).dtype
    for model in models:
        give(model, {name: grad.to(dtype) for name, grad in grads.items()})


def same_state(model: nn.Module, optimizer: Optimizer, net: nn.Module, its: Optimizer) -> None:
    full = checkpoint.full_optim_state_dict(model, optimizer, rank0_only=False)["state"]
    for name, param in net.named_parameters():
        expected = unwrapped(its.state.get(param, {}))
        assert full.get(name, {}).keys() == expected.keys(), name
        for key, value in expected.items():
            found, value = full[name][key], torch.as_tensor(value)
            assert (found.shape, found.dtype) == (value.shape, value.dtype), (name, key)
            assert torch.equal(bits(found), bits(value)), (name, key)


def bits(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def owned(model: nn.Module, kind: str, *, in_blocks: bool = True) -> OwnedOptimizer:
    cls, kwargs, block = kind_of(kind)
    return OwnedOptimizer(named(model), cls, blocks=block if in_blocks else None, **kwargs)
