"""The rule that assigns parameters to Muon or AdamW, and ``Muon`` on an unsharded model."""

from __future__ import annotations

import copy
import pickle
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from itertools import pairwise
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from fullshard.errors import ArgumentTypeError, ConfigError, UnsupportedError
from fullshard.optim import Muon, ShardedOptimizer
from fullshard.optim.muon.rule import ParamInfo
from tests.ranks.models import fill
from tests.ranks.muon import BY_MUON, VOCAB, Model, Reference, backward


def chosen(model: nn.Module, **options: Any) -> dict[str, str]:
    return {one.names[0]: one.algorithm for one in Muon(model, **options).rule}


@pytest.mark.parametrize("head", ["decoder", "lm_head", "output", "classifier"])
@pytest.mark.parametrize("tied", [False, True])
def test_the_default_rule(head: str, tied: bool) -> None:
    """Heads are found by name or width, even if tied; equally wide layers in blocks are none."""
    found = chosen(Model(head, tied=tied))
    assert {name for name, algorithm in found.items() if algorithm == "muon"} == BY_MUON


def test_a_head_is_known_by_its_name_alone() -> None:
    model = nn.ModuleDict({"body": nn.Linear(4, 4), "output": nn.Linear(4, 10)})
    assert chosen(model)["output.weight"] == "adamw"
    assert chosen(model)["body.weight"] == "muon"


def test_outputs_inside_blocks_are_no_heads() -> None:
    attention = nn.ModuleDict({"output": nn.Linear(4, 4)})
    layers = nn.ModuleList([attention])
    assert chosen(nn.ModuleDict({"tokens": nn.Embedding(8, 4), "layers": layers})) == {
        "tokens.weight": "adamw",
        "layers.0.output.weight": "muon",
        "layers.0.output.bias": "adamw",
    }


def block() -> nn.Module:
    return nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 4))


def layers(*sizes: int) -> list[nn.Module]:
    return [nn.Linear(*pair, bias=False) for pair in pairwise(sizes)]


def by_adamw(model: nn.Module) -> set[str]:
    """Return the names of the matrices that AdamW steps."""
    rule = Muon(model).rule
    return {one.names[0] for one in rule if len(one.shape) > 1 and one.algorithm == "adamw"}


SEQUENTIALS: dict[str, tuple[Callable[[], nn.Module], set[str]]] = {
    "classifier": (lambda: nn.Sequential(*layers(7, 5, 5, 3), nn.Softmax()), {"2.weight"}),
    "autoencoder": (lambda: nn.Sequential(*layers(7, 5, 7)), {"1.weight"}),
    "language model": (
        lambda: nn.Sequential(nn.Embedding(9, 4), block(), nn.LayerNorm(4), nn.Linear(4, 9)),
        {"0.weight", "3.weight"},
    ),
    "norm and head in one": (
        lambda: nn.Sequential(block(), block(), nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 3))),
        {"2.1.weight"},
    ),
    "convolutions": (
        lambda: nn.Sequential(nn.Sequential(nn.Conv2d(3, 5, 3), nn.ReLU()), *layers(5, 2)),
        {"1.weight"},
    ),
    "by names": (
        lambda: nn.Sequential(OrderedDict(zip(["first", "last"], layers(4, 4, 2), strict=True))),
        {"last.weight"},
    ),
    "inside of a model": (
        lambda: nn.ModuleDict({"body": block(), "to_logits": nn.Sequential(*layers(4, 9))}),
        {"to_logits.0.weight"},
    ),
    "embedding, then blocks": (
        lambda: nn.Sequential(nn.Embedding(9, 4), block(), block()),
        {"0.weight"},
    ),
    "blocks in a list": (
        lambda: nn.ModuleDict({"wte": nn.Embedding(9, 4), "h": nn.ModuleList([block(), block()])}),
        {"wte.weight"},
    ),
}


@pytest.mark.parametrize("name", SEQUENTIALS)
def test_the_ends_of_a_sequential_go_to_adamw(name: str) -> None:
    make, expected = SEQUENTIALS[name]
    assert by_adamw(make()) == expected


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.Sequential(*layers(4, 4, 4, 4)),  # any of these may be the head
        lambda: nn.Sequential(block(), block()),
        lambda: nn.Sequential(*layers(4, 4, 3), nn.LayerNorm(3)),
        lambda: nn.ModuleDict({"conv": nn.Conv1d(4, 4, 1), "fc": nn.Linear(4, 3)}),
    ],
)
def test_a_model_without_known_ends_is_told_once_what_muon_steps(
    make: Callable[[], nn.Module],
) -> None:
    model = make()
    with pytest.warns(UserWarning, match="Muon found no head and no embedding") as told:
        optimizer = Muon(model)
    (warned,) = told
    assert warned.filename == __file__
    matrices = [name for name, param in model.named_parameters() if param.dim() > 1]
    assert f"so it steps {', '.join(matrices)}. " in str(warned.message)
    assert all(one.algorithm == "muon" for one in optimizer.rule if len(one.shape) > 1)
    Muon(model, rule={matrices[-1]: "adamw"})  # an explicit rule gives no warning
    Muon(model, rule=dict.fromkeys(matrices, "muon"))


def test_it_prints_what_it_chose_and_why() -> None:
    text = str(Muon(Model(tied=True)).rule)
    lines = {line.split()[0]: " ".join(line.split()) for line in text.splitlines()}
    assert lines["parameter"] == "parameter shape stepped by because"
    assert lines["layers.2.up"].endswith("3 x 32 x 16 muon two dims or more, blocks='each'")
    assert lines["mix.weight"].endswith("16 x 16 x 1 muon two dims or more")
    assert "(= decoder.weight) 48 x 16 adamw an embedding" in lines["tokens.weight"]
    assert lines["norm.weight"].endswith("adamw of a norm")
    assert lines["norm.bias"].endswith("adamw of a norm")
    assert lines["layers.0.bias"].endswith("adamw fewer than 2 dims")
    assert "decoder" in str(Muon(Model()).rule)
    muon = 16 * 16 + 2 * 16 * 48 + 2 * 3 * 32 * 16
    assert lines["elements:"].startswith(f"elements: {muon:,} by muon")


def test_answers_by_pattern() -> None:
    """The first matching pattern counts; options make groups; tied names match too."""
    rule = {
        "layers.2.*": "adamw",
        "layers.*.weight": {"lr": 0.5, "blocks": 2},
        "decoder.weight": {"algorithm": "muon", "weight_decay": 0.0},
    }
    optimizer = Muon(Model(tied=True), rule=rule)
    by_name = {name: g for g in optimizer.param_groups for name in g["param_names"]}
    assert by_name["layers.2.up"]["algorithm"] == "adamw"
    assert by_name["layers.0.weight"]["algorithm"] == "muon"
    assert by_name["layers.0.weight"]["lr"] == 0.5
    blocks = {choice.names[0]: choice.blocks for choice in optimizer.rule}
    assert (blocks["layers.0.weight"], blocks["layers.1.weight"]) == ((24, 24), (8, 8))
    assert by_name["mix.weight"]["lr"] == 1e-3
    assert by_name["tokens.weight"]["algorithm"] == "muon"
    assert by_name["tokens.weight"]["weight_decay"] == 0.0
    assert by_name["mix.weight"]["weight_decay"] == 0.1


def test_a_function_as_rule() -> None:
    """The function gets full shapes and modules, and may return None for the default."""
    seen = {}

    def rule(name: str, info: ParamInfo) -> str | None:
        seen[name] = info
        return "adamw" if isinstance(info.modules[0], nn.Conv1d) else None

    found = chosen(Model(tied=True), rule=rule)
    assert {n for n, algorithm in found.items() if algorithm == "muon"} == BY_MUON - {"mix.weight"}
    assert seen["layers.2.up"].shape == (3, 32, 16)
    assert seen["tokens.weight"].names == ("tokens.weight", "decoder.weight")
    assert seen["mix.weight"].vocabularies == {VOCAB}


@pytest.mark.parametrize(
    ("rule", "error", "told"),
    [
        ({"*.bias": "muon"}, UnsupportedError, r"'mix.bias' is of shape \(16,\)"),
        ({"*.wieght": "muon"}, ConfigError, r"'\*.wieght' of the rule fits no parameter"),
        ({"*": "sgd"}, ConfigError, "'sgd' of parameter 'pos_embed'"),
        (lambda name, info: {"algorithm": "lion"}, ConfigError, "lion"),
        ({"mix.weight": {"ns_dtype": "int8"}}, ConfigError, "ns_dtype='int8'"),
        ({"mix.weight": {"blocks": 5}}, ConfigError, "blocks=5 of parameter 'mix.weight'"),
        ({"mix.weight": {"blocks": (8, 7)}}, ConfigError, r"blocks=\(8, 7\)"),
        ({"layers.0.weight": {"blocks": "each"}}, ConfigError, "with more than two dims"),
    ],
)
def test_wrong_rules(rule: Any, error: type[Exception], told: str) -> None:
    with pytest.raises(error, match=told):
        Muon(Model(), rule=rule)


def test_wrong_models() -> None:
    with pytest.raises(ArgumentTypeError, match="expected a module"):
        Muon(Model().parameters())  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="no parameter that requires"):
        Muon(Model().requires_grad_(False))


@pytest.mark.parametrize(
    "options", [{}, {"nesterov": False, "adjust_lr_fn": "match_rms_adamw", "weight_decay": 0.01}]
)
def test_it_is_muon_and_adamw_of_torch(options: dict[str, Any]) -> None:
    """Bit-equal on an unsharded model, with a scheduler of both learning rates."""
    model = fill(Model(tied=True).double())
    other = copy.deepcopy(model)
    adamw = {"lr": 0.01, "betas": (0.8, 0.9), "foreach": False}
    optimizer = Muon(model, lr=0.02, adamw=adamw, **options)
    reference = Reference(other, 0.02, adamw, **options)
    schedulers = [
        torch.optim.lr_scheduler.StepLR(one, step_size=2, gamma=0.5)
        for one in (optimizer, reference.muon, reference.adamw)
    ]
    for number in range(5):
        for one in (model, other):
            one.zero_grad()
            backward(one, number)
        optimizer.step()
        reference.step()
        for scheduler in schedulers:
            scheduler.step()
    assert all(map(torch.equal, model.parameters(), other.parameters()))
    assert {group["algorithm"]: group["lr"] for group in optimizer.param_groups} == {
        "muon": 0.02 / 4,
        "adamw": 0.01 / 4,
    }


def test_state_dicts_and_copies_go_on_alike() -> None:
    """Training continues equally after load_state_dict, deepcopy and pickle."""
    model = fill(Model().double())
    optimizer = Muon(model)
    for number in range(2):
        backward(model, number)
        optimizer.step()
    loaded = copy.deepcopy(model)
    resumed = Muon(loaded, lr=5.0)
    backward(loaded, 9)
    resumed.step()  # loading replaces this state
    loaded.load_state_dict(model.state_dict())
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert resumed.param_groups[0]["lr"] == 1e-3
    pairs = [
        (loaded, resumed),
        copy.deepcopy((model, optimizer)),
        pickle.loads(pickle.dumps((model, optimizer))),
    ]
    for number in (2, 3):
        for one, its in [(model, optimizer), *pairs]:
            one.zero_grad()
            backward(one, number)
            its.step()
    for one, its in pairs:
        assert all(map(torch.equal, one.parameters(), model.parameters()))
        kept, expected = its.state_dict(), optimizer.state_dict()
        assert list(kept["state"]) == list(expected["state"])
        for group, other in zip(kept["param_groups"], expected["param_groups"], strict=True):
            assert group == {"differentiable": False, **other}  # a key that PyTorch adds
        assert str(its.rule) == str(Muon(model).rule)


def test_state_of_another_rule_is_refused_and_nothing_changes() -> None:
    model = fill(Model())
    backward(model, 0)
    optimizer = Muon(model)
    optimizer.step()
    saved = optimizer.state_dict()
    saved["param_groups"][0]["algorithm"] = "adamw"
    with pytest.raises(ConfigError, match="give the rule that was saved"):
        optimizer.load_state_dict(saved)
    optimizer.step()


def test_a_part_that_does_not_fit_leaves_both_as_they_are() -> None:
    model = fill(Model())
    optimizer = Muon(model)
    for number in range(2):
        backward(model, number)
        optimizer.step()
    before = copy.deepcopy(optimizer.state_dict())
    saved = copy.deepcopy(before)
    saved["state"][0]["momentum_buffer"].zero_()
    refuse = mock.Mock(side_effect=ConfigError("does not fit"))
    with (
        mock.patch.object(ShardedOptimizer, "check_loaded", refuse),
        pytest.raises(ConfigError, match="does not fit"),
    ):
        optimizer.load_state_dict(saved)
    assert refuse.call_count == 1
    after = optimizer.state_dict()
    assert torch.equal(after["state"][0]["momentum_buffer"], before["state"][0]["momentum_buffer"])
    assert list(after["state"]) == list(before["state"])
    optimizer.step()


def test_unfrozen_parameters_are_added_by_the_rule() -> None:
    model = fill(Model())
    model.layers.requires_grad_(False)
    optimizer = Muon(model)
    assert [group["algorithm"] for group in optimizer.param_groups] == ["muon", "adamw"]
    model.layers.requires_grad_(True)
    optimizer.add_param_group({"params": list(model.layers.parameters()), "lr": 0.5})
    added = optimizer.param_groups[2:]
    assert [(g["algorithm"], g.get("stacked"), g["lr"]) for g in added] == [
        ("muon", 0, 0.5),
        ("adamw", None, 0.5),
    ]
    before = copy.deepcopy(model)
    backward(model, 0)
    optimizer.step()
    for param, was in zip(model.layers.parameters(), before.layers.parameters(), strict=True):
        assert not torch.equal(param, was)
    with pytest.raises(ConfigError, match="has a group already"):
        optimizer.add_param_group({"params": model.layers.parameters()})
    with pytest.raises(ConfigError, match="were not in the model"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2, 2))]})
    with pytest.raises(ConfigError, match="expected 'muon' or 'adamw'"):
        optimizer.add_param_group({"params": [], "algorithm": "sgd"})


def test_groups_are_added_all_or_none() -> None:
    model = fill(Model())
    weights = [param for param in model.layers.parameters() if param.ndim == 2]
    for weight in weights:
        weight.requires_grad_(False)
    optimizer = Muon(model)
    before = len(optimizer.param_groups)
    for weight in weights:
        weight.requires_grad_(True)
    with pytest.raises(ConfigError, match="has a group already"):
        optimizer.add_param_group({"params": model.layers.parameters()})
    assert len(optimizer.param_groups) == before
    optimizer.add_param_group({"params": weights})
    assert len(optimizer.param_groups) == before + 1


@pytest.mark.parametrize("algorithm", ["muon", "adamw"])
@pytest.mark.parametrize("is_copy", [False, True])
def test_parameters_without_names_are_added_under_an_algorithm(
    algorithm: str, is_copy: bool
) -> None:
    model = fill(Model())
    first = next(model.layers.parameters())
    first.requires_grad_(False)
    optimizer = Muon(model)
    if is_copy:
        optimizer = copy.deepcopy(optimizer)
    new = nn.Linear(4, 3, bias=False)
    first.requires_grad_(True)
    optimizer.add_param_group({"params": [first], "algorithm": algorithm})
    optimizer.add_param_group({"params": new.parameters(), "algorithm": algorithm})
    for param in (first, new.weight):
        before = param.detach().clone()
        param.grad = torch.ones_like(param)
        optimizer.step()
        assert not torch.equal(param, before)


@pytest.mark.parametrize("bad", [{"params": 3}, {"betas": 0.9}])
def test_what_is_refused_is_not_added_in_part(bad: dict[str, Any]) -> None:
    model = fill(Model())
    params = list(model.layers.parameters())
    for param in params:
        param.requires_grad_(False)
    optimizer = Muon(model)
    before = [len(one.param_groups) for one in (optimizer, *optimizer._parts.values())]
    twice = params + params[-1:] if "params" in bad else params
    with pytest.raises((ConfigError, UnsupportedError)):
        optimizer.add_param_group({**bad, "params": twice})
    assert before == [len(one.param_groups) for one in (optimizer, *optimizer._parts.values())]
    optimizer.add_param_group({"params": params})


def test_groups_that_are_removed_are_not_stepped_and_state_may_be_assigned() -> None:
    model, want = fill(Model()), fill(Model())
    optimizer, fresh = Muon(model), Muon(want)
    kept = [param.detach().clone() for param in optimizer.param_groups[-1]["params"]]
    removed = optimizer.param_groups.pop()
    for number in range(2):
        if number:
            optimizer.state = defaultdict(dict)
            for mine, its in zip(model.parameters(), want.parameters(), strict=True):
                its.data.copy_(mine)
        for one, stepped in ((model, optimizer), (want, fresh)):
            one.zero_grad()
            backward(one, number)
            if number or one is model:
                stepped.step()
    for param, was in zip(removed["params"], kept, strict=True):
        assert torch.equal(param, was)
    stepped = fresh.param_groups[0]["params"]
    for mine, its in zip(optimizer.param_groups[0]["params"], stepped, strict=True):
        assert torch.equal(mine, its)
        assert torch.equal(
            optimizer.state[mine]["momentum_buffer"], fresh.state[its]["momentum_buffer"]
        )


@pytest.mark.parametrize("option", [{"ns_steps": 200}, {"adjust_lr_fn": "of tomorrow"}])
def test_a_load_with_options_that_are_refused_changes_nothing(option: dict[str, Any]) -> None:
    model = fill(Model())
    optimizer = Muon(model)
    backward(model, 0)
    optimizer.step()
    groups, state = list(map(dict, optimizer.param_groups)), optimizer.state
    given = copy.deepcopy(optimizer.state_dict())
    given["param_groups"][0].update(option)
    with pytest.raises(ConfigError):
        optimizer.load_state_dict(given)
    assert optimizer.state is state and optimizer.param_groups == groups
    for part in optimizer._parts.values():
        assert all(any(one is its for its in optimizer.param_groups) for one in part.param_groups)


def test_hooks_run_once_and_closures_once() -> None:
    from torch.optim.optimizer import register_optimizer_step_post_hook

    model = fill(Model())
    optimizer = Muon(model)
    stepped: list[Any] = []
    handle = register_optimizer_step_post_hook(lambda one, *_: stepped.append(one))

    def closure() -> float:
        backward(model, 0)
        return 1.5

    try:
        assert optimizer.step(closure) == 1.5
    finally:
        handle.remove()
    assert stepped == [optimizer]


def test_state_and_options_of_another_optimizer_are_refused() -> None:
    model = fill(Model())
    other, optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4), Muon(model)
    backward(model, 0)
    other.step()
    whole = optimizer.state_dict()
    for stepped in (False, True):
        loaded = copy.deepcopy(whole)
        if stepped:
            loaded["state"] = {0: other.state_dict()["state"][0]}
        else:
            loaded["param_groups"][0] |= {"betas": (0.9, 0.95), "amsgrad": False}
        words = "exp_avg, exp_avg_sq, step" if stepped else "betas"
        with pytest.raises(ConfigError, match=f"has {words}: it was saved from another"):
            optimizer.load_state_dict(loaded)
    whole["param_groups"][0]["initial_lr"] = 0.1  # as schedulers add it
    optimizer.load_state_dict(whole)
    optimizer.step()


def test_parameters_of_more_than_two_dims_are_added_as_what_they_are() -> None:
    model = fill(Model())
    known = nn.Parameter(torch.randn(2, 3, 4, 5))
    model.register_parameter("experts", known)
    Muon(model)
    known.requires_grad_(False)
    optimizer = Muon(model)
    known.requires_grad_(True)
    optimizer.add_param_group({"params": [known], "algorithm": "muon"})
    assert optimizer.param_groups[-1]["stacked"] == optimizer._chosen[known].stacked == 1
    assert optimizer.param_groups[-1]["param_names"] == ["experts"]
    new = nn.Parameter(torch.randn(3, 4, 5))
    with pytest.raises(ConfigError, match="may be a stack of matrices"):
        optimizer.add_param_group({"params": [("new", new)], "algorithm": "muon"})
    optimizer.add_param_group({"params": [("new", new)], "algorithm": "muon", "stacked": 1})
