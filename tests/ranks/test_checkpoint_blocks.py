"""``checkpoint_blocks`` keeps values and names and saves memory."""

from __future__ import annotations

import copy
import pickle
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fullshard
from fullshard import FullyShardedDataParallel, Ragged
from fullshard.errors import ArgumentTypeError, ConfigError, NotBuiltError
from fullshard.wrap import ModuleWrapPolicy
from tests.ranks.models import shard_units
from tests.ranks.pool import on_ranks

FACES = ("rows", "ragged", "pieces", "flat")


class Block(nn.Module):
    runs = 0

    def __init__(self, dim: int = 8) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(dim, 3 * dim), nn.Linear(3 * dim, dim)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        Block.runs += 1
        return x + scale * self.drop(self.down(self.up(x).tanh()))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(8, 20, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x, scale=0.5)
        return self.head(x)


def made() -> Any:
    torch.manual_seed(3)
    return Net().double()


def sharded(net: Any, face: str) -> Any:
    if face in ("rows", "ragged"):
        options: dict[str, Any] = {"layout": Ragged("element")} if face == "ragged" else {}
        shard_units(net, net.blocks, **options)
        return net
    return FullyShardedDataParallel(
        net, auto_wrap_policy=ModuleWrapPolicy({Block}), use_orig_params=face == "pieces"
    )


def full_grads(net: Any) -> dict[str, Tensor]:
    with fullshard.unshard_params(net, with_grads=True):
        named = {name: param.grad for name, param in net.named_parameters()}
        return {
            name.replace("_fsdp_wrapped_module.", ""): grad.clone()
            for name, grad in named.items()
            if grad is not None
        }


def step(net: Any) -> float:
    torch.manual_seed(7)
    loss = net(torch.arange(12).view(3, 4)).square().mean()
    loss.backward()
    return loss.item()


@on_ranks(2)
@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("early", [True, False])
@pytest.mark.parametrize("face", FACES)
def test_values_are_those_of_the_unsharded_model(face: str, early: bool, offload: bool) -> None:
    reference = made()
    expected = step(reference)
    grads = {name: param.grad for name, param in reference.named_parameters()}
    keys = list(sharded(made(), face).state_dict())
    net = made()
    checkpointed = partial(fullshard.checkpoint_blocks, offload=offload)
    names = checkpointed(net) if early else ()
    net = sharded(net, face)
    names = names or checkpointed(net)
    assert names == ("blocks.0", "blocks.1", "blocks.2")
    assert list(net.state_dict()) == keys
    for _ in range(2):
        Block.runs = 0
        assert step(net) == pytest.approx(expected, abs=1e-12)
        assert Block.runs == 6  # three forwards, and three again in backward
        own = full_grads(net)
        assert own.keys() == grads.keys()
        for name, grad in grads.items():
            torch.testing.assert_close(own[name], grad, rtol=0, atol=1e-12)
        net.zero_grad()
    with torch.no_grad():
        net(torch.arange(4)[None])
    with pytest.raises(ConfigError, match=r"blocks\.0 recomputes its activations already"):
        fullshard.checkpoint_blocks(net)


@on_ranks(2)
def test_a_sharded_model_is_copied_and_not_pickled() -> None:
    net = made()
    fullshard.checkpoint_blocks(net)
    sharded(net, "rows")
    other = copy.deepcopy(net)
    assert other.blocks[0].forward.args[0].__self__ is other.blocks[0]
    with torch.no_grad():
        other.embed.weight.zero_()
    expected = step(made())
    assert step(net) == pytest.approx(expected, abs=1e-12)
    assert step(other) != pytest.approx(expected, abs=1e-12)
    with pytest.raises(NotBuiltError, match="cannot be pickled"):
        pickle.dumps(net)


@pytest.mark.parametrize("offload", [False, True])
def test_a_plain_model_is_pickled_and_copied(offload: bool) -> None:
    net = made()
    fullshard.checkpoint_blocks(net, offload=offload)
    expected = step(made())
    for other in (pickle.loads(pickle.dumps(net)), copy.deepcopy(net)):
        Block.runs = 0
        assert step(other) == pytest.approx(expected, abs=1e-12) and Block.runs == 6
        assert other.blocks[1].forward.args[0].__self__ is other.blocks[1]


def test_less_is_saved_for_backward() -> None:
    kept = []
    for run in (lambda net: None, fullshard.checkpoint_blocks):
        net, saved = made(), {}
        run(net)
        params = {param.data_ptr() for param in net.parameters()}

        def pack(x: Tensor, saved: dict[int, int] = saved) -> Tensor:
            saved[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
            return x

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            net(torch.arange(12).view(3, 4))
        kept.append(sum(nbytes for at, nbytes in saved.items() if at not in params))
    assert kept[1] < kept[0] / 3


def test_a_policy_chooses_the_blocks() -> None:
    net = made()
    names = fullshard.checkpoint_blocks(net, policy=ModuleWrapPolicy({nn.Linear}))
    assert len(names) == 7 and names[:2] == ("blocks.0.up", "blocks.0.down")


def test_bad_arguments() -> None:
    with pytest.raises(ArgumentTypeError, match=r"expected an nn\.Module"):
        fullshard.checkpoint_blocks(3)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"found no repeated blocks in Linear"):
        fullshard.checkpoint_blocks(nn.Linear(2, 2))
    assert not dist.is_initialized()
