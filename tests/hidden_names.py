"""Hide each private name that ``fullshard._torch`` uses, and report what still works.

    python -m tests.hidden_names    # prints JSON: for each name the missing names, and the errors

Each name is hidden in a process of its own, forked from one that has imported PyTorch but not
fullshard. The name is hidden while fullshard is imported, and restored afterwards, because PyTorch
needs it.
"""

from __future__ import annotations

import importlib
import json
import os
import pkgutil
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg
from torch import nn

Report = dict[str, Any]


@contextmanager
def hidden(name: str) -> Iterator[None]:
    """Delete ``name``, and hide it from look-ups by path (and through its owner's ``__init__``)."""
    owner_name, _, attribute = name.rpartition(".")
    look_up, asked = pkgutil.resolve_name, False

    def blind(path: str) -> Any:
        nonlocal asked
        is_hidden = path == name or (asked and path == owner_name)
        asked = path == name
        if is_hidden:
            raise AttributeError(path)
        return look_up(path)

    owner = look_up(owner_name)
    own = vars(owner) if hasattr(owner, "__dict__") else {}
    value, is_deleted = own.get(attribute), attribute in own
    try:
        delattr(owner, attribute)
    except (TypeError, AttributeError):  # a C class, or a name of its base
        is_deleted = False
    pkgutil.resolve_name = blind
    try:
        yield
    finally:
        pkgutil.resolve_name = look_up
        if is_deleted:
            setattr(owner, attribute, value)


def step(shard: Callable[[nn.Module], nn.Module]) -> None:
    """Train a step on one of two ranks, with a backend that sends nothing."""
    dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=2)
    try:
        model = shard(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(torch.ones(3, 4)).sum().backward()
        optimizer.step()
    finally:
        dist.destroy_process_group()


def by_fully_shard() -> None:
    import fullshard

    def shard(model: nn.Module) -> nn.Module:
        fullshard.fully_shard(next(model.children()))
        return fullshard.fully_shard(model)

    step(shard)


def by_wrapper() -> None:
    import fullshard

    step(lambda model: fullshard.FullyShardedDataParallel(model, device_id=torch.device("cpu")))


def by_plan() -> None:
    import fullshard

    fullshard.plan(nn.Linear(4, 2), batch=torch.ones(3, 4), world_size=2)


PROGRAMS = {"`fully_shard`": by_fully_shard, "FSDP1": by_wrapper, "`plan`": by_plan}
RESILIENT = "`resilient`"  # checks its names first


def refusals(name: str, values: Iterable[Any]) -> Iterator[Callable[[], None]]:
    """Yield the stand-ins of objects and functions that need ``name``."""
    from fullshard._torch.names import PrivateName, _Missing

    for value in values:
        if isinstance(value, list):
            yield from refusals(name, value)
        use = value.use if isinstance(value, _Missing) else getattr(value, "__self__", None)
        if isinstance(use, PrivateName) and use.name == name:
            yield value


def report(name: str) -> Report:
    """Import fullshard without ``name``, and run the programs."""
    with hidden(name):
        from fullshard import _torch

        missing = [use.name for use in _torch.missing()]
        refuses = raises(_torch.world.check_recovery, missing)
    found: Report = {"missing": missing, "refused": 0, "raises": []}
    for module in _torch.MODULES:
        for refusal in refusals(name, [*vars(module).values()]):
            assert raises(refusal, [name])
            found["refused"] += 1
    found["raises"] += [title for title, run in PROGRAMS.items() if raises(run, missing)]
    found["raises"] += [RESILIENT] * refuses
    return found


def raises(function: Callable[[], None], missing: Iterable[str]) -> bool:
    """Return whether ``function`` raises an error that contains one of the missing names."""
    from fullshard.errors import TorchVersionError

    try:
        function()
    except TorchVersionError as error:
        assert any(name in str(error) for name in missing), error
        assert torch.__version__ in str(error), error
        return True
    return False


def apart(function: Callable[[], Any]) -> Any:
    """Run ``function`` in a fork; return its result, or the traceback of its error."""
    reader, writer = os.pipe()
    if pid := os.fork():
        os.close(writer)
        with open(reader) as pipe:
            answer = pipe.read()
        os.waitpid(pid, 0)
        return json.loads(answer or '"no answer"')
    try:
        answer = json.dumps(function())
    except BaseException:
        answer = json.dumps(traceback.format_exc())
    with open(writer, "w") as pipe:
        pipe.write(answer)
    os._exit(0)


def found() -> tuple[list[str], list[str]]:
    """Return every private name that is used, and the PyTorch modules that the programs import."""
    from fullshard import _torch

    for program in PROGRAMS.values():
        program()
    names = {use.name for module in _torch.MODULES for use in module.private.uses}
    return sorted(names), [name for name in sys.modules if name.startswith("torch.")]


def reports(chosen: Iterable[str] = ()) -> dict[str, Report | str]:
    """Return reports by name; a traceback instead of a report is a defect."""
    torch.set_num_threads(1)
    names, modules = apart(found)
    for module in modules:  # PyTorch's own imports then find the name
        importlib.import_module(module)
    return {name: apart(partial(report, name)) for name in chosen or names}


if __name__ == "__main__":
    print(json.dumps(reports(sys.argv[1:]), indent=1))
