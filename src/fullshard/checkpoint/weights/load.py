"""Load weights that others trained, from safetensors files, into a sharded model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from operator import methodcaller
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fullshard.checkpoint.format import AnyPlace, ObjectUrl, datafile, place_of
from fullshard.checkpoint.saving import await_save
from fullshard.checkpoint.state import Row, Tree, part_here
from fullshard.checkpoint.weights.names import (
    Chosen,
    InFile,
    Stored,
    StoredReader,
    adapted_layers,
    check_fits,
    check_loadable,
    choose,
    read_index,
    reset_adapters,
)
from fullshard.comm.consensus import Consensus
from fullshard.comm.text import listed
from fullshard.errors import ConfigError
from fullshard.frontend.contexts import unshard_params
from fullshard.frontend.ownership import owner_of
from fullshard.frontend.places import Place
from fullshard.layout.region import Region, boxes, full_region
from fullshard.progress import Operation
from fullshard.tensors import local_part, taken_by
from fullshard.tensors.form import clean_name
from fullshard.tensors.transfer import view_of

_BUFFER_NBYTES = 32 << 20


class Conversion(NamedTuple):
    """How ``load_weights`` makes a tensor of a model from a stored one that is unlike it.

    Attributes:
        shape: of the stored tensor.
        make: called on every rank with the whole stored tensor, in the dtype of the files; returns
            the full tensor of the model, of which each rank then keeps its part.
    """

    shape: tuple[int, ...]
    make: Callable[[Tensor], Tensor]


class LoadedWeights(NamedTuple):
    """The names of tensors that ``load_weights`` did not load.

    Attributes:
        missing: names of the model's tensors that the files lack.
        unexpected: names in the files that the model lacks.
    """

    missing: list[str]
    unexpected: list[str]


def load_weights(
    model: nn.Module,
    folder: AnyPlace,
    *,
    strict: bool = True,
    init: Callable[[nn.Module], object] | None = None,
    convert: Mapping[str, Conversion] | None = None,
) -> LoadedWeights:
    """Load safetensors files as ``transformers`` writes them; all ranks must call this.

    Each rank reads its own parts, a piece at a time. A model on the meta device gets memory on the
    device of its mesh first. Then tensors that the files lack, such as buffers that are not
    saved, are initialised, equally on all ranks and with full parameters. ``init`` does so, or
    ``_init_weights`` of a model of ``transformers``, or ``peft`` for an adapter, or else the
    ``reset_parameters`` of their modules. Random values depend on ``torch.manual_seed`` on the
    first rank. Layers that have adapters of ``peft`` are found by their names without them.

    Args:
        model: a model, sharded or not; values are cast to its dtypes.
        folder: has ``model.safetensors``, or ``model.safetensors.index.json`` and the files that it
            names; or such a file itself; or a URL of an object store.
        strict: refuse files that lack tensors of the model, or have others.
        init: called with each module on the meta device that has a tensor the files lack.
        convert: by name, how a tensor of the model is made from stored ones; each rank holds one
            such tensor in full at a time.

    Raises:
        ConfigError: files and model do not fit, with all differences. Nothing was changed, unless
            ``init`` or its like left something without a value, which is seen afterwards.
        CheckpointError: files are missing or damaged; if they could be opened, some values may
            have been loaded.
        LostRankError: a rank ended or hangs.
        ProtocolError: during a forward, a backward or ``unshard_params``.

    All ranks raise the same.
    """
    await_save()
    folder = place_of(folder)
    consensus = Consensus(f"load weights from {folder}", "load", "weights")
    index = consensus.agree(lambda: None, lambda _: read_index(folder))
    files = {name: InFile(one[0], one[1], tuple(one[2])) for name, one in index.items()}
    targets: list[_Target] = []

    def plan() -> list[list[str]]:
        targets.append(_Target(model, files, init, convert or {}))
        chosen = targets[0].chosen
        with StoredReader(folder, files) as reader:
            unlike = [
                f"{first} and {second}"
                for first, second in chosen.doubles
                if reader.differ(first, second, consensus.rank, consensus.world)
            ]
        return [chosen.missing, chosen.unexpected, unlike]

    def compare(said: list[list[list[str]]]) -> list[Any]:
        missing = list(dict.fromkeys(name for one, _, _ in said for name in one))
        nowhere = set(said[0][1]).intersection(*(own for _, own, _ in said))
        unlike = list(dict.fromkeys(pair for *_, pairs in said for pair in pairs))
        unexpected = [name for name in said[0][1] if name in nowhere]
        problems = []
        if strict and missing:
            problems.append(f"the files lack {listed(missing)}")
        if strict and unexpected:
            problems.append(f"the model lacks {listed(unexpected)}")
        if unlike:
            problems.append(
                f"{listed(unlike)} differ in the files, but the model ties them: build the model "
                "with tie_word_embeddings=False"
            )
        if problems:
            raise ConfigError("the files do not fit the model: " + "; ".join(problems))
        return [missing, unexpected, torch.initial_seed()]

    missing, unexpected, seed = consensus.agree(plan, compare)
    consensus.agree(lambda: targets[0].fill(folder, seed))
    return LoadedWeights(missing, unexpected)


class _Target:
    """A model and the stored tensors that it is filled with.

    Raises:
        ConfigError: the files do not fit the model; nothing was changed.
    """

    def __init__(
        self,
        model: nn.Module,
        files: Mapping[str, InFile],
        init: Callable[[nn.Module], object] | None,
        convert: Mapping[str, Conversion],
    ) -> None:
        self._model = model
        self._files = files
        self._convert = convert
        check_loadable(model)
        tree = Tree(model, "load_weights", without_values=True)
        rows = [row for row in tree.rows() if isinstance(row.value, Tensor)]
        names: dict[int, list[str]] = {}
        for row in rows:
            names.setdefault(id(row.value), []).append(row.name)
        shapes = {row.name: tuple(row.value.shape) for row in rows}
        nowhere = [name for name in convert if name not in shapes]
        if nowhere:
            raise ConfigError(f"convert names {listed(nowhere)}, which the model lacks")
        shapes |= {name: tuple(one.shape) for name, one in convert.items()}
        self.chosen: Chosen = choose(model, list(names.values()), shapes, files)
        # Memory on another device makes new Parameters of those that no unit owns.
        self._tied = [
            [row.own_name for row in rows if id(row.value) == number]
            for number, same in names.items()
            if len(same) > 1
        ]
        self._device = tree.device
        problems = []
        dtypes = {row.name: row.value.dtype for row in rows}
        dtypes |= dict.fromkeys(convert, torch.float32)  # of some floating point
        for name, parts in self.chosen.parts.items():
            for part in parts:
                try:
                    check_fits(part, files[part.name], dtypes[name])
                except ConfigError as error:
                    problems.append(str(error))
        tied = {name: same[0] for same in names.values() for name in same}
        filled = {name for name, first in tied.items() if first in self.chosen.parts}
        self._lacking = _lacking(model, filled, init)
        problems += [
            f"{name} is on the meta device and not in the files, and "
            f"{type(one.module).__name__} has no reset_parameters(): pass load_weights an init"
            for one in self._lacking
            for name in one.names
            if one.initialise is None
        ]
        if problems:
            raise ConfigError("the files do not fit the model: " + listed(problems, between="; "))

    def fill(self, folder: Path | ObjectUrl, seed: int) -> None:
        """Give the model memory, initialise what the files lack, and read."""
        self._model._apply(self._with_memory)
        self._tie()
        drawn_on = [] if self._device.type == "cpu" else [self._device]
        with torch.random.fork_rng(drawn_on), torch.no_grad():
            torch.manual_seed(seed)
            for one in self._lacking:
                one.fill()
        tree = Tree(self._model, "load_weights")
        rows = [row for row in tree.rows() if row.name in self.chosen.parts]
        work = Operation(
            f"loading {folder.name}", sum(local_part(row.value).nbytes for row in rows)
        )
        with StoredReader(folder, self._files) as reader, torch.no_grad():
            for row in rows:
                if row.name in self._convert:
                    self._fill_converted(row, reader)
                    work.add(local_part(row.value).nbytes)
                else:
                    _fill(row, self.chosen.parts[row.name], reader, work)
        tree.rewritten()

    def _tie(self) -> None:
        """Tie again what was tied before the model got memory."""
        for first, *others in self._tied:
            tensors, own = _place(self._model, first)
            for other in others:
                its, last = _place(self._model, other)
                if its[last] is not tensors[own]:
                    its[last] = tensors[own]

    def _fill_converted(self, row: Row, reader: StoredReader) -> None:
        """Read a stored tensor in full, convert it, and keep this rank's part of the result.

        Raises:
            ConfigError: that has another shape or dtype than the model's.
        """
        conversion, value = self._convert[row.name], row.value
        region, parts = full_region(conversion.shape), self.chosen.parts[row.name]
        dtype = datafile.dtype_in_file(self._files[parts[0].name].dtype)
        read = torch.empty(conversion.shape, dtype=dtype, device="cpu")
        for stored in parts:
            _read(stored, region, read.view(-1), reader)
        made = conversion.make(read)
        if made.shape != value.shape or made.dtype != value.dtype:
            raise ConfigError(
                f"convert made {made.dtype} {tuple(made.shape)} of {row.name}, which is "
                f"{value.dtype} {tuple(value.shape)} here"
            )
        local_part(value).copy_(taken_by(value, made))

    def _with_memory(self, own: Tensor) -> Tensor:
        if not own.is_meta:
            return own
        device = self._device
        if isinstance(own, DTensor) and own.device_mesh.device_type != device.type:
            device = torch.device(own.device_mesh.device_type)  # tensor-parallel, in no unit
        return torch.empty_like(own, device=device)


def _fill(row: Row, parts: Sequence[Stored], reader: StoredReader, work: Operation) -> None:
    """Read what this rank holds of a tensor, a piece at a time."""
    local, region = part_here(row.value)
    step = max(_BUFFER_NBYTES // local.element_size(), 1)
    for start in range(0, region.numel, step):
        piece = region.part(start, min(start + step, region.numel))
        in_place = local.is_contiguous() and local.device.type == "cpu"
        memory = (
            local.view(-1)[start : start + piece.numel]
            if in_place
            else torch.empty(piece.numel, dtype=local.dtype, device="cpu")
        )
        for stored in parts:
            _read(stored, piece, memory, reader)
        if not in_place:
            _put(memory, local, start)
        work.add(memory.nbytes)


def _read(stored: Stored, piece: Region, memory: Tensor, reader: StoredReader) -> None:
    """Read what a stored tensor has of ``piece`` into ``memory``, flat."""
    for one in piece.overlaps(stored.region):
        starts, offset = [], one.other_offset
        for size in stored.region.grid[::-1]:
            offset, start = divmod(offset, size)
            starts.append(start)
        read = reader.read(stored, starts[::-1], one.sizes)
        view_of(memory, one).copy_(read)


def _put(memory: Tensor, local: Tensor, start: int) -> None:
    """Copy elements to their places in a tensor of any strides, from element ``start`` on."""
    for box in boxes(local.shape, start, memory.numel()):
        source, memory = memory.split([box.numel, memory.numel() - box.numel])
        place = tuple(slice(at, at + size) for at, size in zip(*box, strict=True))
        local[place].copy_(source.view(box.sizes))


def _place(model: nn.Module, name: str) -> tuple[dict[str, Any], str]:
    """Return the parameters or buffers of the module that has a tensor, and its name there."""
    path, _, own = name.rpartition(".")
    module = model.get_submodule(path)
    return (module._parameters if own in module._parameters else module._buffers), own


class _Lacking(NamedTuple):
    """A module with tensors on the meta device that the files lack, and how these get values."""

    module: nn.Module
    names: dict[str, str]
    """Of the tensors: in the model, and in the module or below."""
    initialise: Callable[[nn.Module], object] | None
    around: Sequence[nn.Module] = ()
    """Outer modules to initialise next if tensors still lack values; the innermost first."""

    def fill(self) -> None:
        """Give values to the tensors.

        Raises:
            ConfigError: one has none then.
        """
        assert self.initialise is not None
        for module in (self.module, *self.around):
            with self._unsharded(module):
                before = self._tensors()
                versions = {name: own._version for name, own in before.items()}
                self.initialise(module)
                left = [
                    name
                    for name, own in self._tensors().items()
                    if own is before[name] and own._version == versions[name]
                ]
            if not left:
                return
        raise ConfigError(
            f"{type(self.module).__name__} left {left[0]} as it was; pass load_weights an "
            "init that gives it a value"
        )

    def _unsharded(self, module: nn.Module) -> AbstractContextManager[None]:
        """Unshard the tensors, and the parameters of ``module``, so that it can initialise them."""
        places = {
            one: [(one, name) for name, param in one._parameters.items() if param is not None]
            for one in (self.module, module)
        }
        places[self.module] += self._places()
        sharded = [
            one
            for one, own in places.items()
            if any(owner_of(Place(*place)) is not None for place in own)
        ]
        return unshard_params(sharded, recurse=False) if sharded else nullcontext()

    def _tensors(self) -> dict[str, Tensor]:
        places = zip(self.names, self._places(), strict=True)
        return {name: getattr(module, own) for name, (module, own) in places}

    def _places(self) -> list[tuple[nn.Module, str]]:
        split = (own.rpartition(".") for own in self.names.values())
        return [(self.module.get_submodule(path), last) for path, _, last in split]


def _lacking(
    model: nn.Module, filled: set[str], init: Callable[[nn.Module], object] | None
) -> list[_Lacking]:
    """Return the modules that have tensors on the meta device that will not be filled."""
    found = []
    of_models: dict[str, Any] = {}  # by the path of a module: the innermost model's around it
    layers = list(adapted_layers(model))
    adapters = tuple(prefix for layer in layers for prefix in layer.prefixes)
    for path, module in model.named_modules():
        around = of_models.get(path.rpartition(".")[0])
        is_model = hasattr(type(module), "base_model_prefix")
        of_models[path] = getattr(module, "_init_weights", around) if is_model else around
        names = {
            name: own
            for name, own in _on_meta(path, module).items()
            if name not in filled and not (adapters and name.startswith(adapters))
        }
        reset = methodcaller("reset_parameters") if hasattr(module, "reset_parameters") else None
        if names:
            outer = _around(model, path, of_models) if init is None and of_models[path] else ()
            found.append(_Lacking(module, names, init or of_models[path] or reset, outer))
    for layer in layers:
        names = {
            f"{layer.path}{name}": f"{path}.{own}" if path else own
            for path, module in layer.layer.named_modules()
            for name, own in _on_meta(path, module).items()
        }
        names = {name: own for name, own in names.items() if name.startswith(layer.prefixes)}
        if names:
            found.append(_Lacking(layer.layer, names, init or partial(reset_adapters, model)))
    return found


def _around(model: nn.Module, path: str, of_models: dict[str, Any]) -> list[nn.Module]:
    """Return the modules around ``path`` that are in the same model, the innermost first."""
    outer = []
    while path and of_models[path := path.rpartition(".")[0]] is not None:
        outer.append(model.get_submodule(path))
    return outer


def _on_meta(path: str, module: nn.Module) -> dict[str, str]:
    """Return the names, below ``path`` and in ``module``, of its own tensors on the meta device."""
    tensors = {**module._parameters, **module._buffers}
    return {
        clean_name(f"{path}.{own}" if path else own): own
        for own, tensor in tensors.items()
        if tensor is not None and tensor.is_meta
    }
