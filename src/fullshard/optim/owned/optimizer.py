"""``OwnedOptimizer``: any optimizer for sharded parameters, on full tensors at one owner each."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from fullshard.comm import gather_objects
from fullshard.errors import ArgumentTypeError, ConfigError, UnsupportedError
from fullshard.optim.base import Outer
from fullshard.optim.flat import align
from fullshard.optim.inner import KeptOptions, label_of, named, numbered, options_of
from fullshard.optim.owned.assign import (
    Cost,
    Matrix,
    OwnedBlock,
    ParamPlacement,
    Pieces,
    Ranks,
    Rule,
    block_size_of,
    blocks_of,
    newton_schulz_flops,
    owners_of,
    pieces_on,
    placement_or_plain,
)
from fullshard.optim.owned.rounds import Family, Round, step_round
from fullshard.optim.owned.state import OwnedParam
from fullshard.optim.probe import Probe, Shape, Traits, Units, keep_unchanged, units_of
from fullshard.tensors import local_part

log = logging.getLogger("fullshard")

_ROUND_NBYTES = 256 << 20


class OwnedOptimizer(Outer):
    """An optimizer that steps full tensors with ``optimizer_class``, each on one rank, its owner.

    For classes that look at more than one element, such as ``torch.optim.Muon``, ``Adafactor`` or
    Shampoo. In each step one packed all-to-all sends the parts of a matrix, gradient and parameter,
    to its owner. The owner steps. A second all-to-all sends the updated parts back to the ranks
    that hold them. Results are those of ``optimizer_class`` on the unsharded model, bit for
    bit if the gradients are. No rank does what another does: matrices are given to all ranks of
    their mesh, replicas and tensor-parallel ranks too, so that costs are balanced. A matrix that a
    rank holds in full stays there as long as the balance allows, and is stepped in place.

    Parameters travel along with their gradients, because owners keep no copy of them. A copy would
    take the size of the model divided by the number of ranks, and be stale after any other write.
    Owners keep the state. ``state`` shows it on all ranks by parameter and name, as RaggedTensors
    of which only owners hold elements, see ``owned/state.py``; Python numbers are shown as tensors.
    ``fullshard.checkpoint`` saves and loads this state, on any owners, meshes and layouts, also to
    and from the unsharded class. State appears after the first step, in which ranks exchange its
    shapes.

    ``param_groups``, schedulers, closures, ``GradScaler`` (a ``ShardedGradScaler``: all ranks must
    skip the same steps), hooks and copies are as with ``ShardedOptimizer``. Gradients must be
    absent on all ranks or on none. Plain tensors are stepped on every rank, as by the class itself.
    Methods that ``optimizer_class`` adds to those of every optimizer are not available.
    """

    _mine = (
        *Outer._mine,
        "_cost",
        "_blocks",
        "_round_nbytes",
        "_is_vouched_for",
        "_traits",
    )

    def __init__(
        self,
        params: ParamsT,
        optimizer_class: type[Optimizer],
        *,
        cost: Cost | None = None,
        blocks: Rule | None = None,
        round_nbytes: int = _ROUND_NBYTES,
        independent: bool | None = None,
        **kwargs: Any,
    ) -> None:
        """Create the optimizer.

        Args:
            params: parameters, named parameters or parameter groups as for any optimizer; they may
                still be on the meta device.
            optimizer_class: a class like those of ``torch.optim``. Its instance on each rank has
                the matrices that the rank owns, all matrices of a round in one step.
            cost: the cost of a step of a matrix of the given shape, in any unit; None: the
                operations of five Newton-Schulz steps. Equal on all ranks.
            blocks: a rule ``(name, shape) -> None | "each" | numbers of rows | int`` for the
                matrices of a parameter. None: the full parameter is one. "each": each index of the
                first dim is one, with one dim less, as in a stack of experts. Numbers of rows, as
                for queries, keys and values: each is a matrix of so many rows. The name is "" if
                ``params`` have none. An int, from the rule or in its stead: the class steps blocks
                of so many elements independently, as classes with 8-bit states do. Then each rank
                steps the blocks that it holds. A trial on small tensors checks this.
            round_nbytes: the most bytes of parameters (or one matrix) that an owner gets in one
                round of a step, with as many bytes of gradients. The class steps once a round.
            independent: True asserts that the class steps each tensor by itself, or each block of
                elements, and accepts its random numbers; None tests the class on small matrices
                of our own.
            kwargs: arguments of ``optimizer_class``.

        Raises:
            UnsupportedError: the class does not step each tensor by itself, or not without a
                closure, or uses random numbers, or ``differentiable`` is set; or a parameter is a
                flat parameter.
            ConfigError: ``params`` is empty or contains a parameter twice; the class or ``blocks``
                refuses a parameter.
            ArgumentTypeError: an argument has a wrong type.
        """
        self._check_optimizer_class(optimizer_class)
        if not isinstance(round_nbytes, int) or isinstance(round_nbytes, bool) or round_nbytes < 1:
            raise ArgumentTypeError(
                f"OwnedOptimizer(round_nbytes={round_nbytes!r}): expected a number of bytes above 0"
            )
        if isinstance(blocks, int) and (isinstance(blocks, bool) or blocks < 1):
            raise ArgumentTypeError(
                f"OwnedOptimizer(blocks={blocks!r}): expected a function, or a number of elements"
            )
        self._cost = cost or newton_schulz_flops
        self._blocks = blocks
        self._round_nbytes = round_nbytes
        self._is_vouched_for = independent is True
        self._traits = Traits({}, is_late=False, counts=False, makes_state=False)
        super().__init__(params, optimizer_class, kwargs)

    def _start(self) -> None:
        super()._start()
        self._families: list[Family] = []
        self._owned: dict[int, OwnedParam] = {}  # by ``id`` of the parameter
        self._has_warned = False

    def owners_of(self, param: Tensor) -> list[int]:
        """Return the rank that owns each block of a parameter; [] if every rank steps it.

        Raises:
            ConfigError: the optimizer does not have the parameter.
        """
        self._settle()
        owned = self._owned.get(id(param))
        if owned is None:
            raise ConfigError(f"{self._label}: it has no {label_of(self.param_groups, param)}")
        if owned.ranks.is_alone:
            return []
        return [owned.ranks.numbers[owner] for owner in owned.owners]

    def loads(self) -> dict[int, float]:
        """Return the cost of each rank's matrices, on the meshes that contain this rank."""
        self._settle()
        total: dict[int, float] = {}
        for family in self._families:
            for rank, load in family.loads.items():
                total[rank] = total.get(rank, 0.0) + load
        return total

    def state_like(self, param: Tensor, key: str, shape: Sequence[int]) -> DTensor | None:
        """Return an empty tensor cut as the state ``key`` of ``param``, for a load.

        None: the state has its usual form, which is not cut unless it has the parameter's shape.
        The first call may be a collective.
        """
        self._settle()
        owned = self._owned.get(id(param))
        return None if owned is None else owned.like(key, shape, self._inner.scalars)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group, as to any optimizer; known parameters keep their owners.

        Raises:
            ConfigError: a parameter is twice in the group, or already in another group; the class
                does not take it.
            ArgumentTypeError: the group holds something that is not a tensor.
            UnsupportedError: as when the optimizer is created.
        """
        options = self._prepare_group(param_group)
        probe = self._probe(options)
        traits = probe.traits(is_vouched_for=self._is_vouched_for)
        params = param_group["params"]
        if not self._is_vouched_for:
            probe.check_random(params, self._label, "independent=True")
        self._check_matrices(params, probe)
        self._learn([options])
        super().add_param_group(param_group)
        self._convert_group()
        self._traits = self._traits.merged(traits)

    def _check_matrices(self, params: Sequence[Any], probe: Probe) -> None:
        labels: dict[tuple[Shape, torch.dtype], str] = {}
        for index, item in enumerate(params):
            name, param = item if isinstance(item, tuple) else ("", item)
            label = f"{self._label}: " + (f"parameter {name!r}" if name else f"parameter {index}")
            placed, _ = placement_or_plain(param, label)
            block_size = block_size_of(name, placed.shape, self._blocks)
            is_cut = block_size > 0 and torch.Size(placed.shape).numel() > block_size
            if is_cut:
                self._units(param, placed.shape, block_size, probe)
            for block in blocks_of(name, placed.shape, self._blocks):
                labels.setdefault((block.shape, param.dtype), label.partition(": ")[2])
        probe.check_shapes(labels)

    # owners

    def _settle(self) -> None:
        """Give owners to parameters that have none."""
        new: dict[DeviceMesh | None, list[tuple[int, str, Tensor, ParamPlacement]]] = {}
        for group, name, param in named(self.param_groups):
            known = self._owned.get(id(param))
            if known is not None and known.param is param:
                known.group = group
                continue
            placed, mesh = placement_or_plain(param, label_of(self.param_groups, param))
            new.setdefault(mesh, []).append((group, name, param, placed))
        largest_first = sorted(new.items(), key=lambda one: -(one[0].size() if one[0] else 0))
        for mesh, params in largest_first:
            self._add_family(Ranks(mesh), params)
        self._warn_of_replicas()

    def _add_family(
        self, ranks: Ranks, params: Sequence[tuple[int, str, Tensor, ParamPlacement]]
    ) -> None:
        blocks: list[list[OwnedBlock]] = [
            blocks_of(name, placed.shape, self._blocks) for _, name, _, placed in params
        ]
        pieces = pieces_on(ranks, ((name, own) for _, name, _, own in params), self._blocks)
        matrices = [
            Matrix(number, float(self._cost(block.shape)), ranks.holders(placed, block))
            for number, (_, _, _, placed) in enumerate(params)
            for block in (() if number in pieces else blocks[number])
        ]
        # Ranks of one mesh must agree, so only loads that all of them know of count.
        known = [one.loads for one in self._families if one.loads.keys() >= set(ranks.numbers)]
        before = {
            index: sum(loads[rank] for loads in known) for index, rank in enumerate(ranks.numbers)
        }
        for its_blocks, its_owners in pieces.values():
            for block, owner in zip(its_blocks, its_owners, strict=True):
                before[owner] += float(self._cost(block.shape))
        owners = iter(owners_of(matrices, len(ranks.numbers), before))
        owned: dict[int, OwnedParam] = {}
        for number, (group, _, param, placed) in enumerate(params):
            units = None
            its = pieces.get(number)
            if its is None:
                its = Pieces(blocks[number], [next(owners) for _ in blocks[number]])
            elif size := its.blocks[0].block_size:
                units = self._units(param, placed.shape, size, self._group_probe(group))
            owned[id(param)] = OwnedParam(param, group, placed, *its, ranks, units)
        self._owned |= owned
        self._families.append(Family(ranks, owned, self._round_nbytes, self._cost))

    def _units(self, param: Tensor, shape: Shape, block_size: int, probe: Probe) -> Units:
        vouched = self._is_vouched_for
        return units_of(probe, shape, param.dtype, block_size, is_vouched_for=vouched)

    def _group_probe(self, group: int) -> Probe:
        return self._probe(options_of(self.param_groups[group]))

    def _sample(self, group: int, shape: Shape, dtype: torch.dtype) -> dict[str, Any]:
        return self._group_probe(group).sample(shape, dtype)

    def _warn_of_replicas(self) -> None:
        """Log once the parameters that every rank steps."""
        plain = [one for one in self._owned.values() if one.ranks.is_alone]
        if self._has_warned or not plain or not dist.is_initialized() or dist.get_world_size() == 1:
            return
        self._has_warned = True
        work = sum(float(self._cost(block.shape)) for one in plain for block in one.blocks)
        log.warning(
            "%s: %d plain tensors, of %d elements, are replicated, so every rank steps them: cost "
            "%.3g per rank; the busiest owner has %.3g",
            self._label,
            len(plain),
            sum(one.param.numel() for one in plain),
            work,
            max((load for one in self._families for load in one.loads.values()), default=0.0),
        )

    # steps

    def _prepare(self) -> dict[int, Tensor | None]:
        """Return the gradients by ``id`` of their parameters."""
        self._settle()
        self._adopt()
        params = [param for _, param in numbered(self.param_groups)]
        grads: list[Tensor | None] = list(map(attrgetter("grad"), params))
        for param, grad in zip(params, grads, strict=True):
            if grad is not None and grad.layout is not torch.strided:
                raise UnsupportedError(
                    f"{self._label}: the gradient of {label_of(self.param_groups, param)} is "
                    f"{grad.layout}; expected a dense one"
                )
        align(params, grads)
        return {id(param): grad for param, grad in zip(params, grads, strict=True)}

    def _step(self, ready: dict[int, Tensor | None], amp: dict[str, Tensor]) -> None:
        before = KeptOptions(self.param_groups)
        changed: list[dict[str, Any]] = [{} for _ in self.param_groups]
        failures: list[Exception] = []
        for one in (one for family in self._families for one in family.rounds(ready)):
            with one.bound(ready) as bound:
                if failures:
                    continue
                before.restore()
                try:
                    self._step_round(one, bound, amp)
                except Exception as error:  # other ranks wait for this rank's parts
                    failures.append(error)
                for its, new in zip(changed, before.changes(), strict=True):
                    its.update(new)
                before.keep_counts()
        for group, its in zip(self.param_groups, changed, strict=True):
            group.update(its)
        before.give_counts()
        self._announce(ready)
        if failures:
            raise failures[0]
        torch.autograd.graph.increment_version(
            [param for _, param in numbered(self.param_groups) if ready[id(param)] is not None]
        )

    def _step_round(self, one: Round, bound: set[int], amp: Mapping[str, Tensor]) -> None:
        step_round(self._inner, self.param_groups, one, amp, counts=self._traits.counts)
        for owned in one.params:
            owned.refresh(self._inner, self.state, bound, may_change=self._traits.is_late)

    # state

    def _adopt(self) -> None:
        """Read state that was set by hand."""
        touched = [one for one in self._owned.values() if not one.is_untouched(self.state)]
        if touched:
            self._refuse(self.state)
        for owned in touched:
            self._read(owned)

    def _refuse(self, state: Mapping[Tensor, Mapping[str, Any]]) -> None:
        """Refuse state that the class does not make, before any is read."""
        for owned in self._owned.values():
            owned.refuse(state.get(owned.param, {}), self._inner.scalars, self._sample)

    def _read(self, owned: OwnedParam) -> None:
        its = self.state.get(owned.param, {})
        owned.read(its, self._inner, self._traits.numbers, self._sample)
        owned.show(self._inner, self.state)

    def _announce(self, grads: Mapping[int, Tensor | None]) -> None:
        """Show the state of parameters that have stepped for the first time."""
        for family in self._families:
            stepped = (one for id_, one in family.members.items() if grads.get(id_) is not None)
            fresh = [one for one in stepped if self._traits.is_late or not one.is_announced]
            said = [one.describe(self._inner) for one in fresh]
            if fresh and len(family.ranks.numbers) > 1:
                of_ranks = gather_objects(said, family.ranks.mesh.get_group())
                said = [
                    {at: one for its in of_ranks for at, one in its[number].items()}
                    for number in range(len(fresh))
                ]
            for owned, described in zip(fresh, said, strict=True):
                owned.announce(
                    described, self._inner, self.state, makes_state=self._traits.makes_state
                )

    def _protect(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        # Tensors keep the dtypes that the class gives them.
        return keep_unchanged(state_dict, state_dict["state"])

    def check_loaded(self, state: dict[str, Any]) -> None:
        """Check loaded groups and state, and change nothing."""
        self._learn(map(options_of, state["param_groups"]))
        self._check_options(state["param_groups"])
        self._settle()
        self._refuse(state["state"])

    def _adopt_loaded(self) -> None:
        self._settle()
        for _, param in numbered(self.param_groups):
            owned = self._owned[id(param)]
            if not local_part(param).is_meta or param in self.state:
                self._read(owned)
