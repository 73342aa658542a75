"""The table of private names says what the code does, and every name of it is one of PyTorch's."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest
from torch.distributed.fsdp import FullyShardedDataParallel

from fullshard.compat.flat_states import WRAPPER_ATTRIBUTES
from fullshard.compat.views import View, torch_object
from fullshard.errors import UnsupportedError
from tests.private_names import VIEWS, parts, table


def test_the_table_is_that_of_the_code() -> None:
    """If not: ``python -m tests.private_names``."""
    assert parts()[1] == table()


def names_in(cls: type) -> set[str]:
    """Attributes of a class and of its instances, as its source sets and annotates them."""
    source = "".join(inspect.getsource(one) for one in cls.__mro__ if one is not object)
    return set(dir(cls)) | set(re.findall(r"(?:self\.|^    )(\w+)\b(?:: .*)? = ", source, re.M))


SOME = {"_fsdp_param_groups", "_reset_iter_state", "mp_policy", "reduce_scatter_max_input_buffers"}
"""Names that not every PyTorch has that we support."""


@pytest.mark.parametrize("view", VIEWS)
def test_names_of_views_are_pytorchs(view: type[View]) -> None:
    theirs = names_in(torch_object(view.stands_for)) | SOME
    assert set(view.shown) <= theirs
    assert set(view.instead) <= theirs
    assert not set(view.instead) & set(view.shown)


@pytest.mark.parametrize("view", VIEWS)
def test_what_the_table_refuses_raises_and_says_what_to_use(view: type[View]) -> None:
    one = view("nothing")
    assert isinstance(one, torch_object(view.stands_for))
    for name, instead in view.instead.items():
        with pytest.raises(UnsupportedError) as caught:
            getattr(one, name, None)
        assert instead in str(caught.value) and name in str(caught.value)
        with pytest.raises(UnsupportedError):
            setattr(one, name, None)


def test_attributes_of_wrappers_are_pytorchs() -> None:
    """They are set all over the files, so the files are searched."""
    folder = inspect.getsourcefile(FullyShardedDataParallel)
    assert folder is not None
    source = "".join(path.read_text() for path in Path(folder).parent.glob("_*.py"))
    source += inspect.getsource(FullyShardedDataParallel)
    assert [name for name in WRAPPER_ATTRIBUTES if name not in source] == []
