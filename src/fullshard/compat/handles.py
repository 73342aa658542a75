"""Objects that other parts of PyTorch expect from FSDP, implemented with our engine.

All attribute names, including private ones, are the names that PyTorch looks up.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.distributed.fsdp import _common_utils as torch_common
from torch.distributed.fsdp import wrap as torch_wrap
from torch.distributed.fsdp._fully_shard import _fully_shard as torch_fully_shard

from fullshard import wrap
from fullshard.engine import Engine, MixedPrecisionPolicy, Unit
from fullshard.flat import FullyShardedDataParallel
from fullshard.frontend import FSDPModule
from fullshard.frontend.hooks import engine_of
from fullshard.frontend.ownership import unit_of


def state_of(module: nn.Module) -> State | None:
    """Return the state for ``fully_shard.state(module)``; None if ``module`` is not sharded."""
    unit = unit_of(module)
    return None if unit is None else State(unit)


@dataclass(frozen=True)
class State:
    """The state of a sharded module that ``torch.distributed.pipelining`` uses to end a step.

    The gradients of a pipeline come from ``autograd.grad``, or were accumulated by backwards that
    do not reduce. Pipelining calls ``post_backward`` on all groups of all states, then the final
    callback of one state. That callback does all of the work.
    """

    unit: Unit

    @property
    def _state_ctx(self) -> StateContext:
        return StateContext(engine_of(self.unit))

    @property
    def _fsdp_param_groups(self) -> list[ParamGroup]:
        return [ParamGroup() for _ in self.unit.buckets]

    @property
    def _fsdp_param_group(self) -> ParamGroup | None:
        """The only parameter group, for PyTorch 2.11, whose states have at most one group."""
        return ParamGroup() if self.unit.buckets else None

    def _root_post_backward_final_callback(self) -> None:
        engine_of(self.unit).reduce_now()


@dataclass(frozen=True)
class StateContext:
    """The context that all sharded modules of a tree share."""

    engine: Engine

    @property
    def all_states(self) -> list[State]:
        """The states of all sharded modules of the tree."""
        return [State(unit) for unit in self.engine.units]


class ParamGroup:
    """A group of parameters that move together."""

    def post_backward(self) -> None:
        """Do nothing, because the final callback does the work."""


def policy_for_param(policy: MixedPrecisionPolicy, param: nn.Parameter) -> MixedPrecisionPolicy:
    """Implement ``policy._resolve_for_param``, which PyTorch's ``replicate`` calls from 2.15 on."""
    return policy.for_param("of a module given to replicate", param)


class CustomPolicy(wrap.CustomPolicy, torch_wrap._Policy):
    """A ``CustomPolicy`` that PyTorch's ``apply_activation_checkpointing`` accepts too.

    It takes only callables, which a ``ModuleWrapPolicy`` is, and instances of ``_Policy``.
    """

    def _run_policy(
        self,
        root_module: nn.Module,
        ignored_modules: set[nn.Module],
        root_kwargs: wrap.policies.Options,
    ) -> dict[nn.Module, wrap.policies.Options]:
        chosen = self.choose(root_module, ignored_modules)
        return {module: {**root_kwargs, **options} for module, options in chosen.items()}


def get_cls_to_fsdp_cls() -> dict[type, type]:
    """Return PyTorch's and our map of module classes to sharded classes, which Dynamo reads."""
    subclasses = FSDPModule.__subclasses__()
    ours = {cls.__bases__[1]: cls for cls in subclasses if len(cls.__bases__) == 2}
    return torch_fully_shard.cls_to_fsdp_cls | ours


_torchs_flat_state_of = torch_common._get_module_fsdp_state_if_fully_sharded_module


def flat_state_of(module: nn.Module) -> Any:
    """Return the FSDP1 state of ``module``; our wrapper, like PyTorch's, is its own state."""
    ours = isinstance(module, FullyShardedDataParallel)
    return module if ours else _torchs_flat_state_of(module)
