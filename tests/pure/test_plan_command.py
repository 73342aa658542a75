"""``fullshard plan``: its output, exit codes and refusals."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from fullshard.cli import main
from fullshard.plan import hardware_of, in_bytes

TINY = ["2m", "--hardware", "cpu", "--seq", "16"]


def linear() -> nn.Module:
    return nn.Linear(4, 4)


def with_its_batch() -> tuple[nn.Module, Tensor]:
    return nn.Linear(4, 4), torch.empty(2, 4)


def test_it_tells_memory_wires_and_units(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *TINY, "--world-size", "4"]) == 0
    told = capsys.readouterr().out
    assert "rank 0 of replicate 1 x shard 4 on cpu" in told
    assert "fits" in told and "all_gather" in told and "blocks.0 to blocks.3 (4)" in told


def test_json_has_the_same_and_a_picture_is_drawn(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    picture = tmp_path / "memory.svg"
    mesh = ["--mesh", "replicate=2,shard=2", "--json", "--picture", str(picture)]
    assert main(["plan", *TINY, *mesh]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["mesh"] == {"replicate": 2, "shard": 2}
    assert told["rest"]["parameters"] == 2_557_632 * 4 // 2
    drawn = picture.read_text(encoding="utf-8")
    assert drawn.lstrip().startswith("<?xml")
    titles = re.findall(r"<!-- (.+) -->", drawn)
    assert "2,557,632 parameters, rank 0, mesh replicate 2 x shard 2, on cpu" in titles
    assert f"peak, {in_bytes(told['peak_nbytes'])}" in titles
    assert "#0072b2" in drawn and "#e69f00" in drawn  # colors of parameters and activations


@pytest.mark.parametrize(
    ("arguments", "advice"),
    [
        (
            ("--batch", "64", "--seq", "128", "--world-size", "64"),
            "activations; less of it: checkpoint_blocks",
        ),
        (("--seq", "64", "--world-size", "1"), "optimizer state; less of it: more ranks"),
    ],
)
def test_a_plan_that_does_not_fit_says_what_to_do(
    arguments: tuple[str, ...],
    advice: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    small = replace(hardware_of("cpu"), memory_nbytes=10**6, fixed_nbytes=0)
    small.save(tmp_path / "small.json")
    command = ["plan", "2m", *arguments, "--dtype", "fp32", "--hardware"]
    assert main([*command, str(tmp_path / "small.json")]) == 1
    told = capsys.readouterr().out
    assert f"to fit   most of the peak is {advice}" in told and "--budget" in told
    assert main([*command, "cpu"]) == 0
    assert "to fit" not in capsys.readouterr().out


def test_muon_has_one_state_of_each_element_of_a_matrix(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["plan", *TINY, "--world-size", "4", "--json"]
    kept = []
    for optimizer in ("adamw", "muon"):
        assert main([*arguments, "--optimizer", optimizer]) == 0
        kept.append(json.loads(capsys.readouterr().out)["rest"]["optimizer_state"])
    matrices = 4 * (4 * 192 * 192 + 3 * 192 * 512)
    assert kept[0] - kept[1] == 4 * matrices // 4 + 4 * 16  # and AdamW's step counts


@pytest.mark.parametrize("model", ["2m", f"{__name__}:with_its_batch"])
@pytest.mark.parametrize("budget", [(), ("--budget", "1GB")])
def test_a_wire_is_planned_and_kept_by_a_search(
    model: str, budget: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["plan", model, *TINY[1:], "--world-size", "4", "--json", *budget]
    sent = []
    for wire in ((), ("--wire", "gather=int8,reduce=int8")):
        assert main([*arguments, *wire]) == 0
        told = json.loads(capsys.readouterr().out)
        assert ("wire gather=int8" in (told["choice"] or "")) == (bool(wire) and bool(budget))
        sent.append({one["what"]: one["received_nbytes"] for one in told["traffic"]})
    assert sent[1]["all_to_all"] > 0 and "reduce_scatter_mean" not in sent[1]
    if model == "2m":
        assert sent[1]["all_gather"] < 0.6 * sent[0]["all_gather"]  # 1 byte, not 2; and scales


def test_a_function_gives_the_model_and_its_batch(capsys: pytest.CaptureFixture[str]) -> None:
    name = f"{__name__}:with_its_batch"
    assert main(["plan", name, "--world-size", "2", "--dtype", "fp32", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["units"][0]["numel"] == 20
    assert told["flops"] == 2 * 2 * 2 * 4 * 4  # forward, and the gradient of the weight


def test_a_budget_that_is_too_small_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *TINY, "--world-size", "2", "--budget", "1MB"]) == 1
    assert "nothing fits: the least is" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["2m"], "either --world-size N or --mesh"),
        (["2m", "--world-size", "2", "--mesh", "shard=2"], "either --world-size N or --mesh"),
        (["2m", "--mesh", "shard"], "expected each dim once, with its size"),
        (["2m", "--mesh", "shard=2,shard=4"], "expected each dim once, with its size"),
        (["2m", "--mesh", "tp=2"], "have the dims replicate and shard"),
        (["3m", "--world-size", "2"], "--model is 3m"),
        (["2m", "--world-size", "2", "--hardware", "abacus"], "expected one of"),
        (["2m", "--world-size", "2", "--budget", "much"], "expected bytes such as 80GB"),
        (["2m", "--mesh", "shard=2", "--budget", "1GB"], "--budget chooses"),
        (["2m", "--world-size", "2", "--wire", "int8"], "expected some of gather=, reduce="),
        (["2m", "--world-size", "2", "--wire", "gather=int4"], "in 4 bits only gradients"),
        (["no.such:thing", "--world-size", "2"], "no such function"),
        ([f"{__name__}:TINY", "--world-size", "2"], "is a list, expected a function"),
        ([f"{__name__}:linear", "--world-size", "2", "--checkpoint-activations"], "build them in"),
    ],
)
def test_refusals(arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *arguments]) == 2
    assert says in capsys.readouterr().err
