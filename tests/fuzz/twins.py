"""A sharded model and its reference: each step does the same to both.

The sharded model goes first. So a refusal (a ``FullshardError`` before any change) leaves both as
they were, and the program continues.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fullshard import FullyShardedDataParallel, UnshardHandle, checkpoint, unshard_params
from fullshard.frontend.ownership import units_below
from fullshard.frontend.places import places_of
from fullshard.optim import clip_grad_norm_
from fullshard.tensors.form import clean_name
from tests.fuzz.case import Case, Sharding
from tests.fuzz.compare import (
    Differs,
    compare_all,
    compare_states,
    compare_tensors,
    compare_values,
)
from tests.fuzz.draw import below
from tests.fuzz.modules import Planned, blocks_of, build, invoke
from tests.fuzz.reference import ROWS, Batch, Reference, backward_of, batch_of, forward_of
from tests.fuzz.sharding import make_optimizer, shard
from tests.fuzz.transfers import (
    Pair,
    change,
    compare_and_change,
    through_files,
    through_full,
    through_sharded,
)

Spot = tuple[int, str]
"""The number of a block, and the name of a parameter in it."""


class Tie(NamedTuple):
    """A tie or exchange of two parameters while a program runs."""

    first: Spot
    second: Spot
    exchange: bool

    def apply_to(self, blocks: Mapping[int, nn.Module]) -> None:
        """Assign the first parameter to the place of the second, and for an exchange vice versa."""
        places = [_place(blocks[number], name) for number, name in (self.first, self.second)]
        one, other = (getattr(module, name) for module, name in places)
        setattr(*places[1], one)
        if self.exchange:
            setattr(*places[0], other)


def _place(block: nn.Module, name: str) -> tuple[nn.Module, str]:
    path, _, own = name.rpartition(".")
    return block.get_submodule(path), own


def _cast(tensor: Tensor, *, dtype: torch.dtype) -> Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


class Twins:
    """The sharded model of a case with its optimizer, and the reference. Steps are methods."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.sharding = case.sharding
        self.reference = Reference(case)
        self.model = shard(build(case.model, seed=case.seed), case.sharding)
        self.handles: list[UnshardHandle] = []
        self.ties: list[Tie] = []
        self._begin_with(self.model, None)

    def _begin_with(self, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
        self.model: Any = model
        self.handles.clear()
        self.blocks = blocks_of(model)
        self.shards = list(model.parameters())
        if self.sharding.face != "flat":
            own = self.reference.model.parameters()
            self.shard_of = dict(zip(own, self.shards, strict=True))
        if optimizer is None:
            optimizer = self._optimizer_of(model)
        self.optimizer = optimizer

    def _optimizer_of(self, model: nn.Module) -> torch.optim.Optimizer:
        return make_optimizer(model.named_parameters(), self.case.optimizer, plain=False)

    def check(self) -> None:
        """Raise if the sharded model differs from the reference."""
        compare_all(self.model, self.optimizer, self.reference)

    # Training.

    def _own(self, batch: Batch) -> Batch:
        """Return this rank's rows of a batch."""
        rows = slice(ROWS * dist.get_rank(), ROWS * (dist.get_rank() + 1))
        x, ids, weights = (part[rows].detach().clone() for part in batch)
        return x.requires_grad_(batch[0].requires_grad), ids, weights

    def _compare_rows(self, what: str, own: Tensor | None, whole: Tensor | None) -> None:
        rows = slice(ROWS * dist.get_rank(), ROWS * (dist.get_rank() + 1))
        compare_tensors(what, own, None if whole is None else whole[rows])

    def train(
        self,
        batch: int,
        sync: bool = True,
        partial: bool = False,
        last: bool = True,
        forwards: int = 1,
        backwards: int = 1,
    ) -> None:
        """Run forwards, and one or two backwards of the sum of their losses.

        Without ``sync``, gradients wait unreduced. With ``partial``, they wait after the reduction
        over shards.
        """
        if not last:
            with self._not_the_last():
                self.train(batch, sync=sync, partial=partial, forwards=forwards)
        batches = [batch_of(self.case, 10 * batch + number) for number in range(forwards)]
        own = [self._own(one) for one in batches]
        with self._waiting(sync=sync, all_reduce=not partial):
            outputs, total = forward_of(self.model, own)
            backward_of(total, backwards)
        reference = self.reference
        flags = reference.sync, reference.all_reduce
        reference.sync = [flag and sync for flag in flags[0]]
        reference.all_reduce = [flag and not partial for flag in flags[1]]
        expected = reference.train(batches, backwards=backwards)
        reference.sync, reference.all_reduce = flags
        for have, wanted in zip(outputs, expected, strict=True):
            self._compare_rows("output", have, wanted)
        for (x, *_), (whole, *_) in zip(own, batches, strict=True):
            grad = None if whole.grad is None else whole.grad * self.case.world
            self._compare_rows("gradient of the input", x.grad, grad)

    @contextmanager
    def _waiting(self, *, sync: bool, all_reduce: bool) -> Iterator[None]:
        """Let gradients of the block wait for a later backward, unless both flags are true."""
        if sync and all_reduce:
            yield
            return
        if isinstance(self.model, FullyShardedDataParallel):
            with self.model.no_sync():
                yield
            return
        if not sync:
            self.model.set_requires_gradient_sync(False)
        if not all_reduce:
            self.model.set_requires_all_reduce(False)
        try:
            yield
        finally:
            for number, unit in enumerate(self.sharding.units):
                module: Any = self.blocks[unit.nodes[0]]
                module.set_requires_gradient_sync(self.reference.sync[number], recurse=False)
                module.set_requires_all_reduce(self.reference.all_reduce[number], recurse=False)

    @contextmanager
    def _not_the_last(self) -> Iterator[None]:
        """Declare the backwards of the block as not the last of the step."""
        if self.sharding.face != "modules":
            yield
            return
        self.model.set_is_last_backward(False)
        try:
            yield
        finally:
            self.model.set_is_last_backward(True)

    def fail(self, node: int, where: str, batch: int, reset: bool = False) -> None:
        """Raise in a module's forward or backward on all ranks; then drop all gradients."""
        blocks = (self.blocks[node], self.reference.blocks()[node])
        for block in blocks:
            block.fails = where
        try:
            failed = self._fails(lambda: self.train(batch))
        finally:
            for block in blocks:
                block.fails = ""
        if not failed:
            return
        whole = [batch_of(self.case, 10 * batch)]
        blocks[1].fails = where
        if not self._fails(lambda: self.reference.train(whole, backwards=1)):
            raise Differs("an exception of a module came out of the sharded model only")
        blocks[1].fails = ""
        if reset:
            self.model.reset_iter_state()
        elif self.sharding.face == "modules":
            self.model.clear_pending_gradients()
        self.optimizer.zero_grad()
        self.model.zero_grad()
        self.reference.forget_gradients()

    @staticmethod
    def _fails(run: Any) -> bool:
        try:
            run()
        except Planned:
            return True
        return False

    def optimize(self) -> None:
        """Run a step of both optimizers."""
        self.optimizer.step()
        self.reference.optimizer.step()

    def zero(self, by_module: bool = False, to_none: bool = True) -> None:
        """Set gradients to None or zeros."""
        if by_module:
            self.model.zero_grad(to_none)
            if self.sharding.face != "modules":  # the wrapper's zero_grad drops waiting gradients
                self.reference.pending.clear()
        else:
            self.optimizer.zero_grad(to_none)
        self.reference.optimizer.zero_grad(to_none)

    def clip(self, max_norm: float, norm_type: float) -> None:
        """Clip gradients, and compare their norms."""
        if isinstance(self.model, FullyShardedDataParallel):
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "clip_grad_norm_.*no parameter has a gradient")
                norm = self.model.clip_grad_norm_(max_norm, norm_type)
        else:
            norm = clip_grad_norm_(self.shards, max_norm, norm_type)
        params = [p for p in self.reference.model.parameters() if p.numel()]  # inf needs elements
        expected = nn.utils.clip_grad_norm_(params, max_norm, norm_type)
        compare_tensors("norm", norm.double(), expected.double())

    def rate(self, factor: float) -> None:
        """Multiply the learning rates."""
        for optimizer in (self.optimizer, self.reference.optimizer):
            for group in optimizer.param_groups:
                group["lr"] *= factor

    def evaluate(self, batch: int, mode: str) -> None:
        """Run a forward without a backward, and compare the outputs."""
        whole = batch_of(self.case, 10 * batch)
        modes = {"no_grad": torch.no_grad, "inference": torch.inference_mode, "grad": nullcontext}
        with modes[mode]():
            x, ids, _ = self._own(whole)
            have = invoke(self.model, x, ids)
        with modes[mode]():
            expected = invoke(self.reference.model, *whole[:2])
        self._compare_rows("output", have, expected)

    def mode(self, training: bool) -> None:
        """Call ``train()`` or ``eval()``."""
        self.model.train(training)
        self.reference.model.train(training)

    def times(self, node: int, times: int) -> None:
        """Change the number of consecutive calls of a module other than the root."""
        if node + 1 < len(self.case.model.nodes):
            self.blocks[node].times = self.reference.blocks()[node].times = times

    # Parameters.

    @torch.no_grad()
    def edit(self, factor: float) -> None:
        """Multiply the shards in place."""
        for param in (*self.shards, *self.reference.model.parameters()):
            param.mul_(factor)

    def freeze(self, node: int, value: bool) -> None:
        """Freeze or unfreeze a module, except in a flat parameter, whose parts share one flag.

        Nothing is done while gradients wait: a parameter that is frozen when they are reduced loses
        its gradient.
        """
        if self.sharding.face != "flat" and not self.reference.pending:
            self.blocks[node].requires_grad_(value)
            self.reference.blocks()[node].requires_grad_(value)

    def move(self, way: str) -> None:
        """Cast everything to single precision and back, unless gradients wait.

        Parts are cast one by one only while all units show sharded parameters; otherwise the cast
        of a part would be refused.
        """
        if self.reference.pending:
            return
        if not all(places_of(unit).shows_sharded for unit in units_below([self.model])):
            way = "whole"
        reference = self.reference
        for model, blocks in (
            (self.model, self.blocks),
            (reference.model, reference.blocks()),
        ):
            for dtype in (torch.float32, torch.float64):
                if way == "whole":
                    model.to(dtype)
                elif way == "blocks":
                    for block in blocks.values():
                        block.to(dtype)
                else:
                    for module in model.modules():
                        module._apply(partial(_cast, dtype=dtype), recurse=False)

    def break_state(self, node: int, load: bool) -> None:
        """Take or load a state dict in which a hook raises on all ranks."""

        def fail(*_: Any) -> None:
            raise Planned("in a state dict")

        state = self.model.state_dict() if load else {}
        block = self.blocks[node]
        register = "register_load_state_dict_pre_hook" if load else "register_state_dict_pre_hook"
        hook = getattr(block, register)(fail)
        try:
            if not self._fails(
                lambda: self.model.load_state_dict(state) if load else self.model.state_dict()
            ):
                raise Differs("a hook of a state dict was not called")
        finally:
            hook.remove()

    def tie(self, pair: int, exchange: bool) -> None:
        """Tie or exchange two parameters of one unit; make optimizers without state."""
        pairs = [] if self.sharding.face == "flat" else list(self._pairs())
        if not pairs or self.reference.pending:
            return
        tie = Tie(*pairs[pair % len(pairs)], exchange)
        tie.apply_to(self.blocks)
        tie.apply_to(self.reference.blocks())
        self.ties.append(tie)
        named = self.reference.model.named_parameters()
        own = [(name, self.shard_of[param]) for name, param in named]
        self.shards = [param for _, param in own]
        self.optimizer = make_optimizer(own, self.case.optimizer, plain=False)
        self.reference.optimizer = self.reference.new_optimizer()

    def _pairs(self) -> Iterator[tuple[Spot, Spot]]:
        """Yield the places of different parameters that share a unit and a shape."""
        owner = self.reference.owner
        spots = [
            (number, name, param)
            for number, block in self.reference.blocks().items()
            for name, param in block.named_parameters()
            if not name.startswith("inner.")
        ]
        for one, first, param in spots:
            for other, second, beside in spots:
                alike = param.shape == beside.shape and owner[param] == owner[beside]
                if alike and param is not beside:
                    yield (one, first), (other, second)

    def lend(self, node: int, recurse: bool = True, fails: bool = False, **options: Any) -> None:
        """Change full parameters in ``unshard_params``, and gradients too if ``with_grads``.

        With ``fails``, an exception ends the block.
        """
        if not recurse and not any(node in unit.nodes for unit in self.sharding.units):
            node = len(self.case.model.nodes) - 1
        with_grads = options.get("with_grads", False)
        is_shown = not options.get("rank0_only") or dist.get_rank() == 0
        params = self._lent(node, recurse=recurse)
        try:
            with unshard_params(self._module(node), recurse=recurse, **options):
                for name, param in self._module(node).named_parameters() if is_shown else ():
                    expected = params.get(clean_name(name))
                    if expected is not None:
                        compare_and_change(name, param, expected, with_grads)
                if fails:
                    raise Planned("in the block")
        except Planned:
            pass
        if options.get("writeback", True) and not (fails and options.get("on_error") == "discard"):
            for param in params.values():
                change(param, with_grads)

    def _module(self, node: int) -> nn.Module:
        """Return the block, or the wrapper around it."""
        block = self.blocks[node]
        if self.sharding.face != "modules":
            for module in FullyShardedDataParallel.fsdp_modules(self.model):
                if module.module is block:
                    return module
        return block

    def _lent(self, node: int, *, recurse: bool) -> dict[str, nn.Parameter]:
        """Return the reference's parameters that ``unshard_params`` shows in full."""
        owner = self.reference.owner
        units = {n for n, unit in enumerate(self.sharding.units) if recurse or node in unit.nodes}
        params = self.reference.blocks()[node].named_parameters()
        return {name: param for name, param in params if owner[param] in units}

    def values(self, rank0_only: bool) -> None:
        """Compare the parameters one by one."""
        compare_values(self.model, self.reference, rank0_only=rank0_only)

    def compare(self) -> None:
        """Compare everything, state dicts included."""
        self.check()
        compare_states(self.model, self.reference.state(), rank0_only=False)

    # State dicts and copies.

    def load(self, factor: float, broadcast: bool) -> None:
        """Load changed values into both models."""
        state = {
            name: value * factor if value.is_floating_point() else value
            for name, value in self.reference.state().items()
        }
        given = {} if broadcast and dist.get_rank() else state
        checkpoint.load_full_state_dict(self.model, given, broadcast_from_rank0=broadcast)
        self.reference.model.load_state_dict(state)

    def copy(self) -> None:
        """Continue with deep copies of both, without gradients."""
        self._begin_with(*copy.deepcopy((self.model, self.optimizer)))
        self.reference.forget_gradients()

    def save(
        self,
        full: bool,
        optimizer: bool,
        other: Sharding | None = None,
        cpu: bool = True,
        broadcast: bool = False,
    ) -> None:
        """Continue with a new model that is loaded from state dicts."""
        sharding = other or self.sharding
        old, new = (self.model, self.optimizer), self._fresh(sharding)
        if full:
            through_full(old, new, optimizer=optimizer, cpu=cpu, broadcast=broadcast)
        else:
            through_sharded(old, new, optimizer=optimizer)
        self._go_on_with(new, sharding, optimizer=optimizer)

    def store(self, mode: str, differing: str, optimizer: bool, other: Sharding | None) -> None:
        """Save the model with a plain module; continue with a new model that loads both.

        If a parameter of the plain module differs by rank, the save must be refused, and name it.
        """
        sharding = other or self.sharding
        old, new = (self.model, self.optimizer), self._fresh(sharding)
        if through_files(old, new, mode=mode, differing=differing, optimizer=optimizer):
            self._go_on_with(new, sharding, optimizer=optimizer)

    def _fresh(self, sharding: Sharding) -> Pair:
        fresh = build(self.case.model, seed=self.case.seed + 1)
        reference = self.reference
        for tie in self.ties:
            tie.apply_to(blocks_of(fresh))
        for new, old in zip(fresh.parameters(), reference.model.parameters(), strict=True):
            new.requires_grad_(old.requires_grad)
        for number, block in blocks_of(fresh).items():
            block.times = reference.blocks()[number].times
            block.train(reference.blocks()[number].training)
        made = shard(fresh, sharding)
        return made, self._optimizer_of(made)

    def _go_on_with(self, new: Pair, sharding: Sharding, *, optimizer: bool) -> None:
        reference = self.reference
        self.sharding = sharding
        self._begin_with(*new)
        reference.sharded_as(sharding)
        if optimizer:  # loading casts scalars of the state to the parameter's dtype
            reference.optimizer.load_state_dict(copy.deepcopy(reference.optimizer.state_dict()))
        else:
            reference.optimizer = reference.new_optimizer()

    # Units.

    def unshard(self, node: int, later: bool) -> None:
        """Unshard a unit explicitly."""
        handle = self._unit(node).unshard(async_op=later)
        if handle is not None:
            self.handles.append(handle)

    def wait(self) -> None:
        """Wait for the gathers that ``unshard`` started."""
        with ExitStack() as stack:
            for handle in self.handles:
                stack.callback(handle.wait)
        self.handles.clear()

    def reshard(self, node: int) -> None:
        """Reshard a unit explicitly."""
        self._unit(node).reshard()

    def reset(self, node: int) -> None:
        """Abandon the current step in the whole tree."""
        self._unit(node).reset_iter_state()
        self.reference.pending.clear()

    def drop(self, node: int) -> None:
        """Drop the waiting gradients of a unit and of the units below it."""
        self._unit(node).clear_pending_gradients()
        units = self._units(node, recurse=True)
        pending = self.reference.pending
        for param in [p for p in pending if self.reference.owner[p] in units]:
            del pending[param]

    def call(self, method: str, args: tuple[Any, ...], node: int, recurse: bool = True) -> None:
        """Call a method that changes the behaviour of a unit."""
        if "modules" in method:
            args = ([self._unit(number) for number in args[0]],)
        options = {} if recurse else {"recurse": False}
        getattr(self._unit(node), method)(*args, **options)
        for unit in self._units(node, recurse=recurse):
            if method == "set_requires_gradient_sync":
                self.reference.sync[unit] = args[0]
            if method in ("set_requires_gradient_sync", "set_requires_all_reduce"):
                self.reference.all_reduce[unit] = args[0]

    def _unit(self, node: int) -> Any:
        """Return the module of the node, or the root if the node is no unit in a new sharding."""
        if any(node in unit.nodes for unit in self.sharding.units):
            return self.blocks[node]
        return self.model

    def _units(self, node: int, *, recurse: bool) -> list[int]:
        block = self._unit(node).number
        inside = below(self.case.model, block) if recurse else {block}
        return [n for n, unit in enumerate(self.sharding.units) if inside & set(unit.nodes)]
