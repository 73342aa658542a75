"""The package keeps the import rules, and each rule finds a violation in a made-up file."""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

import pytest

from tests.pure.import_rules import (
    ROOT,
    Source,
    collectives_outside_comm,
    dotted_uses_outside_their_seam,
    import_cycles,
    imports_against_the_order,
    imports_of_torch,
    imports_past_a_face,
    misplaced_imports,
    package_sources,
    private_names_outside_their_seam,
    source,
    uses_outside_their_seam,
)


@pytest.fixture(scope="module")
def files() -> list[Source]:
    return package_sources()


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("layout/a.py", "from fullshard.engine import unit"),
        ("layout/a.py", "from fullshard import engine"),
        ("layout/a.py", "from ..engine.unit import Unit"),
        ("layout/__init__.py", "from ..engine.unit import Unit"),
        ("engine/a.py", "import fullshard.frontend.hooks as hooks"),
        ("engine/a.py", "def f():\n    from fullshard import fully_shard"),
        ("doctor/a.py", "from fullshard.plan.hardware import Hardware"),
        ("doctor/a.py", "def f():\n    from fullshard import plan"),
        ("doctor/a.py", "from fullshard.frontend import fully_shard"),
        ("errors.py", "from fullshard import _torch"),
        ("_torch/a.py", "from fullshard.layout import Layout"),
        ("train/a.py", "from fullshard.engine import Unit"),
        ("train/a.py", "from fullshard.optim.clip import clip"),
        ("train/a.py", "from fullshard.cli import main"),
        ("attic/a.py", ""),
    ],
)
def test_an_import_against_the_order_is_seen(path: str, text: str) -> None:
    assert len(imports_against_the_order([source(path, text)])) == 1


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("__init__.py", "from fullshard.frontend.fully_shard import fully_shard"),
        ("_torch/a.py", "from fullshard.errors import UnsupportedError"),
        ("engine/a.py", "from . import b\nfrom .b import c\nfrom fullshard import _torch, layout"),
        ("plan/a.py", "from fullshard.doctor.report import Report"),
        ("train/a.py", "from fullshard import fully_shard\nfrom fullshard.optim import clip"),
        ("cli/a.py", "from fullshard.train.loop import train\nimport fullshard"),
    ],
)
def test_an_import_along_the_order_is_allowed(path: str, text: str) -> None:
    assert imports_against_the_order([source(path, text)]) == []


def test_imports_follow_the_order_of_the_rooms(files: list[Source]) -> None:
    assert imports_against_the_order(files) == []


def test_sub_packages_are_imported_by_their_faces(files: list[Source]) -> None:
    face = source("optim/flat/__init__.py", "from .step import Step")
    for text in (
        "from fullshard.optim.flat.step import Step",
        "from fullshard.optim.flat import step",
        "import fullshard.optim.flat.step",
    ):
        assert len(imports_past_a_face([face, source("optim/a.py", text)])) == 1
        assert imports_past_a_face([face, source("optim/flat/a.py", text)]) == []
    user = source("plan/a.py", "from fullshard.optim.flat import Step")
    assert imports_past_a_face([face, user]) == []
    assert imports_past_a_face(files) == []


def test_layout_and_schedule_import_no_torch(files: list[Source]) -> None:
    torch = source("_torch/__init__.py", "import torch.distributed as dist")
    between = source("schedule/b.py", "from fullshard import _torch")
    start = source("schedule/a.py", "from fullshard.schedule.b import x")
    found = imports_of_torch([start, between, torch], {"schedule"})
    way = "fullshard.schedule.a -> fullshard.schedule.b -> fullshard._torch -> torch.distributed"
    assert len(found) == 2 and way in found[0]
    assert imports_of_torch(files, {"layout", "schedule"}) == []


@pytest.mark.parametrize(
    "text",
    [
        "from torch.distributed.fsdp import fully_shard",
        "from torch.distributed import fsdp",
        "import torch.distributed.fsdp._fully_shard",
        "import torch\nx = torch.distributed.fsdp",
    ],
)
def test_torch_fsdp_outside_compat_is_seen(text: str) -> None:
    assert len(dotted_uses_outside_their_seam([source("engine/a.py", text)])) == 1
    assert dotted_uses_outside_their_seam([source("compat/a.py", text)]) == []


@pytest.mark.parametrize(
    "text",
    ["import torch\ns = torch.cuda.Stream()", "from torch import Event"],
)
def test_streams_and_events_outside_device_are_seen(text: str) -> None:
    assert len(dotted_uses_outside_their_seam([source("engine/a.py", text)])) == 1
    assert dotted_uses_outside_their_seam([source("device/a.py", text)]) == []


@pytest.mark.parametrize(
    ("path", "text", "home"),
    [
        ("comm/a.py", "dist.all_gather_into_tensor(x, y)", "_torch/a.py"),
        ("comm/a.py", "getattr(dist, 'reduce_scatter_single')", "_torch/a.py"),
        ("comm/a.py", "from torch.distributed import reduce_scatter_tensor", "_torch/a.py"),
        ("engine/a.py", "m.register_forward_pre_hook(f)", "frontend/hooks.py"),
        ("engine/a.py", "m.register_forward_hook(f)", "frontend/hooks.py"),
        ("frontend/a.py", "p.register_post_accumulate_grad_hook(f)", "engine/autograd.py"),
        ("engine/a.py", "node.register_prehook(f)", "engine/autograd.py"),
        ("engine/a.py", "engine.queue_callback(f)", "_torch/a.py"),
        ("engine/a.py", "x.untyped_storage().resize_(0)", "device/storage.py"),
        ("engine/a.py", "x.record_stream(s)", "device/cuda.py"),
    ],
)
def test_a_name_outside_its_seam_is_seen(path: str, text: str, home: str) -> None:
    assert len(uses_outside_their_seam([source(path, text)])) == 1
    assert uses_outside_their_seam([source(home, text)]) == []


def test_names_stay_within_their_seams(files: list[Source]) -> None:
    assert uses_outside_their_seam(files) == []
    assert dotted_uses_outside_their_seam(files) == []


@pytest.mark.parametrize(
    "text",
    [
        "from torch.optim.optimizer import _use_grad_for_differentiable",
        "from torch._C import _current_graph_task_id",
        "import torch._dynamo",
        "import torch\ntorch._C._current_graph_task_id()",
        "def f(x):\n    return x._local_tensor",
    ],
)
def test_private_names_are_used_by_torch_alone(files: list[Source], text: str) -> None:
    assert private_names_outside_their_seam([source("engine/a.py", text)])
    assert private_names_outside_their_seam([source("compat/a.py", text)]) == []
    own = "import torch\nself._x = 1\ntorch._foreach_add_(a._x, module._parameters)"
    assert private_names_outside_their_seam([source("engine/a.py", own)]) == []
    assert private_names_outside_their_seam(files) == []


@pytest.mark.parametrize(
    "text",
    [
        "import torch.distributed as dist\ndist.all_reduce(x)",
        "from torch import distributed\ndistributed.isend(x, 1)",
        "import torch\ntorch.distributed.barrier()",
        "from torch.distributed import broadcast",
        "from torch.distributed import distributed_c10d as c10d\nc10d.all_to_all_single(x, y)",
    ],
)
def test_collectives_are_issued_by_comm_alone(files: list[Source], text: str) -> None:
    assert len(collectives_outside_comm([source("engine/a.py", text)])) == 1
    assert collectives_outside_comm([source("comm/a.py", text)]) == []
    assert collectives_outside_comm([source("engine/a.py", "self.comm.all_reduce(x)")]) == []
    assert collectives_outside_comm(files) == []


def test_there_is_no_import_cycle(files: list[Source]) -> None:
    a = source("engine/a.py", "from fullshard.engine import b")
    b = source("engine/b.py", "from fullshard.engine.c import x")
    c = source("engine/c.py", "from .a import y")
    user = source("engine/user.py", "from . import a, leaf")
    leaf = source("engine/leaf.py", "")
    assert len(import_cycles([a, b, c, user, leaf])) == 3
    typing = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from .a import y"
    assert len(import_cycles([a, b, source("engine/c.py", typing), user, leaf])) == 3
    assert import_cycles(files) == []


def test_only_what_is_slow_or_optional_is_imported_inside_functions(files: list[Source]) -> None:
    inside = "def f():\n    import {}"
    assert len(misplaced_imports([source("train/a.py", inside.format("json"))])) == 1
    assert misplaced_imports([source("train/a.py", inside.format("peft.utils"))]) == []
    for module in ("matplotlib.pyplot", "torch.distributed.checkpoint"):
        assert len(misplaced_imports([source("train/a.py", f"import {module} as m")])) == 1
    assert misplaced_imports(files) == []


def test_files_keep_to_their_budget() -> None:
    sizes = {
        str(path): len(path.read_text().splitlines())
        for path in ROOT.rglob("*.py")
        if "_torch" not in path.parts
    }
    assert len(sizes) > 250 and {path: n for path, n in sizes.items() if n > 600} == {}


def test_no_two_classes_have_one_name() -> None:
    """Private classes are exempt, and so is ``compat``, whose classes replace PyTorch's."""
    names = Counter(
        node.name
        for path in (Path(__file__).parents[2] / "src").rglob("*.py")
        if path.parent.name != "compat"
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )
    assert [name for name, count in names.items() if count > 1] == []


def test_no_test_file_imports_another() -> None:
    tests = ROOT.parents[1] / "tests"
    found = [
        (path.name, node.module)
        for path in tests.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("tests.")
        if any("test_" in name for name in (str(node.module), *(one.name for one in node.names)))
    ]
    assert not found, "move helpers that test files share to tests/kit"
