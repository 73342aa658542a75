"""Names of weights in files: those of PEFT's base models and of transformers' classes."""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from fullshard.checkpoint.format import ObjectUrl, Place, datafile
from fullshard.checkpoint.weights.remote import opened_weights
from fullshard.errors import CheckpointError, ConfigError, UnsupportedError
from fullshard.frontend.sharded import ShardedModule
from fullshard.layout.region import Interval, Region, full_region
from fullshard.tensors.form import clean_name

_INSIDE = "base_model.model."  # what PeftModel puts before the names of the model
_BASE = "base_layer."
_LOADED_FIRST = (
    "build the model with from_pretrained instead of on the meta device, call get_peft_model, then "
    "shard it"
)


class Adapted(NamedTuple):
    """A layer with adapters, and its path without the prefixes of wrappers."""

    path: str
    layer: Any  # a BaseTunerLayer of peft

    @property
    def prefixes(self) -> tuple[str, ...]:
        """How the names of its adapters' tensors begin."""
        return tuple(f"{self.path}{name}." for name in self.layer.adapter_layer_names)


def adapted_layers(model: nn.Module) -> Iterator[Adapted]:
    """Yield the layers of ``model`` that have adapters."""
    if "peft" not in sys.modules:
        return
    from peft.tuners.tuners_utils import BaseTunerLayer

    for path, module in model.named_modules():
        if isinstance(module, BaseTunerLayer):
            yield Adapted(clean_name(f"{path}." if path else ""), module)


class _Wrapper(NamedTuple):
    """A module of which ``peft`` trains a copy, or copies of some rows.

    Attributes:
        path: prefix of the tensor names in the model without ``peft``.
        used: prefix of the tensors in use: those of the active copy, else of the original.
        originals: prefixes of original tensors that an active copy replaces.
        left_out: prefixes of copies that are not active.
    """

    path: str
    used: str
    originals: tuple[str, ...]
    left_out: tuple[str, ...]


def _wrappers(model: nn.Module) -> Iterator[_Wrapper]:
    if "peft" not in sys.modules:
        return
    from peft.utils import other

    for name, module in model.named_modules():
        path = clean_name(f"{name}." if name else "")
        if isinstance(module, other.ModulesToSaveWrapper):
            copies: dict[str, str] = {
                adapter: f"{path}modules_to_save.{adapter}." for adapter in module.modules_to_save
            }
            active = [] if module.disable_adapters else list(module.active_adapters)
            used = next((copies.pop(one) for one in active if one in copies), "")
            original = f"{path}original_module."
            stands_in = (original,) if used else ()
            yield _Wrapper(path, used or original, stands_in, tuple(copies.values()))
        elif isinstance(module, getattr(other, "TrainableTokensWrapper", ())):
            yield _Wrapper(path, f"{path}token_adapter.", (), ())


def plain_names(model: nn.Module, names: Iterable[str], *, in_use: bool = False) -> dict[str, str]:
    """Return the names that tensors of ``model`` have without adapters, in the given order.

    Names of adapters' own tensors are left out. ``peft`` trains copies of some modules
    (``modules_to_save``). The active copy gets the name of its original; inactive copies are left
    out. With ``in_use``, an original that an active copy replaces is left out, too.
    """
    layers, wrappers = list(adapted_layers(model)), list(_wrappers(model))
    adapters = tuple(prefix for layer in layers for prefix in layer.prefixes)
    adapters += tuple(prefix for one in wrappers for prefix in one.left_out)
    if in_use:
        adapters += tuple(prefix for one in wrappers for prefix in one.originals)
    bases = {f"{layer.path}{_BASE}": layer.path for layer in layers}
    inside = {prefix: one.path for one in wrappers for prefix in (one.used, *one.originals)}
    found = {}
    for name in names:
        if name.startswith(adapters) and adapters:
            continue
        plain = name
        head, between, own = plain.rpartition(_BASE)
        while head + between in bases:  # what has adapters may be the base of another such layer
            plain = bases[head + between] + own
            head, between, own = plain.rpartition(_BASE)
        for prefix, path in inside.items():
            if plain.startswith(prefix):
                plain = path + plain.removeprefix(prefix)
        found[name] = plain.removeprefix(_INSIDE) if layers or wrappers else plain
    return found


def check_merged(model: nn.Module) -> None:
    """Refuse adapters whose changes are not in the weights.

    Raises:
        UnsupportedError: there is one; its path.
    """
    for adapted in adapted_layers(model):
        if not adapted.layer.merged and not adapted.layer.disable_adapters:
            raise UnsupportedError(
                f"{adapted.path.rstrip('.')} has adapters that are not merged, and weights would "
                "go without what they learned: call merge() of each such layer inside of "
                "unshard_params(layer), or save only the adapters with save_pretrained()"
            )


def reset_adapters(model: nn.Module, layer: Any) -> None:
    """Give a layer's adapters the values with which they begin.

    Raises:
        UnsupportedError: these depend on the weights.
    """
    configs: dict[str, Any] = next(
        vars(own)["peft_config"] for own in model.modules() if "peft_config" in vars(own)
    )
    for adapter, config in configs.items():
        how = getattr(config, "init_lora_weights", None)
        if how not in (True, "gaussian"):
            raise UnsupportedError(
                f"adapter {adapter}: init_lora_weights={how!r} with adapters on the meta device; "
                f"use True or 'gaussian', or {_LOADED_FIRST}"
            )
        if getattr(config, "use_dora", False):
            raise UnsupportedError(
                f"adapter {adapter}: use_dora=True with adapters on the meta device; its "
                f"magnitudes begin as norms of the weights: {_LOADED_FIRST}"
            )
        layer.reset_lora_parameters(adapter, how)


def check_loadable(model: nn.Module) -> None:
    """Refuse modules of which ``peft`` has copied rows to train them.

    Raises:
        UnsupportedError: there is one; its path.
    """
    for adapted in adapted_layers(model):
        if hasattr(adapted.layer, "trainable_tokens_delta"):
            raise UnsupportedError(
                f"{adapted.path.rstrip('.')} trains single tokens, copies of rows that loading "
                "would not change: load the weights before get_peft_model"
            )


_COMPARED_NUMEL = 8 << 20
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"


class Stored(NamedTuple):
    """A tensor in files of weights: a box of a model's tensor.

    Attributes:
        name: in the files.
        source: name of the model's tensor.
        region: the box.
        dims: the dims of the model's tensor that the stored one has; it lacks some of size 1.
    """

    name: str
    source: str
    region: Region
    dims: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape in the files."""
        return tuple(self.region.grid[dim] for dim in self.dims)


class InFile(NamedTuple):
    """The description of a tensor in a file of weights."""

    file: str
    dtype: str
    shape: tuple[int, ...]


def unchanged(name: str, shape: Sequence[int]) -> Stored:
    """Return a tensor that is stored as the model has it."""
    return Stored(name, name, full_region(shape), tuple(range(len(shape))))


def pretrained(model: nn.Module) -> Any:
    """Return the model of ``transformers`` that ``model`` is, or wraps; None if it is none."""
    for name, module in model.named_modules():
        inside = clean_name(f"{name}.x" if name else "x")
        is_model = hasattr(type(module), "base_model_prefix")
        if is_model and plain_names(model, [inside]).get(inside) == "x":
            return module
    return None


def stored_tensors(model: nn.Module, shapes: Mapping[str, Sequence[int]]) -> list[Stored]:
    """Return how tensors of a model are stored, but for those of adapters.

    Args:
        model: if it is of ``transformers``, its names in files are used.
        shapes: of the tensors, by their names in the model.

    Raises:
        UnsupportedError: ``transformers`` stores something else than boxes of them.
    """
    inner = pretrained(model)
    plain = plain_names(model, shapes)
    revert = None if inner is None else _reverter()
    if revert is None:
        found = [unchanged(name, shapes[name]) for name in plain]
        return [one._replace(name=plain[one.source]) for one in found]
    blanks = {own: torch.empty(tuple(shapes[name]), device="meta") for name, own in plain.items()}
    names = {id(blanks[own]): name for name, own in plain.items()}
    with torch.no_grad(), _NoCopies(), _own_classes(inner):  # type: ignore[no-untyped-call]
        views = revert(inner, dict(blanks))
    found = []
    for name, view in views.items():
        base = view if view._base is None else view._base
        source = names.get(id(base))
        box = None if source is None else _box(view, base)
        if source is None or box is None:
            raise UnsupportedError(
                f"{name} is no box of a parameter but computed from some: such weights cannot be "
                "read or written in parts; use from_pretrained and save_pretrained of transformers"
            )
        found.append(Stored(name, source, *box))
    first = {plain[one]: one for one in names.values()}
    others = [name for name, own in plain.items() if first[own] != name]  # copies of modules
    return found + [
        stored._replace(source=name)
        for name in others
        for stored in found
        if stored.source == first[plain[name]]
    ]


def own_class(module: nn.Module) -> type[Any]:
    """Return the class that a module had before it was sharded."""
    return next(base for base in type(module).__mro__ if not issubclass(base, ShardedModule))


@contextmanager
def _own_classes(model: nn.Module) -> Iterator[None]:
    """Give sharded modules the classes that they had before, whose names transformers looks up."""
    changed = [(one, type(one)) for one in model.modules() if isinstance(one, ShardedModule)]
    for module, _ in changed:
        module.__class__ = own_class(module)
    try:
        yield
    finally:
        for module, cls in changed:
            module.__class__ = cls


def _reverter() -> Any:
    """Return what ``transformers`` calls before it saves; None before version 5."""
    try:
        from transformers import core_model_loading
    except ImportError:
        return None
    return core_model_loading.revert_weight_conversion


class _NoCopies(TorchDispatchMode):
    """Lets ``contiguous`` return the view that it is called on."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten.clone.default:
            return args[0]
        return func(*args, **(kwargs or {}))


def _box(view: Tensor, base: Tensor) -> tuple[Region, tuple[int, ...]] | None:
    """Return the box of ``base``, which is contiguous, that ``view`` shows, and its dims."""
    starts, offset = [], int(view.storage_offset())
    for stride, size in zip(base.stride(), base.shape, strict=True):
        start, offset = divmod(offset, stride) if size > 1 else (0, offset)
        starts.append(start)
    sizes, dims, dim = [1] * base.dim(), [], -1
    for size, stride in zip(view.shape, view.stride(), strict=True):
        later = range(dim + 1, base.dim())
        fits = (d for d in later if base.stride(d) == stride or size == base.shape[d] == 1)
        dim = next(fits, base.dim())
        if dim == base.dim() or starts[dim] + size > base.shape[dim]:
            return None
        sizes[dim] = size
        dims.append(dim)
    intervals = tuple((Interval(*one),) for one in zip(starts, sizes, strict=True))
    return Region(intervals, 0, view.numel()), tuple(dims)


def read_index(folder: Place) -> dict[str, InFile]:
    """Return the tensors in the files of weights in ``folder``, or in the file ``folder``.

    ``folder`` may be a URL of an object store.

    Raises:
        CheckpointError: there are none, or they lack tensors that their index names.
    """
    index: dict[str, str] | None = None
    if _is_file(folder):
        names = [folder.name]
        folder = folder.parent
    elif (text := _index_in(folder)) is not None:
        try:
            index = dict(json.loads(text)["weight_map"])
            names = sorted(set(index.values()))
        except (ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"{folder / INDEX}: cannot be read ({error!r})") from error
    else:
        names = [SINGLE]
    found: dict[str, InFile] = {}
    for file in names:
        if Path(file).name != file:
            raise CheckpointError(f"{folder / INDEX}: {file!r} is not the name of a file")
        for name, own in _tensors_in(folder, file):
            if index is None or index.get(name) == file:
                found[name] = own
    lost = [name for name in index or () if name not in found]
    if lost:
        raise CheckpointError(f"{folder / INDEX}: the files lack {', '.join(lost[:8])}")
    return found


def _is_file(place: Place) -> bool:
    """Return whether ``place`` is a file of weights, not a folder of these."""
    if isinstance(place, ObjectUrl):
        return place.name.endswith(".safetensors")
    return place.is_file()


def _index_in(folder: Place) -> bytes | None:
    """Return the index of the files in ``folder``; None if there is none."""
    if isinstance(folder, ObjectUrl):
        return (folder / INDEX).read_if_there()
    try:
        return (folder / INDEX).read_bytes() if (folder / INDEX).exists() else None
    except OSError as error:
        raise CheckpointError(f"{folder / INDEX}: cannot be read ({error!r})") from error


def _tensors_in(folder: Place, file: str) -> Iterator[tuple[str, InFile]]:
    try:
        with opened_weights(folder / file) as opened:
            for name in opened.keys():  # noqa: SIM118 - this is no dictionary
                own = opened.get_slice(name)
                yield name, InFile(file, own.get_dtype(), tuple(own.get_shape()))
    except (OSError, SafetensorError) as error:
        what = f"{folder / file}: cannot be read ({error})"
        if isinstance(folder, Path) and any(folder.glob("*.bin")):
            what += "; files of pickles are not read: save them again with transformers"
        raise CheckpointError(what) from error


class Chosen(NamedTuple):
    """The stored tensors from which a model's tensors are made.

    Attributes:
        parts: by the name of the model's tensor.
        missing: names of the model's tensors that the files lack.
        unexpected: names in the files that nothing was made of.
        doubles: pairs of different names in the files for one tensor of the model, which is tied.
    """

    parts: dict[str, list[Stored]]
    missing: list[str]
    unexpected: list[str]
    doubles: list[tuple[str, str]]


def choose(
    model: nn.Module,
    names: Sequence[Sequence[str]],
    shapes: Mapping[str, Sequence[int]],
    files: Mapping[str, InFile],
) -> Chosen:
    """Choose the stored tensors of a model's tensors.

    Files may have current or older names of ``transformers``, or those of the model itself, with
    the prefix of the base model or without.

    Args:
        model: the model.
        names: of each tensor the names that it has in the model, several if it is tied.
        shapes: by any of these names.
        files: what the files have.
    """
    by_source: dict[str, list[Stored]] = {}
    for stored in stored_tensors(model, shapes):
        by_source.setdefault(stored.source, []).append(stored)
    inner = pretrained(model)
    prefix = f"{inner.base_model_prefix}." if inner is not None else ""
    renamed_files = {name: name for name in files}
    for file, name in _names_of_now(inner, files).items():
        renamed_files.setdefault(name, file)
    chosen: dict[str, list[Stored]] = {}
    missing: list[str] = []
    known: set[str] = set()
    doubles: list[tuple[str, str]] = []
    for tied in names:
        options = [
            [part._replace(name=name) for part, name in zip(parts, renamed, strict=True)]
            for source in tied
            for parts in (by_source.get(source, []), [unchanged(source, shapes[source])])
            for renamed in _names([part.name for part in parts], prefix)
            if parts
        ]
        complete = [
            [part._replace(name=renamed_files[part.name]) for part in one]
            for one in options
            if all(part.name in renamed_files for part in one)
        ]
        known.update(part.name for one in complete for part in one)
        if complete:
            chosen[tied[0]] = complete[0]
            firsts = list(dict.fromkeys(one[0].name for one in complete if len(tied) > 1))
            doubles += [(firsts[0], other) for other in firsts[1:]]
        else:
            missing.append(tied[0])
    ignored = [*_patterns(inner, "_keys_to_ignore_on_load_unexpected"), *_CONSTANTS]
    unexpected = [
        name
        for name in files
        if name not in known and not any(pattern.search(name) for pattern in ignored)
    ]
    may_miss = _patterns(inner, "_keys_to_ignore_on_load_missing")
    may_lack = plain_names(model, missing)  # not those of adapters
    missing = [name for name in may_lack if not any(one.search(name) for one in may_miss)]
    return Chosen(chosen, missing, unexpected, doubles)


# Buffers that models of transformers once saved, and now compute.
_CONSTANTS = (re.compile(r"rotary_emb\.inv_freq$"), re.compile(r"\.masked_bias$"))


def _names_of_now(inner: Any, files: Iterable[str]) -> dict[str, str]:
    """Return the current name of each stored tensor that ``transformers`` renames on loading."""
    if inner is None or _reverter() is None:
        return {}
    from transformers import conversion_mapping
    from transformers.core_model_loading import WeightRenaming

    with _own_classes(inner):
        found = conversion_mapping.get_model_conversion_mapping(inner)
    new = {}
    for name in files:
        now = name
        for one in found:
            if isinstance(one, WeightRenaming):
                now, _ = one.rename_source_key(now)
        if now != name:
            new[name] = now
    return new


def _names(names: list[str], prefix: str) -> Iterator[list[str]]:
    yield names
    if prefix:
        yield [name.removeprefix(prefix) for name in names]
        yield [f"{prefix}{name}" for name in names]


def _patterns(inner: Any, attribute: str) -> list[re.Pattern[str]]:
    patterns: Iterable[str] = getattr(inner, attribute, None) or ()
    return [re.compile(pattern) for pattern in patterns]


class StoredReader:
    """Reads boxes of stored tensors; a context that closes files."""

    def __init__(self, folder: Place, files: Mapping[str, InFile]) -> None:
        self._folder = folder.parent if _is_file(folder) else folder
        self._files = files
        self._open: dict[str, Any] = {}
        self._stack = ExitStack()

    def __enter__(self) -> StoredReader:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def read(self, stored: Stored, starts: Sequence[int], sizes: Sequence[int]) -> Tensor:
        """Return a box of a stored tensor, with the dims of the model's tensor.

        Args:
            stored: the tensor.
            starts: where the box begins in ``stored.region``.
            sizes: of the box.

        Raises:
            CheckpointError: the file cannot be read.
        """
        file = self._files[stored.name].file
        try:
            if file not in self._open:
                opened = opened_weights(self._folder / file)
                self._open[file] = self._stack.enter_context(opened)
            with torch.device("cpu"):  # safetensors follows the default device
                if not stored.dims:
                    found = self._open[file].get_tensor(stored.name)
                else:
                    box = [slice(starts[dim], starts[dim] + sizes[dim]) for dim in stored.dims]
                    found = self._open[file].get_slice(stored.name)[tuple(box)]
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{self._folder / file}: {stored.name}: {error}") from error
        read: Tensor = found.reshape(tuple(sizes))
        return read

    def differ(self, first: str, second: str, rank: int, world: int) -> bool:
        """Return whether two stored tensors differ in the share of ``rank`` of ``world``."""
        shape = self._files[first].shape
        if self._files[second].shape != shape:
            return True
        num_rows = shape[0] if shape else 1
        start, stop = num_rows * rank // world, num_rows * (rank + 1) // world
        step = max(1, _COMPARED_NUMEL * num_rows // max(1, math.prod(shape)))
        one, other = unchanged(first, shape), unchanged(second, shape)
        for at in range(start, stop, step):
            sizes = (min(step, stop - at), *shape[1:])[: len(shape)]
            starts = [at, *[0] * len(shape)][: len(shape)]
            values = [self.read(stored, starts, sizes) for stored in (one, other)]
            dtype = torch.promote_types(*(value.dtype for value in values))
            flat = (value.to(dtype).reshape(-1).view(torch.uint8) for value in values)
            if not torch.equal(*flat):
                return True
        return False


def check_fits(stored: Stored, found: InFile, dtype: torch.dtype) -> None:
    """Raise ``ConfigError`` if a stored tensor has not the shape or the kind of the model's."""
    if found.shape != stored.shape:
        raise ConfigError(
            f"{stored.name} has shape {found.shape} in the files and {stored.shape} here"
        )
    own = datafile.dtype_in_file(found.dtype)
    if own != dtype and not (is_real(own) and is_real(dtype)):
        raise ConfigError(
            f"{stored.name} is {found.dtype} in the files and {dtype} here: what was quantised, or "
            "is of another kind, is not converted"
        )


def is_real(dtype: torch.dtype | None) -> bool:
    """Return whether values of this dtype can be rounded to another such dtype."""
    return dtype is not None and dtype.is_floating_point and dtype.itemsize > 1
