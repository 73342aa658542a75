"""Reading files of ``torch.distributed.checkpoint`` into state of which they lack some."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata


class LoadPlanner(DefaultLoadPlanner):
    """A planner for ``torch.distributed.checkpoint.load`` that knows untouched parameters.

    Optimizers have no state for parameters that never had a gradient, so a file has none either.
    That of a fresh optimizer, made to be filled, has some for all: this planner removes it from
    the state dict for those parameters of which the file has nothing, and they begin anew.
    Anything else that the file lacks is refused, as ever.
    """

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        metadata: Metadata | None = None,
        is_coordinator: bool = False,
    ) -> None:
        """See ``DefaultLoadPlanner``; changes the optimizers' state dicts in ``state_dict``."""
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
    """Yield the state of each optimizer, by names of parameters, and where its state dict is."""
    if isinstance(state_dict.get("state"), dict) and "param_groups" in state_dict:
        yield path, state_dict["state"]
        return
    for key, value in state_dict.items():
        if isinstance(value, dict):
            yield from _optimizer_states(value, f"{path}{key}.")
