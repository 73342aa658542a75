"""``python -m fullshard.compat`` runs unedited programs on our engine.

The tests cover the start of programs, so each program runs in its own processes.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.kit.examples import TORCHRUN, run

HEAD = """
import os, pickle, sys
import torch, torch.distributed as dist
import neighbor  # a module beside the script
from torch import nn

class Net(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(4, 4), nn.Linear(4, 2))

def build():
    torch.manual_seed(0)
    return Net()

assert __name__ == "__main__" and sys.modules["__main__"].Net is Net
assert pickle.loads(pickle.dumps(Net)) is Net
assert sys.argv[1:] == ["--steps", "3"] and os.path.samefile(sys.argv[0], __file__)
assert os.path.isabs(__file__)
dist.init_process_group("gloo")
"""
TAIL = """
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(int(sys.argv[2])):
    x = torch.ones(3, 4) * (dist.get_rank() + 1)
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
dist.all_reduce(loss)
kinds = sorted({cls.__module__.split(".")[0] for m in model.modules() for cls in type(m).__mro__
                if cls.__name__ in ("FSDPModule", "FullyShardedDataParallel")})
if dist.get_rank() == 0:
    print(neighbor.WORD, kinds, f"{loss.item():.6f}")
dist.destroy_process_group()
"""
PROGRAMS = {
    "fsdp2": """
from torch.distributed.fsdp._fully_shard._fully_shard import fully_shard
model = build()
for layer in model:
    fully_shard(layer)
fully_shard(model)
""",
    "fsdp1": """
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
model = FSDP(build(), auto_wrap_policy=ModuleWrapPolicy({nn.Linear}), device_id=torch.device("cpu"))
""",
}
PLAIN = """
model = nn.parallel.DistributedDataParallel(build())
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with the programs; each imports a module from its own folder."""
    beside = tmp_path / "programs"
    beside.mkdir()
    (beside / "neighbor.py").write_text('WORD = "found"\n')
    for name, lines in {**PROGRAMS, "ddp": PLAIN}.items():
        (beside / f"{name}.py").write_text(HEAD + lines + TAIL)
    return tmp_path


@pytest.mark.parametrize(
    "name",
    PROGRAMS,
)
def test_an_unedited_program_runs_on_ours(folder: Path, name: str) -> None:
    arguments = (f"programs/{name}.py", "--steps", "3")
    ours = run(folder, *TORCHRUN, "-m", "fullshard.compat", *arguments)
    assert ours.startswith("found ['fullshard'] ")
    alone = run(folder, *TORCHRUN, "programs/ddp.py", "--steps", "3")
    assert alone.startswith("found [] ")
    assert float(ours.split()[-1]) == pytest.approx(float(alone.split()[-1]), abs=1e-5)


def test_a_module_runs_by_its_name(tmp_path: Path) -> None:
    lines = "import sys, torch.distributed.fsdp as f\nprint(__name__, sys.argv[1:], f.fully_shard)"
    (tmp_path / "program.py").write_text(lines)
    printed = run(tmp_path, "-m", "fullshard.compat", "-m", "program", "a", "b")
    assert printed.startswith("__main__ ['a', 'b'] <function fully_shard")


def test_the_status_of_a_program_is_passed_on(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text("raise SystemExit(7)")
    for arguments, status in ((["program.py"], 7), ([], 2), (["--help"], 0)):
        command = [sys.executable, "-m", "fullshard.compat", *arguments]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
        assert done.returncode == status, done.stderr
        assert ("usage" in done.stdout + done.stderr) == (status != 7)
