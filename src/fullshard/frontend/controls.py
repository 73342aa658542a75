"""Communication settings of single units, which can be changed after ``fully_shard``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from fullshard.comm import AllGather, Collectives, Custom, ReduceScatter, collectives_of_twin
from fullshard.engine import Bucket
from fullshard.errors import ArgumentTypeError, AssertedConfigError, ConfigError, NotBuiltError
from fullshard.frontend.hooks import engine_of
from fullshard.frontend.ownership import unit_of
from fullshard.frontend.sharded import (
    ShardedModule,
    chosen_buckets,
    chosen_units,
    set_machine_policy,
    unit_and_engine,
)


class CommunicationControls(ShardedModule):
    """The methods of ``FSDPModule`` that control reductions and collectives.

    Call them between steps, before or after the first step. Methods that change collectives or
    process groups free unsharded parameters.
    """

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Make the gradients of this unit the sum over all ranks divided by ``factor``.

        The default is the number of ranks, replicas included. Inner units keep their factors.

        Raises:
            ArgumentTypeError, ConfigError: if ``factor`` is not a number, or not above 0.
        """
        if not isinstance(factor, (int, float)):
            raise ArgumentTypeError(
                f"set_gradient_divide_factor: got {factor!r}, expected a number"
            )
        if not factor > 0:
            raise ConfigError(
                f"set_gradient_divide_factor: got {factor!r}, expected a number above 0"
            )
        for bucket in chosen_buckets(self, recurse=False):
            bucket.change_reduction(divide_by=float(factor))

    def set_reduce_scatter_divide_factor(self, factor: float) -> None:
        """Call ``set_gradient_divide_factor``, of which this is the former name."""
        self.set_gradient_divide_factor(factor)

    def set_reduce_scatter_unused_params(
        self, reduce_scatter_unused_params: bool, *, recurse: bool = True
    ) -> None:
        """Set whether reductions give zeros, not None, to parameters without a gradient anywhere.

        Such a parameter has no gradient on any rank. All ranks reduce equal sizes anyway.
        """
        for bucket in chosen_buckets(self, recurse):
            bucket.change_reduction(fill_absent=reduce_scatter_unused_params)

    def set_reduce_scatter_max_input_buffers(
        self, max_input_buffers: int, *, recurse: bool = True
    ) -> None:
        """Allow reductions the memory that the ``max_input_buffers`` largest units need.

        The method is PyTorch's form of ``set_reduction_budget``, for the whole tree; 1, the
        default, is None. The budget is in bytes, so more small units fit. ``recurse`` has no
        effect.

        Raises:
            ArgumentTypeError, ConfigError: if ``max_input_buffers`` is not an int, or below 1.
        """
        what = f"set_reduce_scatter_max_input_buffers: got {max_input_buffers!r}"
        if isinstance(max_input_buffers, bool) or not isinstance(max_input_buffers, int):
            raise ArgumentTypeError(f"{what}, expected an int")
        if max_input_buffers < 1:
            raise ConfigError(f"{what}, expected at least 1")
        units = unit_and_engine(self)[1].units
        largest = sorted((unit.reduction_nbytes for unit in units), reverse=True)
        budget = None if max_input_buffers == 1 else sum(largest[:max_input_buffers])
        set_machine_policy(self, reduction_budget=budget)

    def set_all_reduce_hook(self, hook: Callable[[Tensor], object], *, stream: Any = None) -> None:
        """Call ``hook`` with the reduced gradients of this unit, 1-D, the mean over all ranks.

        The hook runs once per reduction of a bucket, after the reduction over replicas and before a
        factor of ``set_gradient_divide_factor`` is applied. The hook may change the gradients in
        place, for example to reduce over further ranks.

        Args:
            hook: the function to call; its result is ignored.
            stream: the stream to call ``hook`` on; None: the stream of the reduction.

        Raises:
            ConfigError: if the unit's parameters are on several meshes, or if ``stream`` is given
                and there are replicas.
        """
        bucket = _single_bucket(self, "set_all_reduce_hook")
        if stream is not None and bucket is not None and bucket.spec.replicas is not None:
            raise ConfigError(
                "set_all_reduce_hook(stream=...): on a mesh with replicas the hook runs after the "
                "all-reduce, on its stream; leave stream out"
            )
        for one in chosen_buckets(self, recurse=False):
            one.change_reduction(hook=hook, hook_stream=stream)

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Reduce this unit by sums that we scale ourselves, for backends without fast means.

        False does nothing: there is no way back once this is enabled.
        """
        if enable:
            _rewire(self, recurse=False, change=_by_sums)

    def set_separate_reduce_scatter_group(
        self, enable: bool = True, *, recurse: bool = True
    ) -> None:
        """Reduce over separate process groups, so that gathers and reductions can overlap.

        All ranks must call this: it makes a group for each set of ranks that shards parameters.
        ``enable=False`` returns to the process groups of the gathers.
        """
        twins: dict[Any, Any] = {}  # process groups

        def separate(bucket: Bucket) -> dict[str, Collectives | None]:
            comm, group = bucket.spec.comm, bucket.spec.comm.group
            if group is None:
                return {}
            if enable and group not in twins:
                twins[group] = collectives_of_twin(comm, bucket.spec.device.type).group
            return {"reducer": bucket.spec.reducing.over(twins.get(group, group))}

        _rewire(self, recurse, separate)

    def set_custom_all_gather(self, comm: AllGather) -> None:
        """Gather this unit with ``comm``, in memory allocated by ``comm``; see ``fullshard.Comm``.

        Raises:
            ConfigError: if the unit's parameters are on several meshes.
        """
        _single_bucket(self, "set_custom_all_gather")
        _rewire(
            self,
            recurse=False,
            change=lambda bucket: {
                "comm": Custom(bucket.spec.comm, gather=comm),
                "reducer": bucket.spec.reducing,
            },
        )

    def set_custom_reduce_scatter(self, comm: ReduceScatter) -> None:
        """Reduce this unit with ``comm``, in memory allocated by ``comm``; see ``fullshard.Comm``.

        ``comm`` is asked for the sum; we divide the result.

        Raises:
            ConfigError: if the unit's parameters are on several meshes, or ``wire`` of the unit
                says how to reduce.
        """
        bucket = _single_bucket(self, "set_custom_reduce_scatter")
        if bucket is not None and bucket.spec.wire.reduce is not None:
            raise ConfigError(
                f"set_custom_reduce_scatter: the unit was sharded with wire={bucket.spec.wire}, "
                "which decides how gradients are reduced; leave reduce out of one or the other"
            )
        _rewire(
            self,
            recurse=False,
            change=lambda bucket: {"reducer": Custom(bucket.spec.reducing, reduce=comm)},
        )

    def set_post_optim_event(self, event: Any) -> None:
        """Make gathers of the next root forward wait for ``event``, not for all issued computation.

        Record ``event`` after the optimizer step. An ``unshard`` before that forward uses it up.
        """
        unit_and_engine(self)[1].post_optim_event = event

    def set_allocate_memory_from_process_group_for_comm(self, enable: bool) -> None:
        """Do nothing: buffers come from PyTorch's allocator, as for groups without an allocator.

        Raises:
            ConfigError: if the unit has a custom collective, which allocates its own memory.
        """
        _check_no_custom(self, "set_allocate_memory_from_process_group_for_comm", enable)

    def set_symm_mem_for_comm(self, backend: str = "NCCL") -> None:
        """Raise an error, since symmetric memory is not built yet.

        Raises:
            ConfigError: if the unit has a custom collective, which allocates its own memory.
            NotBuiltError: otherwise.
        """
        _check_no_custom(self, "set_symm_mem_for_comm", backend)
        raise NotBuiltError(
            f"set_symm_mem_for_comm({backend!r}): symmetric memory is not built; leave this call "
            "out, PyTorch's allocator is used"
        )


def _check_no_custom(module: nn.Module, what: str, value: object) -> None:
    buckets = chosen_buckets(module, recurse=False)
    wires = [wire for b in buckets for wire in (b.spec.comm, b.spec.reducing)]
    if any(isinstance(wire, Custom) for wire in wires):
        raise AssertedConfigError(
            f"{what}({value!r}): the unit has a collective from set_custom_all_gather or "
            "set_custom_reduce_scatter, which allocates its own memory; use one or the other"
        )


def _single_bucket(module: nn.Module, what: str) -> Bucket | None:
    """Return the first bucket, if any; raise if there are several meshes."""
    buckets = chosen_buckets(module, recurse=False)
    if len({bucket.spec.comm.group for bucket in buckets}) > 1:
        raise ConfigError(
            f"{what}: the unit has parameters on several meshes, so that it would be unclear "
            "which one is meant; give those of one mesh to a call of their own"
        )
    return buckets[0] if buckets else None


def _rewire(
    module: nn.Module, recurse: bool, change: Callable[[Bucket], dict[str, Collectives | None]]
) -> None:
    """Replace collectives of buckets by ``change``, between steps."""
    units = chosen_units(module, recurse)
    for engine in dict.fromkeys(map(engine_of, units)):
        engine.reset_wires([unit for unit in units if unit.engine is engine])
    for unit in units:
        for bucket in unit.buckets:
            bucket.rewire(**change(bucket))


def _by_sums(bucket: Bucket) -> dict[str, Collectives | None]:
    spec = bucket.spec
    replicas = None if spec.replicas is None else spec.replicas.by_sums()
    return {"reducer": spec.reducing.by_sums(), "replicas": replicas}


def share_comm_ctx(modules: Sequence[nn.Module]) -> None:
    """Make sharded modules communicate on the same streams, those of the first module.

    Call this between steps, for models that run in turns, such as pipeline stages on one device.

    Raises:
        ConfigError: if a module is not sharded.
        ProtocolError: if a module is in a forward or backward.
    """
    for module in modules:
        if unit_of(module) is None:
            raise ConfigError(
                f"share_comm_ctx: got a {type(module).__name__} that was not given to "
                "fully_shard, expected sharded modules"
            )
    engines = list(dict.fromkeys(unit_and_engine(module)[1] for module in modules))
    for engine in engines[1:]:
        engine.share_lanes(engines[0])
