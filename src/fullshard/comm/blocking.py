"""Collectives that have ended when they return: of few values, of objects, of uneven pieces."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from fullshard._torch import collectives as _collectives
from fullshard.comm.c10d import default_choice, issued, transferred, way_of
from fullshard.comm.mesh import collectives_of, collectives_of_group, served_by
from fullshard.comm.protocol import Collectives, Done, Label, Pending, Splits, WorkGroup

_BROADCAST_NBYTES = 256 << 20  # approximate; the concatenated tensors take that much memory
_FEW = 1024
_FEW_LABEL = Label("a few numbers, such as a norm")


def all_reduce(
    values: Tensor, group: dist.ProcessGroup, *, is_max: bool, label: Label = _FEW_LABEL
) -> None:
    """Replace ``values`` by their maximum or sum over the ranks of ``group``, equal in every bit.

    All ranks gather a few values, under ``label``, and reduce them. ``values`` may be on a device
    that the group does not serve, as those of offloaded gradients.

    Raises:
        PeerError: another rank failed, so the reduction cannot end.
    """
    op = dist.ReduceOp.MAX if is_max else dist.ReduceOp.SUM
    if not isinstance(group, dist.ProcessGroup):
        dist.all_reduce(values, op, group=group)
        return
    there = values.to(served_by(group, values.device)).reshape(-1)
    if there.numel() <= _FEW:
        rows = there.new_empty(group.size(), there.numel())
        wire = collectives_of_group(group, there.device.type).labelled(label)
        wire.all_gather([rows.view(-1)], [there]).wait()
        there = rows.amax(0) if is_max else rows.sum(0)
    else:

        def start() -> Pending:
            in_order = there.device.type != "cpu"
            return _collectives.all_reduce(group, there, op, in_order=in_order) or Done()

        issued(group, there.device.type, "sum", start, nbytes=there.nbytes).wait()
    if there.data_ptr() != values.data_ptr():
        values.copy_(there.view(values.shape))


def all_gather_bytes(own: Tensor, label: str) -> Tensor:
    """Return the bytes of all ranks of the default group, one row each, on the CPU.

    ``own`` is flat, on the CPU, and has the same size on all ranks; ``label`` says what it is.
    """
    group, device = _default_group()
    gathered = torch.empty(group.size(), len(own), dtype=torch.uint8, device=device)

    def call() -> Tensor:
        dist.all_gather([*gathered], own.to(device), group=group)
        return gathered.cpu()

    return transferred(group, label, call)


def drawn_name(label: str) -> str:
    """Return random digits, drawn by the first rank; ``label`` says what they name."""
    own = torch.tensor([*secrets.token_bytes(8)], dtype=torch.uint8)
    return bytes(all_gather_bytes(own, label)[0].tolist()).hex()


def all_to_all(
    sent: Tensor, lengths: Sequence[int], sizes: Sequence[int], group: dist.ProcessGroup
) -> Tensor:
    """Send bytes to each rank of ``group``; return what each sent to this one, in rank order.

    Args:
        sent: flat bytes for the first rank, then for the second, and so on. The group need not
            serve their device: bytes of offloaded parameters are on the CPU.
        lengths: the number of bytes for each rank.
        sizes: the number of bytes from each rank.
        group: the ranks.

    Raises:
        PeerError: another rank failed, so the exchange cannot end.
    """
    there = served_by(group, sent.device)
    given = torch.empty(sum(sizes), dtype=torch.uint8, device=there)

    def start() -> Pending:
        way = way_of(group, default_choice(group, there.type))
        return way.all_to_all(group, given, sent.to(there), "", Splits(lengths, sizes))

    issued(group, there.type, "exchange", start).wait()
    return given.to(sent.device)


def all_to_all_bytes(
    sent: Tensor, lengths: Sequence[int], into: Tensor, sizes: Sequence[int]
) -> list[Tensor]:
    """Send bytes to each rank of the default group; return what each sent to this one.

    Args:
        sent: flat bytes on the CPU for the first rank, then for the second, and so on.
        lengths: the number of bytes for each rank.
        into: receives the bytes from the ranks, in the same order, on the CPU; may be ``sent`` if
            there is one rank.
        sizes: the number of bytes from each rank.

    Returns:
        Views of ``into``, one for each rank.
    """
    if len(lengths) > 1:
        group, device = _default_group()
        given = into.to(device)

        def call() -> None:
            dist.all_to_all_single(given, sent.to(device), [*sizes], [*lengths], group=group)
            if given is not into:
                into.copy_(given)

        transferred(group, "weights", call)
    return list(into.split([*sizes]))


def _default_group() -> tuple[dist.ProcessGroup, torch.device]:
    """Return the default group and a device whose tensors it sends, the CPU if it can."""
    group = dist.group.WORLD
    assert group is not None
    return group, served_by(group, torch.device("cpu"))


def broadcast_together(tensors: Sequence[Tensor], group: dist.ProcessGroup) -> None:
    """Overwrite ``tensors`` with those of the first rank of ``group``, many in one broadcast."""
    alike: dict[tuple[torch.dtype, torch.device, int], list[Tensor]] = {}
    sent = 0
    for tensor in tensors:
        if tensor.numel():
            key = (tensor.dtype, tensor.device, sent // _BROADCAST_NBYTES)
            alike.setdefault(key, []).append(tensor)
            sent += tensor.nbytes
    for those in alike.values():
        joined = torch.cat([tensor.reshape(-1) for tensor in those])
        collectives_of_group(group, joined.device.type).broadcast(joined, 0).wait()
        parts = joined.split([tensor.numel() for tensor in those])
        for tensor, part in zip(those, parts, strict=True):
            tensor.copy_(part.view(tensor.shape))


def broadcast_from_first(values: Tensor, mesh: DeviceMesh) -> None:
    """Overwrite contiguous ``values`` with the values on the first rank of ``mesh``."""
    for dim in range(mesh.ndim):
        collectives_of(mesh, dim).broadcast(values, 0).wait()


def broadcast_object_from_first(value: Any, mesh: DeviceMesh) -> Any:
    """Return the ``value`` of the first rank of ``mesh``; it is sent pickled."""
    box = [value]

    def broadcast() -> None:
        dist.broadcast_object_list(box, group=group, group_src=0)

    for group in map(mesh.get_group, range(mesh.ndim)):
        transferred(group, "objects", broadcast)
    return box[0]


def gather_objects(own: Any, group: dist.ProcessGroup) -> list[Any]:
    """Return what each rank of ``group`` passed as ``own``, by rank; any small pickled values."""
    found: list[Any] = [None] * group.size()
    transferred(group, "objects", lambda: dist.all_gather_object(found, own, group=group))
    return found


def gather_over(own: Any, mesh: DeviceMesh) -> list[Any]:
    """Return what each rank of ``mesh`` passed as ``own``; any small pickled values."""
    found = [own]
    for dim in range(mesh.ndim):
        found = [one for those in gather_objects(found, mesh.get_group(dim)) for one in those]
    return found


def gather_uneven(piece: Tensor, lengths: Sequence[int], wire: Collectives) -> Tensor:
    """Return the pieces of all ranks of ``wire``, concatenated in rank order.

    ``piece`` is 1-D; ``lengths[r]`` is the number of elements of rank r's piece.

    The pieces are padded and gathered at once. If padding would more than double the traffic, as
    for a tensor that one of many ranks holds, each rank that holds elements broadcasts them.
    """
    total, longest = sum(lengths), max(lengths)
    if piece.dtype is torch.bool:  # gloo does not carry bool
        return gather_uneven(piece.view(torch.uint8), lengths, wire).view(torch.bool)
    if longest * len(lengths) > 2 * total:
        return broadcast_pieces(piece, lengths, wire)
    source = piece.new_zeros(longest)
    source[: len(piece)] = piece
    gathered = piece.new_empty(len(lengths) * longest)
    wire.all_gather([gathered], [source]).wait()
    padded = gathered.view(len(lengths), longest).unbind()
    return torch.cat([row[:length] for row, length in zip(padded, lengths, strict=True)])


def broadcast_pieces(piece: Tensor, lengths: Sequence[int], wire: Collectives) -> Tensor:
    """Do the same as ``gather_uneven`` by one broadcast for each rank that holds elements.

    Only the result is allocated. All broadcasts start at once; together they move what an
    all-gather moves.
    """
    whole = piece.new_empty(sum(lengths))
    parts = whole.split(list(lengths))
    parts[wire.rank].copy_(piece)
    started = [wire.broadcast(part, rank) for rank, part in enumerate(parts) if len(part)]
    WorkGroup(started).wait()
    return whole
