"""Jobs with states of sharded optimizers."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import state_dict as dcp_state
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from fullshard.errors import ConfigError
from fullshard.optim import ShardedOptimizer
from fullshard.tensors import local_part
from tests.kit.sharded_optimizer import (
    backward,
    difference,
    same_state,
    sharded,
)
from tests.ranks.models import shared_folder

STATEFUL: dict[str, tuple[type[Optimizer], dict[str, Any]]] = {
    "adamw": (AdamW, {"lr": 0.01, "foreach": False}),
    "momentum": (SGD, {"lr": 0.1, "momentum": 0.9}),
    "adagrad": (torch.optim.Adagrad, {"lr": 0.1}),
    "rmsprop": (torch.optim.RMSprop, {"centered": True}),
}


class Pair:
    """The same model twice, with a ShardedOptimizer and with the optimizer itself."""

    def __init__(self, layout: str, kind: str = "adamw", **more: Any) -> None:
        cls, kwargs = STATEFUL[kind]
        self.models = [sharded(layout), sharded(layout)]
        for model in self.models:
            model.unused.requires_grad_(False)  # checkpoints need state for all other parameters
        mine, its = (list(model.parameters()) for model in self.models)
        self.mine = ShardedOptimizer(mine, cls, **kwargs, **more)
        self.its = cls(its, **kwargs, **more)

    @property
    def both(self) -> list[tuple[nn.Module, Optimizer]]:
        return list(zip(self.models, (self.mine, self.its), strict=True))

    def step(self, number: int = 0, skip: str | None = None) -> None:
        for model, optimizer in self.both:
            backward(model, number)
            if skip:
                model.get_parameter(skip).grad = None
            optimizer.step()

    def check(self) -> None:
        same_state(self.mine.state_dict(), self.its.state_dict())
        assert difference(*self.models) == 0


def exchanges(layout: str, kind: str) -> None:
    """Load the state that the other optimizer saved, into new and into stepped optimizers."""
    for steps in (0, 2):
        source, target = Pair(layout, kind), Pair(layout, kind)
        source.step(0)
        source.step(1, skip="back.weight")
        for number in range(steps):
            target.step(number + 2)
        saved = copy.deepcopy([source.mine.state_dict(), source.its.state_dict()])
        target.mine.load_state_dict(saved[1])
        target.its.load_state_dict(saved[0])
        target.check()
        for number in range(3):
            target.step(number + 7)
        target.check()


def loads_a_part(layout: str) -> None:
    pair = Pair(layout)
    for number in range(2):
        pair.step(number)
    for _, optimizer in pair.both:
        state = copy.deepcopy(optimizer.state_dict())
        for number in list(state["state"])[::3]:
            del state["state"][number]
        optimizer.load_state_dict(state)
    for number in range(3):
        pair.step(number + 2)
    pair.check()
    assert len({float(state["step"]) for state in pair.mine.state.values()}) == 2


def is_independent(layout: str) -> None:
    """Two optimizers that loaded one state dict do not step each other's state."""
    first, second = Pair(layout), Pair(layout)
    first.step()
    second.mine.load_state_dict(first.mine.state_dict())
    second.its.load_state_dict(copy.deepcopy(first.its.state_dict()))
    for number in range(2):
        first.step(number + 1)
        second.step(number + 5)
    first.check()
    second.check()


def edits(layout: str) -> None:
    """Edit state between steps, also state that several parameters share."""
    pair = Pair(layout)

    def change(edit: Callable[[dict[str, Any]], object]) -> None:
        for model, optimizer in pair.both:
            with torch.no_grad():
                edit(optimizer.state[model.get_parameter("back.weight")])
        for number in range(2):
            pair.step(number)
        pair.check()

    pair.step()
    change(lambda own: local_part(own["exp_avg"]).fill_(0.1))
    change(lambda own: own["exp_avg_sq"].mul_(2))
    change(lambda own: own["step"].zero_())
    change(lambda own: own.update(step=torch.tensor(9.0)))
    change(lambda own: own.update(exp_avg=own["exp_avg"] * 3))
    change(lambda own: own.clear())
    for model, optimizer in pair.both:
        optimizer.state.pop(model.get_parameter("embed.weight"))
    pair.step()
    for _, optimizer in pair.both:
        optimizer.state.clear()
    pair.step()
    pair.check()


def follows() -> None:
    """State that users hold follows training, also when joined tensors change."""
    pair = Pair("per_parameter")
    pair.step()
    param = pair.models[0].get_parameter("first.weight")
    own = pair.mine.state[param]
    held = dict(own)
    for number, skip in enumerate((None, "first.bias", None, "back.weight")):
        pair.step(number, skip)
    assert pair.mine.state[param] is own
    assert torch.equal(local_part(own["exp_avg"]), local_part(held["exp_avg"]))
    pair.check()


def older() -> None:
    """Load older state dicts, which lack options and have numbers instead of tensors."""
    pair = Pair("per_parameter")
    pair.step()
    for _, optimizer in pair.both:
        state = copy.deepcopy(optimizer.state_dict())
        for own in state["state"].values():
            own["step"] = int(own["step"])
        for group in state["param_groups"]:
            del group["foreach"], group["maximize"]
        optimizer.load_state_dict(state)
        assert optimizer.param_groups[0]["maximize"] is False
    for number in range(2):
        pair.step(number)
    pair.check()


def refuses_whole_state() -> None:
    pair = Pair("per_parameter")
    pair.step()
    state = copy.deepcopy(pair.mine.state_dict())
    state["state"][0]["exp_avg"] = state["state"][0]["exp_avg"].full_tensor()
    with pytest.raises(ConfigError, match=r"parameter 0 of group 0.*'exp_avg' is a plain tensor"):
        pair.mine.load_state_dict(state)
    pair.step()
    pair.check()
    param = pair.models[0].get_parameter("back.weight")
    kept = pair.mine.state[param]["exp_avg"]
    pair.mine.state[param]["exp_avg"] = kept.full_tensor()
    for model in pair.models:
        backward(model)
    with pytest.raises(ConfigError, match=r"'exp_avg' is a plain tensor"):
        pair.mine.step()
    assert difference(*pair.models) == 0
    pair.mine.state[param]["exp_avg"] = kept
    pair.step()
    pair.check()


def through_files(layout: str, kind: str) -> None:
    pair, fresh = Pair(layout, kind), Pair(layout, kind)
    for number in range(2):
        pair.step(number, skip="back.weight" if number else None)
    folder = shared_folder()
    for at, ((model, optimizer), (new, its)) in enumerate(zip(pair.both, fresh.both, strict=True)):
        states = dcp_state.get_state_dict(model, optimizer)
        dcp.save(dict(zip("mo", states, strict=True)), checkpoint_id=folder / str(at))
        into = dict(zip("mo", dcp_state.get_state_dict(new, its), strict=True))
        dcp.load(into, checkpoint_id=folder / "0")  # saved by the ShardedOptimizer
        dcp_state.set_state_dict(new, its, model_state_dict=into["m"], optim_state_dict=into["o"])
    for number in range(2):
        fresh.step(number + 5)
        pair.step(number + 5)
    fresh.check()
    assert difference(fresh.models[0], pair.models[1]) == 0


def as_whole_tensors(layout: str) -> None:
    options = dcp_state.StateDictOptions(full_state_dict=True)
    pair, fresh = Pair(layout), Pair(layout)
    pair.step(0)
    pair.step(1, skip="first.bias")
    whole = [
        copy.deepcopy(dcp_state.get_optimizer_state_dict(model, optimizer, options=options))
        for model, optimizer in pair.both
    ]
    same_state(whole[0], whole[1])
    if layout == "ragged":
        return  # torch's distribute_tensor does not know ragged placements
    for (model, optimizer), state in zip(fresh.both, whole[::-1], strict=True):
        model.load_state_dict(pair.models[0].state_dict())
        dcp_state.set_optimizer_state_dict(model, optimizer, state, options=options)
    for number in range(2):
        fresh.step(number + 3)
        pair.step(number + 3)
    fresh.check()
    assert difference(fresh.models[0], pair.models[0]) == 0


def calls_hooks() -> None:
    seen: list[str] = []
    pair = Pair("per_parameter")
    handles = [
        register_optimizer_step_pre_hook(
            lambda optimizer, *_: seen.append(f"global pre {type(optimizer).__name__}")
        ),
        register_optimizer_step_post_hook(
            lambda optimizer, *_: seen.append(f"global post {type(optimizer).__name__}")
        ),
    ]
    pair.mine.register_step_pre_hook(lambda *_: seen.append("pre"))
    pair.mine.register_step_post_hook(lambda *_: seen.append("post"))
    try:
        ShardedOptimizer([nn.Parameter(torch.ones(2))], Adam, eps=1e-5)  # its trial calls no hooks
        backward(pair.models[0])
        scheduler = torch.optim.lr_scheduler.OneCycleLR(pair.mine, 0.1, total_steps=5)
        loss = pair.mine.step(lambda: 7.0)
        scheduler.step()
    finally:
        for handle in handles:
            handle.remove()
    name = "ShardedOptimizer"
    assert seen == [f"global pre {name}", "pre", "post", f"global post {name}"] and loss == 7.0
    assert pair.mine.param_groups[0]["betas"] != (0.9, 0.999)  # changed by the scheduler


def uses_a_closure() -> None:
    pair = Pair("per_parameter")
    for model, optimizer in pair.both:

        def closure(model: nn.Module = model) -> float:
            assert torch.is_grad_enabled()
            backward(model)
            return 3.0

        assert optimizer.step(closure) == 3.0
    pair.check()


def scales(layout: str, fused: bool) -> None:
    more: dict[str, Any] = {"fused": True} if fused else {}
    models = [sharded(layout, torch.float32) for _ in range(2)]
    makers: list[Callable[..., Optimizer]] = [ShardedOptimizer, lambda p, cls, **k: cls(p, **k)]
    scalers = [torch.amp.GradScaler("cpu", init_scale=256.0) for _ in models]
    optimizers = [
        make(model.parameters(), AdamW, lr=0.01, **more)
        for make, model in zip(makers, models, strict=True)
    ]
    for number in range(4):
        for model, scaler, optimizer in zip(models, scalers, optimizers, strict=True):
            backward(model, number)
            scaler.scale(torch.ones(()))
            for param in model.parameters():
                if param.grad is not None:
                    local_part(param.grad).mul_(scaler.get_scale())
            if number == 2 and dist.get_rank() == 1:
                local_part(model.back.weight.grad)[0] = torch.inf
            scaler.step(optimizer)
            scaler.update()
    assert [scaler.get_scale() for scaler in scalers] == [128.0, 128.0]
    assert difference(*models) <= (1e-7 if fused else 0)
    steps = [float(own["step"]) for own in optimizers[0].state.values()]
    assert set(steps) == {3.0}


def is_copied() -> None:
    pair = Pair("per_parameter")
    pair.step()
    file = io.BytesIO()
    torch.save([pair.models[0].state_dict(), pair.mine.state_dict()], file)
    file.seek(0)
    states = torch.load(file, weights_only=False)
    same_state(states[1], pair.its.state_dict())
    model, mine = copy.deepcopy((pair.models[0], pair.mine))
    before = difference(pair.models[0], pair.models[1])
    for number in range(2):
        backward(model, number + 1)
        mine.step()
        backward(pair.models[1], number + 1)
        pair.its.step()
    assert before == 0 and difference(model, pair.models[1]) == 0
    same_state(mine.state_dict(), pair.its.state_dict())
    assert difference(pair.models[0], pair.models[1]) > 0  # models[0] did not step
