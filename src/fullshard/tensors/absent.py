"""A stand-in for a whole parameter in a module while the parameter's memory is freed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from fullshard import _torch
from fullshard.errors import ProtocolError


class AbsentParameter(Tensor):
    """A tensor without memory, with shape, dtype and device, that refuses every operation.

    PyTorch's FSDP1 leaves views of freed memory in such places, whose dtype programs read.
    """

    whose: str
    """The name of the parameter."""

    @classmethod
    def of(
        cls,
        name: str,
        shape: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
        requires_grad: bool,
    ) -> AbsentParameter:
        """Return the stand-in of the parameter with this name and these properties."""
        absent = _torch.wrapper_of(cls, torch.empty(shape, dtype=dtype, device="meta"), device)
        absent.requires_grad = requires_grad
        absent.whose = name
        return absent

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, op: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> NoReturn:
        """Refuse."""
        names = ", ".join(one.whose for one in args if isinstance(one, cls))
        raise ProtocolError(
            f"{op} of {names or 'parameters'}: it is part of a flat parameter, and has no memory "
            "outside of the forward and backward of its wrapper; use it inside of "
            "FullyShardedDataParallel.summon_full_params(), or wrap with use_orig_params=True"
        )

    def __repr__(self) -> str:  # type: ignore[override]
        """Describe it without its elements."""
        return f"AbsentParameter({self.whose}, {tuple(self.shape)}, {self.dtype})"

    def __deepcopy__(self, memo: object) -> AbsentParameter:
        """Return itself, because nothing in it changes."""
        return self

    def __reduce_ex__(self, protocol: object) -> tuple[Callable[..., AbsentParameter], Any]:
        """Pickle what there is."""
        given = (self.whose, self.shape, self.dtype, self.device, self.requires_grad)
        return AbsentParameter.of, given
