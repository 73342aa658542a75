"""The way to whole parameters for tensors that have a say in it, see ``tensors/extension.py``."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from fullshard.comm import Collectives, Done, Pending
from fullshard.device import Buffer, Kind, Lane, Lanes, StorageMeter
from fullshard.engine.shard import Shards
from fullshard.engine.spec import BucketSpec
from fullshard.engine.unshard import Unsharded
from fullshard.errors import ExtensionError, UnsupportedError
from fullshard.tensors import (
    HookArguments,
    carry_attributes,
    gathered_by_itself,
    local_part,
    post_all_gather,
    pre_all_gather,
    releases_outputs,
)


class ExtendedUnsharded:
    """Whole parameters of which some decide themselves what travels, and what comes out.

    What a bucket sends travels as bytes in one call, each tensor into memory of its own, in place.
    The first gather happens here, because the hooks make the parameters: all ranks make this at
    the same point. What else it does is what ``Unsharded`` does.
    """

    borrows = False

    def __init__(self, spec: BucketSpec, shards: Shards, lanes: Lanes, meter: StorageMeter) -> None:
        check_extendable(spec)
        self.shards = shards
        self._spec = spec
        self._lanes = lanes
        self._comm = lanes.wire(Lane.GATHER, spec.comm)
        self._in_flight: Pending | None = None
        self._is_whole = True
        self._parts = [_Part(spec, i, meter) for i in range(len(spec.layout.params))]
        with torch.inference_mode(False), torch.no_grad():
            try:
                self._make()
            except BaseException:
                self._lanes.join(Lane.COMPUTE, Lane.GATHER)  # which may still be writing to it
                for part in self._parts:
                    part.free()
                raise
        self.params = [part.param for part in self._parts]

    def _make(self) -> None:
        """Gather for the first time."""
        for part in self._parts:
            part.ask(self.shards)
        comm = self._spec.comm
        _check_alike(self._spec, self._parts)
        # Bytes of what is gathered, and our own places in them.
        self._outputs = [output for part in self._parts for output in part.outputs()]
        self._sources = [output.view(comm.world, -1)[comm.rank] for output in self._outputs]
        with self._lanes.on(Lane.GATHER):
            self._send()
            self._receive()
        self._lanes.join(Lane.COMPUTE, Lane.GATHER)

    def owns(self, param: nn.Parameter) -> bool:
        """Whether ``param``, one of ours, still lies in our memory; its hook alone could tell."""
        return True

    def reclaim(self) -> list[int]:
        """See ``Unsharded``; hooks give parameters their memory."""
        return []

    def start(self) -> None:
        """Start the all-gather; into memory that is there already if this is a refresh."""
        if self._is_whole:  # it was just made
            self._is_whole = False
            return
        with torch.inference_mode(False), torch.no_grad(), self._lanes.on(Lane.GATHER):
            for part in self._parts:
                part.ask(self.shards)
            self._send()

    def finish(self) -> None:
        """Make the parameters whole on the compute lane."""
        if self._in_flight is None:
            return
        with torch.inference_mode(False), torch.no_grad(), self._lanes.on(Lane.GATHER):
            self._receive()
        self._lanes.join(Lane.COMPUTE, Lane.GATHER)

    def free(self, *, to_secondary: bool = False, keep_memory: bool = False) -> None:
        """Give the memory back once compute is done with it, if it is not to be kept."""
        self._is_whole = False
        self._lanes.join(Lane.GATHER, Lane.COMPUTE)
        if keep_memory:
            return
        with self._lanes.on(Lane.GATHER):
            for part in self._parts:
                part.free()

    def _send(self) -> None:
        outputs, sources = self._outputs, self._sources
        self._in_flight = self._comm.all_gather(outputs, sources) if outputs else Done()

    def _receive(self) -> None:
        assert self._in_flight is not None
        self._lanes.wait(self._in_flight)
        self._in_flight = None
        for part in self._parts:
            part.receive(self.shards)


AnyUnsharded: TypeAlias = Unsharded | ExtendedUnsharded


class _Kind(NamedTuple):
    """What a tensor that travels is like, the same on all ranks."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device

    def __str__(self) -> str:
        return f"{tuple(self.shape)} {self.dtype}"


class _Part:
    """What one parameter sends and becomes."""

    def __init__(self, spec: BucketSpec, index: int, meter: StorageMeter) -> None:
        self._spec = spec
        self._index = index
        self._meter = meter
        self._kinds: list[_Kind] = []  # of what each rank sends
        self._metadata: Any = None
        self._buffers: list[Buffer] = []  # what all ranks send, one for each tensor
        self._others: list[Buffer] = []  # what the hook wants freed besides
        self._releases = False  # the first once the second, or what nobody frees, is filled
        self._param: nn.Parameter | None = None

    @property
    def name(self) -> str:
        """The fully qualified name."""
        return self._spec.layout.params[self._index].name

    @property
    def param(self) -> nn.Parameter:
        """The whole parameter."""
        assert self._param is not None
        return self._param

    @property
    def sent(self) -> str:
        """Shapes and dtypes of what this rank sends, for ranks to compare and people to read."""
        return ", ".join(map(str, self._kinds))

    def outputs(self) -> list[Tensor]:
        """Bytes of the buffers."""
        return [buffer.tensor.view(torch.uint8) for buffer in self._buffers if buffer.nbytes]

    def ask(self, shards: Shards) -> None:
        """Find out what to send, and put it where it is gathered."""
        sent, kinds = self._ask(shards)
        if self._buffers and kinds != self._kinds:
            raise ExtensionError(
                f"parameter {self.name}: fsdp_pre_all_gather returned tensors of other shapes or "
                f"dtypes than before, which were {self.sent}; they must stay the same"
            )
        if self._buffers:
            for buffer in (*self._buffers, *self._others):
                buffer.allocate()
        else:
            self._kinds = kinds
            self._buffers = list(map(self._new_buffer, kinds))
        for buffer, tensor in zip(self._buffers, sent, strict=True):
            place = buffer.tensor.view(self._world, *tensor.shape)[self._spec.comm.rank]
            place.copy_(tensor)
            self._meter.copied(place.nbytes)

    def _ask(self, shards: Shards) -> tuple[list[Tensor], list[_Kind]]:
        """What to send, and what it is once it has been copied to its place.

        Values are cast where they are, and travel to the device in the fewer bytes.
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
        numel = self._world * kind.shape.numel()
        return Buffer(numel, kind.dtype, device, kind=Kind.UNSHARDED, meter=self._meter)

    def receive(self, shards: Shards) -> None:
        """Make the parameter of what all ranks sent."""
        local = shards.locals[self._index]
        outputs = tuple(map(self._joined, self._buffers, self._kinds))
        dtype = self._spec.unsharded_dtype(shards.dtype)
        if not gathered_by_itself(local, self.name):
            if self._param is None:
                self._param = self._spec.whole_param(self._index, outputs[0])
            return
        out = None if self._param is None else local_part(self._param)
        whole, to_free = post_all_gather(
            local, outputs, self._metadata, dtype, name=self.name, out=out
        )
        self._metadata = None
        if self._param is None:
            self._others = self._foreign(to_free)
            self._releases = releases_outputs(local, self.name)
            self._check_released(whole)
            self._param = self._spec.whole_param(self._index, self._stripped(whole))
            carry_attributes(whole, local_part(self._param), vars(local_part(self._param)))
        if self._releases:
            for buffer in self._buffers:
                buffer.free()

    def _joined(self, buffer: Buffer, kind: _Kind) -> Tensor:
        """What all ranks sent of one tensor, joined along its first dim, without padded rows."""
        # Another version counter than the buffer's: the parameter may be this very tensor.
        joined = buffer.tensor.data.view(-1, *kind.shape[1:])
        padded_rows = self._spec.layout.local_shape(0, self._index)[0]
        is_cut_as_we_do = len(kind.shape) > 0 and kind.shape[0] == padded_rows
        return joined[: self._shape[0]] if is_cut_as_we_do else joined

    def _stripped(self, whole: Tensor) -> Tensor:
        """``whole`` without padded rows."""
        shape = self._shape
        if whole.shape == shape:
            return whole
        if whole.shape[1:] == shape[1:] and len(whole) > shape[0]:
            return whole.narrow(0, 0, shape[0])
        raise ExtensionError(
            f"parameter {self.name}: fsdp_post_all_gather made a tensor of shape "
            f"{tuple(whole.shape)}, expected {tuple(shape)}"
        )

    def _check_released(self, whole: Tensor) -> None:
        """Refuse to free memory that the parameter lies in."""
        inside = [value for value in (whole, *vars(whole).values()) if type(value) is Tensor]
        ours = self._addresses()
        if self._releases and any(_address(tensor) in ours for tensor in inside):
            raise ExtensionError(
                f"parameter {self.name}: fsdp_post_all_gather made a tensor in the memory of what "
                "was gathered, which "
                "fsdp_should_release_all_gather_outputs_after_post_all_gather says may be freed; "
                "return False there, or copy"
            )

    def _addresses(self) -> set[int]:
        """Where what was gathered lies."""
        return {_address(buffer.tensor) for buffer in self._buffers if buffer.nbytes}

    def _foreign(self, to_free: Sequence[Tensor]) -> list[Buffer]:
        """Memory among ``to_free`` that is not ours already."""
        ours = self._addresses()
        found: dict[int, Buffer] = {}
        for tensor in to_free:
            if type(tensor) is not Tensor:
                continue
            address = _address(tensor)
            if address not in ours and address not in found:
                found[address] = Buffer.of(tensor, kind=Kind.UNSHARDED, meter=self._meter)
        return list(found.values())

    def free(self) -> None:
        """Give the memory back."""
        for buffer in (*self._buffers, *self._others):
            buffer.free()

    @property
    def _shape(self) -> torch.Size:
        return torch.Size(self._spec.layout.params[self._index].shape)

    @property
    def _world(self) -> int:
        return self._spec.layout.world

    @property
    def _told(self) -> HookArguments:
        assert self._spec.hook_arguments is not None
        return self._spec.hook_arguments


def check_extendable(spec: BucketSpec) -> None:
    """Refuse what hooks do not work with.

    Raises:
        UnsupportedError: another layout than rows by rank, or a secondary shard.
    """
    layout = spec.layout
    names = layout.params
    for param, shape in enumerate(p.shape for p in layout.params):
        rows = (layout.local_shape(0, param)[0], *shape[1:])
        by_rows = layout.world == 1 or layout.local_shape(0, param) == rows
        if spec.hook_arguments is None or not by_rows:
            raise UnsupportedError(
                f"parameter {names[param].name} is of a tensor class of its own, has "
                "fsdp_pre_all_gather, or shares a bucket with one that does; these are cut on "
                "dim 0: use layout=PerParameter() and no other dim for them"
            )
    if spec.secondary is not None:
        raise UnsupportedError(
            f"parameter {names[0].name} has fsdp_pre_all_gather, which does not work with "
            "reshard_after_forward=int; use True or False"
        )


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _check_alike(spec: BucketSpec, parts: Sequence[_Part]) -> None:
    """Refuse, on every rank, tensors that are not the same size on every rank."""
    comm: Collectives = spec.comm
    said = "; ".join(f"{part.name}: {part.sent}" for part in parts)
    device = spec.device
    own = torch.tensor([zlib.crc32(said.encode())], dtype=torch.int64, device=device)
    all_said = own.new_empty(comm.world)
    comm.all_gather([all_said], [own]).wait()
    if bool((all_said != own).any()):
        raise ExtensionError(
            "fsdp_pre_all_gather returned tensors whose shapes or dtypes differ between ranks; "
            f"rank {comm.rank} got {said}; what it is called on has the same shape on all ranks, "
            "padding included, so derive what travels from that alone"
        )
