"""The modules that policies choose, compared with ``torch.distributed.fsdp.wrap``."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed.fsdp.wrap as theirs
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecision
from torch.distributed.fsdp._wrap_utils import _auto_wrap

import fullshard
from fullshard import wrap as ours
from fullshard.errors import AssertedConfigError, ConfigError, FullshardError, UnsupportedError
from fullshard.wrap.units import (
    Ignored,
    WantedUnit,
    check_alike,
    check_tied_together,
    replace_children,
    units_of,
)
from tests.ranks.models import Trouble, message_of


class Wrapped(nn.Module):
    """The wrapper class of both sides."""

    def __init__(self, module: nn.Module, **options: Any) -> None:
        super().__init__()
        self.module = module
        self.options = options

    def forward(self, x: Tensor) -> Tensor:
        return self.module(x)


class Special(nn.Linear):
    """A subclass of a class that policies name."""


class Inner(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(dim, 2)
        self.mlp = nn.Sequential(nn.Linear(dim, 3 * dim), nn.GELU(), Special(3 * dim, dim))
        self.norm = nn.BatchNorm1d(dim)


class Outer(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.own = nn.Parameter(nn.Linear(dim, 3).weight.detach().clone())
        self.parts = nn.ModuleDict({"b": Inner(dim), "a": Inner(dim)})
        self.layers = nn.ModuleList([Inner(dim), nn.Linear(dim, dim)])


class Model(nn.Module):
    """Nested containers, with parameters on every level."""

    def __init__(self, dim: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, dim)
        self.outer = nn.ModuleList([Outer(dim), Outer(2 * dim)])
        self.encoder = nn.TransformerEncoderLayer(dim, 2, 3 * dim)
        self.head = nn.Linear(dim, 11, bias=False)


def names_by_torch(
    model: nn.Module,
    policy: Any,
    ignored: Ignored = Ignored(),
    mixed_precision: Any = None,
) -> dict[str, dict[str, Any]]:
    """Return the names of wrapped modules before wrapping, in order, with their options."""
    names = {module: name for name, module in model.named_modules()}
    found = {}

    class Noted(Wrapped):
        def __init__(self, module: nn.Module, **options: Any) -> None:
            super().__init__(module, **options)
            found[names[module]] = options

    root_kwargs = {"mixed_precision": mixed_precision, "color": "red"}
    _auto_wrap(model, policy, set(ignored.modules), set(ignored.params), root_kwargs, Noted)
    for options in found.values():
        options.pop("auto_wrap_policy", None)
        if mixed_precision is None:
            del options["mixed_precision"]
    return found


def names_by_us(
    model: nn.Module, policy: Any, ignored: Ignored = Ignored(), **more: Any
) -> dict[str, dict[str, Any]]:
    units = units_of(model, policy, ignored, **more)
    return {unit.name: {"color": "red"} | unit.options for unit in units}


def both(name: str, *args: Any, **kwargs: Any) -> list[Any]:
    return [getattr(module, name)(*args, **kwargs) for module in (theirs, ours)]


def bound(name: str, **kwargs: Any) -> list[Any]:
    return [partial(getattr(module, name), **kwargs) for module in (theirs, ours)]


def colored(module: nn.Module) -> Any:
    if isinstance(module, nn.Embedding):
        return {"color": "blue"}
    return {} if isinstance(module, nn.GELU) else isinstance(module, nn.Linear)


POLICIES: dict[str, list[Any]] = {
    "always": [theirs.always_wrap_policy, ours.always_wrap_policy],
    "classes": both("ModuleWrapPolicy", {nn.Linear, Inner}),
    "root_class": both("ModuleWrapPolicy", [Model, nn.Embedding]),
    "custom": both("CustomPolicy", colored),
    "custom_all": both("CustomPolicy", lambda module: True),
    "custom_none": both("CustomPolicy", lambda module: False),
    "lambda": bound("lambda_auto_wrap_policy", lambda_fn=lambda m: isinstance(m, Inner)),
    "transformer": bound("transformer_auto_wrap_policy", transformer_layer_cls={Inner, Outer}),
    "large": bound("size_based_auto_wrap_policy"),
    "classes_as_functions": [
        lambda *args, policy=policy, **kwargs: policy(*args, **kwargs)
        for policy in both("ModuleWrapPolicy", {nn.Linear, Inner})
    ],
    "no_leaf": bound(
        "size_based_auto_wrap_policy", min_num_params=20, force_leaf_modules={nn.Embedding}
    ),
    "leaf": bound(
        "size_based_auto_wrap_policy", min_num_params=20, force_leaf_modules={Inner, nn.Embedding}
    ),
    "excluded": bound(
        "size_based_auto_wrap_policy", min_num_params=60, exclude_wrap_modules={nn.Linear, Inner}
    ),
    "nothing_excluded": bound(
        "size_based_auto_wrap_policy", min_num_params=60, exclude_wrap_modules=set()
    ),
} | {
    f"size_{size}": bound("size_based_auto_wrap_policy", min_num_params=size)
    for size in (0, 1, 16, 17, 44, 45, 64, 100, 150, 300, 301, 600, 1000, 2000, 4000)
}  # fmt: skip

every = pytest.mark.parametrize("name", POLICIES)


@every
def test_the_same_modules_in_the_same_order(name: str) -> None:
    policy, own = POLICIES[name]
    expected = names_by_torch(Model(), policy)
    assert list(names_by_us(Model(), own).items()) == list(expected.items())
    assert list(names_by_us(Model(), policy).items()) == list(expected.items())  # torch's own


def test_the_policies_choose_different_things() -> None:
    """If they chose the same, the test above would show little."""
    chosen = {name: tuple(names_by_us(Model(), own)) for name, (_, own) in POLICIES.items()}
    assert len(set(chosen.values())) > 15
    assert chosen["large"] == chosen["custom_none"] == ()
    assert "" not in {one for names in chosen.values() for one in names}


@every
def test_what_is_ignored_does_not_count(name: str) -> None:
    def ignored(model: Model) -> Ignored:
        modules = [model.outer[0].parts, model.head]
        return Ignored.of(modules, [model.outer[1].own, *model.outer[1].layers[0].parameters()])

    policy, own = POLICIES[name]
    model, other = Model(), Model()
    expected = names_by_torch(model, policy, ignored(model))
    assert list(names_by_us(other, own, ignored(other)).items()) == list(expected.items())


def test_nobody_is_asked_about_what_is_ignored() -> None:
    """Shared modules are asked about once, and a function policy is not asked about the root."""
    model = Model()
    model.outer[1].layers[0] = model.outer[0].layers[0]
    ignored = Ignored.of([model.outer[0].parts, model.encoder])
    asked: dict[str, list[nn.Module]] = {"custom": [], "function": []}

    def function(module: nn.Module, recurse: bool, nonwrapped_numel: int) -> bool:
        asked["function"] += [] if recurse else [module]
        return True

    units_of(model, ours.CustomPolicy(lambda m: bool(asked["custom"].append(m))), ignored)
    units_of(model, function, ignored)
    expected = set(model.modules()) - set(ignored.modules)
    assert set(asked["custom"]) == expected and len(asked["custom"]) == len(expected)
    assert set(asked["function"]) == expected - {model}
    assert len(asked["function"]) == len(expected) - 1


def test_ignored_elements_decide() -> None:
    model = Model()
    policy = POLICIES["size_44"][1]
    few = names_by_us(model, policy, Ignored.of(params=[model.embed.weight]))
    assert set(names_by_us(model, policy)) - set(few) == {"embed"}


@pytest.mark.parametrize("name", [name for name in POLICIES if not name.startswith("custom")])
def test_classes_of_their_own(name: str) -> None:
    """As batch norms under mixed precision; function policies recurse differently, see below."""
    policy, own = POLICIES[name]
    chosen = names_by_us(
        Model(), own, single_classes=(nn.BatchNorm1d,), single_options={"mixed_precision": None}
    )
    norms = {name for name, module in Model().named_modules() if isinstance(module, nn.BatchNorm1d)}
    assert norms <= set(chosen)
    assert {n for n, options in chosen.items() if "mixed_precision" in options} == norms
    if hasattr(policy, "_run_policy"):
        with pytest.warns(UserWarning, match="mixed"):
            expected = names_by_torch(Model(), policy, mixed_precision=MixedPrecision())
        assert list(chosen) == list(expected)
        assert {n for n, one in expected.items() if one["mixed_precision"] is None} == norms


def test_classes_of_their_own_open_no_leaf() -> None:
    """PyTorch looks inside leaves then, and wraps parts of an attention, which cannot run."""
    policies = bound("size_based_auto_wrap_policy", min_num_params=16)
    inside = {name for name, _ in Model().named_modules() if name.endswith("out_proj")}
    assert not inside & set(names_by_us(Model(), policies[1], single_classes=(nn.BatchNorm1d,)))
    with pytest.warns(UserWarning, match="mixed"):
        expected = names_by_torch(Model(), policies[0], mixed_precision=MixedPrecision())
    assert inside & set(expected)


def test_names_signatures_and_defaults() -> None:
    assert sorted(ours.__all__) == sorted(theirs.__all__)
    for name in ours.__all__:
        mine, other = getattr(ours, name), getattr(theirs, name)
        if isinstance(mine, type):
            mine, other = mine.__init__, other.__init__
        a, b = inspect.signature(mine).parameters, inspect.signature(other).parameters
        assert list(a) == list(b)
        assert [p.default for p in a.values()] == [p.default for p in b.values()]
        assert [p.kind for p in a.values()] == [p.kind for p in b.values()]
    for name in ("FORCE_LEAF_MODULES", "EXCLUDE_WRAP_MODULES"):
        mine, other = (getattr(m.size_based_auto_wrap_policy, name) for m in (ours, theirs))
        assert mine == other
    assert "Linear" in repr(ours.ModuleWrapPolicy({nn.Linear}))


def test_defaults_of_the_size_based_policy_may_be_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = partial(ours.size_based_auto_wrap_policy, min_num_params=16)
    assert "outer.0.parts.b.mlp.0" in names_by_us(Model(), policy)
    monkeypatch.setattr(ours.size_based_auto_wrap_policy, "FORCE_LEAF_MODULES", {Inner})
    assert "outer.0.parts.b.mlp.0" not in names_by_us(Model(), policy)


def test_one_of_ours_works_in_torch() -> None:
    """A class policy can be called as a function policy."""
    policy = ours.ModuleWrapPolicy({nn.Linear, Inner})
    assert names_by_torch(Model(), policy).keys() == names_by_us(Model(), policy).keys()


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (lambda: units_of(Model(), ours.CustomPolicy(lambda module: None)), ValueError),  # type: ignore[arg-type]
        (lambda: units_of(Model(), ours.CustomPolicy(lambda module: "yes")), ValueError),  # type: ignore[arg-type]
        (lambda: units_of(Model(), "every layer"), TypeError),  # type: ignore[arg-type]
        (lambda: units_of(Model(), ours.ModuleWrapPolicy), TypeError),
        (lambda: units_of(Model(), theirs.ModuleWrapPolicy), TypeError),
        (lambda: ours.ModuleWrapPolicy(nn.Linear), TypeError),  # type: ignore[arg-type]
        (lambda: ours.ModuleWrapPolicy(["Linear"]), TypeError),  # type: ignore[list-item]
        (lambda: ours.CustomPolicy({nn.Linear}), TypeError),  # type: ignore[arg-type]
    ],
)
def test_what_is_no_policy(make: Callable[[], Any], kind: type[Exception]) -> None:
    with pytest.raises(FullshardError) as raised:
        make()
    assert isinstance(raised.value, kind)


def test_a_wrong_answer_is_named() -> None:
    policy = ours.CustomPolicy(lambda m: 1 if isinstance(m, nn.GELU) else False)
    with pytest.raises(ConfigError, match=r"answered 1 for outer\.0\.parts\.b\.mlp\.1 \(GELU\)"):
        units_of(Model(), policy)


# Modules and parameters in several places.


class Sharing(nn.Module):
    """One block in three places, with two parents."""

    def __init__(self) -> None:
        super().__init__()
        block = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        self.first = nn.ModuleList([block, nn.Linear(4, 4), block])
        self.second = nn.ModuleDict({"again": block})


@pytest.mark.parametrize(
    "policy",
    [
        ours.ModuleWrapPolicy({nn.Sequential, nn.Linear}),
        ours.ModuleWrapPolicy({nn.Sequential}),
        partial(ours.size_based_auto_wrap_policy, min_num_params=15),
        partial(ours.size_based_auto_wrap_policy, min_num_params=30),
    ],
)
def test_a_shared_module_is_one_unit_in_all_its_places(policy: Any) -> None:
    model = Sharing()
    units = units_of(model, policy)
    assert len({unit.module for unit in units}) == len(units)
    check_tied_together(model, units)
    made = replace_children(model, units, lambda unit: Wrapped(unit.module, **unit.options))
    assert len(made) == len(units)
    wrapped = {m for m in model.modules() if isinstance(m, Wrapped)}
    assert wrapped == set(made)
    assert model.first[0] is model.first[2] is model.second["again"]
    assert [m for m in model.modules() if m in {unit.module for unit in units}] == [
        m.module for m in model.modules() if isinstance(m, Wrapped)
    ]


def test_torch_leaves_the_second_place_bare() -> None:
    model = Sharing()
    _auto_wrap(
        model,
        theirs.ModuleWrapPolicy({nn.Sequential}),
        set(),
        set(),
        {"mixed_precision": None},
        Wrapped,
    )
    assert isinstance(model.first[0], Wrapped) and not isinstance(model.second["again"], Wrapped)


def test_a_tied_parameter_counts_once() -> None:
    """PyTorch subtracts it twice, and may not see that enough parameters remain to wrap."""
    inner = nn.Module()
    inner.own = nn.Parameter(nn.Linear(5, 5).weight.detach().clone())
    inner.one, inner.two = nn.Linear(5, 5, bias=False), nn.Linear(5, 5, bias=False)
    inner.two.weight = inner.one.weight
    model = nn.Sequential(inner)
    policies = bound("size_based_auto_wrap_policy", min_num_params=25)
    assert list(names_by_us(model, policies[1])) == ["0.one", "0.two", "0"]
    assert list(names_by_torch(model, policies[0])) == ["0.one", "0.two"]


def tied(*pairs: tuple[str, str]) -> Model:
    model = Model()
    for a, b in pairs:
        model.get_submodule(a).weight = model.get_submodule(b).weight
    return model


def test_parameters_tied_across_units_are_refused_by_name() -> None:
    model = tied(("embed", "head"))
    policy = ours.ModuleWrapPolicy({nn.Embedding, Outer})
    said = r"head\.weight in unit \(root\) is tied to embed\.weight, which is in unit embed"
    with pytest.raises(ConfigError, match=said):
        check_tied_together(model, units_of(model, policy))
    check_tied_together(model, units_of(model, ours.ModuleWrapPolicy({Outer})))
    ignored = Ignored.of(params=[model.head.weight])
    check_tied_together(model, units_of(model, policy, ignored), ignored)
    inside = tied(("outer.0.layers.0.mlp.0", "outer.0.parts.a.mlp.0"))
    check_tied_together(inside, units_of(inside, ours.ModuleWrapPolicy({Outer})))
    with pytest.raises(ConfigError, match="is tied to"):
        check_tied_together(inside, units_of(inside, ours.ModuleWrapPolicy({Inner})))


def test_a_module_inside_of_two_units_is_refused() -> None:
    model = nn.ModuleList([nn.Sequential(nn.Linear(2, 2)), nn.Sequential(nn.Linear(2, 2))])
    model[1][0] = model[0][0]  # type: ignore[index, operator]
    units = units_of(model, ours.ModuleWrapPolicy({nn.Sequential}))
    with pytest.raises(ConfigError, match=r"1\.0\.weight"):
        check_tied_together(model, units)
    check_tied_together(model, units_of(model, ours.ModuleWrapPolicy({nn.Sequential, nn.Linear})))


# Frozen parameters.


@pytest.mark.parametrize("frozen", ["outer.0.parts", "outer.0.layers.0.mlp.0", "head", "outer"])
@pytest.mark.parametrize("kinds", [(Inner,), (Outer,), (Inner, Outer), (Inner, nn.Linear, Outer)])
def test_frozen_beside_trainable_is_refused_where_torch_does(
    frozen: str, kinds: tuple[type[nn.Module], ...]
) -> None:
    """PyTorch checks the root only if the policy names it, and fails halfway through wrapping."""
    model = Model()
    model.get_submodule(frozen).requires_grad_(False)
    units = units_of(model, ours.ModuleWrapPolicy(kinds))

    def by_torch() -> bool:
        try:
            names_by_torch(model, theirs.ModuleWrapPolicy({*kinds, Model}))
        except ValueError:
            return True
        return False

    def by_us() -> str:
        return message_of(ConfigError, check_alike, model, units)

    message = by_us()
    assert bool(message) == by_torch()
    if message:
        assert frozen in message and "use_orig_params" in message


def test_ignored_parameters_may_be_frozen_anywhere() -> None:
    model = Model()
    frozen = list(model.outer[0].parts.a.mlp.parameters())
    for param in frozen:
        param.requires_grad_(False)
    units = units_of(model, ours.ModuleWrapPolicy({Inner}))
    with pytest.raises(ConfigError, match=r"unit outer\.0\.parts\.a \(Inner\) has frozen"):
        check_alike(model, units)
    check_alike(model, units, Ignored.of(params=frozen))
    check_alike(model, units, Ignored.of([model.outer[0].parts.a.mlp]))


def test_a_unit_that_shows_one_parameter_has_one_dtype() -> None:
    model = Model()
    model.outer[0].parts.a.mlp.to(torch.bfloat16)
    units = units_of(model, ours.ModuleWrapPolicy({Inner}))
    message = message_of(ConfigError, check_alike, model, units)
    assert "unit outer.0.parts.a (Inner) has bfloat16 parameters (outer.0.parts.a.mlp" in message
    assert " and float32 parameters (" in message and "use_orig_params=True" in message
    for param in model.outer[0].parts.a.parameters():
        param.data = param.data.to(torch.bfloat16)
    check_alike(model, units)


# Replacing modules.


@pytest.mark.parametrize("after", [0, 1, 5, 8])
def test_a_failure_half_way_puts_everything_back(after: int) -> None:
    model = Model()
    before = {(holder, name): child for holder in model.modules()
              for name, child in holder._modules.items()}  # fmt: skip
    order = [name for name, _ in model.named_modules()]
    units = units_of(model, ours.always_wrap_policy)
    calls = iter(range(1000))

    def make(unit: WantedUnit) -> nn.Module:
        if next(calls) == after:
            raise Trouble
        return Wrapped(unit.module)

    with pytest.raises(Trouble):
        replace_children(model, units, make)
    assert [name for name, _ in model.named_modules()] == order
    assert all(holder._modules[name] is child for (holder, name), child in before.items())


def test_children_are_wrapped_before_their_parents_see_them() -> None:
    model = Model()
    units = units_of(model, ours.ModuleWrapPolicy({Outer, Inner}))
    seen = {}

    def make(unit: WantedUnit) -> nn.Module:
        seen[unit.name] = sum(isinstance(m, Wrapped) for m in unit.module.modules())
        return Wrapped(unit.module)

    replace_children(model, units, make)
    assert seen == {f"outer.{i}.{inner}": 0 for i in range(2)
                    for inner in ("parts.b", "parts.a", "layers.0")} | {
                        "outer.0": 3, "outer.1": 3}  # fmt: skip
    assert type(model.outer[0].module.parts["b"]) is Wrapped
    assert type(model.outer[0].module.layers[0].module) is Inner


def test_what_comes_back_must_be_a_module() -> None:
    model = Model()
    units = units_of(model, ours.ModuleWrapPolicy({Inner}))
    with pytest.raises(AssertionError) as raised:
        replace_children(model, units, lambda unit: None)  # type: ignore[arg-type, return-value]
    assert isinstance(raised.value, AssertedConfigError)


# wrap and enable_wrap


def annotated(module: Any, **options: Any) -> list[Any]:
    """Return the results of ``wrap`` of one implementation, outside and inside of the block."""
    linear = nn.Linear(2, 2)
    outside = module.wrap(linear, color="red")
    with module.enable_wrap(wrapper_cls=Wrapped, color="red", size=1, **options):
        inside = [module.wrap(linear), module.wrap(linear, color="blue", more=2)]
    after = module.wrap(linear)
    return [outside is linear, after is linear,
            *[(type(one), one.module is linear, one.options) for one in inside]]  # fmt: skip


def test_wrap_does_what_torch_does() -> None:
    got = annotated(ours, depth=3)
    assert got == annotated(theirs, depth=3)
    assert got[3] == (Wrapped, True, {"color": "blue", "size": 1, "depth": 3, "more": 2})


@pytest.mark.parametrize("module", [ours, theirs])
def test_errors_of_enable_wrap_are_those_of_torch(module: Any) -> None:
    once, twice = (module.enable_wrap(wrapper_cls=Wrapped) for _ in range(2))
    with pytest.raises(NotImplementedError) as raised, once, twice:
        pass
    assert module is theirs or isinstance(raised.value, UnsupportedError)
    with pytest.raises(AssertionError) as missing, module.enable_wrap(wrapper_cls=None):
        module.wrap(nn.Linear(2, 2))
    assert module is theirs or isinstance(missing.value, AssertedConfigError)
    with pytest.raises(TypeError):
        module.enable_wrap()
    with pytest.raises(Trouble), module.enable_wrap(wrapper_cls=Wrapped):
        raise Trouble
    linear = nn.Linear(2, 2)
    assert module.wrap(linear) is linear


# shard_blocks


def sharded_names(model: nn.Module) -> list[str]:
    return [n for n, m in model.named_modules() if isinstance(m, fullshard.FSDPModule)]


class Runs(nn.Sequential):
    """Two blocks of two linear layers, and a single layer."""

    def __init__(self) -> None:
        blocks = [nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)) for _ in range(2)]
        super().__init__(*blocks, nn.Linear(4, 4))


def test_shard_blocks_follows_a_policy(world_of_one: None) -> None:
    model = Runs()
    policy = ours.CustomPolicy(
        lambda m: {"reshard_after_forward": False} if m is model[0] else isinstance(m, nn.Linear)
    )
    chosen = fullshard.shard_blocks(model, policy=policy, reshard_after_forward=True)
    assert [unit.name for unit in chosen] == ["0.0", "0.1", "0", "1.0", "1.1", "2", ""]
    assert [unit.numel for unit in chosen] == [20, 20, 0, 20, 20, 20, 0]
    assert [unit.why for unit in chosen].count("chosen by the policy") == 6
    assert set(sharded_names(model)) == {"", "0", "0.0", "0.1", "1.0", "1.1", "2"}


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


def test_options_of_a_unit_are_not_those_of_the_model(world_of_one: None) -> None:
    """A per-unit option makes a scalar shardable, which the model's own options refuse."""
    model = nn.Sequential(nn.Linear(3, 3), Scale())
    with pytest.raises(ConfigError, match="is a scalar"):
        fullshard.shard_blocks(model, policy=ours.ModuleWrapPolicy({nn.Linear}))
    options = {"layout": fullshard.Ragged()}
    policy = ours.CustomPolicy(lambda m: options if isinstance(m, Scale) else False)
    fullshard.shard_blocks(model, policy=policy)
    assert type(model[1].factor) is fullshard.RaggedTensor


@pytest.mark.parametrize(
    ("policy", "kind"),
    [
        (ours.CustomPolicy(lambda m: isinstance(m, nn.Linear) and {"layout": 3}), ValueError),
        (ours.CustomPolicy(lambda m: isinstance(m, nn.Linear) and {"colour": 3}), TypeError),
        (ours.CustomPolicy(lambda m: 3), ValueError),  # type: ignore[arg-type, return-value]
        ("blocks", TypeError),
    ],
)
def test_shard_blocks_refuses_before_it_changes_anything(
    world_of_one: None, policy: Any, kind: type[Exception]
) -> None:
    model = Runs()
    with pytest.raises(kind):
        fullshard.shard_blocks(model, policy=policy)
    assert sharded_names(model) == []


def test_shard_blocks_refuses_containers_and_ties(world_of_one: None) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.ModuleList([nn.Linear(3, 3)]), nn.Linear(3, 3))
    with pytest.raises(ConfigError, match="ModuleList has no forward"):
        fullshard.shard_blocks(model, policy=ours.always_wrap_policy)
    model[0].weight = model[2].weight
    with pytest.raises(ConfigError, match=r"2\.weight in unit 2 is tied to 0\.weight"):
        fullshard.shard_blocks(model, policy=ours.ModuleWrapPolicy({nn.Linear}))
    assert sharded_names(model) == []


def test_shard_blocks_refuses_what_an_attention_reads(world_of_one: None) -> None:
    model = nn.Sequential(nn.MultiheadAttention(4, 2), nn.Linear(4, 4))
    with pytest.raises(ConfigError, match=r"0\.out_proj cannot be a unit"):
        fullshard.shard_blocks(model, policy=ours.ModuleWrapPolicy({nn.Linear}))
    assert sharded_names(model) == []
    small = partial(ours.size_based_auto_wrap_policy, min_num_params=16)
    assert [unit.name for unit in fullshard.shard_blocks(model, policy=small)] == ["1", ""]


def test_annotated_modules_may_be_given_to_fully_shard(world_of_one: None) -> None:
    with ours.enable_wrap(wrapper_cls=fullshard.fully_shard, reshard_after_forward=True):
        model = nn.Sequential(ours.wrap(nn.Linear(3, 3)), ours.wrap(nn.Linear(3, 3)))
    assert sharded_names(model) == ["0", "1"]
