"""Handles of PyTorch's own that its other parts reach for; each leads to our engine.

Names are PyTorch's, private ones too.
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
    """``fully_shard.state(module)``; None if that was not sharded."""
    unit = unit_of(module)
    return None if unit is None else State(unit)


@dataclass(frozen=True)
class State:
    """What ``torch.distributed.pipelining`` asks of a sharded module at the end of a step.

    Its gradients come by ``autograd.grad``, or were added up by backwards that do not reduce. It
    calls ``post_backward`` for all groups of all states, then the final callback of one of them,
    which does everything.
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
        """The only one, for PyTorch 2.11, whose states have no more."""
        return ParamGroup() if self.unit.buckets else None

    def _root_post_backward_final_callback(self) -> None:
        engine_of(self.unit).reduce_now()


@dataclass(frozen=True)
class StateContext:
    """What the modules of a tree have in common."""

    engine: Engine

    @property
    def all_states(self) -> list[State]:
        """Those of the tree's sharded modules."""
        return [State(unit) for unit in self.engine.units]


class ParamGroup:
    """Parameters that move together."""

    def post_backward(self) -> None:
        """Leave it to the final callback."""


def policy_for_param(policy: MixedPrecisionPolicy, param: nn.Parameter) -> MixedPrecisionPolicy:
    """``policy._resolve_for_param(param)``, which PyTorch's own ``replicate`` asks from 2.15 on."""
    return policy.for_param("of a module given to replicate", param)


class CustomPolicy(wrap.CustomPolicy, torch_wrap._Policy):
    """Also what ``apply_activation_checkpointing`` takes for a policy that is no function.

    ``ModuleWrapPolicy`` is one for it, and needs nothing of this.
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
    """Classes of modules and their sharded ones, by which Dynamo knows them; PyTorch's and ours."""
    subclasses = FSDPModule.__subclasses__()
    ours = {cls.__bases__[1]: cls for cls in subclasses if len(cls.__bases__) == 2}
    return torch_fully_shard.cls_to_fsdp_cls | ours


_torchs_flat_state_of = torch_common._get_module_fsdp_state_if_fully_sharded_module


def flat_state_of(module: nn.Module) -> Any:
    """What the wrapper of FSDP1 keeps for ``module``; ours is its own state, as PyTorch's is."""
    ours = isinstance(module, FullyShardedDataParallel)
    return module if ours else _torchs_flat_state_of(module)
