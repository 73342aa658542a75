"""Load ``torch.distributed.checkpoint`` files that lack some of the optimizer state."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata


class LoadPlanner(DefaultLoadPlanner):
    """A planner for ``torch.distributed.checkpoint.load`` that allows missing optimizer state.

    An optimizer, and so a file, has no state for parameters that never had a gradient, but
    ``sharded_optim_state_dict(template=True)`` makes state for all trainable parameters. This
    planner removes the state of parameters without state in the file, so that they start without
    state. The load still fails if the file lacks anything else.
    """

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        metadata: Metadata | None = None,
        is_coordinator: bool = False,
    ) -> None:
        """See ``DefaultLoadPlanner``; removes optimizer state from ``state_dict`` in place."""
        if metadata is not None:
            saved = metadata.state_dict_metadata.keys()
            for path, state in _optimizer_states(state_dict, ""):
                for name in [*state]:
                    prefix = f"{path}state.{name}."
                    is_there = any(f"{prefix}{key}" in saved for key in state[name])
                    if not is_there and not any(key.startswith(prefix) for key in saved):
                        del state[name]
        super().set_up_planner(state_dict, metadata, is_coordinator)


def _optimizer_states(state_dict: dict[str, Any], path: str) -> Iterator[tuple[str, Any]]:
    """Yield the path of each optimizer's state dict and its state, by parameter name."""
    if isinstance(state_dict.get("state"), dict) and "param_groups" in state_dict:
        yield path, state_dict["state"]
        return
    for key, value in state_dict.items():
        if isinstance(value, dict):
            yield from _optimizer_states(value, f"{path}{key}.")
