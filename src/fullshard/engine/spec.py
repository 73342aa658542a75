"""What is decided about a bucket before any tensor is touched."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fullshard import _torch
from fullshard.comm import Collectives, Label
from fullshard.engine.offload import Offload
from fullshard.layout import Layout, Segment
from fullshard.tensors import HookArguments, ParallelSpec, ShardForm, announce_flat


class Piece(NamedTuple):
    """Where this rank's piece of a parameter lies in its shard, and its shape."""

    offset: int
    numel: int
    shape: tuple[int, ...]


@dataclass(frozen=True)
class BucketSpec:
    """Layout, wires and dtypes of a bucket.

    ``comm`` is the wire among the ranks that share one copy of the parameters, ``replicas`` the one
    among ranks with equal shards of several copies, and ``secondary`` the one among those that
    gather again what is resharded to a smaller group. ``param_dtype`` is None where the parameters'
    own dtype is used, ``reduce_dtype`` where ``GradDtypes`` decides.
    """

    layout: Layout
    comm: Collectives
    form: ShardForm
    device: torch.device
    reducer: Collectives | None = None
    """What reduces among the ranks of ``comm``, if not ``comm`` itself."""
    replicas: Collectives | None = None
    secondary: Collectives | None = None
    parallel: tuple[ParallelSpec | None, ...] | None = None
    """How each parameter lies over other than data-parallel ranks; None: none of them does."""
    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    grad_dtype: torch.dtype | None = None
    """Of reduced gradients; None: what ``grad_dtype`` of the parameters says."""
    follows_grad_dtype: bool = False
    """Whether gradients are computed and reduced as ``grad_dtype`` of the parameters says, too."""
    clean_padding: bool = False
    """Whether gradients are zero where no parameter lies, because somebody sees them as one."""
    offload: Offload | None = None
    """How shards get to ``device`` from the CPU; None: they are there."""
    are_wrapped: bool = False
    """Whether the parameters, and so gradients, are of a tensor class that stands around others."""
    hook_arguments: HookArguments | None = None
    """What hooks of tensors are told; None: there can be none."""

    def labelled(self, label: Label) -> BucketSpec:
        """The same with wires that say what they carry."""
        given = {name: getattr(self, name) for name in ("comm", "reducer", "replicas", "secondary")}
        wires = {name: wire.labelled(label) for name, wire in given.items() if wire is not None}
        return replace(self, **wires)

    def described(self, unit: str, dtype: torch.dtype) -> str:
        """What ranks compare before they exchange anything of a bucket of ``unit``.

        The dtype is that of the shards. A digest stands for names, shapes and dtypes of all.
        """
        params = [(param.name, param.shape) for param in self.layout.params]
        all_of_it = repr((unit, params, dtype, self.param_dtype, self.reduce_dtype))
        digest = hashlib.blake2b(all_of_it.encode(), digest_size=8).hexdigest()
        names = [param.name for param in self.layout.params[:3]]
        more = len(params) - len(names)
        some = ", ".join(names) + (f" and {more} more" if more else "")
        return f"unit {unit or '(root)'} ({some}; digest {digest})"

    @property
    def home(self) -> torch.device:
        """Where shards and gradients are between steps."""
        return self.device if self.offload is None else torch.device("cpu")

    @property
    def reducing(self) -> Collectives:
        """What reduces over the shards."""
        return self.reducer or self.comm

    @property
    def num_copies(self) -> int:
        """Of all parameters, over which gradients are averaged besides the shards."""
        return 1 if self.replicas is None else self.replicas.world

    @property
    def segments(self) -> tuple[Segment, ...]:
        """This rank's segment of each parameter."""
        return self.layout.segments_of(self.comm.rank)

    @cached_property
    def pieces(self) -> tuple[Piece, ...]:
        """This rank's piece of each parameter."""
        return tuple(
            Piece(s.shard_offset, s.numel, self.layout.local_shape(self.comm.rank, s.param))
            for s in self.segments
        )

    @cached_property
    def gaps(self) -> tuple[tuple[int, int], ...]:
        """Offset and length of what lies between the pieces of this rank, and behind the last."""
        gaps, end = [], 0
        for piece in sorted(self.pieces):
            if piece.offset > end:
                gaps.append((end, piece.offset - end))
            end = max(end, piece.offset + piece.numel)
        if end < self.layout.shard_numel:
            gaps.append((end, self.layout.shard_numel - end))
        return tuple(gaps)

    def own_views(self, flat: Tensor) -> list[Tensor]:
        """This rank's piece of every parameter in ``flat`` (1-D, in shard order).

        Each has a storage of just its part, so that users may pickle and compile it. They keep
        ``flat`` alive and can be found as neighbours in it by ``tensors.flat_part_of``.
        """
        announce_flat(flat, ((piece.offset, piece.numel) for piece in self.pieces))
        views = [_torch.own_part(flat, piece.offset, piece.shape) for piece in self.pieces]
        for view in views:
            _torch.keep_alive(view, flat)
        return views

    def whole_param(self, index: int, whole: Tensor) -> nn.Parameter:
        """A parameter as modules compute with it, frozen as yet, around the memory it is in."""
        parallel = self.parallel[index] if self.parallel else None
        if parallel is None:
            return nn.Parameter(whole, requires_grad=False)
        return parallel.parameter(whole, requires_grad=False)

    def unsharded_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype of the unsharded parameters of shards of ``dtype``."""
        return self.param_dtype if self.param_dtype and dtype.is_floating_point else dtype
