"""Accelerate shards on CPUs on request while PyTorch is patched.

Training with Accelerate and with trainers that build on it is tested in ``tests/frameworks``. An
``Accelerator`` changes its process for good, so each program runs in its own processes.
"""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from fullshard.compat import patch_torch
from tests.kit.examples import TIMEOUT_S, TORCHRUN

PROGRAM = """
import os, sys
import torch, torch.nn.functional as F
from torch import nn
from accelerate import Accelerator
from accelerate.utils import FullyShardedDataParallelPlugin

class Block(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(8, 8), nn.GELU())

how = sys.argv[1]
options = {"auto_wrap_policy": "transformer_based_wrap", "transformer_cls_names_to_wrap": ["Block"]}
if how == "env":
    os.environ |= {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2",
                   "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
                   "FSDP_TRANSFORMER_CLS_TO_WRAP": "Block"}
    plugin = None
elif how == "none":
    plugin = None
else:
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, **options)
accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
torch.manual_seed(0)
model = nn.Sequential(Block(), Block(), nn.Linear(8, 2))
model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
for step in range(3):
    seed = step + 10 * accelerator.process_index
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(seed))
    loss = F.cross_entropy(model(x), torch.tensor([0, 1, 0, 1]))
    accelerator.backward(loss)
    accelerator.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
shapes = [tuple(value.shape) for value in accelerator.get_state_dict(model).values()]
units = [type(m).__mro__ for m in model.modules()]
ours = sum(any(cls.__module__.startswith("fullshard") for cls in mro) for mro in units)
if accelerator.is_main_process:
    assert shapes == [(8, 8), (8,), (8, 8), (8,), (2, 8), (2,)], shapes
    print(f"{accelerator.distributed_type.value} {ours} {loss.item():.6f}")
accelerator.end_training()
"""
# A gloo thread releases a Python object after its last collective. If the interpreter is shutting
# down meanwhile, PyTorch aborts ("terminate called without an active exception"), with or without
# fullshard.
AT_ONCE = """
sys.stdout.flush()
os._exit(0)
"""


def run(folder: Path, source: str, *arguments: str, patched: bool) -> tuple[str, int, float]:
    """Run a program on two ranks; return the kind of training, our number of units, the loss."""
    (folder / "program.py").write_text(source + AT_ONCE)
    compat = ("-m", "fullshard.compat") if patched else ()
    command = [sys.executable, *TORCHRUN, *compat, "program.py", *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=TIMEOUT_S)
    found = re.search(r"^([A-Z_]+) (\d+) ([\d.]+)$", done.stdout, re.MULTILINE)
    assert done.returncode == 0 and found, done.stdout + done.stderr
    return found[1], int(found[2]), float(found[3])


def test_the_environment_shards_on_cpus(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    kind, units, loss = run(tmp_path, PROGRAM, "env", patched=True)
    assert kind == "FSDP" and units == 3
    kind, units, alone = run(tmp_path, PROGRAM, "plugin", patched=False)
    assert kind == "MULTI_CPU" and units == 0  # DDP, which PyTorch's users get without a warning
    assert loss == pytest.approx(alone, abs=1e-5)


def test_who_asks_for_no_sharding_gets_none(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    kind, units, _ = run(tmp_path, PROGRAM, "none", patched=True)
    assert kind == "MULTI_CPU" and units == 0


def accelerate_like(monkeypatch: pytest.MonkeyPatch, has_fsdp: bool) -> Any:
    """Return a stand-in for the module ``accelerate.state``."""
    names = {"MULTI_CPU": "cpu", **({"FSDP": "fsdp"} if has_fsdp else {})}
    kinds: Any = type("Kind", (), {})
    for name in names:
        setattr(kinds, name, kinds())
        getattr(kinds, name).name = name
    state = ModuleType("accelerate.state")

    class AcceleratorState:
        def __init__(self, fsdp_plugin: Any = None) -> None:
            self.distributed_type = kinds.MULTI_CPU
            self.mixed_precision = "no"

    vars(state).update(
        AcceleratorState=AcceleratorState, PartialState=SimpleNamespace(_shared_state={})
    )
    monkeypatch.setitem(sys.modules, "accelerate.state", state)
    return state


def test_what_was_imported_before_is_changed_and_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    state = accelerate_like(monkeypatch, has_fsdp=True)
    theirs = state.AcceleratorState.__init__
    finders = list(sys.meta_path)
    with patch_torch():
        assert state.AcceleratorState("plugin").distributed_type.name == "FSDP"
        assert state.AcceleratorState().distributed_type.name == "MULTI_CPU"
    assert state.AcceleratorState.__init__ is theirs
    assert state.AcceleratorState("plugin").distributed_type.name == "MULTI_CPU"
    monkeypatch.delitem(sys.modules, "accelerate.state")
    with patch_torch():
        assert len(sys.meta_path) == len(finders) + 1
        found = sys.meta_path[0].find_spec("accelerate.state", None)  # type: ignore[attr-defined]
        assert found is None or isinstance(found, ModuleSpec)
    assert sys.meta_path == finders


def test_a_version_that_cannot_be_changed_warns(monkeypatch: pytest.MonkeyPatch) -> None:
    state = accelerate_like(monkeypatch, has_fsdp=False)
    with patch_torch(), pytest.warns(UserWarning, match="takes DDP on CPUs"):
        assert state.AcceleratorState("plugin").distributed_type.name == "MULTI_CPU"
