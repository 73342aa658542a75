"""The path from the shard to unsharded parameters. See [Note: the tensors of a bucket]."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fullshard._torch import autograd as _autograd
from fullshard._torch import device as _device
from fullshard._torch import memory as _memory
from fullshard.comm import Collectives, Pending
from fullshard.device import Buffer, BufferKind, Lane, LaneEvent, Lanes, StorageMeter
from fullshard.engine.extended import HookedGather
from fullshard.engine.shard import Shards
from fullshard.engine.spec import BucketSpec, Offload, Outbound
from fullshard.layout import GatherPlan, StridedCopy, even_from, plan_gather, round_up
from fullshard.tensors import local_part

_ADDRESS = Tensor.data_ptr


FREED = 2**32 - 1
"""The version of parameters without memory, the highest that a counter can hold."""


class Versions:
    """The version counters of unsharded parameters: ``FREED`` while parameters have no memory.

    Autograd remembers the version of each tensor that it saves, and raises a RuntimeError if a
    backward reads the tensor at another version. Views have the counter of their base. Where
    ``Buffer`` refuses reads itself, no versions are needed, and its error names the unit.
    """

    def __init__(self, params: Sequence[nn.Parameter] = ()) -> None:
        inside = [local_part(param) for param in params if isinstance(param, DTensor)]
        is_needed = params and not _memory.refuses_reads(params[0].device)
        self._tensors: tuple[Tensor, ...] = (*params, *inside) if is_needed else ()
        self._freed = (FREED,) * len(self._tensors)
        self._kept: tuple[int, ...] | None = None

    def freed(self) -> None:
        """Make autograd refuse to read the parameters, whose memory was freed."""
        if self._kept is None:
            self._kept = _autograd.versions_of(self._tensors)
            _autograd.set_versions(self._tensors, self._freed)

    def gathered(self) -> None:
        """Restore the versions that the parameters had before ``freed``."""
        if self._kept is not None:
            _autograd.set_versions(self._tensors, self._kept)
            self._kept = None


class Unsharded:
    """The unsharded parameters of a bucket, whose memory comes and goes.

    ``start`` and ``finish`` gather; ``free`` frees the memory. The scheduler makes sure that the
    three are called in turn. There are three ways from the shards to ``params``:

        no gather      this rank has all elements in the right dtype: parameters use the shard.
        FlatGather     fills one buffer for all parameters.
        HookedGather   fills separate memory, as some parameters have all-gather hooks.

    With a secondary shard, ``free`` can keep this shard alone, and the next ``start`` gathers from
    it.

    ``is_lost``: True once ``free`` was called in the middle of a gather, which happens only after a
    fault. The backend may still write to the memory, so the object cannot be used any more.

    ``is_gathered``: True from ``start`` to ``free``.
    """

    is_lost = False
    is_gathered = False
    _gather: FlatGather | HookedGather | None = None
    _secondary: _Secondary | None = None
    _buffer: Buffer | None = None
    """The memory of all parameters, if it is one buffer that comes and goes."""
    _flat: Tensor | None = None
    """The 1-D memory of all parameters; None if hooks make each in memory of its own."""
    _plain: Sequence[nn.Parameter] = ()
    """The parameters in ``_flat`` that are no DTensors."""
    _memory: Sequence[Tensor] = ()
    """The part of ``_flat`` of each of ``_plain``."""
    _is_filled = False
    """True if the constructor has gathered, so that the next ``start`` need not."""

    def __init__(
        self, spec: BucketSpec, shards: Shards, lanes: Lanes, meter: StorageMeter, *, hooked: bool
    ) -> None:
        """Make the parameters, without memory unless ``hooked`` or borrowed from the shard.

        All-gather hooks make the parameters from the tensors of all ranks. So the constructor
        gathers, and all ranks must construct at the same point.
        """
        self._lanes = lanes
        self._in_flight: Pending | None = None
        self._versions = Versions()
        with torch.inference_mode(False), torch.no_grad():
            if hooked:
                self._gather = gather = HookedGather(spec, shards, lanes, meter)
                self._gather_first()
                self.params = gather.params
                self._versions = Versions(self.params)
            elif _can_borrow(spec, shards.flat):
                self.params = self._over(spec, shards.flat)
            else:
                self._buffer = buffer = _unsharded_buffer(spec, shards.flat, meter)
                self.params = self._over(spec, buffer.tensor)
                self._gather = FlatGather(spec, shards.flat, buffer, lanes, meter)
                if spec.secondary is not None:
                    comm = lanes.wire(Lane.GATHER, spec.secondary)
                    self._secondary = _Secondary(comm, buffer, meter)
                buffer.free()
                self._versions = Versions(self.params)
                self._versions.freed()

    def _over(self, spec: BucketSpec, flat: Tensor) -> list[nn.Parameter]:
        """Return parameters over ``flat``.

        Each parameter is made from ``.data`` of a view, so that it has its own version counter and
        no base. So to autograd, the engine's writes to the memory modify nothing.
        """
        self._flat = flat
        layout = spec.layout
        views = [
            flat.narrow(0, offset, param.numel).view(param.shape).data
            for param, offset in zip(layout.params, layout.unsharded_offsets, strict=True)
        ]
        params = [spec.unsharded_param(i, view) for i, view in enumerate(views)]
        pairs = list(zip(params, views, strict=True))
        self._plain = [param for param, _ in pairs if not isinstance(param, DTensor)]
        self._memory = [view for param, view in pairs if not isinstance(param, DTensor)]
        return params

    def _gather_first(self) -> None:
        """Gather for the first time; free the memory if a hook raises."""
        try:
            self.start()
            self.finish()
        except BaseException:
            self.free()
            raise
        self._is_filled, self.is_gathered = True, False

    @property
    def borrows(self) -> bool:
        """True if the parameters share the memory of the shard."""
        return self._gather is None

    def _source(self) -> FlatGather | HookedGather | _Secondary | None:
        """Return the gather that fills the memory next."""
        return self._secondary if self._secondary and self._secondary.kept else self._gather

    def start(self) -> None:
        """Start the all-gather; if memory is still allocated, write the new values to it."""
        is_filled, self._is_filled = self._is_filled, False
        self.is_gathered = False  # until it has been started: it may fail
        source = self._source()
        if source is not None and not is_filled:
            with self._lanes.on(Lane.GATHER):
                self._in_flight = source.start()
        self.is_gathered = True
        self.reclaim()

    def finish(self) -> None:
        """Make the unsharded parameters usable on the compute lane."""
        source = self._source()
        if self._in_flight is None or source is None:
            return
        with self._lanes.on(Lane.GATHER):
            self._lanes.wait(self._in_flight)
            self._in_flight = None
            source.finish()
        self._versions.gathered()
        self._lanes.join(Lane.COMPUTE, Lane.GATHER)

    def free(self, *, to_secondary: bool = False, keep_memory: bool = False) -> None:
        """Free the memory once compute is done with it, except a secondary shard if asked.

        With ``keep_memory`` nothing is freed, and the next gather writes to the same place. In the
        middle of a gather, nothing is freed, and ``is_lost`` is set.
        """
        self._is_filled = self.is_gathered = False
        if self._gather is None:
            return
        secondary = self._secondary
        if self._in_flight is not None:  # of a step that a fault ended: it will never end
            self._in_flight, self.is_lost = None, True
            for buffer in (*self._gather.buffers, *([secondary.slice] if secondary else ())):
                buffer.leave()
            return
        self._lanes.join(Lane.GATHER, Lane.COMPUTE)
        with self._lanes.on(Lane.GATHER):
            if secondary is not None:
                if to_secondary:
                    secondary.keep()
                else:
                    secondary.slice.free()
            if not keep_memory:
                for buffer in self._gather.buffers:
                    buffer.free()
        if not keep_memory:
            self._versions.freed()

    def owns(self, param: nn.Parameter) -> bool:
        """Return whether ``param``, one of ``params``, still uses our memory, as far as we know."""
        return self._flat is None or _memory.shares_storage(local_part(param), self._flat)

    def reclaim(self) -> list[int]:
        """Point parameters with foreign ``data`` back to our memory; return their indices.

        While no memory is allocated, do nothing: nobody reads them, and ``start`` calls this again.
        """
        if self._buffer is not None and not self._buffer.allocated:
            return []
        if list(map(_ADDRESS, self._plain)) == list(map(_ADDRESS, self._memory)):
            return []
        replaced = []
        for param, view in zip(self._plain, self._memory, strict=True):
            if param.data_ptr() != view.data_ptr():
                param.data = view
                replaced.append(next(i for i, one in enumerate(self.params) if one is param))
        return replaced

    def takes(self, shards: Shards) -> bool:
        """Gather from ``shards`` from now on; return False if a new object is needed instead.

        ``shards`` have the device and dtype of the old ones.
        """
        if not isinstance(self._gather, FlatGather):
            return False
        self._gather.take(shards.flat)
        return True


def _can_borrow(spec: BucketSpec, shard: Tensor) -> bool:
    """Return whether ``shard`` is all of the unsharded parameters, on their device and in dtype."""
    is_whole = spec.layout.world == 1 and spec.layout.zero_copy
    return is_whole and spec.offload is None and spec.unsharded_dtype(shard.dtype) == shard.dtype


def _unsharded_buffer(spec: BucketSpec, shard: Tensor, meter: StorageMeter) -> Buffer:
    dtype = spec.unsharded_dtype(shard.dtype)
    device = shard.device if spec.offload is None or shard.is_meta else spec.device
    numel = spec.layout.unsharded_numel
    if spec.secondary is not None:
        numel = round_up(numel, spec.secondary.world)
    kind, label = BufferKind.UNSHARDED, spec.label
    return Buffer(numel, dtype, device, kind=kind, meter=meter, label=label)


class _Secondary:
    """A slice of the unsharded buffer, kept by each rank of a small group in place of all of it.

    The slices cut the buffer at any point of its parameters, so that the buffer is gathered in
    place, whatever the layout and sizes of the parameters.
    """

    def __init__(self, comm: Collectives, buffer: Buffer, meter: StorageMeter) -> None:
        flat = buffer.tensor
        numel = flat.numel() // comm.world
        self._comm = comm
        self._buffer = buffer
        self._meter = meter
        self._own = flat.narrow(0, comm.rank * numel, numel)
        self.slice = Buffer(numel, flat.dtype, flat.device, kind=BufferKind.SECONDARY, meter=meter)
        self.slice.free()

    @property
    def kept(self) -> bool:
        """True if the slice holds values from which the buffer can be gathered."""
        return self.slice.allocated

    def keep(self) -> None:
        """Copy this rank's slice of the buffer, which will be freed next."""
        self.slice.allocate()
        self.slice.tensor.copy_(self._own)
        self._meter.copied(self._own.nbytes)

    def start(self) -> Pending:
        """Start to gather the slices into the buffer."""
        self._buffer.allocate()
        return self._comm.all_gather([self._buffer.tensor], [self.slice.tensor])

    def finish(self) -> None:
        """Free the slice."""
        self.slice.free()


class FlatGather:
    """A gather from flat shards into ``buffer``: in place, or through staging buffers.

    The shards are cast to the dtype of the buffer, and brought to its device if they are offloaded.
    """

    def __init__(
        self, spec: BucketSpec, shard: Tensor, buffer: Buffer, lanes: Lanes, meter: StorageMeter
    ) -> None:
        layout, flat = spec.layout, buffer.tensor
        plan = plan_gather(layout, min_numel=_DIRECT_NBYTES // flat.itemsize)
        self._comm = lanes.wire(Lane.GATHER, spec.gathering(flat.dtype))
        self._lanes = lanes
        self._meter = meter
        self._landing: list[Buffer] = []  # at most one, for an offloaded shard
        self._slices = [(part.shard_offset, part.numel) for part in plan.direct]
        self._outputs = [
            flat.narrow(0, part.unsharded_offset, layout.world * part.numel) for part in plan.direct
        ]
        self._written = [buffer] if plan.direct else []  # buffers that the gathers write
        self._stagings = [
            _Staging(spec, start, stop, buffer, meter) for start, stop in _staged(plan, spec)
        ]
        for staging in self._stagings:
            self._slices.append((staging.start, staging.numel))
            self._outputs.append(staging.buffer.tensor)
            self._written.append(staging.buffer)
        # This rank's slices of the outputs.
        self._own = [output.view(layout.world, -1)[spec.comm.rank] for output in self._outputs]
        self._arrived: LaneEvent | None = None  # arrival of a shard that needs no collective
        self._outbound: Outbound | None = None
        if spec.offload is not None:
            self._bring_from_host(spec, spec.offload)
        self.take(shard)
        self.buffers = [buffer, *(staging.buffer for staging in self._stagings), *self._landing]
        """All memory that the gather writes."""
        for staging in self._stagings:
            staging.buffer.free()

    def _bring_from_host(self, spec: BucketSpec, offload: Offload) -> None:
        """Plan how an offloaded shard comes to this rank's slices of the gathered buffers.

        A single slice is copied to its place, several by way of a landing buffer on the device.
        """
        target = self._own[0]
        self._sources = self._own
        if len(self._own) > 1:
            numel, kind = spec.layout.shard_numel, BufferKind.ALL_GATHER_INPUT
            landing = Buffer(numel, target.dtype, target.device, kind=kind, meter=self._meter)
            self._landing, target = [landing], landing.tensor
            self._sources = self._sliced(target)
            landing.free()
        self._outbound = Outbound(offload, target, self._lanes)

    def _sliced(self, shard: Tensor) -> list[Tensor]:
        return [shard.narrow(0, start, numel) for start, numel in self._slices]

    def take(self, shard: Tensor) -> None:
        """Gather from ``shard`` from now on."""
        self._shard = shard
        if self._outbound is None:
            self._sources = self._sliced(shard)

    def start(self) -> Pending:
        """Allocate memory, and start to gather the shards of all ranks.

        A shard of another dtype is cast into its place in the result: one pass copies and casts.
        """
        for buffer in (*self._written, *self._landing):
            buffer.allocate()
        sources = self._sources
        if self._outbound is not None:
            self._lanes.join(Lane.HOST_TO_DEVICE, Lane.GATHER)
            with self._lanes.on(Lane.HOST_TO_DEVICE):
                self._meter.copied(sum(source.nbytes for source in sources))
                self._outbound.send(self._shard)
                pending = self._comm.all_gather(self._outputs, sources)
                if self._comm.group is None:
                    self._arrived = self._lanes.mark()
                return pending
        if self._shard.dtype != self._own[0].dtype:
            copy_all(self._own, sources)
            self._meter.copied(sum(own.nbytes for own in self._own))
            sources = self._own
        return self._comm.all_gather(self._outputs, sources)

    def finish(self) -> None:
        """Copy the staged parameters to their places."""
        if self._arrived is not None:
            self._lanes.wait_event(Lane.GATHER, self._arrived)
        for buffer in self._landing:
            buffer.free()
        for staging in self._stagings:
            staging.empty()


def _staged(plan: GatherPlan, spec: BucketSpec) -> list[tuple[int, int]]:
    """Return the bounds, in each shard, of the parts that get separate staging buffers.

    There is usually one; a part that a device copies out in one kernel is not mixed with the rest.
    """
    stop = plan.staged_numel
    even = even_from(spec.layout, stop) if _device.fuses_copies(spec.device) else stop
    return [(start, end) for start, end in ((0, even), (even, stop)) if start < end]


class _Staging:
    """A staging buffer, with the copies out of that buffer."""

    def __init__(
        self, spec: BucketSpec, start: int, stop: int, target: Buffer, meter: StorageMeter
    ) -> None:
        """Stage elements ``start`` to ``stop`` of each shard, on their way into ``target``."""
        layout, flat = spec.layout, target.tensor
        self.start, self.numel = start, stop - start
        numel = layout.world * self.numel
        self.buffer = Buffer(
            numel, flat.dtype, flat.device, kind=BufferKind.GATHER_OUTPUT, meter=meter
        )
        self._target = target
        self._meter = meter
        copies = layout.copies(self.numel, above=start, below=stop)
        self._to, self._from = places_of_copies(
            copies, flat, self.buffer.tensor, layout.unsharded_offsets
        )
        self._nbytes = sum(view.nbytes for view in self._to)
        self._side_by_side: list[Tensor] = []
        self._rows = self.buffer.tensor.view(layout.world, self.numel)
        if _device.fuses_copies(spec.device):
            self._split_up(copies, layout.world)

    def _split_up(self, copies: Sequence[StridedCopy], world: int) -> None:
        """Plan one kernel, if the same ranks have pieces of all parameters, each of one size.

        The padding between pieces is copied to tensors that nobody reads.
        """
        ranks = {copy.sizes[0] for copy in copies}
        pieces = [copy.sizes[-1] for copy in copies]
        ends = [copy.staging_offset + copy.sizes[-1] for copy in copies]
        in_one = len(ranks) == 1 and all(len(copy.sizes) == 2 for copy in copies)
        if not in_one or len(copies) < 2 or self.numel - sum(pieces) > 16 * len(copies):
            return
        (num_ranks,) = ranks
        self._rows = self._rows[:num_ranks]
        order = sorted(range(len(copies)), key=ends.__getitem__)
        at = 0
        for number in order:
            self._side_by_side += self._unread(ends[number] - pieces[number] - at)
            self._side_by_side.append(self._to[number])
            at = ends[number]
        self._side_by_side += self._unread(self.numel - at)

    def _unread(self, numel: int) -> list[Tensor]:
        return [self._rows.new_empty(len(self._rows), numel)] if numel else []

    def empty(self) -> None:
        """Copy the gathered pieces to their places, in one batch, and free the staging buffer."""
        self._target.allocate()
        if self._side_by_side:
            _device.split_copy(self._rows, self._side_by_side)
        else:
            copy_all(self._to, self._from)
        self._meter.copied(self._nbytes)
        self.buffer.free()


# Copies of many tensors, in as few kernels as the device allows. On a CPU a batched copy runs one
# tensor after the other. On CUDA it is one kernel if all tensors are dense, each with the strides
# of its counterpart, and each of the two lists has one dtype. A single tensor that breaks these
# rules makes CUDA copy one tensor after the other as well.

MOST_DENSE = 64
"""Number of tensors that every build of PyTorch copies in one kernel; later builds take more."""


def copy_all(places: list[Tensor], sources: list[Tensor]) -> None:
    """Copy ``sources`` to ``places``, with a cast; one device, and one shape per pair."""
    if not places:
        return
    if not _device.fuses_copies(places[0].device):
        torch._foreach_copy_(places, sources)
        return
    dense: dict[tuple[torch.dtype, torch.dtype], tuple[list[Tensor], list[Tensor]]] = {}
    for place, source in zip(places, sources, strict=True):
        if place.is_contiguous() and source.is_contiguous():
            to, of = dense.setdefault((place.dtype, source.dtype), ([], []))
            to.append(place)
            of.append(source)
        else:
            place.copy_(source)
    for to, of in dense.values():
        if len(to) > 1:
            torch._foreach_copy_(to, of)
        else:
            to[0].copy_(of[0])


_DIRECT_NBYTES = 512 << 10
"""Size from which pieces of a parameter are gathered in place, if the layout allows that.

Each such piece travels alone. Smaller pieces travel together: a copy takes less time with gloo.
"""


def places_of_copies(
    copies: Sequence[StridedCopy],
    unsharded: Tensor,
    staging: Tensor,
    offsets: Sequence[int] | Mapping[int, int],
) -> tuple[list[Tensor], list[Tensor]]:
    """Return views of ``unsharded``, the targets of copies, and views of ``staging``, the sources.

    ``offsets`` are the offsets of the parameters in ``unsharded``, in elements.
    """
    to = [
        unsharded.as_strided(box.sizes, box.param_strides, offsets[box.param] + box.param_offset)
        for box in copies
    ]
    of = [staging.as_strided(box.sizes, box.staging_strides, box.staging_offset) for box in copies]
    return to, of
