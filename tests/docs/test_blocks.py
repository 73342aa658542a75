"""Each program on a page runs on two ranks, or the page says why not.

This file runs each block of Python, unless another file runs the blocks of the page, or the line
before the block is ``<!-- not run: REASON -->``. A block of text right after a program is its
output.
"""

from __future__ import annotations

import re
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from fullshard.compat import patch
from tests.ranks.pool import RankPool

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
ELSEWHERE = {  # the start of a page's path, and the file that runs its blocks
    "quickstart.md": "tests/ranks/test_examples.py",
    "recipes/": "tests/ranks/test_recipes.py",
}


class Block(NamedTuple):
    """A block of Python on a page, and the names that the page assumes to exist."""

    page: str
    number: int
    source: str
    reason: str
    printed: str


def blocks_of(page: Path) -> list[Block]:
    name = page.relative_to(DOCS).as_posix()
    found = re.findall(
        r"^(?:<!-- not run: ([^\n]+) -->\n)?```python\n(.*?)^```\n(?:\n```(?:text)?\n(.*?)^```)?",
        page.read_text(),
        re.DOTALL | re.MULTILINE,
    )
    assert len(found) == len(re.findall(r"^ *```python", page.read_text(), re.MULTILINE)), name
    return [Block(name, n, source, why, said) for n, (why, source, said) in enumerate(found)]


BLOCKS = [block for page in sorted(DOCS.rglob("*.md")) for block in blocks_of(page)]
HERE = [one for one in BLOCKS if not one.reason and not one.page.startswith(tuple(ELSEWHERE))]

EVERYWHERE = """
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import fullshard
from fullshard import DataParallelMeshDims, Ragged, fully_shard
from fullshard.optim import Muon, OwnedOptimizer


def build():
    return nn.Sequential(*(nn.Linear(16, 16) for _ in range(3)))


model = build()
block = build()
"""

SHARDED = """
fullshard.shard_blocks(model)
model(torch.ones(2, 16)).square().mean().backward()
"""

BEFORE = {  # names that a page assumes to exist, by page and number of the block
    "compat.md 0": """
def build_and_shard():
    from torch.distributed.fsdp import fully_shard
    assert fully_shard.__module__.startswith("fullshard")
    return fully_shard(build())
""",
    "faults.md 0": """
from typing import NamedTuple

fullshard.shard_blocks(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loss_of = nn.functional.mse_loss


class Batch(NamedTuple):
    x: torch.Tensor
    y: torch.Tensor


batches = [Batch(torch.ones(4, 16), torch.zeros(4, 16)) for _ in range(2)]
""",
    "layouts.md 0": """
block, whole = None, fully_shard


def fully_shard(_block, **options):  # three ways to shard one block
    assert isinstance(whole(build(), **options), fullshard.FSDPModule)


from fullshard import Ragged
""",
    "meshes.md 1": """
mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
fully_shard(model, mesh=mesh)
""",
    "meshes.md 7": """
class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(16, 8), nn.Linear(8, 16, bias=True)
        self.head.weight = self.embedding.weight


model = Tied()
""",
    "muon.md 0": "model.append(nn.Linear(16, 4))\n" + SHARDED,
    "muon.md 1": """
class Expert(nn.Module):
    def __init__(self):
        super().__init__()
        self.router, self.qkv = nn.Linear(16, 16), nn.Linear(16, 48)


model = nn.ModuleDict({"block": Expert(), "head": nn.Linear(16, 4)})
fully_shard(model["block"])
""",
    "optimizers.md 0": SHARDED,
    "optimizers.md 1": SHARDED + "from fullshard.optim import ShardedOptimizer\n",
    "optimizers.md 2": SHARDED,
    "optimizers.md 3": "",
    "planning.md 0": "",
}


def run_block(source: str) -> str:
    """Run a block on this rank, and return its output."""
    names: dict[str, Any] = {"__name__": "__main__"}
    try:
        with redirect_stdout(StringIO()) as printed:
            exec(compile(source, "block", "exec"), names)
    finally:
        while patch._patched is not None:  # a leftover patch would reach the tests that follow
            patch._patched.wanted_by[-1].undo()
    return printed.getvalue()


def is_patched() -> bool:
    return patch._patched is not None


def test_a_page_that_patches_pytorch_leaves_no_patch(pool: RankPool) -> None:
    pool.run(2, run_block, "from fullshard.compat import patch_torch\npatch_torch()\npatch_torch()")
    assert pool.run(2, is_patched) == [False, False]


@pytest.mark.parametrize("block", HERE, ids=lambda one: f"{one.page} {one.number}")
def test_a_block_of_a_page_runs(block: Block, pool: RankPool) -> None:
    before = EVERYWHERE + BEFORE.get(f"{block.page} {block.number}", "")
    if "torchao" in block.source:
        pytest.importorskip("torchao")
    first, second = pool.run(2, run_block, before + block.source)
    assert first == second
    if block.printed:
        assert first == block.printed


def test_other_files_run_what_is_not_run_here() -> None:
    for start, file in ELSEWHERE.items():
        if any(block.page.startswith(start) for block in BLOCKS):
            assert start.rstrip("/") in (ROOT / file).read_text()


def test_the_names_that_pages_take_for_granted_are_used() -> None:
    assert set(BEFORE) <= {f"{one.page} {one.number}" for one in HERE}
    assert len(HERE) > 10
    assert any(one.printed for one in HERE)
