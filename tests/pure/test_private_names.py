"""The tables of private names equal the code, and PyTorch has all names in them."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.fsdp import FullyShardedDataParallel

from fullshard import _torch
from fullshard._torch.names import VERSION
from fullshard.compat.flat_states import WRAPPER_ATTRIBUTES
from fullshard.compat.states import View, torch_name
from fullshard.errors import UnsupportedError
from tests.private_names import (
    END_USED,
    USED,
    VIEWS,
    hidden_reports,
    parts,
    table,
    used_table,
    uses,
)


def test_the_table_is_that_of_the_code() -> None:
    """To update the table, run ``python -m tests.private_names``."""
    assert parts()[1] == table()


def names_in(cls: type) -> set[str]:
    """Return attributes of a class and of its instances, as found in its source."""
    source = "".join(inspect.getsource(one) for one in cls.__mro__ if one is not object)
    return set(dir(cls)) | set(re.findall(r"(?:self\.|^    )(\w+)\b(?:: .*)? = ", source, re.M))


SOME = {"_fsdp_param_groups", "_reset_iter_state", "mp_policy", "reduce_scatter_max_input_buffers"}
"""Names that some supported versions of PyTorch lack."""


@pytest.mark.parametrize("view", VIEWS)
def test_names_of_views_are_pytorchs(view: type[View]) -> None:
    theirs = names_in(torch_name(view.stands_for)) | SOME
    assert set(view.shown) <= theirs
    assert set(view.instead) <= theirs
    assert not set(view.instead) & set(view.shown)


@pytest.mark.parametrize("view", VIEWS)
def test_what_the_table_refuses_raises_and_says_what_to_use(view: type[View]) -> None:
    one = view("nothing")
    assert isinstance(one, torch_name(view.stands_for))
    for name, instead in view.instead.items():
        with pytest.raises(UnsupportedError) as caught:
            getattr(one, name, None)
        assert instead in str(caught.value) and name in str(caught.value)
        with pytest.raises(UnsupportedError):
            setattr(one, name, None)


def test_attributes_of_wrappers_are_pytorchs() -> None:
    """Many files set these attributes, so the test searches the text of all."""
    folder = inspect.getsourcefile(FullyShardedDataParallel)
    assert folder is not None
    source = "".join(path.read_text() for path in Path(folder).parent.glob("_*.py"))
    source += inspect.getsource(FullyShardedDataParallel)
    assert [name for name in WRAPPER_ATTRIBUTES if name not in source] == []


def test_this_pytorch_has_all_names() -> None:
    """On a new PyTorch, the output lists the names to look at."""
    assert _torch.missing() == []


def private_attributes(source: str) -> Iterator[str]:
    """Yield the private attributes that a module reads."""
    for one in ast.walk(ast.parse(source)):
        is_read = isinstance(one, ast.Attribute) and isinstance(one.ctx, ast.Load)
        if is_read and one.attr.startswith("_") and not one.attr.startswith("__"):
            yield one.attr


def test_every_private_name_is_declared() -> None:
    """An undeclared name could be missing without an error. The import rules check imports."""
    declared = {use.name.rpartition(".")[2] for _, use in uses()}
    sources = [path.read_text() for path in Path(_torch.__file__).parent.glob("*.py")]
    read = {name for source in sources for name in private_attributes(source)}
    assert read - declared <= {"_C", "_current_frames", "_module", "_feature"} | OF_OTHER_VERSIONS


OF_OTHER_VERSIONS = {"_has_grad_dtype_override", "_set_pg_timeout"}


def check(reports: dict[str, Any]) -> None:
    for _, use in uses():
        if use.name in reports:
            found = reports[use.name]
            assert isinstance(found, dict), f"{use.name}: {found}"  # a string is a traceback
            assert use.name in found["missing"]
            assert all(name.startswith(use.name) for name in found["missing"])
            assert bool(found["refused"]) == use.is_needed, use
            assert use.is_needed or not found["raises"], use


SOME_USED = (
    "torch._C._dynamo.eval_frame._FrameAction",
    "torch.distributed.ProcessGroup._allgather_base",
    "torch.distributed.device_mesh.DeviceMesh._flatten_rank_map",
    "torch.distributed.distributed_c10d._world",
    "torch.distributed.tensor.placement_types._StridedShard",
)


def test_import_works_without_some_names_and_errors_name_them() -> None:
    reports = hidden_reports(*SOME_USED)
    check(reports)
    trains = [name for name in SOME_USED if "`fully_shard`" not in reports[name]["raises"]]
    assert trains == [SOME_USED[0], *SOME_USED[2:]]


def test_import_works_without_each_name_and_errors_name_it() -> None:
    """Takes a minute. To update the table, run ``python -m tests.private_names``."""
    reports = hidden_reports()
    assert set(reports) == {use.name for _, use in uses()}
    check(reports)
    if VERSION == (2, 13):
        assert parts(USED, END_USED)[1] == used_table(reports)
