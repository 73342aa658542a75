"""The way from the shard to whole parameters. See [Note: the tensors of a bucket]."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fullshard.comm import Pending
from fullshard.device import Buffer, Kind, Lane, Lanes, StorageMeter
from fullshard.engine.spec import BucketSpec

__all__ = ["Unsharded"]


class Unsharded:
    """Whole parameters whose memory comes and goes.

    ``start`` and ``finish`` gather, ``free`` gives the memory back; the scheduler sees to it that
    they are called in turn. Each parameter is made from ``.data`` of the buffer, so that it has a
    version counter of its own and no base: what the engine writes through the buffer is no
    modification in the eyes of autograd.
    """

    def __init__(self, spec: BucketSpec, shard: Tensor, lanes: Lanes, meter: StorageMeter) -> None:
        self.shard = shard
        self._spec = spec
        self._lanes = lanes
        self._in_flight: Pending | None = None
        dtype = spec.unsharded_dtype(shard.dtype)
        layout = spec.layout
        self._meter = meter
        self.borrows = layout.world == 1 and layout.zero_copy and dtype == shard.dtype
        with torch.inference_mode(False), torch.no_grad():
            self._buffer = (
                None
                if self.borrows
                else Buffer(
                    layout.unsharded_numel, dtype, shard.device, kind=Kind.UNSHARDED, meter=meter
                )
            )
            flat = shard if self._buffer is None else self._buffer.tensor
            self.params = [
                nn.Parameter(
                    flat.narrow(0, offset, param.numel).view(param.shape).data,
                    requires_grad=False,
                )
                for param, offset in zip(layout.params, layout.unsharded_offsets, strict=True)
            ]
            gathered = flat
            self._staging: Buffer | None = None
            self._copied_nbytes = sum(p.numel for p in layout.params) * dtype.itemsize
            if not layout.zero_copy:
                self._staging = Buffer(
                    layout.world * layout.shard_numel,
                    dtype,
                    shard.device,
                    kind=Kind.GATHER_OUTPUT,
                    meter=meter,
                )
                gathered = self._staging.tensor
                self._prepare_copies(flat, gathered)
            # Our slice of what is gathered.
            self._own = gathered.view(layout.world, -1)[spec.comm.rank]
            self._own_nbytes = self._own.nbytes
            if self._staging is not None:
                self._staging.free()
            if self._buffer is not None:
                self._buffer.free()

    def _prepare_copies(self, flat: Tensor, staging: Tensor) -> None:
        layout = self._spec.layout
        boxes = layout.copies(row=layout.shard_numel)
        self._targets = [
            flat.as_strided(
                box.sizes,
                box.param_strides,
                layout.unsharded_offsets[box.param] + box.param_offset,
            )
            for box in boxes
        ]
        self._sources = [
            staging.as_strided(box.sizes, box.staging_strides, box.staging_offset) for box in boxes
        ]

    def owns(self, param: nn.Parameter) -> bool:
        """Whether ``param``, one of ours, still lies in our memory."""
        flat = self.shard if self._buffer is None else self._buffer.tensor
        return param.untyped_storage().data_ptr() == flat.untyped_storage().data_ptr()

    def start(self) -> None:
        """Start the all-gather; into memory that is there already if this is a refresh.

        Our slice is cast to its place in the result, so that one pass does both.
        """
        if self._buffer is None:
            return
        output = self._staging or self._buffer
        with self._lanes.on(Lane.GATHER), torch.no_grad():
            output.allocate()
            self._own.copy_(self.shard)
            self._meter.copied(self._own_nbytes)
            self._in_flight = self._spec.comm.all_gather(output.tensor, self._own)

    def finish(self) -> None:
        """Make the parameters whole on the compute lane."""
        if self._buffer is None or self._in_flight is None:
            return
        with self._lanes.on(Lane.GATHER), torch.no_grad():
            self._lanes.wait(self._in_flight)
            if self._staging is not None:
                self._buffer.allocate()
                torch._foreach_copy_(self._targets, self._sources)
                self._meter.copied(self._copied_nbytes)
                self._staging.free()
        self._in_flight = None
        self._lanes.join(Lane.COMPUTE, Lane.GATHER)

    def free(self) -> None:
        """Give the memory back once compute is done with it."""
        if self._buffer is not None:
            self._lanes.join(Lane.GATHER, Lane.COMPUTE)
            with self._lanes.on(Lane.GATHER):
                self._buffer.free()
