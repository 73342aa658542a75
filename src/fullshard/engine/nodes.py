"""Autograd nodes of one forward: which tensors they made, and on which device backward runs them.

Autograd has one queue and one thread for each device, and runs younger nodes first within a queue
only. Between two queues, the graph alone orders nodes.
"""

from __future__ import annotations

from collections.abc import Container

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import Node

from fullshard._torch import autograd as _autograd


def base_of(tensor: Tensor) -> Tensor:
    """Return the tensor that ``tensor`` is a view of as autograd sees it, or ``tensor`` itself.

    A view that a custom Function returns, such as the result of ``DTensor.to_local``, has its own
    node while its base has none.
    """
    base = tensor._base
    if base is None or (base.grad_fn is None and not base.requires_grad):
        return tensor
    return base


def is_leaf(tensor: Tensor) -> bool:
    """Return whether ``tensor`` may be a parameter, or is another leaf that needs gradients."""
    return isinstance(tensor, nn.Parameter) or (tensor.requires_grad and tensor.grad_fn is None)


def is_on(device: torch.device, tensor: Tensor) -> bool:
    """Return whether ``tensor`` is on ``device``, or on the meta device as in a dry run."""
    return tensor.device == device or tensor.is_meta


class Elsewhere:
    """The nodes of a forward between its outputs on other devices and the nodes of ``device``.

    Args:
        device: the device of the unit.
        made: the numbers of the nodes that the forward made.
        given: the ids of the nodes that made its inputs.
    """

    def __init__(self, device: torch.device, made: range, given: Container[int]) -> None:
        self._device, self._made, self._given = device, made, given
        self.outputs: dict[int, Node] = {}
        """The nodes that made the outputs, by id."""
        self.entries: dict[int, Node] = {}
        """The first nodes of ``device`` behind them, by id: backward enters through these."""
        self.numbers: set[int] = set()
        """The numbers of the nodes on other devices that were found."""
        self.may_read = False
        """True if one of them is a custom Function, which may read the unit's parameters; PyTorch's
        own nodes on other devices only copy."""

    def follow(self, output: Node | None) -> None:
        """Follow the node that made an output to the first nodes of ``device``."""
        if output is None or not self._is_ours(output):
            return
        self.outputs[id(output)] = output
        ahead = [output]
        while ahead:
            node = ahead.pop()
            number = _autograd.node_number(node)
            if _autograd.node_device(node) == self._device:
                self.entries[id(node)] = node
            elif number not in self.numbers:
                self.numbers.add(number)
                self.may_read = self.may_read or isinstance(node, BackwardCFunction)
                ahead += [one for one, _ in node.next_functions if one and self._is_ours(one)]

    def _is_ours(self, node: Node) -> bool:
        return _autograd.node_number(node) in self._made and id(node) not in self._given
