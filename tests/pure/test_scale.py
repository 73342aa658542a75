"""Growth of costs: the fit of exponents, each curve at its smallest, and equal collectives."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench import costs, order, scale
from fullshard.checkpoint import latest, list_checkpoints
from fullshard.checkpoint.format.examine import numbered
from fullshard.checkpoint.format.manifest import MANIFEST, Contents, Manifest


@pytest.mark.parametrize("power", [0.0, 0.5, 1.0, 2.0])
def test_the_exponent_of_a_power_is_found(power: float) -> None:
    sizes = [10, 30, 100, 300, 1000]
    fitted = scale.exponent(sizes, [3e-3 * size**power for size in sizes])
    assert fitted == pytest.approx(power, abs=1e-9)


def test_only_the_larger_half_of_the_sizes_is_fitted() -> None:
    sizes = [1, 10, 100, 1000, 10000]
    assert scale.exponent(sizes, [7, 1, 5, 50, 500]) == pytest.approx(1)
    assert scale.exponent([10, 100], [1, 10]) == pytest.approx(1)


def test_exponents_have_names() -> None:
    assert scale.growth(0.02) == scale.growth(-0.02) == "constant"
    assert scale.growth(0.968) == "n^0.97"
    assert scale.growth(2) == "n^2.00"


@pytest.mark.parametrize("name", scale.CURVES)
def test_each_curve_runs_at_its_smallest(name: str) -> None:
    curve = scale.CURVES[name]
    smallest = {"bytes": 1 << 12, "ranks": 2}.get(curve.grows_in, curve.sizes[0])
    if name in ("step", "step-calls", "plan"):
        smallest = 8
    assert curve.cost(smallest) > 0
    assert list(curve.sizes) == sorted(curve.sizes)


def test_all_ranks_issue_the_same_collectives_whatever_they_skip() -> None:
    proof = order.prove(256)
    assert not proof.apart
    assert proof.behaviors > 100
    assert proof.collectives > 100


def test_a_rank_that_differs_is_noticed() -> None:
    def behavior(rank: int) -> order.Behavior:
        own = order.drawn(rank)
        return own._replace(skips=(frozenset({3}),)) if rank == 77 else own  # not skip-tolerant

    ((rank, where),) = order.prove(128, behavior).apart
    assert rank == 77
    assert "unshard 5, expected unshard 3" in where


def test_a_rank_in_the_order_of_another_stage_is_noticed() -> None:
    programs = {stage: order.collectives(order.Behavior(stage, (frozenset(),))) for stage in (0, 3)}
    assert programs[0] != programs[3]


def test_the_newest_checkpoint_is_found_by_opening_one_manifest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    opened: list[int] = []
    read = Manifest.from_json

    def count(data: bytes) -> Manifest:
        opened.append(len(data))
        return read(data)

    monkeypatch.setattr(Manifest, "from_json", count)
    monkeypatch.setattr(costs, "TENSORS", 3)

    def look(root: Path) -> float:
        assert [(one.step, one.name, one.time) for one in numbered(root)] == [
            (step, f"step-{step:06}", 1e9 + step) for step in range(1, 21)
        ]
        assert not opened
        assert latest(root) == root / "step-000020"
        assert len(opened) == 1
        assert len({one.digest for one in numbered(root)}) == 20
        (root / "step-000020" / MANIFEST).write_text("{}")
        (root / "step-000019" / "rank-00003.safetensors").unlink()
        text = (root / "step-000018" / MANIFEST).read_bytes()
        (root / "step-000018" / MANIFEST).write_bytes(text.replace(b"blocks.0", b"blocks.9"))
        opened.clear()
        assert latest(root) == root / "step-000017" == list_checkpoints(root)[-1].path
        return len(opened)

    assert costs.at_root(20, look) == 3 + 20 - 1 + 1


def test_tensors_of_the_same_ranks_share_the_set_of_these_ranks() -> None:
    manifest = costs.manifest_of(64)
    assert len({id(ranks) for held in manifest._held.values() for _, ranks in held}) == 1


def test_tensors_that_some_contents_share_have_the_ranks_of_all() -> None:
    whole = costs.manifest_of(6)
    (one, values), names = whole.contents[0], whole.names()
    parts = [
        {n: one[n] for n in names[:2]},
        {n: one[n] for n in names[1:3]},
        {names[1]: one[names[1]]},
    ]
    files = [file._replace(contents=file.rank // 2) for file in whole.files]
    contents = [Contents(part, values) for part in parts]
    manifest = Manifest(1, 1.0, {}, contents, files, None)
    ranks = {name: held[0][1] for name, held in manifest._held.items()}
    assert ranks == {names[0]: {0, 1}, names[1]: {0, 1, 2, 3, 4, 5}, names[2]: {2, 3}}
