"""``shard_blocks`` shards the repeated blocks of a model, ``checkpoint_blocks`` recomputes them."""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Unpack

import torch
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils.checkpoint import checkpoint

from fullshard.comm import default_mesh
from fullshard.comm.text import in_bytes, in_notebook
from fullshard.engine import OffloadPolicy, WirePolicy
from fullshard.errors import ArgumentTypeError, ConfigError
from fullshard.frontend.checks import as_modules, has_forward
from fullshard.frontend.fully_shard import (
    CallOptions,
    ShardOptions,
    checked_choices,
    plan_unit,
    shard_modules,
)
from fullshard.frontend.module import FSDPModule
from fullshard.frontend.ownership import units_below
from fullshard.frontend.places import places_of
from fullshard.layout import LayoutStrategy, PerParameter
from fullshard.schedule import AfterForward
from fullshard.tensors.form import WRAPPED, clean_name
from fullshard.wrap.policies import PolicyLike
from fullshard.wrap.units import (
    Ignored,
    WantedUnit,
    check_read_together,
    check_tied_together,
    units_of,
)

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
_EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)
# The forward of these classes reads parameters of child modules without calling the children.
_READ_THEIR_CHILDREN = (nn.MultiheadAttention,)


class Why(enum.StrEnum):
    """The reason why a module is a unit."""

    BLOCK = "repeated block"
    EMBEDDING = "large embedding"
    HEAD = "large linear layer outside of the blocks"
    POLICY = "chosen by the policy"
    REST = "everything else"


@dataclass(frozen=True)
class ChosenUnit:
    """A unit that ``shard_blocks`` made, with the reason."""

    name: str
    """Fully qualified name of the module, empty for the model itself; of blocks that form one unit
    those of the first and the last."""
    kind: str
    """Name of the module's class before sharding."""
    numel: int
    """Number of elements in the unit's parameters, without those of inner units."""
    why: Why


@dataclass(frozen=True)
class ChosenUnits:
    """The units that ``shard_blocks`` made; prints as a table."""

    units: tuple[ChosenUnit, ...]

    def __len__(self) -> int:
        return len(self.units)

    def __iter__(self) -> Iterator[ChosenUnit]:
        return iter(self.units)

    def __str__(self) -> str:
        """One line a unit; equal neighbours of one list share a line."""
        lines: list[list[ChosenUnit]] = []
        for unit in self.units:
            if lines and _is_next(lines[-1][-1], unit, alike=True):
                lines[-1].append(unit)
            else:
                lines.append([unit])
        rows = [
            (
                _span(alike[0], alike[-1]) or "(root)",
                alike[0].kind,
                f"{len(alike)} x {alike[0].numel:,}" if len(alike) > 1 else f"{alike[0].numel:,}",
                alike[0].why,
            )
            for alike in lines
        ]
        names, kinds, sizes, _ = (max(map(len, column)) for column in zip(*rows, strict=True))
        return "\n".join(
            f"{name:{names}}  {kind:{kinds}}  {size:>{max(sizes, 15)}}  {why}"
            for name, kind, size, why in rows
        )

    def _repr_html_(self) -> str:
        return in_notebook(self)


def _is_next(one: ChosenUnit, other: ChosenUnit, alike: bool = False) -> bool:
    """Return whether ``other`` is the next member of a list, of the same size if ``alike``."""
    (parent, _, at), (next_to, _, then) = (each.name.rpartition(".") for each in (one, other))
    numbered = at.isdigit() and then.isdigit() and int(then) == int(at) + 1
    same = one.why is other.why and (not alike or replace(one, name=other.name) == other)
    return parent == next_to and numbered and same


def _span(first: ChosenUnit, last: ChosenUnit) -> str:
    return first.name if first is last else f"{first.name} to {last.name}"


def shard_blocks(
    model: nn.Module,
    mesh: DeviceMesh | None = None,
    *,
    policy: PolicyLike | None = None,
    reshard_after_forward: bool | int | None = None,
    ignored_params: set[nn.Parameter] | None = None,
    plan: Any = None,
    **options: Unpack[ShardOptions],
) -> ChosenUnits:
    """Shard the repeated blocks, the large ends and the rest of ``model`` over ``mesh``.

    With ``policy``, the units are the modules that the policy chooses, and the rest.

    Without a policy, each block is a unit: each member of a list that holds several modules of one
    class (a transformer's layers, but not modules that repeat inside a layer). Of stages, as in
    ConvNets and Swin, the blocks are units. Embeddings and linear layers outside these blocks are
    units if they are more than half as large as the largest block. The model itself, with all other
    parameters, is the last unit. A module with a parameter that is tied to one outside the module
    does not become a unit. Build the optimizer afterwards.

    Args:
        model: the whole model, with nothing sharded yet.
        mesh: as for ``fully_shard``.
        policy: one of ``fullshard.wrap``, which chooses the units; a ``CustomPolicy`` also chooses
            options of ``fully_shard`` for each unit. None: the choice described above.
        reshard_after_forward: as for ``fully_shard``. If this and ``policy`` are None, a large
            linear layer outside the blocks, which is the head in most models, stays unsharded
            until its backward, which follows at once.
        ignored_params: as for ``fully_shard``.
        plan: the choices of ``fullshard.plan(model, budget_nbytes=...)``: mesh, layout, whether
            units are resharded after forward and offloaded, how many blocks form a unit, which
            blocks recompute activations, and budgets.
        **options: other options of ``fully_shard``, the same for each unit.

    Returns:
        The units in the order in which they were made, the model last; print the result to see it.

    Raises:
        AlreadyShardedError, ConfigError, UnsupportedError, NotBuiltError: as for ``fully_shard``;
            nothing was changed.
    """
    if not isinstance(model, nn.Module):
        raise ArgumentTypeError(f"shard_blocks: got {type(model).__name__}, expected an nn.Module")
    if units_below([model]):
        raise ConfigError(
            f"shard_blocks: parts of this {type(model).__name__} were given to fully_shard before; "
            "shard the rest by hand, or give it a model of which nothing is sharded"
        )
    given: dict[str, Any] = {
        "mesh": mesh,
        "reshard_after_forward": reshard_after_forward,
        "ignored_params": ignored_params,
        **options,
    }
    choice = Choice() if plan is None else Choice.of(plan)
    if plan is not None:
        if reshard_after_forward is not None or not options.keys().isdisjoint(CHOSEN):
            raise ConfigError(
                f"shard_blocks(plan=...): the plan has chosen {', '.join(CHOSEN)}; leave them out, "
                "or give them to fullshard.plan"
            )
        given["mesh"] = choice.checked_mesh(mesh)
        given |= {name: getattr(choice, name) for name in CHOSEN}
    choices = checked_choices(given)
    given["mesh"] = given["mesh"] or choices.mesh.mesh
    decided = (
        _by_shape(model, choices) if policy is None else _by_policy(model, policy, choices, given)
    )
    blocks = [one.module for one in decided if one.unit.why in (Why.BLOCK, Why.POLICY)]
    recompute(blocks[: choice.recomputed])
    made = list(_grouped(decided, choice.blocks_per_unit))
    for group in made:
        shard_modules([one.module for one in group], group[0].choices)
    if plan is not None:
        assert isinstance(model, FSDPModule)
        model.set_prefetch_budget(choice.prefetch_nbytes)
        model.set_reduction_budget(choice.reduction_nbytes)
    return ChosenUnits(tuple(_described(group) for group in made))


@dataclass(frozen=True)
class _Decided:
    """A unit that passed all checks and can be made."""

    unit: ChosenUnit
    module: nn.Module
    choices: CallOptions


def _grouped(decided: Iterable[_Decided], size: int) -> Iterator[list[_Decided]]:
    """Yield neighbouring blocks of one list that are sharded alike, ``size`` together."""
    group: list[_Decided] = []
    for one in decided:
        if group and (len(group) == size or not _follows(group[-1], one)):
            yield group
            group = []
        group.append(one)
    yield group


def _follows(one: _Decided, other: _Decided) -> bool:
    is_block = one.unit.why in (Why.BLOCK, Why.POLICY)
    return is_block and one.choices is other.choices and _is_next(one.unit, other.unit)


def _described(group: Sequence[_Decided]) -> ChosenUnit:
    units = [one.unit for one in group]
    numel = sum(unit.numel for unit in units)
    return replace(units[0], name=_span(units[0], units[-1]), numel=numel)


def _by_shape(model: nn.Module, choices: CallOptions) -> list[_Decided]:
    plan_unit(as_modules(model), choices)  # raises before anything is changed
    kept = replace(choices, after_forward=AfterForward.KEEP)
    is_auto = choices.after_forward is AfterForward.AUTO
    return [
        _Decided(
            unit,
            model.get_submodule(unit.name),
            kept if is_auto and unit.why is Why.HEAD else choices,
        )
        for unit in choose(model, choices.ignored)
    ]


def _by_policy(
    model: nn.Module, policy: PolicyLike, choices: CallOptions, given: dict[str, Any]
) -> list[_Decided]:
    """Check the units that ``policy`` chooses; ``choices`` were made from the options ``given``."""
    ignored = Ignored.of(params=choices.ignored)
    wanted = units_of(model, policy, ignored)
    check_read_together(model, wanted)
    check_tied_together(model, wanted, ignored)
    found = []
    taken: set[nn.Parameter] = set()
    for one in (*wanted, WantedUnit("", model)):
        own = checked_choices({**given, **one.options}) if one.options else choices
        # Plan the unit as if its inner units had already been made.
        plan_unit(as_modules(one.module), replace(own, ignored=own.ignored | taken))
        params = set(one.module.parameters()) - own.ignored - taken
        taken |= params
        kind, numel = type(one.module).__name__, sum(param.numel() for param in params)
        why = Why.REST if one.module is model else Why.POLICY
        found.append(_Decided(ChosenUnit(one.name, kind, numel, why), one.module, own))
    return found


def num_blocks(model: nn.Module, policy: PolicyLike | None = None) -> int:
    """Return the number of units that ``shard_blocks`` makes of blocks or of a policy's choices."""
    if policy is not None:
        return len(units_of(model, policy, Ignored.of()))
    return sum(unit.why is Why.BLOCK for unit in choose(model, set()))


def choose(model: nn.Module, ignored: set[nn.Parameter]) -> ChosenUnits:
    """Return the units for ``model``, which is not changed."""
    names = {module: name for name, module in model.named_modules()}
    places = _places(model)

    def numel(module: nn.Module) -> int:
        return sum(param.numel() for param in _places(module) if param not in ignored)

    def fits(module: nn.Module) -> bool:
        """Return whether ``module`` has elements to shard, and no parameter shared with outside."""
        own = _places(module)
        return numel(module) > 0 and all(places[param] == count for param, count in own.items())

    def unit(module: nn.Module, why: Why) -> ChosenUnit:
        return ChosenUnit(names[module], type(module).__name__, numel(module), why)

    kinds = {type(block) for block in _repeated(model) if _has_children(block)}
    blocks = [block for block in _repeated(model, kinds) if fits(block)]
    largest = max(map(numel, blocks), default=numel(model) // 4)
    closed = [*blocks, *(m for m in names if isinstance(m, _READ_THEIR_CHILDREN))]
    inside = {inner for module in closed for inner in module.modules()}
    ends = [
        module
        for module in names
        if isinstance(module, (*_EMBEDDINGS, nn.Linear)) and module not in inside
        if fits(module) and numel(module) > largest // 2 and module is not model
    ]
    units = [unit(block, Why.BLOCK) for block in blocks]
    units += [unit(end, Why.HEAD if isinstance(end, nn.Linear) else Why.EMBEDDING) for end in ends]
    rest = numel(model) - sum(unit.numel for unit in units)
    return ChosenUnits((*units, ChosenUnit("", type(model).__name__, rest, Why.REST)))


def _repeated(module: nn.Module, kinds: Collection[type[nn.Module]] = ()) -> Iterator[nn.Module]:
    """Yield the outermost modules of ``kinds``, or of a list in which a class repeats.

    Lists in a list count as one list, and of a list of stages the blocks of each stage are yielded.
    In ``Sequential(Linear, body, Linear)`` the blocks of the body are yielded, not the layers.
    """
    children = _members(module)
    repeated: set[type[nn.Module]] = set()
    if isinstance(module, _CONTAINERS):
        counts = Counter(type(child) for child in children if _is_block(child))
        for kind in (kind for kind, count in counts.items() if count > 1):
            in_stages = _kinds_in_stages([child for child in children if type(child) is kind])
            kinds = {*kinds, *in_stages}
            repeated |= set() if in_stages else {kind}
    others = [child for child in children if type(child) not in {*kinds, *repeated}]
    inner = {child: list(_repeated(child, kinds)) for child in others}
    bodies = {child for child, found in inner.items() if any(map(_has_children, found))}
    if bodies and not any(_has_children(child) for child in children if type(child) in repeated):
        repeated = set()  # layers around a body of blocks, as in Sequential(Linear, body, Linear)
    for child in children:
        is_odd_one = bool(repeated) and _is_block(child) and _has_children(child)
        is_body = child in bodies and isinstance(child, _CONTAINERS)
        if type(child) in {*kinds, *repeated} or (is_odd_one and not is_body):
            yield child
        else:
            yield from inner.get(child, ())


def _has_children(module: nn.Module) -> bool:
    return any(module.children())


def _members(module: nn.Module) -> list[nn.Module]:
    """Return the children of ``module``; of a list that has only lists in it, their members."""
    children = _children(module)
    has_lists = _is_bare_list(module) and bool(children) and all(map(_is_bare_list, children))
    return [one for child in children for one in _members(child)] if has_lists else children


def _children(module: nn.Module) -> list[nn.Module]:
    """Return the children of ``module``, without the wrappers around them."""
    return [unwrapped(child) for child in module.children()]


def unwrapped(module: nn.Module) -> nn.Module:
    """Return the module that is in ``module``, a ``FullyShardedDataParallel``, or itself."""
    while WRAPPED in module._modules:
        module = module.get_submodule(WRAPPED)
    return module


def _is_bare_list(module: nn.Module) -> bool:
    return isinstance(module, _CONTAINERS) and not has_forward(module)


def _kinds_in_stages(alike: Sequence[nn.Module]) -> set[type[nn.Module]]:
    """Return the classes of blocks if ``alike``, of one class in a list, are stages, else none.

    Most elements of a stage lie in lists of blocks, and blocks of different stages have other
    shapes. The experts of a layer have the shapes of those of the next layer.
    """
    lists = [[one, *_children(one)] for one in alike]
    blocks = [
        [
            block
            for held in around
            if isinstance(held, _CONTAINERS)
            for block in _children(held)
            if has_forward(block) and _has_children(block) and not isinstance(block, _CONTAINERS)
            if sum(param.dim() > 1 for param in block.parameters()) > 1  # no convolution and norm
        ]
        for around in lists
    ]
    kinds = Counter(type(block) for own in blocks for block in own)
    in_blocks = sum(_numel(block) for own in blocks for block in own)
    if not all(blocks) or max(kinds.values()) < 2 or 2 * in_blocks <= sum(map(_numel, alike)):
        return set()
    shapes = [{param.shape for block in own for param in block.parameters()} for own in blocks]
    return set(kinds) if any(one != shapes[0] for one in shapes) else set()


def _numel(module: nn.Module) -> int:
    return sum(param.numel() for param in module.parameters())


def _is_block(module: nn.Module) -> bool:
    """Return whether ``module`` has a forward and, unlike norms, a parameter of 2 or more dims."""
    return has_forward(module) and any(param.dim() > 1 for param in module.parameters())


def _places(module: nn.Module) -> Counter[nn.Parameter]:
    """Count the places of each parameter below ``module``."""
    return Counter(
        param
        for inner in module.modules()
        for param in inner._parameters.values()
        if param is not None
    )


CHOSEN = ("layout", "reshard_after_forward", "offload_policy", "wire")
"""Options of ``fully_shard`` that a choice has."""


@dataclass(frozen=True)
class Choice:
    """The options with which a model is sharded and run, except its precision."""

    replicas: int = 1
    """Copies of the shards (HSDP)."""
    layout: LayoutStrategy = field(default_factory=PerParameter)
    reshard_after_forward: bool | int | None = None
    offload_policy: OffloadPolicy = field(default_factory=OffloadPolicy)
    wire: WirePolicy = field(default_factory=WirePolicy)
    """Copied from the arguments; the search never picks a lossy codec."""
    blocks_per_unit: int = 1
    """Neighboring blocks that form one unit; the rest at the end of a list forms a smaller unit."""
    recomputed: int = 0
    """Blocks, from the first on, whose activations are computed again in backward."""
    prefetch_nbytes: int | None = None
    """As of ``set_prefetch_budget``."""
    reduction_nbytes: int | None = None
    """As of ``set_reduction_budget``."""

    @classmethod
    def of(cls, given: Any) -> Choice:
        """Return the choice that is given, or the ``choice`` of a plan.

        Raises:
            ArgumentTypeError: ``given`` is neither.
        """
        found = getattr(given, "choice", given)
        if not isinstance(found, cls):
            raise ArgumentTypeError(
                f"shard_blocks(plan=...): got {type(given).__name__}, expected a Plan of "
                "fullshard.plan(..., budget_nbytes=...), which has chosen"
            )
        return found

    def __str__(self) -> str:
        reshard = self.reshard_after_forward
        after = f"reshard_after_forward={reshard}" if reshard else "kept after forward"
        words = {
            f"{self.replicas} replicas": self.replicas > 1,
            f"layout {self.layout!r}": self.layout != PerParameter(),
            after: reshard is not None,
            "offloaded to the host": self.offload_policy != OffloadPolicy(),
            f"wire {self.wire}": self.wire != WirePolicy(),
            f"{self.blocks_per_unit} blocks a unit": self.blocks_per_unit > 1,
            f"{self.recomputed} blocks recomputed": self.recomputed > 0,
        }
        budgets = {"gathered ahead": self.prefetch_nbytes, "in reductions": self.reduction_nbytes}
        said = [word for word, is_said in words.items() if is_said]
        said += [f"{in_bytes(size)} {what}" for what, size in budgets.items() if size is not None]
        return ", ".join(said) or "as by default"

    def checked_mesh(self, mesh: DeviceMesh | None) -> DeviceMesh:
        """Return the mesh to shard over, or check the user's.

        Raises:
            ConfigError: there are not as many replicas as chosen.
        """
        if mesh is None:
            mesh = default_mesh()
            if self.replicas == 1:
                return mesh
            shards, left = divmod(mesh.size(), self.replicas)
            if left:
                raise ConfigError(
                    f"shard_blocks(plan=...): the plan has {self.replicas} replicas, which do not "
                    f"divide {mesh.size()} ranks; plan for as many as there are"
                )
            return init_device_mesh(
                mesh.device_type, (self.replicas, shards), mesh_dim_names=("replicate", "shard")
            )
        replicas = mesh.size(0) if mesh.ndim == 2 else 1
        if replicas != self.replicas:
            raise ConfigError(
                f"shard_blocks(plan=...): the plan has {self.replicas} replicas, the mesh "
                f"{replicas}; leave mesh= out, or plan for this mesh"
            )
        return mesh


def checkpoint_blocks(
    model: nn.Module, *, policy: PolicyLike | None = None, offload: bool = False
) -> tuple[str, ...]:
    """Recompute the activations of the repeated blocks of ``model`` in backward.

    Each block then keeps its inputs alone, and backward runs its forward again
    (``torch.utils.checkpoint``, non-reentrant). The blocks are those that ``shard_blocks`` chooses.
    Call this before or after the model is sharded, with ``fully_shard``, ``shard_blocks`` or
    ``FullyShardedDataParallel``. Names of parameters and modules stay as they are.

    Args:
        model: the whole model, or a part of one.
        policy: one of ``fullshard.wrap``, which chooses the blocks instead.
        offload: keep the inputs of the blocks in host memory until backward
            (``torch.autograd.graph.save_on_cpu``).

    Returns:
        The names of the blocks, in the order of the model.

    Raises:
        ArgumentTypeError: if ``model`` is not a module, or ``policy`` not a policy.
        ConfigError: if no block was found, or one recomputes its activations already; nothing was
            changed.
    """
    if not isinstance(model, nn.Module):
        raise ArgumentTypeError(
            f"checkpoint_blocks: got {type(model).__name__}, expected an nn.Module"
        )
    with _showing_shapes(model):
        names = _chosen(model, policy)
    found = [unwrapped(model.get_submodule(name)) for name in names]
    blocks = {clean_name(f"{name}.")[:-1]: one for name, one in zip(names, found, strict=True)}
    if not blocks:
        raise ConfigError(
            f"checkpoint_blocks: found no repeated blocks in {type(model).__name__}; choose them "
            "by policy=ModuleWrapPolicy({Block}) of fullshard.wrap"
        )
    twice = [name for name, block in blocks.items() if recomputes(block)]
    if twice:
        raise ConfigError(
            f"checkpoint_blocks: {twice[0]} recomputes its activations already; call "
            "checkpoint_blocks once, or not with a plan that recomputes blocks"
        )
    recompute(dict.fromkeys(blocks.values()), offload=offload)
    return tuple(blocks)


def _chosen(model: nn.Module, policy: PolicyLike | None) -> list[str]:
    if policy is None:
        return [unit.name for unit in choose(model, set()) if unit.why is Why.BLOCK]
    order = {name: at for at, (name, _) in enumerate(model.named_modules())}
    return sorted(
        (one.name for one in units_of(model, policy, Ignored.of())), key=order.__getitem__
    )


@contextmanager
def _showing_shapes(model: nn.Module) -> Iterator[None]:
    """Show parameters of the original shapes in the block, without values.

    Blocks are recognized by the shapes of their parameters, which pieces do not have.
    """
    placed = [(places_of(unit), unit.buckets) for unit in units_below([model])]
    holders = {slot.place.module for places, _ in placed for slot in places.slots()}
    holders |= {place.module for places, _ in placed for place in places.in_their_place()}
    before = {module: dict(module._parameters) for module in holders}
    try:
        for places, buckets in placed:
            for place in places.in_their_place():
                place.module._parameters.pop(place.name, None)
            shown = [
                [nn.Parameter(torch.empty(param.shape, device="meta")) for param in layout.params]
                for layout in (bucket.spec.layout for bucket in buckets)
            ]
            for slot in places.slots():
                slot.params[slot.name] = shown[slot.bucket][slot.number]
        yield
    finally:
        for module, own in before.items():
            module._parameters.clear()
            module._parameters.update(own)


def recompute(blocks: Iterable[nn.Module], *, offload: bool = False) -> None:
    """Make each of ``blocks`` recompute its activations in backward, instead of keeping them.

    With ``offload``, the inputs of the blocks stay on the CPU until backward.
    """
    run = _recomputed_from_host if offload else checkpoint
    for block in blocks:
        block.forward = partial(run, block.forward, use_reentrant=False)


def recomputes(block: nn.Module) -> bool:
    """Return whether ``recompute`` was applied to ``block``."""
    forward = vars(block).get("forward")
    return isinstance(forward, partial) and forward.func in (_recomputed_from_host, checkpoint)


def _recomputed_from_host(forward: Any, *args: Any, **options: Any) -> Any:
    with save_on_cpu(pin_memory=torch.cuda.is_available()):
        return checkpoint(forward, *args, **options)
