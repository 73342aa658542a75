"""``Muon``: one optimizer for a model, its matrices by Muon, everything else by AdamW."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import AdamW, Optimizer

from fullshard.errors import ArgumentTypeError, ConfigError
from fullshard.optim.flat import ShardedOptimizer
from fullshard.optim.host import refuse_fraction
from fullshard.optim.inner import label_of, loss_of, numbered
from fullshard.optim.muon.full import BUFFER, FullMuon, check_options, not_a_matrix
from fullshard.optim.muon.newton_schulz import COEFFICIENTS, Coefficients
from fullshard.optim.muon.rule import (
    ADAMW,
    MUON,
    Answer,
    Blocks,
    Choices,
    ParamChoice,
    Rule,
    choose,
    warn_without_ends,
)
from fullshard.optim.owned import OwnedOptimizer, placement_of
from fullshard.optim.probe import Probe

Part = OwnedOptimizer | ShardedOptimizer


class Muon(Optimizer):
    """An optimizer for a model: Muon for its matrices, AdamW for all other parameters.

    Usage is that of any optimizer, but the first argument is the model, sharded or not::

        optimizer = Muon(model, lr=0.02, adamw=dict(lr=3e-4))
        print(optimizer.rule)  # which parameter is stepped by what, and why

    Results are those of ``torch.optim.Muon`` and ``torch.optim.AdamW`` on the unsharded model.
    Full matrices are stepped, each by one rank, see ``OwnedOptimizer``; the others in the ranks'
    shards, see ``ShardedOptimizer``. There are parameter groups of both kinds, told apart by
    ``group["algorithm"]``, so schedulers scale both learning rates.

    Parameters that are frozen now belong to no group; add them when they are to be trained.

    Attributes:
        rule: what was chosen for each parameter of the model, in its order; printed, a table.
    """

    def __init__(
        self,
        model: nn.Module,
        lr: float = 1e-3,
        *,
        adamw: Mapping[str, Any] | None = None,
        rule: Rule | Mapping[str, Answer] | None = None,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: Coefficients = COEFFICIENTS,
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
        ns_dtype: torch.dtype | str = torch.bfloat16,
        batched: bool | None = None,
    ) -> None:
        """Create the optimizer; defaults are those of ``torch.optim.Muon`` and ``AdamW``.

        Args:
            model: the model, after it was sharded; it may still be on the meta device.
            lr: the learning rate of Muon.
            adamw: options of ``torch.optim.AdamW``, such as its learning rate.
            rule: changes of the rule that chooses: a function of a parameter's name and
                ``ParamInfo``, or answers by pattern, such as ``{"*.router.weight": "adamw"}``. An
                answer is ``"muon"``, ``"adamw"``, None for the default, or a mapping of options for
                the parameter, such as ``{"algorithm": "adamw", "weight_decay": 0.0}``, or
                ``{"blocks": 3}`` for queries, keys and values that are one parameter.
            weight_decay: the share of a matrix, times ``lr``, that is taken off it in a step.
            momentum: the factor of the momentum.
            nesterov: whether Nesterov momentum is used.
            ns_coefficients: a, b, c of the polynomial of Newton-Schulz.
            eps: the least norm by which a matrix is divided.
            ns_steps: iterations of Newton-Schulz.
            adjust_lr_fn: how ``lr`` depends on a matrix's shape (rows, columns): "original" or
                None times max(1, rows / columns) ** 0.5; "match_rms_adamw" times 0.2 max(rows,
                columns) ** 0.5, for learning rates of AdamW; "spectral_unclamped" times
                (rows / columns) ** 0.5.
            ns_dtype: the dtype of the products of Newton-Schulz.
            batched: whether matrices of one shape share products. None: share products that a trial
                finds bit-equal to those of each matrix alone, so results are equal on any number of
                ranks.

        Raises:
            ConfigError: an option or an answer of ``rule`` cannot work; nothing can be trained.
            ArgumentTypeError: ``model`` is not a module.
            UnsupportedError: ``rule`` chose Muon for a parameter that is no matrix, or parameters
                are parts of flat ones (``use_orig_params=False``).
        """
        if not isinstance(model, nn.Module):
            raise ArgumentTypeError(
                f"Muon: model is a {type(model).__name__}, expected a module: the rule reads names "
                "and modules of parameters"
            )
        self._options: dict[str, Any] = {
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_coefficients": ns_coefficients,
            "eps": eps,
            "ns_steps": ns_steps,
            "adjust_lr_fn": adjust_lr_fn,
            "ns_dtype": str(ns_dtype).removeprefix("torch."),
            "batched": batched,
        }
        self._adamw = dict(adamw or {})
        self._parts: dict[str, Part] = {}
        chosen = list(choose(model, rule))
        self.rule = Choices([choice for _, choice in chosen])
        # Strong references: tensors on the meta device with weak ones cannot be given memory.
        self._chosen: dict[Tensor, ParamChoice] = dict(chosen)
        trained = [(param, choice) for param, choice in chosen if param.requires_grad]
        if not trained:
            raise ConfigError("Muon: the model has no parameter that requires a gradient")
        super().__init__(list(_groups_of(trained)), {})
        warn_without_ends(self.rule)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step all parameters that have gradients.

        Args:
            closure: a function that computes loss and gradients; called before the step.

        Returns:
            The result of ``closure``, or None.
        """
        loss = loss_of(closure)
        outer: Optimizer = self
        for name, part in self._parts.items():
            # The program may have removed groups, or assigned state.
            part.param_groups = [one for one in self.param_groups if one["algorithm"] == name]
            if vars(part)["state"] is not self.state:
                part.state = self.state
            part.step_within(outer)
            outer = part  # what the other part refuses comes when matrices were stepped
        return loss

    def state_like(self, param: Tensor, key: str, shape: Sequence[int]) -> DTensor | None:
        """Return an empty tensor cut as the state ``key`` of ``param``, for a load.

        None: it has the form of state of AdamW; see ``OwnedOptimizer.state_like``.
        """
        part = self._parts.get(MUON)
        return part.state_like(param, key, shape) if isinstance(part, OwnedOptimizer) else None

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, for example when layers are unfrozen.

        Without ``"algorithm"`` in the group, ``rule`` chooses for each parameter, and there may be
        several new groups.

        Raises:
            ConfigError: a parameter has a group already, or is not one of the model.
            UnsupportedError: ``"algorithm"`` is Muon, and a parameter is no matrix.
        """
        given = param_group["params"]
        items = [_named(one) for one in ([given] if isinstance(given, Tensor) else given)]
        params = [param for _, param in items]
        if "algorithm" in param_group:
            self._check_new(params)
            groups = [{"params": self._with_names(items)}]
            if param_group["algorithm"] == MUON and "stacked" not in param_group:
                groups = self._by_stack(groups[0]["params"])
            self._add_all([{**param_group, **group} for group in groups])
            return
        unknown = [tuple(param.shape) for param in params if param not in self._chosen]
        if unknown:
            raise ConfigError(
                f"Muon.add_param_group: parameters of shapes {unknown[:4]} were not in the model "
                'when the optimizer was built; say {"algorithm": "muon"} or "adamw" in the group'
            )
        self._check_new(params)
        options = {key: value for key, value in param_group.items() if key != "params"}
        new = _groups_of([(param, self._chosen[param]) for param in params])
        self._add_all([{**group, **options} for group in new])

    def _with_names(self, items: Iterable[tuple[str, Any]]) -> list[tuple[str, Any]]:
        """Return names and parameters; parameters that came without a name get one."""
        numbers = count(sum(len(group["params"]) for group in self.param_groups))
        choices = [(name, param, self._chosen.get(param)) for name, param in items]
        return [
            (name or (choice.names[0] if choice else f"added.{number}"), param)
            for number, (name, param, choice) in zip(numbers, choices, strict=False)
        ]

    def _by_stack(self, items: Iterable[tuple[str, Any]]) -> list[dict[str, Any]]:
        """Split parameters into groups by the number of leading dims that count matrices."""
        named = {name: choice for choice in self.rule for name in choice.names}
        found: dict[int, list[tuple[str, Any]]] = {}
        for name, param in items:
            choice = self._chosen.get(param, named.get(name))
            stacked = 0
            if choice is not None:
                stacked = choice.options.get("stacked", choice.stacked)
            is_known = choice is not None and choice.algorithm == MUON
            if not is_known and len(shape := _full_shape(param)) > 2:
                raise ConfigError(
                    f"Muon.add_param_group: {name} of shape {shape} may be "
                    'a stack of matrices: say {"stacked": N} in the group, the number of leading '
                    'dims that count matrices; {"stacked": 0} for a convolution'
                )
            found.setdefault(stacked, []).append((name, param))
        return [{"params": those, "stacked": stacked} for stacked, those in found.items()]

    def _add_all(self, groups: Iterable[dict[str, Any]]) -> None:
        """Add all ``groups``, or none if one is refused."""
        before, parts = len(self.param_groups), dict(self._parts)
        try:
            for group in groups:
                self._add(group)
        except BaseException:
            for group in self.param_groups[before:]:
                of_part = self._parts[group["algorithm"]].param_groups
                of_part[:] = [one for one in of_part if one is not group]
            del self.param_groups[before:]
            self._parts = parts
            raise

    def _add(self, group: dict[str, Any]) -> None:
        refuse_fraction({**self._adamw, **group}, "Muon")
        algorithm = group["algorithm"]
        if algorithm not in (MUON, ADAMW):
            raise ConfigError(f"Muon: algorithm is {algorithm!r}, expected 'muon' or 'adamw'")
        self._check_new(param for _, param in map(_named, group["params"]))
        if algorithm == MUON:
            options = {"stacked": 0, **self._options, **group}
            check_options(options)
            for name, param in map(_named, group["params"] if options["stacked"] else ()):
                shape = _full_shape(param)
                if len(shape) < 2 + options["stacked"]:
                    raise not_a_matrix(
                        name or "a parameter", shape, options["stacked"], param.dtype
                    )
        part = self._parts.get(algorithm)
        if part is not None:
            part.add_param_group(group)
        else:
            part = self._parts[algorithm] = self._part(algorithm, group)
            part.state = self.state  # one dict for all; a new part has no state
        self.param_groups.append(part.param_groups[-1])

    def _check_new(self, params: Iterable[Tensor]) -> None:
        known = {id(param) for _, param in numbered(self.param_groups)}
        for param in params:
            if id(param) in known:
                label = label_of(self.param_groups, param)
                raise ConfigError(f"Muon: {label} has a group already; give it once")

    def _part(self, algorithm: str, group: dict[str, Any]) -> Part:
        if algorithm == ADAMW:
            return ShardedOptimizer([group], AdamW, **self._adamw)
        blocks = partial(_blocks, {choice.names[0]: choice.blocks for choice in self.rule})
        return _Matrices([group], FullMuon, blocks=blocks, independent=True, **self._options)

    def __getstate__(self) -> dict[str, Any]:
        mine = ("_options", "_adamw", "_parts", "rule")
        return {**super().__getstate__(), **{name: vars(self)[name] for name in mine}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a copy; also called at the end of ``load_state_dict``.

        Raises:
            ConfigError: the state does not fit; nothing was loaded.
        """
        if "_parts" in state:  # a copy, whose parts are copied with it
            super().__setstate__(state)
            self._chosen = {}
            return
        groups: list[dict[str, Any]] = state["param_groups"]
        for number, (group, known) in enumerate(zip(groups, self.param_groups, strict=True)):
            own = known["algorithm"]
            if group.setdefault("algorithm", own) != own:
                raise ConfigError(
                    f"Muon.load_state_dict: parameters of group {number} were stepped by "
                    f"{group['algorithm']}, and are by {own} now; give the rule that was saved"
                )
            held = (state["state"].get(param, {}) for param in group["params"])
            odd = (set().union(*held) - {BUFFER}) | (group.keys() & {"betas"})  # of AdamW
            if own == MUON and odd:
                raise ConfigError(
                    f"Muon.load_state_dict: group {number} is stepped by muon, but has "
                    f"{', '.join(sorted(map(str, odd)))}: it was saved from another optimizer"
                )
        loaded: dict[str, dict[str, Any]] = {
            name: {
                "state": state["state"],
                "param_groups": [group for group in groups if group["algorithm"] == name],
            }
            for name in self._parts
        }
        for name, part in self._parts.items():
            part.check_loaded(loaded[name])
        super().__setstate__(state)
        for name, part in self._parts.items():
            part.__setstate__(loaded[name])


class _Matrices(OwnedOptimizer):
    """The part that is stepped by Muon; trials of the class step plain matrices, not stacks."""

    @property
    def _label(self) -> str:
        return "Muon"

    def _probe(self, options: dict[str, Any]) -> Probe:
        return super()._probe({**options, "stacked": 0})


def _named(item: Any) -> tuple[str, Tensor]:
    """Return name and parameter of an item of a group; the name is empty if it has none."""
    return item if isinstance(item, tuple) else ("", item)


def _full_shape(param: Tensor) -> tuple[int, ...]:
    placed = placement_of(param, "Muon: a parameter")
    return tuple(param.shape) if placed is None else placed[0].shape


def _groups_of(chosen: Sequence[tuple[Tensor, ParamChoice]]) -> Iterator[dict[str, Any]]:
    """Yield groups of named parameters that have the same options, those of Muon first."""
    found: dict[str, dict[str, Any]] = {}
    for param, choice in sorted(chosen, key=lambda pair: pair[1].algorithm == ADAMW):
        options = {"algorithm": choice.algorithm, **choice.options}
        if choice.algorithm == MUON:
            options.setdefault("stacked", choice.stacked)
        group = found.setdefault(repr(sorted(options.items())), {"params": [], **options})
        group["params"].append((choice.names[0], param))
    yield from found.values()


def _blocks(known: Mapping[str, Blocks], name: str, shape: Sequence[int]) -> Blocks:
    """Return the blocks of a parameter, as ``OwnedOptimizer`` asks for them."""
    return known.get(name)
