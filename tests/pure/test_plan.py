"""Plans equal arithmetic by hand; also their parts: hardware, values, FLOP, text."""

from __future__ import annotations

import dataclasses
import html
import math
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import fullshard
from fullshard import MixedPrecisionPolicy
from fullshard.errors import ArgumentTypeError, ConfigError, UnsupportedError
from fullshard.plan import CPU, PRESETS, Hardware, Host, Link, Plan, hardware_of, plan, planning
from fullshard.plan.dry_run import Job
from fullshard.plan.flops import flops_of
from fullshard.plan.found import activations
from fullshard.plan.ledger import Moment
from fullshard.plan.text import in_bytes, in_seconds, table

BF16 = MixedPrecisionPolicy(torch.bfloat16, torch.float32)


class Layers(nn.Module):
    """Equal linear layers without biases."""

    def __init__(self, dim: int = 64, layers: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(dim, dim, bias=False) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def of_layers(**options: Any) -> Plan:
    given = {"world_size": 4, "hardware": "cpu", **options}
    return plan(Layers(), batch=torch.ones(2, 64), **given)


def received(found: Plan) -> dict[tuple[str, str], tuple[int, int]]:
    return {(one.dim, one.what): (one.num_calls, one.received_nbytes) for one in found.traffic}


def test_the_name_of_the_package_is_a_function_and_a_module() -> None:
    import fullshard.plan as as_plan
    import fullshard.trace as as_trace

    assert as_plan is fullshard.plan is plan is as_plan.plan
    assert as_plan.PRESETS is PRESETS and as_trace.combine.__module__.startswith("fullshard.trace")


def test_a_notebook_shows_the_text() -> None:
    found = of_layers()
    text = found._repr_html_()
    assert text.startswith("<pre>") and text.endswith("</pre>")
    assert html.unescape(text.removeprefix("<pre>").removesuffix("</pre>")) == str(found)


def test_traffic_is_that_of_the_arithmetic() -> None:
    layer, rest = 64 * 64 * 4, 3 * 64 * 64 * 4 // 4
    found = received(of_layers())
    # Each layer is gathered for forward and for backward; a rank holds a quarter.
    assert found["shard", "all_gather"] == (8, 8 * layer * 3 // 4)
    num_calls, nbytes = found["shard", "reduce_scatter_mean"]
    assert num_calls == 4
    assert 0 < nbytes - 4 * rest <= 4 * 3 * 8 * 4  # and eight flags per layer and other rank


def test_kept_units_are_gathered_once_and_held() -> None:
    kept, freed = of_layers(reshard_after_forward=False), of_layers()
    assert received(kept)["shard", "all_gather"][0] == 4
    assert kept.peak.held["unsharded"] == 4 * 64 * 64 * 4
    assert freed.peak_nbytes < kept.peak_nbytes


def test_replicas_halve_the_shards_and_reduce_over_both_dims() -> None:
    found = of_layers(world_size=None, mesh={"replicate": 2, "shard": 2})
    assert found.rest["parameters"] == 4 * 64 * 64 * 4 // 2
    assert received(found)["replicate", "all_reduce_mean"][0] == 4


def test_microbatches_that_reduce_once() -> None:
    each, once = of_layers(accumulate=3), of_layers(accumulate=3, reduces_once=True)
    assert received(each)["shard", "reduce_scatter_mean"][0] == 12
    assert received(once)["shard", "reduce_scatter_mean"][0] == 4
    assert once.peak.held.get("whole_gradients", 0) >= 3 * 64 * 64 * 4


INT8 = fullshard.WirePolicy(gather="int8", reduce="int8")


def test_what_travels_encoded_is_counted_in_bytes_and_held_meanwhile() -> None:
    """A rank holds 1,024 elements of a layer: a byte for each, and 16 scales of four bytes."""
    plain, found = of_layers(), of_layers(wire=INT8)
    encoded = 1024 + 16 * 4
    assert received(found)["shard", "all_gather"] == (8, 8 * 3 * encoded)
    assert ("shard", "reduce_scatter_mean") not in received(found)
    with_flags = -(-(encoded + 8 * 4) // 16) * 16
    assert received(found)["shard", "all_to_all"] == (4, 4 * 3 * with_flags)
    halves = of_layers(wire=fullshard.WirePolicy(reduce="int4"))
    with_flags = 1024 // 2 + 16 * 2 + 8 * 4
    assert received(halves)["shard", "all_to_all"] == (4, 4 * 3 * with_flags)
    held = [moment.held.get("encoded", 0) for moment in found.memory]
    assert max(held) == 5 * encoded and "encoded" not in found.rest  # own shard and all four
    assert not any("encoded" in moment.held for moment in plain.memory)
    kept = [[unit.activation_nbytes for unit in one.units] for one in (plain, found)]
    assert kept[0] == kept[1]


def test_a_search_keeps_the_wire_that_is_given() -> None:
    whole = of_layers(hardware=BESIDE, wire=INT8).peak_nbytes
    found = searched(whole * 7 // 10, wire=INT8)
    assert found.fits and found.choice.wire == INT8
    assert {one.choice.wire for one in found.tried} == {INT8} and len(found.tried) > 3
    assert "wire gather=int8,reduce=int8" in str(found)
    assert (
        received(found)["shard", "all_to_all"][1]
        < received(of_layers())["shard", "reduce_scatter_mean"][1] / 3
    )
    assert searched(whole).choice.wire == fullshard.WirePolicy()
    with pytest.raises(ConfigError, match=r"the plan has chosen layout, .*, wire"):
        fullshard.shard_blocks(Layers(), plan=found, wire=INT8)


BESIDE = dataclasses.replace(
    CPU, device="cuda", in_background=True, op_s=0.0, host=Host(1 << 30, 1e9, 1e6)
)
AWAY = {"offload_policy": fullshard.CPUOffloadPolicy()}


def test_offload_moves_what_rests_and_takes_the_time_of_the_bus() -> None:
    there, here = of_layers(hardware=BESIDE, **AWAY), of_layers(hardware=BESIDE)
    shards = 4 * 64 * 64 * 4 // 4
    assert here.rest["parameters"] == there.host["parameters"] == shards
    assert here.rest["optimizer_state"] == 2 * shards
    assert there.host["optimizer_state"] == 2 * shards + 4 * 4  # and step counts
    assert here.host == {} and not {"parameters", "optimizer_state"} & there.rest.keys()
    # Each layer crosses the bus for forward and for backward; its gradients cross once, with flags.
    assert received(there)["host", "to_device"] == (8, 2 * shards)
    num_calls, nbytes = received(there)["host", "to_host"]
    assert num_calls == 4 and 0 < nbytes - shards < 4 * 16 * 4
    bus_s = sum(span.end_s - span.start_s for span, _ in there.spans if "to_" in span.what)
    assert bus_s == pytest.approx((2 * shards + nbytes) / 1e6)
    assert there.step_s > 2 * shards / 1e6 > here.step_s  # no work hides the copies
    host_s = sum(span.end_s - span.start_s for span, _ in there.spans if span.lane == "host")
    assert host_s > 7 * shards / 1e9  # AdamW reads four values and writes three


def test_what_does_not_fit_on_the_host_does_not_fit() -> None:
    host = dataclasses.replace(BESIDE.host, memory_nbytes=1000)
    found = of_layers(hardware=dataclasses.replace(BESIDE, host=host), **AWAY)
    assert not found.fits
    assert found.excess_nbytes == found.host_nbytes - 1000
    assert f"DOES NOT FIT, by {in_bytes(found.excess_nbytes)}" in str(found)
    assert "host     " in str(found) and found.as_json()["host_nbytes"] == found.host_nbytes


def test_offload_needs_a_host_and_has_none_on_a_cpu() -> None:
    assert of_layers(**AWAY).host == of_layers().host == {}
    with pytest.raises(ConfigError, match="has no host"):
        of_layers(hardware=dataclasses.replace(BESIDE, host=None), **AWAY)


def searched(budget_nbytes: int, hardware: Hardware = BESIDE, **options: Any) -> Plan:
    return of_layers(hardware=hardware, budget_nbytes=budget_nbytes, **options)


def test_a_search_offloads_only_what_would_not_fit() -> None:
    whole = of_layers(hardware=BESIDE).peak_nbytes
    assert searched(whole).choice.offload_policy == fullshard.OffloadPolicy()
    found = searched(whole * 7 // 10)
    assert found.fits and found.choice.offload_policy == fullshard.CPUOffloadPolicy()
    for fixed in (
        searched(whole * 7 // 10, offload_policy=fullshard.OffloadPolicy()),
        searched(whole * 7 // 10, hardware=dataclasses.replace(BESIDE, host=None)),
    ):
        assert not fixed.fits and "offloaded" not in str(fixed)
        assert fixed.peak_nbytes == min(one.peak_nbytes for one in fixed.tried)
        assert "nothing fits: the least is" in str(fixed)


def test_a_search_goes_on_where_offload_cannot_be_planned() -> None:
    def plan_without_offload(job: Job) -> Plan:
        if "CPUOffloadPolicy(" in repr(job.shard):
            raise UnsupportedError("plan: no offload")
        return make(job)

    make = planning._plan
    least = of_layers(hardware=BESIDE).peak_nbytes
    with mock.patch.object(planning, "_plan", plan_without_offload):
        found = searched(least * 7 // 10)
    assert not found.fits and "nothing fits: the least is" in str(found)


def test_a_search_makes_units_of_several_blocks_where_wires_are_late() -> None:
    late = dataclasses.replace(CPU, links=(Link(None, 1e12, 1e-3),))
    found = searched(1 << 30, hardware=late, reshard_after_forward=True)
    assert found.choice.blocks_per_unit == 4
    assert received(found)["shard", "all_gather"][0] == 2
    tried = {one.choice.blocks_per_unit: one.step_s for one in found.tried}
    assert tried[4] < tried[2] < tried[1]
    short = searched(of_layers().peak_nbytes, hardware=late)  # two blocks per unit would not fit
    assert short.choice.blocks_per_unit == 1 and short.fits


def test_flop_are_those_of_the_products() -> None:
    # Each layer has one product in forward and two in backward; the input needs no gradient.
    assert of_layers().flops == 2 * 2 * 64 * 64 * (4 * 3 - 1)


class Attends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(32, 96, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4).unbind()
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def test_attention_makes_no_scores_and_counts_half_if_causal() -> None:
    x = torch.ones(2, 256, 32, requires_grad=True)
    for hardware in ("cpu", "h100"):
        found = plan(Attends(), batch=x, world_size=2, hardware=hardware)
        scores = 2 * 4 * 256 * 256
        assert found.peak.held["activations"] < 4 * scores
        products = 3 * 2 * 2 * 256 * 32 * 96
        assert found.flops == pytest.approx(products + 3.5 * 2 * scores * 16 / 2, rel=0.35)


@pytest.mark.parametrize("is_causal", [False, True])
def test_attention_with_values_of_another_size_counts_half_if_causal(is_causal: bool) -> None:
    q, k = (torch.empty(2, 4, 256, 8, device="meta") for _ in range(2))
    v = torch.empty(2, 4, 256, 16, device="meta")
    aten = torch.ops.aten
    forward = aten._scaled_dot_product_efficient_attention.default
    out = forward(q, k, v, None, True, 0.0, is_causal)
    scores = 2 * 4 * 256 * 256
    expected = 2 * scores * (8 + 16) / (2 if is_causal else 1)
    assert flops_of(forward, (q, k, v, None, True, 0.0, is_causal), {}, out) == expected
    assert flops_of(forward, (q, k, v, None, True), {"is_causal": is_causal}, out) == expected
    backward = aten._scaled_dot_product_efficient_attention_backward.default
    given = (out[0], q, k, v, None, out[0], *out[1:], 0.0, [True, True, True, False], is_causal)
    assert flops_of(backward, given, {}, None) == 2.5 * expected


class Recomputes(Layers):
    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(
                lambda x, layer=layer: layer(x).sin().cos().exp(), x, use_reentrant=False
            )
        return x


def test_recomputation_costs_flop_and_saves_activations() -> None:
    x = torch.ones(512, 64)
    whole = plan(Layers(), batch=x, world_size=2, hardware="cpu")
    again = plan(Recomputes(), batch=x, world_size=2, hardware="cpu")
    assert again.flops == pytest.approx(whole.flops * (4 * 4 - 1) / (4 * 3 - 1))


class Positions(nn.Module):
    """Reads values of small tensors, as models of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 4)

    def forward(self, tokens: Tensor) -> Tensor:
        at = torch.arange(tokens.shape[1], device=tokens.device)[None]
        if (torch.diff(at) == 1).all() and int(tokens.max()) < 8:
            assert tokens[tokens > 2].numel() == 3  # a shape that depends on values
            return self.embed(tokens)
        raise AssertionError("values are wrong")


def test_values_of_constants_and_of_the_batch_are_known() -> None:
    tokens = torch.tensor([[0, 1, 2, 3, 4, 5]])
    assert plan(Positions(), batch=tokens, world_size=2, hardware="cpu").flops == 0


@pytest.mark.parametrize("counts", [False, True])
def test_values_on_the_cpu_are_computed_once(counts: bool) -> None:
    class Cuts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
            most = int(lengths.cpu().max())
            if counts:
                count = torch.tensor(most - 1)
                count += 1
                most = int(count)
            return self.layer(x[:, :most])

    batch = torch.ones(2, 9, 8), torch.tensor([3, 4])
    cut = plan(Cuts(), batch=batch, world_size=2, hardware="cpu")
    assert cut.flops == 6 * 2 * 4 * 8 * 8 - 2 * 2 * 4 * 8 * 8  # the input needs no gradient


def test_written_values_are_forgotten() -> None:
    class Writes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4))

        def forward(self, x: Tensor) -> Tensor:
            known = torch.zeros(4, device=x.device)
            view = known[1:]
            known.copy_(self.weight.detach())
            return x * self.weight if float(view.sum()) else x

    with pytest.raises(UnsupportedError, match="reads values that a dry run does not have"):
        plan(Writes(), batch=torch.ones(4), world_size=2, hardware="cpu")


def test_what_was_there_stays_as_it_was() -> None:
    model = Layers().double()
    before = {name: (param, param.clone()) for name, param in model.named_parameters()}
    of_layers()
    plan(model, batch=torch.ones(2, 64).double(), world_size=2, hardware="cpu")
    assert type(model) is Layers
    for name, param in model.named_parameters():
        was, values = before[name]
        assert param is was and torch.equal(param, values)
    assert not torch.distributed.is_initialized()


def test_a_failing_model_leaves_no_world_behind() -> None:
    class Fails(Layers):
        def forward(self, x: Tensor) -> Tensor:
            raise KeyError("of the user")

    with pytest.raises(KeyError, match="of the user"):
        plan(Fails(), batch=torch.ones(2, 64), world_size=2)
    assert not torch.distributed.is_initialized()
    assert of_layers().fits


def test_units_own_the_activations_that_they_leave() -> None:
    def at(doing: str, unit: str, nbytes: int) -> Moment:
        return Moment(0.0, {"activations": nbytes}, doing, unit)

    left = activations(
        [
            at("forward", "(root)", 0),
            at("forward", "a", 10),  # the 10 are the root's
            at("after the forward", "a", 25),
            at("forward", "b", 20),  # 5 of a's bytes were freed after it
            at("after the forward", "b", 50),
            at("after the forward", "(root)", 52),
            at("backward", "(root)", 90),
        ]
    )
    assert left == {"(root)": 12, "a": 10, "b": 30}


def test_it_says_when_memory_is_not_enough() -> None:
    small = dataclasses.replace(CPU, memory_nbytes=1000)
    found = of_layers(hardware=small)
    assert not found.fits
    assert "DOES NOT FIT" in str(found)
    assert of_layers().as_json()["fits"]


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"world_size": None}, ConfigError, "either world_size= or mesh="),
        ({"mesh": {"shard": 2}}, ConfigError, "either world_size= or mesh="),
        ({"world_size": 0}, ConfigError, "world_size is 0"),
        ({"rank": 4}, ConfigError, "rank=4"),
        ({"accumulate": 0}, ConfigError, "accumulate is 0"),
        ({"hardware": "abacus"}, ConfigError, "expected one of"),
        ({"shard": lambda m, mesh: None}, ConfigError, "made no unit"),
        ({"shard": lambda m, mesh: None, "layout": fullshard.Ragged()}, ConfigError, "layout"),
        ({"layuot": 1}, TypeError, "layuot"),
    ],
)  # fmt: skip
def test_refusals(options: dict[str, Any], error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        of_layers(**options)


def test_what_is_no_model_is_refused() -> None:
    with pytest.raises(ArgumentTypeError, match="expected an nn"):
        plan(torch.ones(2), batch=None, world_size=2)  # type: ignore[arg-type]


def test_parameters_of_the_model_cannot_be_ignored_in_its_copy() -> None:
    model = Layers()
    with pytest.raises(ConfigError, match="a copy of it is planned"):
        plan(model, batch=torch.ones(2, 64), world_size=2, ignored_params={model.layers[0].weight})


def test_a_sharded_model_is_refused() -> None:
    model = Layers()
    seen: list[nn.Module] = []

    def shard(copied: nn.Module, mesh: Any) -> None:
        fullshard.fully_shard(copied, mesh=mesh)
        seen.append(copied)

    of_layers(shard=shard)
    with pytest.raises(ConfigError, match="is sharded already"):
        plan(seen[0], batch=torch.ones(2, 64), world_size=2)
    assert type(model) is Layers


def test_hardware_goes_through_a_file(tmp_path: Path) -> None:
    path = tmp_path / "machine.json"
    PRESETS["h100"].save(path)
    assert hardware_of(path) == PRESETS["h100"]
    path.write_text("[]")
    with pytest.raises(ConfigError, match="no description of hardware"):
        hardware_of(path)


NODE = Hardware(
    "node", 1, {"float32": 1.0}, 1.0, links=(Link(8, 100.0, 0.0), Link(None, 10.0, 0.0))
)


def test_a_gather_within_a_node_takes_what_comes_from_others() -> None:
    assert NODE.exchange_s("all_gather", tuple(range(8)), 800) == pytest.approx(7.0)
    assert NODE.exchange_s("all_gather", (3,), 800) == 0


def test_a_gather_over_nodes_takes_what_comes_in_divided_among_neighbours() -> None:
    # 16 ranks, 100 bytes each: 800 bytes come in over 8 wires with 10 bytes a second each.
    assert NODE.exchange_s("all_gather", tuple(range(16)), 1600) == pytest.approx(15.0)
    # One rank a node: everything comes in over the rank's own wire.
    assert NODE.exchange_s("all_gather", tuple(range(0, 32, 8)), 400) == pytest.approx(30.0)


@given(st.integers(1, 64), st.integers(1, 1 << 30))
def test_means_of_whole_values_take_twice_as_long(world: int, nbytes: int) -> None:
    ranks = tuple(range(world))
    once = NODE.exchange_s("reduce_scatter_mean", ranks, nbytes)
    assert NODE.exchange_s("all_reduce_mean", ranks, nbytes) == pytest.approx(2 * once)


@given(st.floats(1e-9, 1e6), st.integers(0, 10**15))
def test_figures_have_three_digits(seconds: float, nbytes: int) -> None:
    for text, scales, value in (
        (in_seconds(seconds), {"s": 1, "ms": 1e-3, "µs": 1e-6, "ns": 1e-9}, seconds),
        (in_bytes(nbytes), {"B": 1, "kB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12}, nbytes),
    ):
        number, unit = text.split()
        assert float(number) * scales[unit] == pytest.approx(value, rel=6e-3, abs=5e-10)


def test_tables_line_up() -> None:
    lines = list(table(("name", "n"), [("a", "1"), ("bcdef", "10")]))
    assert lines == ["name    n", "a       1", "bcdef  10"]


# Real models: sizes by hand, and plans for them on a small machine.


def llama_70b(layers: int = 80) -> tuple[nn.Module, int]:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=128256, hidden_size=8192, intermediate_size=28672, num_hidden_layers=layers,
        num_attention_heads=64, num_key_value_heads=8, max_position_embeddings=8192,
        use_cache=False,
    )  # fmt: skip
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    attention, mlp = 8192 * (8192 + 2 * 1024 + 8192), 3 * 8192 * 28672
    return model, layers * (attention + mlp + 2 * 8192) + 2 * 128256 * 8192 + 8192


def deepseek_v3() -> tuple[nn.Module, int]:
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    config = DeepseekV3Config(use_cache=False)
    config._experts_implementation = "grouped_mm"
    with torch.device("meta"):
        model = DeepseekV3ForCausalLM(config)
    h, heads = 7168, 128
    attention = h * 1536 + 1536 + 1536 * heads * 192 + h * 576 + 512 + 512 * heads * 256
    attention += heads * 128 * h
    dense, expert = 3 * h * 18432, 3 * h * 2048
    moe = 256 * expert + expert + 256 * h
    return model, 61 * (attention + 2 * h) + 3 * dense + 58 * moe + 2 * 129280 * h + h


@pytest.mark.parametrize(
    ("make", "world", "layout"),
    [
        pytest.param(llama_70b, 1024, fullshard.PerParameter(), id="llama 70b, 1024"),
        pytest.param(llama_70b, 16384, fullshard.PerParameter(), id="llama 70b, 16384"),
        pytest.param(deepseek_v3, 4096, fullshard.Ragged("row"), id="deepseek v3, 4096"),
    ],
)  # fmt: skip
def test_large_models(make: Any, world: int, layout: Any) -> None:
    model, numel = make()
    tokens = 2048
    ids = torch.empty(1, tokens, dtype=torch.long, device="meta")
    found = plan(
        model, batch={"input_ids": ids, "labels": ids}, world_size=world, mp_policy=BF16,
        layout=layout,
    )  # fmt: skip
    assert sum(unit.numel for unit in found.units) == numel
    padded = sum(unit.numel * (1 + unit.padding) for unit in found.units)
    shard = padded / world
    assert found.rest["parameters"] == pytest.approx(4 * shard, rel=2e-3)
    assert found.rest["optimizer_state"] == pytest.approx(8 * shard, rel=0.02)
    # Gathers twice in bf16, except the last block, head and root; reductions in fp32.
    traffic = received(found)
    most = 2 * 2 * padded * (world - 1) / world
    assert 0.9 * most <= traffic["shard", "all_gather"][1] <= most
    reduced = traffic["shard", "reduce_scatter_mean"][1]
    assert reduced == pytest.approx(4 * padded * (world - 1) / world, rel=0.05)
    if make is llama_70b:
        head_and_blocks = numel - 128256 * 8192
        attention = 80 * 3.5 * 2 * 64 * tokens * tokens * 256 / 2
        assert found.flops == pytest.approx(6 * tokens * head_and_blocks + attention, rel=0.02)
    assert math.isfinite(found.step_s)


def test_a_published_training_is_reproduced() -> None:
    """Llama 2 7B on 128 A100: 3,700 tokens a second and GPU, 57 % of the device's FLOP/s.

    Source: research.ibm.com/blog/pytorch-fsdp, 13 March 2024. Its hardware and model FLOP/s are
    equal, so nothing was recomputed. Two sequences of 4,096 tokens a GPU are an assumption.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=32000, hidden_size=4096, intermediate_size=11008, num_hidden_layers=32,
        num_attention_heads=32, use_cache=False,
    )  # fmt: skip
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    ids = torch.empty(2, 4096, dtype=torch.long, device="meta")
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16)
    found = plan(
        model, batch={"input_ids": ids, "labels": ids}, world_size=128, hardware="a100-80gb",
        mp_policy=policy,
    )  # fmt: skip
    tokens_per_s = ids.numel() / found.step_s
    numel = sum(unit.numel for unit in found.units)
    utilization = tokens_per_s * (6 * numel + 12 * 32 * 4096 * 4096) / 312e12
    assert found.fits
    assert tokens_per_s == pytest.approx(3700, rel=0.1)
    assert utilization == pytest.approx(0.57, rel=0.1)
