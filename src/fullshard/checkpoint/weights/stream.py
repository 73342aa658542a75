"""Stream full weights out of a sharded model, a bounded number of bytes at a time."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from fullshard._torch import autograd as _autograd
from fullshard._torch import memory as _memory
from fullshard.checkpoint.format import Manifest, TensorEntry
from fullshard.checkpoint.saving import Collected, await_save
from fullshard.checkpoint.weights.save import (
    FilePiece,
    Planned,
    described,
    grouped,
    parts_by_rank,
    planned_tensors,
    put_parts,
    size_of,
)
from fullshard.comm.bucketed_gather import BucketedGather
from fullshard.comm.consensus import Consensus
from fullshard.errors import ConfigError, ProtocolError
from fullshard.tensors.transfer import aligned, places, unpack


class StreamedTensor(NamedTuple):
    """The description of a tensor of a stream.

    Attributes:
        name: as ``transformers`` knows it, for its models; else the model's.
        shape: of the full tensor.
        dtype: in which it comes.
        bucket: number of its bucket.
        offset: where it begins in the bucket's ``packed``, in bytes.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    bucket: int
    offset: int


def stream_params(
    model: nn.Module,
    *,
    bucket_nbytes: int,
    dtype: torch.dtype | None = None,
    names: Collection[str] | None = None,
    ranks: Collection[int] | None = None,
) -> ParamStream:
    """Return the weights of ``model`` as buckets of full tensors; all ranks must call this.

    For programs that need the weights while the training goes on, such as inference engines::

        stream = fullshard.stream_params(model, bucket_nbytes=1 << 30, dtype=torch.bfloat16)
        engine.prepare(stream.metadata)
        for bucket in stream:                     # mappings from name to tensor
            engine.load_weights(bucket.items())

    While one bucket is used, the next one is gathered, from any layout and mesh: beside its shards
    a rank needs at most twice ``bucket_nbytes``, or twice the largest tensor if that is larger.
    Names are those that ``save_weights`` gives: those of ``transformers`` for its models, one of
    several tied ones. Persistent buffers come, too.

    Every ``for`` loop over the stream gives the weights as they are then. All ranks must run the
    loops, each to its end, and nobody may write to the weights meanwhile. A tensor is usable until
    the loop asks for the next bucket; clone it to keep it.

    Args:
        model: a model, sharded or not.
        bucket_nbytes: the size of buckets, in bytes.
        dtype: cast weights and buffers of floating point to this; None: as they are.
        names: only these, which are in ``metadata`` without this argument; None: all.
        ranks: give tensors to these ranks of the default process group only. Others run the loop
            without its body, and send what they have. None: to all ranks.

    Raises:
        ConfigError: an argument has no meaning, or ranks differ in it.
        UnsupportedError: something of this model is no plain tensor.
        ProtocolError: during a forward, a backward or ``unshard_params``.
        LostRankError: a rank ended or hangs.

    All ranks raise the same.
    """
    await_save()
    consensus = Consensus("stream parameters", "stream", "weights")
    chosen = None if names is None else sorted(names)
    receivers = [*range(consensus.world)] if ranks is None else sorted(set(ranks))
    found, manifest = described(consensus, model, [str(dtype), bucket_nbytes, chosen, receivers])
    plans: list[list[list[Planned]]] = []

    def plan() -> None:
        if isinstance(bucket_nbytes, bool) or not isinstance(bucket_nbytes, int):
            raise ConfigError(f"bucket_nbytes={bucket_nbytes!r}: expected a number of bytes")
        if bucket_nbytes < 1:
            raise ConfigError(f"bucket_nbytes={bucket_nbytes}: expected a positive number")
        if not receivers or not all(0 <= rank < consensus.world for rank in receivers):
            raise ConfigError(f"ranks={receivers}: expected some of 0 to {consensus.world - 1}")
        tensors = planned_tensors(model, manifest, dtype)
        if chosen is not None:
            unknown = sorted(set(chosen) - {one.stored.name for one in tensors})
            if unknown:
                raise ConfigError(f"names: the model has no {', '.join(unknown[:8])}")
            tensors = [one for one in tensors if one.stored.name in set(chosen)]
        plans.append(grouped(tensors, bucket_nbytes, lambda one: aligned(one.nbytes)))

    consensus.agree(plan)
    return ParamStream(model, manifest, found.tensors, plans[0], receivers, consensus)


class ParamStream:
    """Weights as an iterable of buckets; see ``stream_params``.

    Attributes:
        metadata: all tensors, in the order in which they come.
    """

    def __init__(
        self,
        model: nn.Module,
        manifest: Manifest,
        own: Mapping[str, TensorEntry],
        buckets: Sequence[Sequence[Planned]],
        receivers: Sequence[int],
        consensus: Consensus,
    ) -> None:
        self._model = model
        self._known, self._own = set(manifest.names()), own
        self._rank, self._world = consensus.rank, consensus.world
        self._receivers = receivers
        self._batches = [
            [FilePiece(0, one, 0, one.stored.region.numel) for one in b] for b in buckets
        ]
        self._parts = [parts_by_rank(manifest, batch) for batch in self._batches]
        self._room = max((_offsets(bucket)[-1] for bucket in buckets), default=0)
        self.metadata = [
            StreamedTensor(one.stored.name, one.stored.shape, one.dtype, number, offset)
            for number, bucket in enumerate(buckets)
            for one, offset in zip(bucket, _offsets(bucket), strict=False)
        ]
        self._is_running = False

    def __len__(self) -> int:
        """Return the number of buckets."""
        return len(self._batches)

    def __iter__(self) -> Iterator[TensorBucket]:
        """Yield the buckets; a collective.

        Raises:
            ProtocolError: during a forward, a backward or ``unshard_params``; or weights were
                written to, or the loop before has not ended.
        """
        if self._is_running:
            raise ProtocolError("a loop over this stream has not ended: run each one to its end")
        await_save()
        found = Collected(self._rank, self._world)
        found.add_model(self._model)
        apart = sorted(self._known - found.tensors.keys()) if self._world == 1 else []
        apart += [name for name, entry in found.tensors.items() if entry != self._own.get(name)]
        if apart:
            raise ProtocolError(
                f"{apart[0]} is not what it was when the stream was made: make a new one"
            )
        return self._run(found)

    def _run(self, found: Collected) -> Iterator[TensorBucket]:
        if not self._batches:
            return
        self._is_running = True
        watched = list(found.params.values())
        version = _autograd.versions(watched)
        pairs = zip(self._parts, self._batches, strict=True)
        sizes = [[size_of(own, batch) for own in parts] for parts, batch in pairs]
        memory: Tensor | None = None
        gather: BucketedGather | None = None
        try:
            gather = BucketedGather(sizes, self._receivers, found.device)
            self._send(gather, found, 0)
            for number in range(len(self._batches)):
                bucket, memory = self._received(gather, number, memory), None
                if _autograd.versions(watched) != version:
                    raise ProtocolError(
                        "weights were written to while they were streamed: end the loop before "
                        "the next step of the optimizer"
                    )
                if number + 1 < len(self._batches):
                    self._send(gather, found, number + 1)
                if bucket is not None:
                    try:
                        yield bucket
                    finally:
                        memory = bucket.end()
        finally:
            self._is_running = False
            if gather is not None:
                gather.wait()  # a loop that was left has sent its next bucket

    def _send(self, gather: BucketedGather, found: Collected, number: int) -> None:
        """Begin to gather a bucket."""
        parts, batch = self._parts[number][self._rank], self._batches[number]
        put_parts(parts, batch, found.parts, gather.begin(number))
        gather.start()

    def _received(
        self, gather: BucketedGather, number: int, memory: Tensor | None
    ) -> TensorBucket | None:
        """Return a bucket, in ``memory`` if there is some; None if this rank gets none."""
        messages = gather.wait()
        if self._rank not in self._receivers:
            return None
        if memory is None:
            memory = torch.empty(self._room, dtype=torch.uint8, device=gather.device)
        bucket = TensorBucket([piece.planned for piece in self._batches[number]], memory)
        pieces = [bucket.flat(name) for name in bucket]
        for parts, message in zip(self._parts[number], messages, strict=True):
            unpack(message, [part.of_block(pieces[part.block]) for part in parts])
        return bucket


class TensorBucket(Mapping[str, Tensor]):
    """Full tensors by name, usable until the next bucket of the stream is asked for.

    Operations on a tensor give plain tensors, but for views of it, which are bound to the bucket,
    too; after that any use raises ``ProtocolError``.
    """

    def __init__(self, planned: Sequence[Planned], memory: Tensor) -> None:
        *offsets, self._size = _offsets(planned)
        self._memory: Tensor | None = memory
        pairs = zip(planned, offsets, strict=True)
        self._planned = {one.stored.name: (one, offset) for one, offset in pairs}
        self._is_lent = False

    @property
    def packed(self) -> Tensor:
        """All tensors as flat bytes, plain, to be sent at once; ``metadata`` has the offsets.

        You may keep these bytes: the stream then takes new memory for later buckets.
        """
        self._is_lent = True
        return self._alive()[: self._size]

    def flat(self, name: str) -> Tensor:
        """Return the plain elements of a tensor, to be written."""
        one, offset = self._planned[name]
        return self._alive()[offset : offset + one.nbytes].view(one.dtype)

    def _alive(self) -> Tensor:
        if self._memory is None:
            raise ProtocolError(
                "a tensor of a bucket was used after the next bucket was asked for: its memory "
                "belongs to that. Clone what you keep"
            )
        return self._memory

    def end(self) -> Tensor | None:
        """Make all tensors unusable; return their memory, if nobody else has it."""
        memory, self._memory = self._memory, None
        return None if self._is_lent else memory

    def __getitem__(self, name: str) -> Tensor:
        one, _ = self._planned[name]
        return BucketTensor.of(self.flat(name).view(one.stored.shape), self)

    def __iter__(self) -> Iterator[str]:
        return iter(self._planned)

    def __len__(self) -> int:
        return len(self._planned)


class BucketTensor(Tensor):
    """A tensor in the memory of a bucket, or a view of one."""

    _bucket: TensorBucket
    _plain: Tensor

    @classmethod
    def of(cls, plain: Tensor, bucket: TensorBucket) -> BucketTensor:
        """Return ``plain``, in the memory of ``bucket``, bound to it."""
        found = _memory.wrapper_of(cls, plain)
        found._bucket, found._plain = bucket, plain
        return found

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        buckets: list[TensorBucket] = []

        def plain(one: BucketTensor) -> Tensor:
            one._bucket._alive()
            buckets.append(one._bucket)
            return one._plain

        def bound(one: Tensor) -> Tensor:
            for bucket in buckets:
                if _memory.shares_storage(one, bucket._alive()):
                    return cls.of(one, bucket)
            return one

        args, kwargs = tree_map_only(cls, plain, (args, kwargs or {}))
        return tree_map_only(Tensor, bound, func(*args, **kwargs))

    def __repr__(self) -> str:  # type: ignore[override]
        """Return what a plain tensor shows."""
        self._bucket._alive()
        return repr(self._plain)

    # These hand out memory that the bucket cannot follow, so the stream does not reuse it.

    def data_ptr(self) -> int:
        """Return the address of the first element."""
        return self._given_away().data_ptr()

    def numpy(self, *, force: bool = False) -> Any:
        """Return an array of the same memory."""
        return self._given_away().numpy(force=force)

    def tolist(self) -> Any:
        """Return the elements."""
        return self._given_away().tolist()

    def untyped_storage(self) -> torch.UntypedStorage:
        """Return the memory."""
        return self._given_away().untyped_storage()

    def _given_away(self) -> Tensor:
        self._bucket.packed  # noqa: B018
        return self._plain


def _offsets(bucket: Sequence[Planned]) -> list[int]:
    """Return where the tensors of a bucket begin, and where the last one ends, in bytes."""
    return places(one.nbytes for one in bucket)
