"""fullshard's calls on process groups, backends and options exist in the installed PyTorch.

The classes of NCCL's backends are only in builds for GPUs, which import without a GPU:

    make test TORCH=2.15.0 ARGS=tests/pure/test_backend_calls.py
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch._C import _distributed_c10d

from fullshard import _torch
from fullshard._torch import collectives as _collectives

VERSION = tuple(map(int, torch.__version__.split(".")[:2]))

CALLS = {
    "group": {
        "_allgather_base",
        "_device_types",
        "_get_backend",
        "_reduce_scatter_base",
        "_register_backend",
        "allgather_into_tensor_coalesced",
        "allreduce",
        "alltoall_base",
        "broadcast",
        "rank",
        "recv",
        "scatter",
        "size",
    },
    "backend": {"abort", "name", "options"},
    "gloo": {"_set_default_timeout"},
    "given": {"_timeout", "config", "is_high_priority_stream", "lazy_init"},
}
"""Attributes by the name of the variable in ``_torch``."""

OF_PYTHON = {"all_gather_single_coalesced", "reduce_scatter_single"}
"""Methods of process groups written in Python, called if they exist."""

SINCE = {"ProcessGroupNCCL2": (2, 14), "ProcessGroupNCCLLazy": (2, 14), "lazy_init": (2, 15)}
"""The PyTorch version that introduced a name; all versions have the other names."""

needs_nccl = pytest.mark.skipif(not dist.is_nccl_available(), reason="a build without NCCL")


def called(name: str) -> set[str]:
    """Return the attributes that ``_torch`` reads from variables with this name."""
    sources = Path(_torch.__file__).parent.glob("*.py")
    return {
        node.attr
        for source in sources
        for node in ast.walk(ast.parse(source.read_text()))
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == name
    }


def test_the_table_has_all_calls() -> None:
    assert called("group") == CALLS["group"] | OF_PYTHON
    assert called("given") == CALLS["given"]
    assert called("backend") | {"abort"} == CALLS["backend"] | {"wrapped_pg"}
    assert called("gloo") == CALLS["gloo"]


def backends() -> Iterator[type]:
    yield dist.ProcessGroupGloo
    for name in ("ProcessGroupNCCL", "ProcessGroupNCCL2", "ProcessGroupNCCLLazy"):
        if VERSION >= SINCE.get(name, (0, 0)) and dist.is_nccl_available():
            yield getattr(_distributed_c10d, name)


def test_process_groups_and_backends_have_what_is_called() -> None:
    assert set(dir(dist.ProcessGroup)) >= CALLS["group"] | {"bound_device_id"}
    assert hasattr(_distributed_c10d._ProcessGroupWrapper, "wrapped_pg")
    assert set(dir(dist.ProcessGroupGloo)) >= CALLS["gloo"]
    for cls in backends():
        assert set(dir(cls)) >= CALLS["backend"], cls


@needs_nccl
def test_options_of_nccl_have_what_is_copied() -> None:
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    expected = {name for name in CALLS["given"] if VERSION >= SINCE.get(name, (0, 0))}
    assert {name for name in CALLS["given"] if hasattr(options, name)} == expected
    options.config.max_ctas = 4
    again = _collectives.options_like(options)
    assert again is not options and again.is_high_priority_stream
    assert again.config.max_ctas == 4 and again._timeout == options._timeout


@needs_nccl
def test_nccl_of_each_version_is_known() -> None:
    """The table of NCCL backends in docs/limits.md covers the installed PyTorch."""
    for name in ("ProcessGroupNCCL2", "ProcessGroupNCCLLazy"):
        assert hasattr(_distributed_c10d, name) == (VERSION >= SINCE[name])
    assert hasattr(c10d, "_nccl2_device") == (VERSION >= (2, 15))
    makers = [name for name in dir(c10d) if name.startswith("_register_builtin_nccl")]
    assert ("_register_builtin_nccl2_backend" in makers) == (VERSION >= (2, 14))
    for maker in makers:
        getattr(c10d, maker)()
    assert {name for name in dist.Backend.backend_list if "nccl" in name} <= _collectives.NCCL
