"""The spec of a bucket: everything decided before any tensor is touched."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fullshard import _torch
from fullshard.comm import ENCODED, Collectives, Label, encoded
from fullshard.engine.offload import Offload
from fullshard.engine.policy import WirePolicy
from fullshard.engine.wire import WireCheck
from fullshard.layout import Layout, Segment, round_up
from fullshard.tensors import HookArguments, ParallelSpec, ShardForm, announce_flat


def num_flags(num_params: int) -> int:
    """Return the number of elements behind each rank's slice for the flags of ``num_params``."""
    return round_up(num_params, 8)


class Piece(NamedTuple):
    """The offset in the shard, in elements, and the shape of this rank's piece of a parameter."""

    offset: int
    numel: int
    shape: tuple[int, ...]


@dataclass(frozen=True)
class BucketSpec:
    """The layout, wires and dtypes of a bucket.

    ``comm`` is the wire among the ranks that share one copy of the parameters, ``replicas`` the
    wire among ranks with equal shards of several copies, and ``secondary`` the wire among the ranks
    of the smaller group that holds secondary shards. ``param_dtype`` is None if the parameters' own
    dtype is used, ``reduce_dtype`` is None if ``GradDtypes`` decides.
    """

    layout: Layout
    comm: Collectives
    form: ShardForm
    device: torch.device
    reducer: Collectives | None = None
    """The wire that reduces among the ranks of ``comm``, if not ``comm`` itself."""
    replicas: Collectives | None = None
    secondary: Collectives | None = None
    parallel: tuple[ParallelSpec | None, ...] | None = None
    """Placements of each parameter over ranks that are not data-parallel; None: there are none."""
    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    grad_dtype: torch.dtype | None = None
    """The dtype of reduced gradients; None: as ``grad_dtype`` of the parameters says."""
    follows_grad_dtype: bool = False
    """True if ``grad_dtype`` of the parameters also sets the dtypes to compute and reduce in."""
    clean_padding: bool = False
    """True if padding in gradients must be zero, because all gradients are seen as one tensor."""
    offload: Offload | None = None
    """The transport of shards from the CPU to ``device``; None: shards live on ``device``."""
    are_wrapped: bool = False
    """True if the parameters, and so gradients, are of a wrapper subclass, see ``is_wrapper``."""
    hook_arguments: HookArguments | None = None
    """The arguments for all-gather hooks of tensors; None: there can be no hooks."""
    wire: WirePolicy = field(default_factory=WirePolicy)
    """How parameters and gradients travel."""
    wire_check: WireCheck = field(default_factory=WireCheck, compare=False)
    """What looks at the errors of that, if asked to."""

    def labelled(self, label: Label) -> BucketSpec:
        """Return this spec with ``label`` on its wires."""
        given = {name: getattr(self, name) for name in ("comm", "reducer", "replicas", "secondary")}
        wires = {name: wire.labelled(label) for name, wire in given.items() if wire is not None}
        return replace(self, **wires)

    def described(self, unit: str, dtype: torch.dtype) -> str:
        """Return the text that ranks compare before communication for a bucket of ``unit``.

        ``dtype`` is the dtype of the shards. The text has a digest of all names, shapes and dtypes,
        and of the layout.
        """
        params = [(param.name, param.shape) for param in self.layout.params]
        wire = str(self.wire)
        dtypes = (dtype, self.param_dtype, self.reduce_dtype)
        places = (type(self.form).__name__, self.layout.shard_numel, self.layout.bands)
        all_of_it = repr((unit, params, places, *dtypes, *filter(None, [wire])))
        digest = hashlib.blake2b(all_of_it.encode(), digest_size=8).hexdigest()
        names = [param.name for param in self.layout.params[:3]]
        more = len(params) - len(names)
        some = ", ".join(names) + (f" and {more} more" if more else "")
        travels = f"; wire {wire}" if wire else ""
        return f"unit {unit or '(root)'} ({some}{travels}; digest {digest})"

    @property
    def home(self) -> torch.device:
        """The device of shards and gradients between steps."""
        return self.device if self.offload is None else torch.device("cpu")

    @property
    def reducing(self) -> Collectives:
        """The wire that reduces over the shards."""
        return self.reducer or self.encoding_gradients(self.comm)

    def encoding_gradients(self, comm: Collectives) -> Collectives:
        """Return ``comm``, which reduces gradients as ``wire`` says; presence flags stay exact.

        What goes on over replicas are means over the shards, unless those are of one rank.
        """
        codec = self.wire.reducing
        if codec is not None and comm is self.replicas and self.comm.world > 1:
            codec = codec.for_means
        exact = num_flags(len(self.layout.params))
        watch = partial(self.wire_check.look, "reduced")
        return encoded(comm, codec, exact=exact, watch=watch)

    def gathering(self, dtype: torch.dtype) -> Collectives:
        """Return the wire that gathers shards into unsharded parameters of ``dtype``."""
        codec = self.wire.gathering if dtype in ENCODED else None
        return encoded(self.comm, codec, watch=partial(self.wire_check.look, "gathered"))

    @property
    def num_copies(self) -> int:
        """Number of copies of all parameters; gradients are averaged over copies and shards."""
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
        """Offset and length of each gap between this rank's pieces, and of one behind the last."""
        gaps, end = [], 0
        for piece in sorted(self.pieces):
            if piece.offset > end:
                gaps.append((end, piece.offset - end))
            end = max(end, piece.offset + piece.numel)
        if end < self.layout.shard_numel:
            gaps.append((end, self.layout.shard_numel - end))
        return tuple(gaps)

    def own_views(self, flat: Tensor) -> list[Tensor]:
        """Return this rank's piece of every parameter in ``flat`` (1-D, in shard order).

        Each view has a storage of just its part, so that users may pickle and compile it. The views
        keep ``flat`` alive, and ``tensors.flat_part_of`` finds them as neighbors in ``flat``.
        """
        announce_flat(flat, ((piece.offset, piece.numel) for piece in self.pieces))
        views = [_torch.own_part(flat, piece.offset, piece.shape) for piece in self.pieces]
        for view in views:
            _torch.keep_alive(view, flat)
        return views

    def whole_param(self, index: int, whole: Tensor) -> nn.Parameter:
        """Return a parameter over the memory of ``whole``, for modules to use; frozen at first."""
        parallel = self.parallel[index] if self.parallel else None
        if parallel is None:
            return nn.Parameter(whole, requires_grad=False)
        return parallel.parameter(whole, requires_grad=False)

    def unsharded_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype of the unsharded parameters if the shards have ``dtype``."""
        return self.param_dtype if self.param_dtype and dtype.is_floating_point else dtype
