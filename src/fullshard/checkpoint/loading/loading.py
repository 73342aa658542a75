"""Load checkpoints into models of any layout on any number of ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from fullshard._torch import dtensor as _dtensor
from fullshard.checkpoint.format import (
    AnyPlace,
    Bytes,
    CheckpointInfo,
    FileInfo,
    Manifest,
    Place,
    TensorEntry,
    datafile,
    decode,
    described,
    digest_of,
    in_folder,
    place_of,
    read_manifest,
)
from fullshard.checkpoint.loading.read import Reader, WantedPart
from fullshard.checkpoint.saving import await_save
from fullshard.checkpoint.state import (
    Announced,
    Key,
    OptimStateToLoad,
    Stepped,
    Tree,
    load_into,
    part_here,
)
from fullshard.comm.consensus import Consensus
from fullshard.comm.text import listed
from fullshard.errors import CheckpointError, ConfigError
from fullshard.progress import Operation
from fullshard.tensors import is_on_one_rank, local_part


def load(
    path: AnyPlace,
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    strict: bool = True,
) -> Any:
    """Load the checkpoint at ``path`` and return the ``extra`` that was saved.

    All ranks must call this. Layout, mesh and number of ranks may differ from those of the save.
    Each rank reads the parts that it keeps; some tensors are read in shares and exchanged. Data are
    verified, in the memory of the host, before the model or the optimizer is changed.

    Args:
        path: a folder or URL that ``save`` wrote to.
        model: a model, sharded or not; it may not be on the meta device.
        optimizer: the optimizer that steps its parameters; None: its state is not read.
        strict: refuse tensors that only the model or only the checkpoint has, and other dtypes.

    Raises:
        ConfigError: model, optimizer and checkpoint do not fit, with all differences.
        CheckpointError: the checkpoint is damaged or incomplete.
        LostRankError: a rank ended or hangs.
        ProtocolError: during a forward, a backward or ``unshard_params``; or other ranks do
            something else, and wait for this one.
        PeerError: a step of another rank failed, which so does not come to this.

    All ranks raise the same, and nothing was changed.
    """
    await_save()
    path = place_of(path)
    consensus = Consensus(f"load {path}", "load", "a checkpoint")
    return load_from(consensus, in_folder(path), path, model, optimizer, strict=strict).extra


def load_from(
    consensus: Consensus,
    opened: Callable[[FileInfo], Bytes],
    path: Place,
    model: nn.Module,
    optimizer: Optimizer | None,
    *,
    strict: bool,
    manifest: Manifest | None = None,
) -> CheckpointInfo:
    """Load a checkpoint as ``load`` does and return its description.

    Args:
        consensus: of all ranks.
        opened: opens the data files.
        path: the checkpoint's folder or URL.
        model, optimizer, strict: as for ``load``.
        manifest: of the checkpoint, the same on all ranks; None: each reads that at ``path``.
    """
    found: list[Any] = []

    def prepare() -> dict[str, Any]:
        own = read_manifest(path) if manifest is None else manifest
        target = Target(own, model, optimizer, strict=strict)
        work = Operation(f"loading {path.name}", target.nbytes)
        reader = Reader(
            opened, own, target.wanted, rank=consensus.rank, world=consensus.world, work=work
        )
        found.extend((target, reader, work, described(path, own)))
        state = "None" if optimizer is None else "an optimizer"
        return {
            "model": digest_of("\n".join(target.names).encode()),
            "options": {"optimizer": state, "strict": str(strict)},
            "files": digest_of("\n".join(f"{one.name} {one.digest}" for one in own.files).encode()),
            "exchange": reader.to_exchange(),
        }

    exchanged = consensus.agree(prepare, _exchanged)
    target, reader, work, info = found
    kept = consensus.agree(lambda: reader.kept_of(exchanged), list) if exchanged else []

    def read() -> None:
        with reader:
            reader.read(exchanged, kept)
        for wanted in target.again:
            with Reader(opened, reader.manifest, wanted, work=work) as alone:
                alone.read([])
        target.convert()

    consensus.agree(read)
    consensus.agree(lambda: target.put(optimizer))
    return info  # type: ignore[no-any-return]


def _exchanged(said: list[dict[str, Any]]) -> list[str]:
    """Return the names of all tensors that ranks exchange.

    Raises:
        CheckpointError: two ranks read different manifests.
        ConfigError: two ranks of one model, not of two stages of a pipeline, differ in options.
    """
    first_of: dict[str, int] = {}
    for rank, one in enumerate(said):
        if one["files"] != said[0]["files"]:
            raise CheckpointError(
                f"rank {rank} and rank 0 found different checkpoints there: the checkpoint was "
                "replaced meanwhile, or the ranks see different folders; load again, and let all "
                "ranks see the same place"
            )
        first = first_of.setdefault(one["model"], rank)
        given, expected = one["options"], said[first]["options"]
        for key in (key for key in given if given[key] != expected[key]):
            raise ConfigError(
                f"{key} of rank {rank} differs from that of rank {first}, which has the same "
                f"model: {given[key]}, not {expected[key]}; give all ranks the same"
            )
    return list(dict.fromkeys(name for one in said for name in one["exchange"]))


class Target:
    """The values to load into a model and an optimizer, in new memory of the host.

    Attributes:
        wanted: this rank's parts, by their names in the checkpoint.
        again: more of these, of names that are in ``wanted`` already.

    Raises:
        ConfigError: model, optimizer and checkpoint do not fit.
    """

    def __init__(
        self, manifest: Manifest, model: nn.Module, optimizer: Optimizer | None, *, strict: bool
    ) -> None:
        self.wanted: dict[str, WantedPart] = {}
        self.again: list[dict[str, WantedPart]] = []
        self._manifest = manifest
        self._model = model
        self._strict = strict
        self._tree = Tree(model, "load")
        self._model_state: dict[str, Any] = {}
        self._optimizer_state: dict[Any, Any] = {}
        self._to_load: OptimStateToLoad | None = None
        self._problems: list[str] = []
        self._add_model()
        if optimizer is not None:
            self._add_optimizer(optimizer)
        if self._problems:
            raise ConfigError("it does not fit; " + "; ".join(self._problems))

    @property
    def nbytes(self) -> int:
        """The size of all that this rank loads."""
        parts = (part for wanted in (self.wanted, *self.again) for part in wanted.values())
        return sum(part.memory.nbytes for part in parts)

    @property
    def names(self) -> list[str]:
        """The names of the tensors that the model loads, in order."""
        return sorted(self._model_state)

    @torch.no_grad()
    def convert(self) -> None:
        """Make what the optimizer loads; changes nothing yet."""
        if self._to_load is not None:
            get = self._optimizer_state.__getitem__
            self._optimizer_state = self._to_load.state_dict(get, copies=False)

    def put(self, optimizer: Optimizer | None) -> None:
        """Copy everything into the optimizer, which may refuse it, and the model."""
        if optimizer is not None and self._to_load is not None:
            optimizer.load_state_dict(self._optimizer_state)
        load_into(self._model, self._model_state, "load", strict=False, agrees=False)

    def _add_model(self) -> None:
        ties, states = self._manifest.values("ties"), self._manifest.values("states")
        rows = list(self._tree.rows())
        given: dict[object, str] = {}
        for row in rows:
            name = f"model/{ties.get(row.name, row.name)}"
            if not isinstance(row.value, Tensor) or row.name in states:
                if row.name in states:
                    self._model_state[row.name] = decode(states[row.name])
                    given[row.identity] = row.name
            elif name in self._manifest and row.identity not in given:
                given[row.identity] = name
                self._model_state[row.name] = self._want(name, row.value, row.value)
            elif self._strict and name in self._manifest and name != given[row.identity]:
                self._problems.append(f"{name} is tied to {given[row.identity]} here, not there")
        contents = self._manifest.contents
        left_out = {name for one in contents for name in one.values.get("left_out", ())}
        missing = [
            row.name for row in rows if row.identity not in given and row.name not in left_out
        ]
        names = {row.name for row in rows} | {ties.get(row.name, row.name) for row in rows}
        kinds = (name.partition("/") for name in self._manifest.names())
        saved = [name for kind, _, name in kinds if kind == "model"]
        unexpected = [name for name in (*saved, *states) if name not in names]
        if self._strict and missing:
            self._problems.append(f"the checkpoint lacks {listed(missing)}")
        if self._strict and unexpected:
            self._problems.append(f"the model lacks {listed(unexpected)}")

    def _add_optimizer(self, optimizer: Optimizer) -> None:
        stored = [c.values["optimizer"] for c in self._manifest.contents if "optimizer" in c.values]
        if not stored:
            if self._strict:
                self._problems.append("the checkpoint has no state of an optimizer")
            return
        stepped = Stepped(self._tree, optimizer)
        known = {*(row.name for row in self._tree.rows()), *stepped.shown}
        announced: dict[Key, Announced] = {}
        for full in self._manifest.names():
            kind, _, rest = full.partition("/")
            name, _, key = rest.rpartition("/")
            if kind == "optimizer" and name in known:
                announced[name, key] = _announced(self._manifest.entry(full))
            elif kind == "optimizer" and self._strict:
                self._problems.append(f"the optimizer lacks {name}, which has state {key!r}")
        for one in stored:
            for name, values in one["state"].items():
                for key, value in decode(values).items():
                    announced[name, key] = Announced(None, value=value)
        groups = [group for one in stored for group in decode(one["param_groups"])]
        announced["param_groups"] = Announced(None, value=groups)
        if self._problems:
            return
        found = OptimStateToLoad("load", self._tree, stepped, announced, self._strict)
        for (name, key), like in found.likes.items():
            one = announced[name, key]
            if one.shape is None:
                self._optimizer_state[name, key] = one.value
            else:
                like = torch.empty(one.shape, device="meta") if like is None else like
                self._optimizer_state[name, key] = self._want(f"optimizer/{name}/{key}", like, None)
        self._to_load = found

    def _want(self, full: str, like: Tensor, own: Tensor | None) -> Tensor | None:
        """Return memory for a tensor that is cut like ``like``, and have it filled."""
        entry = self._manifest.entry(full)
        if entry.shape != tuple(like.shape):
            got, expected = tuple(entry.shape), tuple(like.shape)
            self._problems.append(f"{full} has shape {got} there and {expected} here")
            return None
        if own is not None and own.is_meta:
            self._problems.append(f"{full} is on the meta device here: use to_empty() first")
            return None
        dtype = datafile.dtype_of(entry.dtype)
        if own is not None and self._strict and dtype != own.dtype:
            self._problems.append(f"{full} is of {dtype} there and of {own.dtype} here")
            return None
        if own is not None and _overlaps_itself(own):
            self._problems.append(f"{full} shares memory between its elements here")
            return None
        held, region = part_here(like)
        local = torch.empty(held.shape, dtype=dtype, device="cpu")
        if full in self.wanted:  # tied there, and not here
            self.again.append({full: WantedPart(region, local.view(-1))})
        else:
            self.wanted[full] = WantedPart(region, local.view(-1))
        return _dtensor.dtensor_like(like, local) if isinstance(like, DTensor) else local


def _announced(entry: TensorEntry) -> Announced:
    is_on_one = is_on_one_rank(entry.placements or ())
    return Announced(torch.Size(entry.shape), None, entry.placements is not None, is_on_one)


def _overlaps_itself(value: Tensor) -> bool:
    local = local_part(value)
    pairs = zip(local.shape, local.stride(), strict=True)
    return any(size > 1 and stride == 0 for size, stride in pairs)
