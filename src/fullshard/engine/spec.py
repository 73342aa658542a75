"""The spec of a bucket, decided before any tensor is touched, and copies to and from the host.

For shards in host memory, values are cast first and cross in one copy per bucket. Shards cross in
the dtype of the all-gather, gradients in the narrower of the dtypes of the reduction and of
``.grad``. The host reads a shard into a separate buffer when the copy is issued, so an optimizer
may write to the shard right after.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fullshard.comm import ENCODED, Collectives, Label, encoded
from fullshard.device import LaneEvent, Lanes, dry_host_tensor, host_tensor
from fullshard.engine.policy import WireCheck, WirePolicy
from fullshard.layout import Layout, Segment, round_up
from fullshard.tensors import Face, HookArguments, ParallelSpec, cut_flat


@dataclass(frozen=True)
class Offload:
    """A mark of a bucket whose shards, gradients and optimizer state live on the CPU."""

    pinned: bool
    """True if copies go through pinned memory; if False, each copy blocks the host."""


class Outbound:
    """A sender of shards from the host to ``target`` on the device, in the dtype of ``target``."""

    def __init__(self, offload: Offload, target: Tensor, lanes: Lanes) -> None:
        self._offload = offload
        self._target = target
        self._lanes = lanes
        self._host: Tensor | None = None
        self._sent: LaneEvent | None = None

    def send(self, shard: Tensor) -> None:
        """Issue the copy of ``shard`` on the current lane."""
        target = self._target
        if not self._offload.pinned:
            target.copy_(shard.to(target.dtype))
            return
        if self._sent is not None:
            self._sent.synchronize()  # the previous copy, which ended long ago
        if self._host is None:
            self._host = _on_host(target, pinned=True)
        self._host.copy_(shard)
        target.copy_(self._host, non_blocking=True)
        self._sent = self._lanes.mark()


def bring_home(row: Tensor, dtype: torch.dtype, offload: Offload, lanes: Lanes) -> Tensor:
    """Return ``row``, 1-D on the device, as a tensor of ``dtype`` on the host; block the host.

    The host waits for a reduction that began two units ago; the device has work issued before.
    """
    on_bus = row.to(dtype) if dtype.itemsize < row.itemsize else row
    host = _on_host(on_bus, pinned=offload.pinned)
    host.copy_(on_bus, non_blocking=True)
    lanes.mark().synchronize()
    return host.to(dtype)


def _on_host(like: Tensor, *, pinned: bool) -> Tensor:
    """Return memory of the host for the elements of ``like``, which a dry run has on meta."""
    if like.is_meta:
        return dry_host_tensor(like.numel(), like.dtype)
    return host_tensor(like.numel(), like.dtype, pinned=pinned)


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
    """The layout, collectives and dtypes of a bucket.

    ``comm`` communicates among the ranks that share one copy of the parameters. ``replicas``
    communicates among ranks with equal shards of several copies. ``secondary`` communicates among
    the ranks of the smaller group that holds secondary shards. ``param_dtype`` is None if the
    parameters' own dtype is used, ``reduce_dtype`` is None if ``GradDtypes`` decides.
    """

    layout: Layout
    comm: Collectives
    form: Face
    device: torch.device
    reducer: Collectives | None = None
    """The collectives that reduce among the ranks of ``comm``, if not ``comm`` itself."""
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
    """The formats in which parameters and gradients are sent."""
    wire_check: WireCheck = field(default_factory=WireCheck, compare=False)
    """The meter of the errors that the codecs of ``wire`` introduce, when enabled."""
    label: Label = field(default_factory=Label, compare=False)
    """The label of the bucket's collectives: unit and parameters, as error messages name them."""

    def labelled(self, label: Label) -> BucketSpec:
        """Return this spec with ``label``, also on its collectives."""
        given = {name: getattr(self, name) for name in ("comm", "reducer", "replicas", "secondary")}
        wires = {name: wire.labelled(label) for name, wire in given.items() if wire is not None}
        return replace(self, label=label, **wires)

    def described(self, unit: str, dtype: torch.dtype) -> str:
        """Return the text that ranks compare before communication for a bucket of ``unit``.

        ``dtype`` is the dtype of the shards. The text has a digest of all names, shapes and dtypes,
        and of the layout.
        """
        params = [(param.name, param.shape) for param in self.layout.params]
        wire = str(self.wire)
        dtypes = (dtype, self.param_dtype, self.reduce_dtype)
        places = (self.form.is_plain, self.layout.shard_numel, self.layout.bands)
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
        """The collectives that reduce over the shards."""
        return self.reducer or self.encoding_gradients(self.comm)

    def encoding_gradients(self, comm: Collectives) -> Collectives:
        """Return ``comm``, which reduces gradients as ``wire`` says; presence flags stay exact.

        The all-reduce over replicas carries shard means, unless there is one shard rank.
        """
        codec = self.wire.reducing
        if codec is not None and comm is self.replicas and self.comm.world > 1:
            codec = codec.for_means
        exact = num_flags(len(self.layout.params))
        watch = partial(self.wire_check.look, "reduced")
        return encoded(comm, codec, exact=exact, watch=watch)

    def gathering(self, dtype: torch.dtype) -> Collectives:
        """Return the collectives that gather shards into unsharded parameters of ``dtype``."""
        codec = self.wire.gathering if dtype in ENCODED else None
        return encoded(self.comm, codec, watch=partial(self.wire_check.look, "gathered"))

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

    def parts_of(self, flat: Tensor) -> list[Tensor]:
        """Return this rank's piece of every parameter in ``flat`` (1-D, in shard order)."""
        return [flat.narrow(0, p.offset, p.numel).view(p.shape) for p in self.pieces]

    def own_views(self, flat: Tensor) -> list[Tensor]:
        """Return ``parts_of(flat)``, each with a storage of its own.

        Each view has a storage of just its part, so that users may pickle and compile it. The views
        keep ``flat`` alive, and ``tensors.flat_part_of`` finds them as neighbors in ``flat``.
        """
        return cut_flat(flat, ((piece.offset, piece.shape) for piece in self.pieces))

    def unsharded_param(self, index: int, view: Tensor) -> nn.Parameter:
        """Return a parameter over the memory of ``view``, for modules to use; frozen at first."""
        parallel = self.parallel[index] if self.parallel else None
        if parallel is None:
            return nn.Parameter(view, requires_grad=False)
        return parallel.parameter(view, requires_grad=False)

    def unsharded_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype of the unsharded parameters if the shards have ``dtype``."""
        return self.param_dtype if self.param_dtype and dtype.is_floating_point else dtype
