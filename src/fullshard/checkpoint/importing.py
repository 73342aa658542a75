"""Load weights that others trained, from safetensors files, into a sharded model."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fullshard import _torch
from fullshard.checkpoint.stored import (
    Chosen,
    InFile,
    Stored,
    StoredReader,
    check_fits,
    choose,
    pretrained,
    read_index,
)
from fullshard.checkpoint.tree import Row, Tree
from fullshard.comm.council import Council
from fullshard.errors import ConfigError
from fullshard.frontend.contexts import clean_name
from fullshard.layout.region import Region, whole
from fullshard.tensors import region_of
from fullshard.tensors.parts import coordinate_in

_BUFFER_NBYTES = 32 << 20


class LoadedWeights(NamedTuple):
    """What ``load_weights`` did not load.

    Attributes:
        missing: names of the model's tensors that the files lack.
        unexpected: names in the files that the model lacks.
    """

    missing: list[str]
    unexpected: list[str]


def load_weights(
    model: nn.Module,
    folder: str | os.PathLike[str],
    *,
    strict: bool = True,
    init: Callable[[nn.Module], object] | None = None,
) -> LoadedWeights:
    """Load safetensors files as ``transformers`` writes them; all ranks must call this.

    Each rank reads its own parts, a piece at a time. A model on the meta device gets memory on the
    device of its mesh first. What files do not have, such as buffers that are not saved, is then
    initialised: by ``init``, by the model's ``_init_weights`` if it is of ``transformers``, else by
    the ``reset_parameters`` of their modules.

    Args:
        model: a model, sharded or not; values are cast to its dtypes.
        folder: has ``model.safetensors``, or ``model.safetensors.index.json`` and the files that it
            names; or such a file itself.
        strict: refuse files that lack tensors of the model, or have others.
        init: called with each module on the meta device that has a tensor the files lack.

    Raises:
        ConfigError: files and model do not fit, with all differences. Nothing was changed.
        CheckpointError: files are missing or damaged; if they could be opened, some values may
            have been loaded.
        LostRankError: a rank ended or hangs.
        ProtocolError: during a forward, a backward or ``unshard_params``.

        All ranks raise the same.
    """
    folder = Path(folder)
    council = Council(f"load weights from {folder}")
    listed = council.agree(lambda: None, lambda _: read_index(folder))
    files = {name: InFile(one[0], one[1], tuple(one[2])) for name, one in listed.items()}
    targets: list[_Target] = []

    def plan() -> list[list[str]]:
        targets.append(_Target(model, files, init))
        return [targets[0].chosen.missing, targets[0].chosen.unexpected]

    def compare(said: list[list[list[str]]]) -> list[list[str]]:
        missing = list(dict.fromkeys(name for one, _ in said for name in one))
        nowhere = set(said[0][1]).intersection(*(own for _, own in said))
        unexpected = [name for name in said[0][1] if name in nowhere]
        problems = []
        if strict and missing:
            problems.append(f"the files lack {_some(missing)}")
        if strict and unexpected:
            problems.append(f"the model lacks {_some(unexpected)}")
        if problems:
            raise ConfigError("they do not fit; " + "; ".join(problems))
        return [missing, unexpected]

    missing, unexpected = council.agree(plan, compare)
    council.agree(lambda: targets[0].fill(folder))
    return LoadedWeights(missing, unexpected)


class _Target:
    """A model and the stored tensors that it is filled with.

    Raises:
        ConfigError: they do not fit; nothing was changed.
    """

    def __init__(
        self,
        model: nn.Module,
        files: Mapping[str, InFile],
        init: Callable[[nn.Module], object] | None,
    ) -> None:
        self._model = model
        self._files = files
        tree = Tree(model, "load_weights", without_values=True)
        rows = [row for row in tree.rows() if isinstance(row.value, Tensor)]
        names: dict[int, list[str]] = {}
        for row in rows:
            names.setdefault(id(row.value), []).append(row.name)
        shapes = {row.name: tuple(row.value.shape) for row in rows}
        self.chosen: Chosen = choose(model, list(names.values()), shapes, files)
        self._names = set(self.chosen.parts)
        # Memory on another device makes new Parameters of those that no unit owns.
        self._tied = [
            [row.own_name for row in rows if id(row.value) == number]
            for number, same in names.items()
            if len(same) > 1
        ]
        self._device = tree.device
        problems = []
        for parts in self.chosen.parts.values():
            for part in parts:
                try:
                    check_fits(part, files[part.name])
                except ConfigError as error:
                    problems.append(str(error))
        tied = {name: same[0] for same in names.values() for name in same}
        filled = {name for name, first in tied.items() if first in self._names}
        self._init = [
            (module, _initialiser(model, module, init, ", ".join(lacking), problems))
            for module, lacking in _lacking(model, filled)
        ]
        if problems:
            raise ConfigError("they do not fit; " + _some(problems, "; "))

    def fill(self, folder: Path) -> None:
        """Give the model memory, initialise what the files lack, and read."""
        self._model._apply(
            lambda own: torch.empty_like(own, device=self._device) if own.is_meta else own
        )
        for first, *others in self._tied:
            param = _place(self._model, first)
            for other in others:
                if _place(self._model, other) is not param:
                    path, _, last = other.rpartition(".")
                    self._model.get_submodule(path)._parameters[last] = param
        for module, initialise in self._init:
            before = {key: (own, own._version) for key, own in _own_buffers(module)}
            with torch.no_grad():
                initialise(module)
            for key, own in _own_buffers(module):
                was, version = before.get(key, (None, 0))
                if was is own and version == own._version:
                    raise ConfigError(
                        f"{type(module).__name__} left its buffer {key} as it was; pass "
                        "load_weights an init that gives it a value"
                    )
        tree = Tree(self._model, "load_weights")
        with StoredReader(folder, self._files) as reader, torch.no_grad():
            for row in tree.rows():
                if row.name in self._names:
                    _fill(row, self.chosen.parts[row.name], reader)
        tree.rewritten()


def _fill(row: Row, parts: Sequence[Stored], reader: StoredReader) -> None:
    """Read what this rank holds of a tensor, a piece at a time."""
    value = row.value
    local, region = value.detach(), whole(value.shape)
    if isinstance(value, DTensor):
        mesh = value.device_mesh
        local = _torch.local_of(value)
        region = region_of(value.shape, value.placements, mesh.shape, coordinate_in(mesh))
    step = max(_BUFFER_NBYTES // local.element_size(), 1)
    for start in range(0, region.numel, step):
        piece = region.part(start, min(start + step, region.numel))
        in_place = local.is_contiguous() and local.device.type == "cpu"
        memory = (
            local.view(-1)[start : start + piece.numel]
            if in_place
            else torch.empty(piece.numel, dtype=local.dtype)
        )
        for stored in parts:
            _read(stored, piece, memory, reader)
        if not in_place:
            _put(memory, local, start)


def _read(stored: Stored, piece: Region, memory: Tensor, reader: StoredReader) -> None:
    """Read what a stored tensor has of ``piece`` into ``memory``, flat."""
    for one in piece.overlaps(stored.region):
        starts, offset = [], one.other_offset
        for size in stored.region.grid[::-1]:
            offset, start = divmod(offset, size)
            starts.append(start)
        read = reader.read(stored, starts[::-1], one.sizes)
        at = memory.storage_offset() + one.offset
        memory.as_strided(one.sizes, one.strides, at).copy_(read)


def _put(memory: Tensor, local: Tensor, start: int) -> None:
    """Copy elements to their places in a tensor of any strides, from element ``start`` on."""
    offset = 0
    for box in whole(local.shape).part(start, start + memory.numel()).boxes():
        target = local
        for dim, one in enumerate(box):
            target = target.narrow(dim, *one)
        source = memory[offset : offset + target.numel()]
        target.copy_(source.view(target.shape))
        offset += target.numel()


def _place(model: nn.Module, name: str) -> nn.Parameter | None:
    path, _, own = name.rpartition(".")
    return model.get_submodule(path)._parameters.get(own)


def _own_buffers(module: nn.Module) -> list[tuple[str, Tensor]]:
    return [(name, own) for name, own in module._buffers.items() if own is not None]


def _lacking(model: nn.Module, filled: set[str]) -> list[tuple[nn.Module, list[str]]]:
    """Return the modules that have tensors on the meta device that will not be filled."""
    found = []
    for prefix, module in model.named_modules():
        tensors = {**module._parameters, **module._buffers}
        names = [
            clean_name(f"{prefix}.{name}" if prefix else name)
            for name, own in tensors.items()
            if own is not None and own.is_meta
        ]
        lacking = [name for name in names if name not in filled]
        if lacking:
            found.append((module, lacking))
    return found


def _initialiser(
    model: nn.Module,
    module: nn.Module,
    init: Callable[[nn.Module], object] | None,
    lacking: str,
    problems: list[str],
) -> Callable[[nn.Module], Any]:
    """Return what gives values to the tensors of a module; add to ``problems`` if nothing does."""
    inner = pretrained(model)
    if init is not None:
        return init
    if inner is not None and hasattr(inner, "_init_weights"):
        own: Callable[[nn.Module], Any] = inner._init_weights
        return own
    if not hasattr(module, "reset_parameters"):
        problems.append(
            f"{lacking} is on the meta device and not in the files, and "
            f"{type(module).__name__} has no reset_parameters(): pass load_weights an init"
        )
    return lambda module: module.reset_parameters()  # type: ignore[operator]


def _some(names: Sequence[str], between: str = ", ") -> str:
    return between.join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
