"""The optimizers that may step on coalesced tensors, and the refusal of others."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from fullshard.errors import ArgumentTypeError, ConfigError, UnsupportedError
from fullshard.optim import ShardedOptimizer
from fullshard.optim.flat.scalars import is_cut, one_for_many
from fullshard.optim.probe import scalar_keys_of
from tests.pure.buffers import neighbours, parameters


def params() -> list[nn.Parameter]:
    return parameters(neighbours(0))


class Shaped(Optimizer):
    """Subclasses override ``change(param, group)``, some of them element-wise."""

    def __init__(self, params: Any, lr: float = 0.1, **options: Any) -> None:
        super().__init__(params, {"lr": lr, **options})

    def change(self, param: Tensor, group: dict[str, Any]) -> Tensor:
        return param.grad

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.sub_(self.change(param, group), alpha=group["lr"])


class ByNorm(Shaped):
    """Divides by the norm of each gradient, as LARS and LAMB do."""

    def change(self, param: Tensor, group: dict[str, Any]) -> Tensor:
        return param.grad / param.grad.norm()


class ByGlobalNorm(Shaped):
    """Depends on all parameters, but not on how they are joined; on shards its norm is wrong."""

    def change(self, param: Tensor, group: dict[str, Any]) -> Tensor:
        grads = [p.grad.norm() for g in self.param_groups for p in g["params"]]
        return param.grad / torch.stack(grads).norm()


class ByDims(Shaped):
    """Decays matrices only, by their dims instead of by group options."""

    def change(self, param: Tensor, group: dict[str, Any]) -> Tensor:
        return param.grad + (0.1 * param if param.dim() > 1 else 0)


class ByNormIfAsked(ByNorm):
    """Steps by norm in some groups, as a class with Muon and AdamW does."""

    def __init__(self, params: Any, by_norm: bool = False) -> None:
        super().__init__(params, by_norm=by_norm)

    def change(self, param: Tensor, group: dict[str, Any]) -> Tensor:
        return super().change(param, group) if group["by_norm"] else param.grad


class ByNormAfterAWhile(ByNorm):
    def change(self, param: Tensor, group: dict[str, Any]) -> Tensor:
        count = self.state[param]["count"] = self.state[param].get("count", 0) + 1
        return super().change(param, group) if count > 5 else param.grad


class ByNormLater(ByNorm):
    """Steps by norm after some steps, which it counts in its state or in its groups."""

    def __init__(self, params: Any, after: int = 30, in_group: bool = False) -> None:
        super().__init__(params, after=after, in_group=in_group, count=0)

    def change(self, param: Tensor, group: dict[str, Any]) -> Tensor:
        where = group if group["in_group"] else self.state[param]
        where["count"] = where.get("count", 0) + 1
        return super().change(param, group) if where["count"] > group["after"] else param.grad


class Clipped(Shaped):
    """Clips each tensor by its norm."""

    made = 0

    def __init__(self, params: Any, clip: float = 1.0, lr: float = 0.1) -> None:
        super().__init__(params, lr=lr, clip=clip)
        Clipped.made += 1

    def change(self, param: Tensor, group: dict[str, Any]) -> Tensor:
        return param.grad * (group["clip"] / param.grad.norm()).clamp(max=1.0)


class Recent(Shaped):
    """Keeps the last two gradients of all elements in one tensor, or in a list."""

    def __init__(self, params: Any, lr: float = 0.1, kind: Any = torch.stack) -> None:
        super().__init__(params, lr=lr)
        self.kind = kind

    def change(self, param: Tensor, group: dict[str, Any]) -> Tensor:
        last = self.state[param].get("last", (torch.zeros_like(param),))
        self.state[param]["last"] = self.kind([param.grad, last[0]])
        return param.grad + last[0]


REFUSED: list[tuple[type[Optimizer], dict[str, Any]]] = [
    (Recent, {}),
    (Recent, {"kind": list}),
    (torch.optim.Adafactor, {}),
    (torch.optim.Muon, {}),
    (torch.optim.LBFGS, {}),
    (torch.optim.SparseAdam, {}),
    (ByNorm, {}),
    (ByGlobalNorm, {}),
    (ByDims, {}),
    (ByNormIfAsked, {"by_norm": True}),
    (ByNormAfterAWhile, {}),
    (ByNormLater, {}),
    (ByNormLater, {"after": 5000}),
    (ByNormLater, {"after": 5000, "in_group": True}),
    (Clipped, {"clip": 1.0}),
    (Clipped, {"clip": 1e4}),
    (ByNorm, {"lr": 0.0}),  # zero until a scheduler raises it
]


@pytest.mark.parametrize(("cls", "kwargs"), REFUSED)
def test_what_looks_at_more_than_an_element_is_refused(
    cls: type[Optimizer], kwargs: dict[str, Any]
) -> None:
    for _ in range(2):  # also after an earlier trial
        with pytest.raises(UnsupportedError, match=f"{cls.__name__}.*elementwise=True"):
            ShardedOptimizer(params(), cls, **kwargs)
    with pytest.raises(NotImplementedError):
        ShardedOptimizer(params(), cls, **kwargs)


def test_a_class_may_replace_the_data_of_parameters() -> None:
    class Replaces(Shaped):
        def step(self, closure: Any = None) -> None:
            for param in (one for group in self.param_groups for one in group["params"]):
                if param.grad is not None:
                    param.data = param.data - 0.5 * param.grad

    mine = params()
    before = [param.detach().clone() for param in mine]
    for param in mine:
        param.grad = torch.ones_like(param)
    ShardedOptimizer(mine, Replaces).step()
    for param, value in zip(mine, before, strict=True):
        assert torch.equal(param, value - 0.5)


def test_a_class_that_passed_is_tried_again_with_another_value_of_an_option() -> None:
    optimizer = ShardedOptimizer(params(), Clipped, clip=1e9)
    with pytest.raises(UnsupportedError, match="Clipped"):
        ShardedOptimizer(params(), Clipped, clip=1.0)
    state = optimizer.state_dict()
    state["param_groups"][0]["clip"] = 1.0
    with pytest.raises(UnsupportedError, match="Clipped"):
        optimizer.load_state_dict(state)
    assert optimizer.param_groups[0]["clip"] == 1e9


def test_groups_that_differ_in_their_rates_share_a_trial() -> None:
    ShardedOptimizer(params(), Clipped, clip=1e9)
    before = Clipped.made
    groups = [{"params": [param], "lr": 0.1 / (n + 1)} for n, param in enumerate(params())]
    optimizer = ShardedOptimizer(groups, Clipped, clip=1e9)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
    made = Clipped.made - before
    for _ in range(3):
        for param in (param for group in groups for param in group["params"]):
            param.grad = torch.ones_like(param)
        optimizer.step()
        schedule.step()
    optimizer.load_state_dict(optimizer.state_dict())
    assert (made, Clipped.made - before) == (1, 1)  # only the inner optimizer that steps


def test_a_user_may_vouch_for_a_class_or_against_it() -> None:
    optimizer = ShardedOptimizer(params(), ByNorm, elementwise=True)
    assert optimizer.param_groups[0]["lr"] == 0.1
    with pytest.raises(UnsupportedError, match=r"AdamW.*elementwise=False"):
        ShardedOptimizer(params(), AdamW, elementwise=False)


def test_options_of_a_group_are_tried_too() -> None:
    optimizer = ShardedOptimizer(params(), ByNormIfAsked)
    with pytest.raises(UnsupportedError, match="ByNormIfAsked"):
        optimizer.add_param_group({"params": params(), "by_norm": True})
    assert len(optimizer.param_groups) == 1
    optimizer.add_param_group({"params": params(), "lr": 0.5})


@pytest.mark.parametrize(
    "kwargs",
    [
        {"lr": 0.0},
        {"lr": torch.tensor(0.01)},
        {"capturable": True, "lr": torch.tensor(0.01), "foreach": True},
        {"fused": True},
        {"betas": (torch.tensor(0.9), torch.tensor(0.99))},
    ],
)
def test_a_trial_copes_with_options_that_need_another_device_or_time(
    kwargs: dict[str, Any],
) -> None:
    assert ShardedOptimizer(params(), Adam, **kwargs).defaults["lr"] is not None


class Random(Shaped):
    def change(self, param: Tensor, group: dict[str, Any]) -> Tensor:
        torch.rand(3)
        return param.grad


def test_a_trial_leaves_no_trace() -> None:
    seen: list[object] = []
    handles = [
        register_optimizer_step_pre_hook(lambda *args: seen.append(args)),
        register_optimizer_step_post_hook(lambda *args: seen.append(args)),
    ]
    torch.manual_seed(7)
    before = torch.get_rng_state()
    try:
        with torch.device("meta"), pytest.raises(UnsupportedError, match="uses random numbers"):
            ShardedOptimizer(params(), Random)
    finally:
        for handle in handles:
            handle.remove()
    assert not seen and torch.equal(torch.get_rng_state(), before)


def test_wrong_arguments_are_named() -> None:
    with pytest.raises(ArgumentTypeError, match="optimizer_class is 'adam'"):
        ShardedOptimizer(params(), "adam")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"ShardedOptimizer\(Adam\): params is empty"):
        ShardedOptimizer([], Adam)
    with pytest.raises(TypeError, match="params is a tensor"):
        ShardedOptimizer(torch.ones(2), Adam)
    with pytest.raises(TypeError, match="parameter 1 is a str"):
        ShardedOptimizer([params()[0], "weight"], Adam)
    with pytest.raises(TypeError, match="sets"):
        ShardedOptimizer([{"params": set(params())}], Adam)
    one = params()[0]
    with pytest.raises(ValueError, match=r"parameter 'b', of shape \(2, 3\), is given twice"):
        ShardedOptimizer([("a", one), ("b", one)], Adam)
    with pytest.raises(ConfigError, match="given twice"):
        ShardedOptimizer([{"params": [one]}, {"params": [one]}], Adam)
    with pytest.raises(ValueError, match="Invalid learning rate: -1"):
        ShardedOptimizer(params(), Adam, lr=-1)
    with pytest.raises(ValueError, match="non-leaf"):
        ShardedOptimizer([one * 2], Adam)
    with pytest.raises(UnsupportedError, match="differentiable=True"):
        ShardedOptimizer(params(), Adam, differentiable=True)


def test_it_is_an_optimizer_with_the_defaults_of_its_class() -> None:
    named = [(str(i), param) for i, param in enumerate(params())]
    optimizer, expected = ShardedOptimizer(iter(named), AdamW, lr=0.5), AdamW(named, lr=0.5)
    assert optimizer.defaults == expected.defaults
    assert optimizer.param_groups == expected.param_groups
    assert optimizer.state_dict() == expected.state_dict()
    assert not optimizer._step_supports_amp_scaling
    assert ShardedOptimizer(params(), AdamW, fused=True)._step_supports_amp_scaling
    assert "lr: 0.5" in repr(optimizer)


def test_an_error_in_a_step_leaves_it_usable() -> None:
    its_params = params()
    optimizer = ShardedOptimizer(its_params, Adam)
    for param, grad in zip(its_params, neighbours(1), strict=True):
        param.grad = grad
    optimizer.step()
    optimizer.param_groups[0]["betas"] = None
    with pytest.raises(TypeError):
        optimizer.step()
    optimizer.param_groups[0]["betas"] = (0.9, 0.999)
    optimizer.step()
    assert {float(own["step"]) for own in optimizer.state.values()} == {2.0}


def test_autograd_notices_a_step_between_forward_and_backward() -> None:
    param = params()[0]
    optimizer = ShardedOptimizer([param], SGD, foreach=False)
    loss = param.square().sum()
    param.grad = torch.ones_like(param)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


SINGLES: dict[type[Optimizer], set[str]] = {
    torch.optim.ASGD: {"step", "eta", "mu"},
    torch.optim.NAdam: {"step", "mu_product"},
    torch.optim.Adafactor: {"step", "row_var", "col_var"},
}


@pytest.mark.parametrize(
    "cls",
    "Adadelta Adafactor Adagrad Adam AdamW Adamax ASGD Muon NAdam RAdam RMSprop Rprop SGD".split(),
)
def test_state_with_one_value_for_any_parameter_is_known(cls: str) -> None:
    optimizer_class = getattr(torch.optim, cls)
    optimizer = optimizer_class([torch.zeros(2, 2)])
    assert scalar_keys_of(optimizer) == SINGLES.get(optimizer_class, {"step"})


class Optax(Shaped):
    """Its moment ``mu`` has the name of a scalar in torch.optim; its ``count`` is no name there."""

    def change(self, param: Tensor, group: dict[str, Any]) -> Tensor:
        own = self.state[param]
        own["mu"] = own.get("mu", torch.zeros_like(param)) + param.grad
        own["count"] = own.get("count", torch.zeros(1)) + 1
        return own["mu"]


class OfAnother(Optax):
    """Is made from another optimizer, so no trial can make one."""

    def __init__(self, other: Optimizer) -> None:
        super().__init__([param for group in other.param_groups for param in group["params"]])


class CountsIfLarge(Optax):
    """Keeps a count only with a large decay."""

    def __init__(self, params: Any, decay: float, lr: float = 0.1) -> None:
        super().__init__(params, lr=lr, decay=decay)

    def change(self, param: Tensor, group: dict[str, Any]) -> Tensor:
        found = super().change(param, group)
        if group["decay"] < 0.5:
            del self.state[param]["count"]
        return found


def test_another_value_of_an_option_may_make_other_state() -> None:
    assert scalar_keys_of(CountsIfLarge([torch.zeros(1)], decay=0.1)) == {"step"}
    assert scalar_keys_of(CountsIfLarge([torch.zeros(1)], decay=0.9)) == {"step", "count"}


def test_names_alone_say_nothing_about_state() -> None:
    optimizer = Optax([torch.zeros(1)])
    assert scalar_keys_of(optimizer) == {"step", "count"}
    sharded = ShardedOptimizer(params(), Optax)
    assert scalar_keys_of(sharded) == {"step", "count"}
    assert scalar_keys_of(OfAnother(optimizer)) == {"step"}
    seen = [(torch.Size([3, 2]), "count", torch.Size([1])), (torch.Size([]), "mu", torch.Size([]))]
    assert one_for_many(seen) == {"count"}


def test_state_has_an_element_for_each_of_the_parameters_or_one_value() -> None:
    shapes = [torch.Size(shape) for shape in ((), (1,), (1, 1), (3,))]
    for shape in shapes:
        assert is_cut("exp_avg", shape, shape, {"step"})
        assert is_cut("step", shape, shape, {"step"}) is (shape == (3,))
        assert not is_cut("step", None, shape, set())
        assert not is_cut("exp_avg", torch.Size([2]), shape, {"step"})
        assert is_cut("step", shape, shape, {"step"}, is_dtensor=True)
