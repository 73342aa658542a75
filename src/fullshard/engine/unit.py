"""A unit: the buckets that one call of ``fully_shard`` unshards and reduces together."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain, compress, islice
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from fullshard._torch import autograd as _autograd
from fullshard.engine.bucket import Bucket
from fullshard.engine.reduce import Gradients
from fullshard.engine.spec import BucketSpec
from fullshard.engine.unshard import Unsharded
from fullshard.errors import AssertedProtocolError, BusyError, ProtocolError, UnsupportedError
from fullshard.schedule import Residency, Scheduler, UnitPolicy, UnitState

log = logging.getLogger("fullshard")


class Registration(Protocol):
    """The places of a unit's parameters in modules; the engine knows no module."""

    def show_sharded(self, buckets: Sequence[Bucket]) -> None:
        """Make the modules show the sharded parameters."""

    def show_unsharded(self, buckets: Sequence[Bucket]) -> None:
        """Make the modules show the unsharded parameters."""

    def take_over(self, unit: Unit, *, keeps_ties: bool = False) -> None:
        """Adopt parameters that the user put into modules in place of our sharded parameters.

        Parameters of this unit that the user tied or exchanged are shown so from now on.
        ``keeps_ties``: True after a conversion or a load, which replaces parameters one by one.
        Tied places then stay tied, and show the parameter that was put there last.

        Raises:
            ConfigError: new parameters have another placement, replace unsharded parameters, or
                are in only some places of a tied parameter.
        """

    def put_back(self, buckets: Sequence[Bucket]) -> list[str]:
        """Restore unsharded parameters that were replaced in modules; return their FQNs."""

    def lend(
        self, buckets: Sequence[Bucket], params: Sequence[Sequence[nn.Parameter] | None]
    ) -> None:
        """Show ``params``, bucket by bucket, instead of any other parameters until ``take_back``.

        For a bucket with None, continue to show the bucket's own parameters.
        """

    def take_back(self, buckets: Sequence[Bucket]) -> list[list[Tensor] | None]:
        """Show the unit's own parameters again; return the tensors now in the places of a loan.

        Raises:
            ConfigError: a place holds something that cannot be a parameter; the rest was done.
        """

    def lent_ties(self, buckets: Sequence[Bucket]) -> list[str]:
        """Return the FQNs of lent parameters that the user replaced by other lent parameters."""

    def tie(self, buckets: Sequence[Bucket]) -> None:
        """Keep the ties that ``lent_ties`` found: their places show the other parameter now."""


@dataclass(frozen=True)
class Lending:
    """An active loan of a unit's full parameters.

    Attributes:
        call: what the user called, for messages, such as "unshard_params()".
        to_first: whether only rank 0 of the data-parallel mesh gets full parameters.
        is_shown: whether the modules of this rank show the full parameters.
    """

    call: str
    to_first: bool
    is_shown: bool


class Unit:
    """The buckets that move together, known to the scheduler by ``key``."""

    def __init__(
        self,
        name: str,
        buckets: Sequence[Bucket],
        registration: Registration,
        *,
        device: torch.device,
        num_members: int,
        num_inside: int,
    ) -> None:
        self.key = -1
        self.device = device
        self.buckets = tuple(buckets)
        self.name = name
        self.registration = registration
        self.num_members = num_members
        self.num_inside = num_inside
        self.engine: object = None  # the ``Engine`` that runs the unit
        self.lending: Lending | None = None
        self.readers: list[Callable[[], None]] = []  # wait for other readers of the shards
        self._grad_nodes: tuple[list[bool], list[Node]] | None = None
        self._version = 0

    @property
    def shown_name(self) -> str:
        """The name for messages."""
        return self.name or "(root)"

    def copy(self, memo: dict[Any, Any]) -> Unit:
        """Return a separate unit, resharded, with copied shards; its registration is still ours.

        Enter the new unit and its parameters into ``memo`` of ``copy.deepcopy``.
        """
        new = copy.copy(self)
        new.buckets = tuple(bucket.copy(memo) for bucket in self.buckets)
        new.engine, new.lending, new.readers = None, None, []
        new.forget_nodes()
        memo[id(self)] = new
        return new

    def tell_hooks(self, memo: dict[Any, Any]) -> None:
        """Pass the copied modules, found in ``memo``, to all-gather hooks of tensors."""
        for bucket in self.buckets:
            told = bucket.spec.hook_arguments
            if told is not None:
                bucket.rewire(hook_arguments=told.copied(memo))

    def __deepcopy__(self, memo: dict[int, object]) -> NoReturn:
        """Refuse to copy: module hooks refer to the unit, so copying part of a model gets here."""
        raise UnsupportedError(
            f"a module with parameters of unit {self.shown_name} cannot be copied without "
            "the module that was given to fully_shard; copy that one, or the state_dict()"
        )

    @property
    def name(self) -> str:
        """The FQN of the unit's module in the tree; labels of communication contain it."""
        return self._name

    @name.setter
    def name(self, name: str) -> None:
        self._name = name
        for bucket in self.buckets:
            bucket.tell_unit(name)

    @property
    def nbytes(self) -> int:
        """Bytes of all unsharded parameters."""
        return sum(bucket.unsharded_nbytes for bucket in self.buckets)

    @property
    def reduction_nbytes(self) -> int:
        """Bytes of a copy of all gradients in the dtype of the reduction."""
        return sum(bucket.reduction_nbytes for bucket in self.buckets)

    @property
    def replicated(self) -> bool:
        """True if other ranks hold the same shard of some bucket."""
        return any(bucket.spec.replicas is not None for bucket in self.buckets)

    def state(self, policy: UnitPolicy) -> UnitState:
        """Return the scheduler's state of this unit, resharded."""
        return UnitState(
            self.key,
            nbytes=self.nbytes,
            reduction_nbytes=self.reduction_nbytes,
            num_members=self.num_members,
            num_inside=self.num_inside,
            replicated=self.replicated,
            policy=policy,
        )

    @property
    def num_params(self) -> int:
        """Number of parameters, frozen ones included."""
        return sum(len(bucket.sharded_params) for bucket in self.buckets)

    def describe(self) -> str:
        """Describe the unit in one line for people: parameters, elements, ranks, bytes."""
        if not self.buckets:
            return "a unit without parameters of its own"
        specs = [bucket.spec for bucket in self.buckets]
        numel = sum(param.numel for spec in specs for param in spec.layout.params)
        shards = sum(bucket.shards.nbytes for bucket in self.buckets)
        forms = " and ".join(dict.fromkeys(str(spec.form) for spec in specs))
        ranks = " and ".join(dict.fromkeys(map(_ranks, specs)))
        return (
            f"a unit: {self.num_params} parameters, {numel:,} elements, {forms} over "
            f"{ranks} rank(s), {shards:,} bytes a rank, {self.nbytes:,} unsharded"
        )

    def sides(self) -> tuple[Unsharded | None, ...]:
        """Return the unsharded sides; a graph compares them with those that its forward read."""
        return tuple(bucket.unsharded for bucket in self.buckets)

    def wait_for_readers(self) -> None:
        """Wait until nothing reads the shards, before they are written.

        The compute stream waits for gathers in flight, the host for ``readers``.
        """
        for bucket in self.buckets:
            if bucket.unsharded is not None:
                bucket.unsharded.finish()
        for wait in self.readers:
            wait()

    def sync_requires_grad(self) -> None:
        """Freeze and unfreeze the unsharded parameters like the sharded ones, and vice versa."""
        for bucket in self.buckets:
            bucket.sync_requires_grad()

    def gradients(self) -> list[Gradients]:
        """Return the ``Gradients`` of the buckets whose unsharded side has been made."""
        return [bucket.gradients for bucket in self.buckets if bucket.gradients is not None]

    def unsharded_params(self) -> list[nn.Parameter]:
        """Return the unsharded parameters that have been made, bucket by bucket."""
        made = (bucket.unsharded for bucket in self.buckets if bucket.unsharded is not None)
        return list(chain.from_iterable(unsharded.params for unsharded in made))

    def grad_nodes(self) -> list[Node]:
        """Return the autograd nodes that accumulate gradients of the trainable parameters.

        The unit keeps the nodes alive: parameters hold nodes weakly, and backward must find these.
        """
        params = self.unsharded_params()
        trainable = _autograd.requires_grad(params)
        if self._grad_nodes is None or self._grad_nodes[0] != trainable:
            nodes = list(map(_autograd.gradient_node, compress(params, trainable)))
            self._grad_nodes = (trainable, nodes)
        return self._grad_nodes[1]

    def is_read(self) -> bool:
        """Return whether others may read the unsharded parameters, which no module shows now."""
        flags = iter(() if self._grad_nodes is None else self._grad_nodes[0])
        for bucket in self.buckets:
            if bucket.unsharded is not None:
                num_nodes = sum(islice(flags, len(bucket.unsharded.params)))
                if bucket.is_read(num_nodes):
                    return True
        return False

    def forget_nodes(self) -> None:
        """Forget the nodes of ``grad_nodes``, because the unsharded parameters are new objects."""
        self._grad_nodes = None

    def was_written(self) -> bool:
        """Return whether a sharded parameter was visibly written since the last call."""
        last, self._version = self._version, sum(bucket.version() for bucket in self.buckets)
        return self._version != last

    def check_ready(self, *, with_memory: bool = True) -> None:
        """Refuse to gather parameters that ``Bucket.check`` refuses, or ``with_memory`` meta ones.

        Raises:
            ProtocolError, ExtensionError, UnsupportedError, ConfigError: nothing was changed.
        """
        for bucket in self.buckets:
            bucket.check()
        names = [
            n
            for bucket in self.buckets
            if with_memory and bucket.shards.device.type == "meta"
            for n in bucket.names
        ]
        if names:
            raise ProtocolError(
                f"unit {self.shown_name} has parameters on the meta device: "
                f"{', '.join(names)}. Give them memory with to_empty(device=...) and values with "
                "reset_parameters(), or load_state_dict(..., assign=True)"
            )

    @property
    def is_lent(self) -> bool:
        """Return whether full parameters are on loan."""
        return self.lending is not None

    def check_not_lent(self, what: str) -> None:
        """Raise ``BusyError`` while full parameters are on loan."""
        if self.lending is not None:
            raise BusyError(
                f"{what} while {self.lending.call} lends the full parameters of unit "
                f"{self.shown_name}; units are expected to be in states of rest: leave the "
                "with block first"
            )

    def check_shown(self, what: str) -> None:
        """Raise ``BusyError`` while full parameters are on loan to the first rank, not to this."""
        if self.lending is not None and not self.lending.is_shown:
            raise BusyError(
                f"{what} while {self.lending.call} with rank0_only=True lends the full parameters "
                f"of unit {self.shown_name} to another rank: do this on rank 0 only, or "
                "leave the with block first"
            )

    def called_outside(self, carrier: Unit) -> ProtocolError:
        """Return the error of a forward outside of that of ``carrier``, which makes it usable."""
        around = carrier.shown_name
        return ProtocolError(
            f"a forward of unit {self.name}, which ranks may skip and which is therefore gathered "
            f"with unit {around}, came outside of the forward of {around}: other ranks may not "
            "take part. Call it inside of that forward, or call set_skip_tolerance(False) on it"
        )

    def check_not_replaced(self) -> None:
        """Check before a backward that the unsharded parameters are those that the forward read.

        Raises:
            AssertedProtocolError: the user set ``data`` of unsharded parameters or replaced them;
                the replacements are dropped.
        """
        names = self.registration.put_back(self.buckets)
        for bucket in self.buckets:
            replaced = () if bucket.unsharded is None else bucket.unsharded.reclaim()
            names += [bucket.names[number] for number in replaced]
        if names:
            raise AssertedProtocolError(
                f"unit {self.shown_name}: FSDP does not support changing the parameters "
                f"between forward and backward while they are unsharded, got others for "
                f"{', '.join(names)}. The others are dropped; write between steps, or inside "
                "of unshard_params()"
            )


class Retained:
    """The units whose unsharded memory is kept for a graph that may read it, see ``Op.RETAIN``."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._residents = scheduler.residents
        self._units: dict[Unit, int] = {}  # with the generation of the weights
        self._has_warned = False
        _autograd.num_holders_of_a_node()  # makes a node, which no forward may count as its own

    def __contains__(self, unit: Unit) -> bool:
        return unit in self._units

    def add(self, unit: Unit) -> None:
        """Keep the memory of ``unit`` when it is resharded."""
        self._units[unit] = self._residents.generation

    def free(self, *, at_once: bool = False) -> None:
        """Free the memory of each sharded unit if no graph can read it.

        No graph can read the memory if only the unit refers to its unsharded parameters and to
        their memory. If the weights have changed since, or with ``at_once``, the memory is freed
        in any case.
        """
        for unit, generation in tuple(self._units.items()):
            is_old = at_once or generation != self._residents.generation
            if self._residents.units[unit.key].residency is Residency.SHARDED:
                if not is_old and unit.is_read():
                    continue
                for bucket in unit.buckets:
                    bucket.reshard()
            elif not is_old:
                continue
            del self._units[unit]

    def warn(self, unit: Unit) -> None:
        """Tell the user once what keeps the memory, unless the carrier of ``unit`` keeps it."""
        if self._has_warned or self._residents.units[unit.key].carrier is not None:
            return
        self._has_warned = True
        log.warning(
            "unit %s: its forward made an autograd node that is newer than every output found in "
            "lists, tuples, mappings and dataclasses, or handed out a parameter, or a custom "
            "Function returned tensors on another device. So the memory of its unsharded "
            "parameters is kept until the end of backward, or for as long as something refers to "
            "them. Return the tensor, or detach what needs no gradient, such as y.detach().norm() "
            "for a log. Other units are not reported",
            unit.shown_name,
        )


def check_lent_alike(units: Sequence[Unit], what: str) -> None:
    """Check that gathers of ``units`` are possible, if any are needed.

    Raises:
        BusyError: some units, not all, are on loan to the first rank; others would wait for it.
    """
    lent = next((one for one in units if one.lending is not None and one.lending.to_first), None)
    if lent is not None and not all(unit.is_lent for unit in units):
        assert lent.lending is not None
        raise BusyError(
            f"{what} while {lent.lending.call} with rank0_only=True lends unit "
            f"{lent.shown_name} to rank 0 alone, and others have to be gathered by all "
            "ranks: lend all of them, or lend to all ranks"
        )


def _ranks(spec: BucketSpec) -> str:
    """Return the number of ranks as text for people."""
    world = str(spec.layout.world)
    return world if spec.replicas is None else f"{spec.replicas.world} x {world}"
