"""``patch_torch`` replaces PyTorch's names and nothing else, and restores them."""

from __future__ import annotations

import functools
import subprocess
import sys
import warnings
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch.distributed as dist
import torch.distributed.fsdp as fsdp
from torch import nn
from torch.distributed._composable import replicate_with_fsdp
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointWrapper,
    apply_activation_checkpointing,
)
from torch.distributed.fsdp._fully_shard import _fsdp_api, _fsdp_common, _fsdp_state, _fully_shard
from torch.distributed.pipelining import stage

import fullshard
from fullshard import wrap
from fullshard.compat import patch_torch
from fullshard.compat.ineffective import IneffectivePatches
from fullshard.compat.names import OURS, SHOWN
from fullshard.compat.states import torch_file
from tests.versions import TORCH

THEIRS = {name: getattr(fsdp, name) for name in fsdp.__all__}
FSDP2 = set(fsdp._fully_shard.__all__)
SINCE = {
    "DataParallelMeshDims": (2, 13),
    "GradientReductionHandle": (2, 15),
    "ShardPlacementResult": (2, 13),
}
"""The PyTorch versions that introduced names."""
FSDP1 = (*fsdp.api.__all__, "FullyShardedDataParallel", "OptimStateKeyType")


@pytest.fixture(autouse=True)
def _torch_is_as_before() -> Iterator[None]:
    yield
    assert {name: getattr(fsdp, name) for name in fsdp.__all__} == THEIRS
    assert not hasattr(fullshard.fully_shard, "state")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return a folder on ``sys.path``; forget the modules that the test imported."""
    monkeypatch.syspath_prepend(tmp_path)
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        del sys.modules[name]


def module_of(folder: Path, name: str, source: str) -> Any:
    (folder / f"{name}.py").write_text(source)
    return __import__(name)


def test_every_name_is_ours() -> None:
    with patch_torch():
        for name in fsdp.__all__:
            assert getattr(fsdp, name) is getattr(fullshard, name)
        for name in FSDP2:
            assert getattr(fsdp._fully_shard, name) is getattr(fullshard, name)
        for name in FSDP1:
            assert getattr(fsdp.fully_sharded_data_parallel, name) is getattr(fullshard, name)
        for name in fsdp.api.__all__:
            assert getattr(fsdp.api, name) is getattr(fullshard, name)
        for name in fullshard.wrap.__all__:
            theirs, own = getattr(fsdp.wrap, name), getattr(fullshard.wrap, name)
            assert theirs is own or (name == "CustomPolicy" and issubclass(theirs, own))
        ours = fullshard.optim.ShardedGradScaler
        assert fsdp.sharded_grad_scaler.ShardedGradScaler is ours
        for name in ("AllGather", "ReduceScatter", "Comm"):
            assert getattr(_fsdp_api, name) is getattr(fullshard, name)
        for name in SINCE:
            assert getattr(_fsdp_common, name, None) in (None, getattr(fullshard, name))


def test_every_name_of_the_table_is_one_of_this_pytorch() -> None:
    new = {name for name, version in SINCE.items() if TORCH < version}
    for module, names in (*OURS.items(), *SHOWN.items()):
        assert names.keys() - new <= vars(import_module(module)).keys()


def test_the_page_names_what_is_replaced() -> None:
    page = (Path(__file__).parents[2] / "docs" / "compat.md").read_text()
    fsdp2 = set(OURS["torch.distributed.fsdp"]) - set(FSDP1)
    others = {"FullyShardedDataParallel", "ShardedGradScaler", "torch.distributed.fsdp.wrap"}
    assert [name for name in fsdp2 | others if f"`{name}`" not in page] == []


def test_what_implements_pytorchs_fsdp_keeps_its_names() -> None:
    with patch_torch():
        for module in (_fully_shard, replicate_with_fsdp):
            assert vars(module)["FSDPModule"] is THEIRS["FSDPModule"]
        assert replicate_with_fsdp.FSDPModule is THEIRS["FSDPModule"]
        assert issubclass(replicate_with_fsdp.ReplicateModule, THEIRS["FSDPModule"])


@pytest.mark.parametrize(
    ("folder_name", "is_told"), [("spmd_types", False), ("of_a_program", True)]
)
def test_functions_that_pytorch_imports_are_no_replacements(
    folder_name: str, is_told: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "site-packages" / folder_name / "axes.py"
    names: dict[str, Any] = {}
    exec(compile("def flatten_axes(axes): return axes", str(path), "exec"), names)
    of_pytorch = torch_file("_fully_shard._fsdp_param")
    monkeypatch.setattr(of_pytorch, "flatten_axes", names["flatten_axes"], raising=False)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        IneffectivePatches().warn()
    assert bool(told) == is_told


def test_modules_that_imported_before_have_ours_meanwhile(folder: Path) -> None:
    lines = "from torch.distributed.fsdp import FSDPModule, fully_shard as shard, ShardingStrategy"
    user = module_of(folder, "imports_before", lines)
    with patch_torch():
        assert user.FSDPModule is stage.FSDPModule is fullshard.FSDPModule
        assert user.shard is fullshard.fully_shard
        assert user.ShardingStrategy is fullshard.ShardingStrategy
    assert user.ShardingStrategy is THEIRS["ShardingStrategy"]
    assert user.FSDPModule is stage.FSDPModule is THEIRS["FSDPModule"]
    assert user.shard is THEIRS["fully_shard"]


DEEP = "from torch.distributed.fsdp._fully_shard._fully_shard import FSDPModule, fully_shard\n"


def test_a_deep_import_gives_ours_before_and_meanwhile(folder: Path) -> None:
    deep = "import torch.distributed.fsdp._fully_shard._fully_shard as deep\n"
    before = module_of(folder, "deep_before", DEEP + deep)
    with patch_torch():
        meanwhile = module_of(folder, "deep_meanwhile", DEEP + deep)
        for user in (before, meanwhile, _fully_shard, before.deep):
            assert user.fully_shard is fullshard.fully_shard
            assert user.FSDPModule is fullshard.FSDPModule
        assert _fully_shard.UnshardHandle is fullshard.UnshardHandle
        assert _fully_shard.share_comm_ctx is fullshard.share_comm_ctx
        assert vars(_fully_shard)["fully_shard"] is THEIRS["fully_shard"]
    for user in (before, meanwhile, _fully_shard):
        assert user.fully_shard is THEIRS["fully_shard"]
        assert user.FSDPModule is THEIRS["FSDPModule"]
    for module in (_fully_shard, _fsdp_common, _fsdp_state):
        assert type(module) is ModuleType


def test_who_replaces_a_shown_name_for_a_while_leaves_pytorchs_behind() -> None:
    """A framework may replace ``FSDPModule``, and later put the old class back."""

    class Other:
        pass

    with patch_torch():
        shown = _fully_shard.FSDPModule
        _fully_shard.FSDPModule = Other
        assert _fully_shard.FSDPModule is vars(_fully_shard)["FSDPModule"] is Other
        _fully_shard.FSDPModule = shown
        assert _fully_shard.FSDPModule is fullshard.FSDPModule
        assert vars(_fully_shard)["FSDPModule"] is THEIRS["FSDPModule"]
    assert _fully_shard.FSDPModule is THEIRS["FSDPModule"]


def test_modules_imported_meanwhile_have_pytorchs_afterwards(folder: Path) -> None:
    lines = "from torch.distributed.fsdp import FSDPModule\nimport torch.distributed.fsdp as f\n"
    with patch_torch():
        user = module_of(folder, "imports_meanwhile", lines + "also = f.fully_shard")
        assert user.FSDPModule is fullshard.FSDPModule
        assert user.also is fullshard.fully_shard
    assert user.FSDPModule is THEIRS["FSDPModule"]
    assert user.also is THEIRS["fully_shard"]


def test_who_takes_our_names_from_us_keeps_them(folder: Path) -> None:
    lines = "from fullshard import FSDPModule, fully_shard as mine\n"
    both = lines + "from torch.distributed.fsdp import fully_shard as theirs"
    before = module_of(folder, "ours_before", both)
    with patch_torch():
        meanwhile = module_of(folder, "ours_meanwhile", both)
        star = module_of(folder, "star_meanwhile", "from fullshard import *")
        assert before.theirs is meanwhile.theirs is fullshard.fully_shard
    for user in (before, meanwhile):
        assert user.FSDPModule is fullshard.FSDPModule
        assert user.mine is fullshard.fully_shard
        assert user.theirs is THEIRS["fully_shard"]
    assert star.fully_shard is fullshard.fully_shard


def test_a_name_that_somebody_changed_meanwhile_is_left_alone(folder: Path) -> None:
    user = module_of(folder, "changes", "from torch.distributed.fsdp import fully_shard")
    gone = module_of(folder, "gone", "from torch.distributed.fsdp import fully_shard")
    with patch_torch():
        user.fully_shard = "something else"
        del sys.modules["gone"]
    assert user.fully_shard == "something else"
    assert gone.fully_shard is THEIRS["fully_shard"]


def test_calls_may_be_nested_and_undone_in_any_order() -> None:
    first, second = patch_torch(), patch_torch()
    first.undo()
    first.undo()
    assert fsdp.fully_shard is fullshard.fully_shard
    with second:
        assert fsdp.fully_shard is fullshard.fully_shard
    assert fsdp.fully_shard is THEIRS["fully_shard"]
    second.undo()
    with patch_torch():
        assert fsdp.fully_shard is fullshard.fully_shard


def test_an_exception_ends_it_too() -> None:
    with pytest.raises(ZeroDivisionError), patch_torch():
        raise ZeroDivisionError
    assert fsdp.fully_shard is THEIRS["fully_shard"]


def test_a_lazy_module_is_not_loaded() -> None:
    class Lazy(ModuleType):
        def __getattribute__(self, name: str) -> Any:
            raise AssertionError(f"{name} was asked for")

    sys.modules["lazy"] = Lazy("lazy")
    sys.modules["none"] = None  # type: ignore[assignment]
    try:
        patch_torch().undo()
    finally:
        del sys.modules["lazy"], sys.modules["none"]


def test_activation_checkpoints_take_our_policies() -> None:
    """The policy's options for a module are passed to the checkpoint."""

    def chosen(module: nn.Module) -> bool | dict[str, Any]:
        return {"preserve_rng_state": False} if isinstance(module, nn.Linear) else False

    def blocks() -> nn.Sequential:
        return nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Sequential(nn.Linear(2, 2)))

    with patch_torch():
        for policy in (fsdp.wrap.CustomPolicy(chosen), fsdp.wrap.ModuleWrapPolicy({nn.Linear})):
            assert isinstance(policy, (wrap.CustomPolicy, wrap.ModuleWrapPolicy))
            model = blocks()
            apply_activation_checkpointing(model, auto_wrap_policy=policy)
            found = [m for m in model.modules() if isinstance(m, CheckpointWrapper)]
            assert found == [model[0], model[2][0]]
            if isinstance(policy, wrap.CustomPolicy):
                assert found[0].checkpoint_fn.keywords["preserve_rng_state"] is False


def test_what_is_not_sharded_has_no_state() -> None:
    with patch_torch():
        assert fsdp.fully_shard.state(nn.Linear(2, 2)) is None  # type: ignore[attr-defined]


FRESH = """
import sys, importlib
import fullshard
assert "torch._dynamo" not in sys.modules  # which takes a third of a second
import fullshard.compat, torch.distributed.pipelining, torch.distributed.checkpoint, torch._dynamo
import transformers
def everything():
    return {name: (m, dict(object.__getattribute__(m, "__dict__")))
            for name, m in sys.modules.items() if m is not None}
before = everything()
patch = fullshard.compat.patch_torch()
changed = sum(
    vars(m)[key] is not value for m, names in before.values() for key, value in names.items())
late = ["torch.distributed._composable.fsdp", "torch.distributed._tools.fsdp2_mem_tracker"]
late = [importlib.import_module(name) for name in late if name not in sys.modules]
patch.undo()
after = everything()
for name, (module, names) in before.items():
    now = after[name][1]
    assert after[name][0] is module
    for key, value in names.items():
        assert now[key] is value, (name, key)
ours = [fullshard.fully_shard, fullshard.FSDPModule, fullshard.UnshardHandle]
for name, (module, names) in after.items():
    if not name.startswith("fullshard"):
        assert not any(value is one for value in names.values() for one in ours), name
print(changed, len(late))
"""


def test_in_a_fresh_interpreter_all_modules_are_afterwards_what_they_were() -> None:
    pytest.importorskip("transformers")
    command = [sys.executable, "-W", "ignore", "-c", FRESH]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    changed, late = map(int, done.stdout.split())
    assert changed > 20 and late > 0


WITHOUT_FSDP1 = """
import sys
import warnings
import torch, torch.distributed as dist, torch.distributed.fsdp as fsdp
from torch.distributed._composable import replicate_with_fsdp
from torch import nn
import fullshard
assert "fullshard.compat" not in sys.modules
theirs, only_moved = fsdp.fully_shard, sys.argv[1] == "moved"
for name in [n for n in sys.modules if n.startswith("torch.distributed.fsdp.")]:
    short = name.removeprefix("torch.distributed.fsdp.")
    if not short.startswith("_fully_shard"):
        sys.modules[name] = None  # an import of it fails from now on
        delattr(fsdp, short)
if not only_moved:
    for name in (*fullshard.flat.__all__, "FlatParameter"):
        delattr(fsdp, name)
from fullshard.compat import patch_torch
patch = patch_torch()
found = getattr(fsdp, "FullyShardedDataParallel", None)
assert found is (fullshard.FullyShardedDataParallel if only_moved else None)
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
model = fsdp.fully_shard(nn.Linear(2, 2))
model(torch.ones(1, 2)).sum().backward()
assert isinstance(model, fullshard.FSDPModule)
assert fsdp.fully_shard.state(model)._fsdp_param_group.is_sharded
wrapper = fullshard.FullyShardedDataParallel(nn.Linear(2, 2), device_id=torch.device("cpu"))
wrapper(torch.ones(1, 2)).sum().backward()
assert wrapper._has_params and wrapper._all_fsdp_states == [wrapper]
for name in ("_handle", "_all_handles", "_fully_sharded_module_to_handle", "training_state"):
    try:
        getattr(wrapper, name)
    except fullshard.errors.UnsupportedError as error:
        print(error)
patch.undo()
assert fsdp.fully_shard is theirs
"""


@pytest.mark.parametrize("files", ["moved", "gone"])
def test_fsdp2_is_patched_where_the_files_of_fsdp1_are(files: str) -> None:
    """``moved``: FSDP1's files have other private names; ``gone``: its public names are gone."""
    command = [sys.executable, "-W", "ignore", "-c", WITHOUT_FSDP1, files]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    said = done.stdout.splitlines()
    handle, state = "_flat_param.FlatParamHandle", "_common_utils.TrainingState"
    for error, path in zip(said, [handle] * 3 + [state], strict=True):
        assert f"has no torch.distributed.fsdp.{path}, so" in error
        assert "use the public methods of the module" in error


PATCHED = {
    "_fully_shard._fsdp_collectives": ("", "foreach_reduce"),
    "_fully_shard._fsdp_param_group": ("FSDPParamGroup", "post_backward"),
    "_fully_shard._fsdp_param": ("FSDPParam", "to_accumulated_grad_if_needed"),
    "_fully_shard._fsdp_state": ("FSDPState", "_pre_forward"),
    "_flat_param": ("FlatParamHandle", "unshard"),
}
"""Functions of PyTorch that real programs patch, among them NeMo AutoModel."""


@pytest.mark.parametrize("file", PATCHED)
def test_a_patch_of_pytorchs_implementation_is_told_of_once(
    file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cls, name = PATCHED[file]
    module = import_module(f"torch.distributed.fsdp.{file}")
    holder = getattr(module, cls) if cls else module
    original = getattr(holder, name, None)
    if original is None:
        pytest.skip(f"this PyTorch has no {name}")

    @functools.wraps(original)
    def theirs(*args: Any, **kwargs: Any) -> Any:
        return original(*args, **kwargs)

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with patch_torch():
            fsdp.fully_shard(nn.Linear(2, 2))
            monkeypatch.setattr(holder, name, theirs)
            with pytest.warns(UserWarning, match=f"{name} of torch.distributed.fsdp"):
                fsdp.fully_shard(nn.Linear(2, 2))
            fsdp.fully_shard(nn.Linear(2, 2))
        fullshard.fully_shard(nn.Linear(2, 2))  # no warning outside of the patch
    finally:
        dist.destroy_process_group()
