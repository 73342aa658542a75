"""``RaggedTensor``: a DTensor of which each rank holds an interval of the flattened tensor."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement

from fullshard._torch import autograd as _autograd
from fullshard._torch import dtensor as _dtensor
from fullshard._torch import memory as _memory
from fullshard.comm import collectives_of, gather_uneven
from fullshard.errors import ConfigError, UnsupportedError
from fullshard.layout.region import Box, Interval
from fullshard.tensors.ragged_cut import cut_of
from fullshard.tensors.ragged_ops import run_on_intervals
from fullshard.tensors.ragged_shard import RaggedShard

if TYPE_CHECKING:  # imported when tensors are saved: it takes 0.1 s
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
    from torch.distributed.checkpoint.planner import WriteItem


class RaggedTensor(_dtensor.OwnDispatch):
    """A tensor cut into intervals of elements, in row-major order; each rank holds one interval.

    ``shape``, ``stride()`` and ``dtype`` describe the full tensor; ``to_local()`` returns this
    rank's interval, 1-D and perhaps empty. One of ``placements`` is a ``RaggedShard``. Earlier mesh
    dims replicate; later mesh dims are for tensor parallelism, with ``Shard(d)`` or
    ``Replicate()``, and the ranks along the ragged mesh dim divide the tensor-parallel part.

    Pointwise operations, also those of ``torch.optim``, run on the intervals; all their tensors
    must be cut alike or have no dims. Norms and sums over all elements communicate. A whole plain
    tensor can be copied in (``copy_``, ``load_state_dict``): each rank takes its interval.
    Operations that need rows, columns or single elements raise ``RaggedOperationError``, a
    ``NotImplementedError``, because an interval has none: use ``full_tensor()``, ``unshard()``, or
    ``layout=PerParameter()``.

    Checkpoints (``torch.distributed.checkpoint``) see an interval as at most ``2 n - 1`` boxes, for
    a tensor with n dims, and need no communication.
    """

    @property
    def interval(self) -> Interval:
        """This rank's elements: an interval of the tensor, or of its tensor-parallel part.

        Raises:
            ConfigError: if no RaggedTensor can have these placements.
        """
        return cut_of(self).interval

    def to_local(self, *, grad_placements: Sequence[Placement] | None = None) -> Tensor:
        """Return this rank's interval, 1-D; differentiable."""
        if not (torch.is_grad_enabled() and self.requires_grad):
            return _dtensor.local_of(self)
        return cast("Tensor", _autograd.apply(_ToLocal, self))

    def full_tensor(self, *, grad_placements: Sequence[Placement] | None = None) -> Tensor:
        """Return the full tensor; a collective of all ranks of the mesh, differentiable.

        The gradient of the full tensor is assumed to be the same on all ranks. Replicas do not
        communicate with each other.
        """
        tp_part = self._tp_part()
        return self._as_dtensor(tp_part).full_tensor() if cut_of(self).has_tp else tp_part

    def redistribute(
        self,
        device_mesh: DeviceMesh | None = None,
        placements: Sequence[Placement] | None = None,
        **_: Any,
    ) -> DTensor:
        """Return the tensor with other placements, as an ordinary DTensor; differentiable.

        The method gathers the full tensor, or the tensor-parallel part if there is one.

        Raises:
            ConfigError: for another mesh, no placements, or placements with other intervals.
        """
        mesh = self.device_mesh
        if not placements or (device_mesh or mesh) != mesh:
            raise ConfigError(
                f"RaggedTensor.redistribute: got placements={placements} on {device_mesh}, "
                f"expected placements on {mesh}"
            )
        if tuple(placements) == self.placements:
            return self
        if any(isinstance(placement, RaggedShard) for placement in placements):
            raise ConfigError(
                f"RaggedTensor.redistribute: got placements={placements}, the tensor is placed as "
                f"{self.placements}; expected placements of torch's own, such as Shard(0): other "
                "intervals are not made here"
            )
        return self._as_dtensor(self._tp_part()).redistribute(placements=placements)

    def _tp_part(self) -> Tensor:
        """Return this rank's tensor-parallel part, gathered over the ragged mesh dim."""
        if torch.is_grad_enabled() and self.requires_grad:
            return cast("Tensor", _autograd.apply(_ToTpPart, self))
        return self._gather()

    def _gather(self) -> Tensor:
        cut = cut_of(self)
        local = _dtensor.local_of(self).detach()
        if local.is_meta:
            return torch.empty(cut.region.grid, dtype=self.dtype, device="meta")
        lengths = [cut.ragged.interval(rank).length for rank in range(cut.ragged.num_ranks)]
        wire = collectives_of(self.device_mesh, cut.mesh_dim)
        return gather_uneven(local, lengths, wire).view(cut.region.grid)

    def _as_dtensor(self, tp_part: Tensor) -> DTensor:
        """Return ``tp_part`` as a DTensor that is replicated except for tensor parallelism."""
        return DTensor.from_local(
            tp_part,
            self.device_mesh,
            cut_of(self).tp_placements,
            run_check=False,
            shape=self.shape,
            stride=self.stride(),
        )

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, op: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return run_on_intervals(op, args, kwargs or {})

    def __repr__(self) -> str:  # type: ignore[override]
        cut = cut_of(self)
        offsets = tuple(own.start for (own,) in cut.region.dims)
        part = f"{cut.region.grid} at {offsets} of " if cut.has_tp else ""
        placements = ", ".join(map(repr, self.placements))
        return (
            f"RaggedTensor(elements {cut.interval.start} to {cut.interval.stop} of "
            f"{part}{tuple(self.shape)}: {_dtensor.local_of(self)}, {placements})"
        )

    # Copies and pickles: torch's methods would lose the class, or include unneeded memory.

    def __deepcopy__(self, memo: dict[int, Any]) -> RaggedTensor:
        if id(self) in memo:
            return cast("RaggedTensor", memo[id(self)])
        if not self.is_leaf:
            raise UnsupportedError("deepcopy of a RaggedTensor that is no leaf: detach() it first")
        new = _dtensor.dtensor_like(self, _dtensor.local_of(self).detach().clone())
        new.requires_grad_(self.requires_grad)
        memo[id(self)] = new
        new.__dict__.update(copy.deepcopy(vars(self), memo))
        if isinstance(self, nn.Parameter):
            _memory.make_param(new)
        elif self.grad is not None:
            _autograd.set_grad(new, copy.deepcopy(self.grad, memo))
        return cast("RaggedTensor", new)

    def __reduce_ex__(self, protocol: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        local = _dtensor.local_of(self).detach()
        if local.untyped_storage().nbytes() != local.nbytes:
            local = local.clone()
        is_param = isinstance(self, nn.Parameter)
        mesh, placements, shape = self.device_mesh, self.placements, tuple(self.shape)
        return _rebuild, (local, mesh, placements, shape, self.requires_grad, is_param)

    @staticmethod
    def __tensor_unflatten__(
        inner_tensors: Any, flatten_spec: Any, outer_size: Any, outer_stride: Any
    ) -> RaggedTensor:
        plain = DTensor.__tensor_unflatten__(inner_tensors, flatten_spec, outer_size, outer_stride)
        local, spec = _dtensor.local_of(plain), _dtensor.spec_of(plain)
        return _dtensor.dtensor_from_spec(
            local, spec, requires_grad=plain.requires_grad, cls=RaggedTensor
        )

    # Methods that torch.distributed.checkpoint calls.

    def __create_write_items__(self, fqn: str, object: Any) -> list[WriteItem]:
        from torch.distributed.checkpoint import metadata, planner

        # Replicas offer equal items, and the planner takes one. Copies from tensor parallelism may
        # be cut at other places, so only the first copy offers items.
        if not cut_of(self).is_first_copy:
            return []
        properties = metadata.TensorProperties.create_from_tensor(_dtensor.local_of(self))
        return [
            planner.WriteItem(
                index=metadata.MetadataIndex(fqn, chunk.offsets),
                type=planner.WriteItemType.SHARD,
                tensor_data=planner.TensorWriteData(chunk, properties, self.size()),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        return [
            ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes))
            for box in self._boxes()
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        start = 0
        for box in self._boxes():
            if index.offset is None or tuple(index.offset) == box.offsets:
                local = _dtensor.local_of(self).detach()
                return local.narrow(0, start, box.numel).view(box.sizes)
            start += box.numel
        raise ConfigError(f"checkpoint: {index} is not part of {self.interval} of {index.fqn}")

    def _boxes(self) -> tuple[Box, ...]:
        cut = cut_of(self)
        if self.numel():
            return cut.boxes
        # One rank offers an empty box; otherwise no rank would write the tensor.
        return (Box((0,) * self.dim(), tuple(self.shape)),) if cut.is_first else ()


def _rebuild(
    local: Tensor,
    mesh: DeviceMesh,
    placements: tuple[Placement, ...],
    shape: tuple[int, ...],
    requires_grad: bool,
    is_param: bool,
) -> RaggedTensor:
    spec = _dtensor.dtensor_spec(mesh, placements, shape=torch.Size(shape), dtype=local.dtype)
    new = _dtensor.dtensor_from_spec(local, spec, requires_grad=requires_grad, cls=RaggedTensor)
    if is_param:
        _memory.make_param(new)
    return new


torch.serialization.add_safe_globals([RaggedTensor, RaggedShard, _rebuild])


class _ToLocal(torch.autograd.Function):
    """The autograd function of ``to_local``, which returns the gradient as a RaggedTensor."""

    @staticmethod
    def forward(ctx: Any, shown: RaggedTensor) -> Tensor:
        ctx.like = shown.detach()
        return _dtensor.local_of(shown).view_as(_dtensor.local_of(shown))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return _dtensor.dtensor_like(ctx.like, grad.contiguous())


class _ToTpPart(torch.autograd.Function):
    """The autograd function of ``_tp_part``, which cuts the gradient (equal on all ranks) again."""

    @staticmethod
    def forward(ctx: Any, shown: RaggedTensor) -> Tensor:
        ctx.like = shown.detach()
        return shown._gather()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return _dtensor.dtensor_like(ctx.like, cut_of(ctx.like).own_part(grad).clone())
