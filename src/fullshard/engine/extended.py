"""Unsharding for tensors that control their own all-gather, see ``tensors/extension.py``."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fullshard.comm import Collectives, Done, Pending
from fullshard.device import Buffer, BufferKind, Lane, Lanes, StorageMeter
from fullshard.engine.shard import Shards
from fullshard.engine.spec import BucketSpec
from fullshard.errors import ExtensionError, UnsupportedError
from fullshard.tensors import (
    carry_attributes,
    gathered_by_itself,
    local_part,
    post_all_gather,
    pre_all_gather,
    releases_outputs,
)


class HookedGather:
    """A gather for a bucket in which some parameters have all-gather hooks.

    All tensors that a bucket sends travel as bytes in one call, each gathered in place into
    separate memory. The hooks make the parameters, so the first gather runs before they exist.
    """

    def __init__(self, spec: BucketSpec, shards: Shards, lanes: Lanes, meter: StorageMeter) -> None:
        check_extendable(spec)
        self._spec = spec
        self._shards = shards
        self._comm = lanes.wire(Lane.GATHER, spec.comm)
        self._parts = [_Part(spec, i, meter) for i in range(len(spec.layout.params))]
        self._outputs: list[Tensor] | None = None  # the gathered tensors, as bytes
        self._sources: list[Tensor] = []  # this rank's places in them

    @property
    def params(self) -> list[nn.Parameter]:
        """The unsharded parameters, once they were gathered."""
        return [part.param for part in self._parts]

    @property
    def buffers(self) -> list[Buffer]:
        """All memory that the gather writes."""
        return [buffer for part in self._parts for buffer in (*part.buffers, *part.others)]

    @torch.inference_mode(False)
    @torch.no_grad()
    def start(self) -> Pending:
        """Call the hooks, allocate memory, and start to gather the tensors of all ranks."""
        for part in self._parts:
            part.ask(self._shards)
        if self._outputs is None:
            _check_alike(self._spec, self._parts)
            world, rank = self._spec.comm.world, self._spec.comm.rank
            self._outputs = [output for part in self._parts for output in part.outputs()]
            self._sources = [output.view(world, -1)[rank] for output in self._outputs]
        return self._comm.all_gather(self._outputs, self._sources) if self._outputs else Done()

    @torch.inference_mode(False)
    @torch.no_grad()
    def finish(self) -> None:
        """Make or refill the unsharded parameters by the hooks."""
        for part in self._parts:
            part.receive(self._shards)


class _Kind(NamedTuple):
    """Shape, dtype and device of a tensor that travels, the same on all ranks."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device

    def __str__(self) -> str:
        return f"{tuple(self.shape)} {self.dtype}"


class _Part:
    """One parameter of a bucket: the tensors that it sends, and the unsharded parameter."""

    def __init__(self, spec: BucketSpec, index: int, meter: StorageMeter) -> None:
        param = spec.layout.params[index]
        assert spec.hook_arguments is not None  # or ``check_extendable`` has raised
        self.name = param.name
        self._shape = torch.Size(param.shape)
        self._told = spec.hook_arguments
        self._spec = spec
        self._index = index
        self._meter = meter
        self._kinds: list[_Kind] = []  # one for each tensor that a rank sends
        self._metadata: Any = None
        self.buffers: list[Buffer] = []  # the tensors of all ranks, one buffer for each tensor
        self.others: list[Buffer] = []  # other memory that the hook wants freed
        self._releases = False  # True: free ``buffers`` once the unsharded parameter is filled
        self._param: nn.Parameter | None = None

    @property
    def param(self) -> nn.Parameter:
        """The unsharded parameter."""
        assert self._param is not None
        return self._param

    @property
    def sent(self) -> str:
        """Shapes and dtypes of the tensors to send, as text that ranks compare and people read."""
        return ", ".join(map(str, self._kinds))

    def outputs(self) -> list[Tensor]:
        """Return the non-empty buffers as bytes."""
        return [buffer.tensor.view(torch.uint8) for buffer in self.buffers if buffer.nbytes]

    def ask(self, shards: Shards) -> None:
        """Get the tensors to send, and copy them to their places in the buffers."""
        sent, kinds = self._ask(shards)
        if self.buffers and kinds != self._kinds:
            raise ExtensionError(
                f"parameter {self.name}: fsdp_pre_all_gather returned tensors of other shapes or "
                f"dtypes than before, which were {self.sent}; they must stay the same"
            )
        if self.buffers:
            for buffer in (*self.buffers, *self.others):
                buffer.allocate()
        else:
            self._kinds = kinds
            self.buffers = list(map(self._new_buffer, kinds))
        for buffer, tensor in zip(self.buffers, sent, strict=True):
            place = buffer.tensor.view(self._spec.layout.world, *tensor.shape)[self._spec.comm.rank]
            place.copy_(tensor)
            self._meter.copied(place.nbytes)

    def _ask(self, shards: Shards) -> tuple[list[Tensor], list[_Kind]]:
        """Return the tensors to send, and their kinds once they are copied to the buffers.

        Without a hook, the copy casts values where they are: they cross to the device narrowed.
        """
        spec, index = self._spec, self._index
        local = shards.locals[index]
        if not gathered_by_itself(local, self.name):
            padded = shards.padded(index, shards.device)
            kind = _Kind(padded.shape, spec.unsharded_dtype(shards.dtype), spec.device)
            return [padded], [kind]
        padded = shards.padded(index, spec.device)
        sent, self._metadata = pre_all_gather(
            local, padded, self._shape, index, self.name, self._told
        )
        return sent, [_Kind(tensor.shape, tensor.dtype, tensor.device) for tensor in sent]

    def _new_buffer(self, kind: _Kind) -> Buffer:
        device = self._spec.device if kind.device.type != "meta" else kind.device
        numel = self._spec.layout.world * kind.shape.numel()
        of, label = BufferKind.UNSHARDED, self._spec.label
        return Buffer(numel, kind.dtype, device, kind=of, meter=self._meter, label=label)

    def receive(self, shards: Shards) -> None:
        """Make or refill the unsharded parameter from the tensors of all ranks."""
        local = shards.locals[self._index]
        outputs = tuple(map(self._joined, self.buffers, self._kinds))
        dtype = self._spec.unsharded_dtype(shards.dtype)
        if not gathered_by_itself(local, self.name):
            if self._param is None:
                self._param = self._spec.unsharded_param(self._index, outputs[0])
            return
        out = None if self._param is None else local_part(self._param)
        unsharded, to_free = post_all_gather(
            local, outputs, self._metadata, dtype, name=self.name, out=out
        )
        self._metadata = None
        if self._param is None:
            self.others = self._foreign(to_free)
            self._releases = releases_outputs(local, self.name)
            self._check_released(unsharded)
            self._param = self._spec.unsharded_param(self._index, self._stripped(unsharded))
            carry_attributes(unsharded, local_part(self._param), vars(local_part(self._param)))
        if self._releases:
            for buffer in self.buffers:
                buffer.free()

    def _joined(self, buffer: Buffer, kind: _Kind) -> Tensor:
        """Return one tensor of all ranks, joined along the first dim, without padded rows."""
        # ``.data`` has a separate version counter: the parameter may be this very tensor.
        joined = buffer.tensor.data.view(-1, *kind.shape[1:])
        padded_rows = self._spec.layout.local_shape(0, self._index)[0]
        is_cut_as_we_do = len(kind.shape) > 0 and kind.shape[0] == padded_rows
        return joined[: self._shape[0]] if is_cut_as_we_do else joined

    def _stripped(self, unsharded: Tensor) -> Tensor:
        """Return ``unsharded`` without padded rows."""
        shape = self._shape
        if unsharded.shape == shape:
            return unsharded
        if unsharded.shape[1:] == shape[1:] and len(unsharded) > shape[0]:
            return unsharded.narrow(0, 0, shape[0])
        raise ExtensionError(
            f"parameter {self.name}: fsdp_post_all_gather made a tensor of shape "
            f"{tuple(unsharded.shape)}, expected {tuple(shape)}"
        )

    def _check_released(self, unsharded: Tensor) -> None:
        """Refuse to free memory that the parameter uses."""
        inside = [
            value for value in (unsharded, *vars(unsharded).values()) if type(value) is Tensor
        ]
        ours = self._addresses()
        if self._releases and any(_address(tensor) in ours for tensor in inside):
            raise ExtensionError(
                f"parameter {self.name}: fsdp_post_all_gather made a tensor in the memory of a "
                "gathered tensor, which "
                "fsdp_should_release_all_gather_outputs_after_post_all_gather says may be freed; "
                "return False there, or copy"
            )

    def _addresses(self) -> set[int]:
        """Return the addresses of the gathered tensors."""
        return {_address(buffer.tensor) for buffer in self.buffers if buffer.nbytes}

    def _foreign(self, to_free: Sequence[Tensor]) -> list[Buffer]:
        """Return buffers for the memory in ``to_free`` that is not ours already."""
        ours, label = self._addresses(), self._spec.label
        found: dict[int, Buffer] = {}
        for tensor in to_free:
            if type(tensor) is not Tensor:
                continue
            address = _address(tensor)
            if address not in ours and address not in found:
                found[address] = Buffer.of(
                    tensor, kind=BufferKind.UNSHARDED, meter=self._meter, label=label
                )
        return list(found.values())


def check_extendable(spec: BucketSpec) -> None:
    """Refuse specs that all-gather hooks do not work with.

    Raises:
        UnsupportedError: the layout is not rows by rank, or there is a secondary shard.
    """
    layout = spec.layout
    names = layout.params
    for param, shape in enumerate(p.shape for p in layout.params):
        rows = (layout.local_shape(0, param)[0], *shape[1:])
        by_rows = layout.world == 1 or layout.local_shape(0, param) == rows
        if spec.hook_arguments is None or not by_rows:
            raise UnsupportedError(
                f"parameter {names[param].name} is of a tensor class of its own, has "
                "fsdp_pre_all_gather, or shares a bucket with one that does. Such parameters are "
                "cut on dim 0: use layout=PerParameter() and no other dim for them"
            )
    if spec.secondary is not None:
        raise UnsupportedError(
            f"parameter {names[0].name} has fsdp_pre_all_gather, which does not work with "
            "reshard_after_forward=int; use True or False"
        )


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _check_alike(spec: BucketSpec, parts: Sequence[_Part]) -> None:
    """Raise on every rank if shapes or dtypes of tensors to send differ between ranks."""
    comm: Collectives = spec.comm
    said = "; ".join(f"{part.name}: {part.sent}" for part in parts)
    device = spec.device
    own = torch.tensor([zlib.crc32(said.encode())], dtype=torch.int64, device=device)
    all_said = own.new_empty(comm.world)
    comm.all_gather([all_said], [own]).wait()
    if bool((all_said != own).any()):
        raise ExtensionError(
            "fsdp_pre_all_gather returned tensors whose shapes or dtypes differ between ranks; "
            f"rank {comm.rank} got {said}. The hook is called on a tensor of the same shape on all "
            "ranks, padding included: derive the returned shapes and dtypes from that shape alone"
        )
