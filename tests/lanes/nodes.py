"""The streams on which autograd runs backward, as on CUDA.

A node and its hooks run on the stream that was current when forward made the node. Here a node that
accumulates into a leaf runs on the stream of a node before it. The stream of a node waits for the
streams of the nodes that send it gradients. The first node waits for the stream of the caller. At
the end the caller's stream waits for the streams of the leaves. A sum of gradients from several
nodes counts as work of the last of these nodes, which on CUDA waits for the others.

Autograd on a CPU records no streams. So the sequence number of a node tells its stream: the stream
that was current when the node was made.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.graph import Node

from tests.lanes.clocks import Clock

if TYPE_CHECKING:
    from tests.lanes.fake import Stream


def current_node() -> Node | None:
    """Return the node that autograd runs in this thread; None outside of nodes."""
    return torch._C._current_autograd_node()


@dataclass
class _Task:
    """One call of backward."""

    caller: Stream
    outer: Node | None
    """The node that called it."""
    arriving: dict[int, tuple[Node, Clock]] = field(default_factory=dict)
    """The clocks that nodes which have yet to run wait for, by the address of the node."""
    leaves: dict[int, Stream] = field(default_factory=dict)
    start: Clock = field(init=False)
    """The clock that the first nodes wait for."""

    def __post_init__(self) -> None:
        self.start = dict(self.caller.timeline.clock)


class Backward:
    """The streams of nodes, ordered as autograd orders them."""

    def __init__(self, default: Stream) -> None:
        self._firsts: list[int] = [0]
        self._streams = [default]  # of the nodes from that number on
        self._seen = 0
        self._tasks: dict[int, _Task] = {}
        self._node: Node | None = None
        self._task = -1

    def made_on(self, stream: Stream) -> None:
        """Nodes that were made since this was called last were made on ``stream``."""
        now = torch._C._autograd._get_sequence_nr()
        if now > self._seen:
            if self._streams[-1] is not stream:
                self._firsts.append(self._seen)
                self._streams.append(stream)
            self._seen = now

    def runs(self, node: Node | None, caller: Stream) -> Stream | None:
        """The stream of ``node``, once it waits as it should; None: that of the caller.

        With one stream there is nothing to order.
        """
        if len(self._streams) == 1:
            return None
        number = torch._C._current_graph_task_id()
        if (node, number) != (self._node, self._task):
            self._leave()
            if number >= 0 and number not in self._tasks:
                outer = self._node
                self._tasks[number] = _Task(
                    caller if outer is None else self._stream_of(outer), outer
                )
            self._close(keep=number)
            task = self._tasks.get(number)
            if task is not None and node is not None and node is not task.outer:
                self._enter(node, task)
            elif task is not None:
                self._end(task)
            self._node, self._task = node, number
        return None if node is None else self._stream_of(node)

    def _stream_of(self, node: Node) -> Stream:
        for task in self._tasks.values():
            if id(node) in task.leaves:
                return task.leaves[id(node)]
        return self._streams[bisect.bisect(self._firsts, node._sequence_nr()) - 1]

    def _enter(self, node: Node, task: _Task) -> None:
        stream = self._stream_of(node).timeline
        _, clock = task.arriving.get(id(node), (node, task.start))
        stream.join(clock)

    def _leave(self) -> None:
        """All nodes behind the one that ran come after it, also those that we never see run."""
        task, node = self._tasks.get(self._task), self._node
        if task is None or node is None or node is task.outer:
            return
        stream = self._stream_of(node)
        clock = dict(stream.timeline.clock)
        ahead = [following for following, _ in node.next_functions]
        while ahead:
            following: Any = ahead.pop()
            if following is None:
                continue
            _, known = task.arriving.setdefault(id(following), (following, {}))
            if all(known.get(timeline, -1) >= tick for timeline, tick in clock.items()):
                continue
            for timeline, tick in clock.items():
                known[timeline] = max(known.get(timeline, 0), tick)
            if not following.next_functions:
                task.leaves.setdefault(id(following), stream)
            ahead += [one for one, _ in following.next_functions]

    def _end(self, task: _Task) -> None:
        for number, stream in task.leaves.items():
            task.caller.timeline.join(task.arriving[number][1])
            task.caller.timeline.join(stream.timeline.clock)

    def _close(self, keep: int) -> None:
        """Tasks that are over; of nested ones the outer goes on."""
        for number in [n for n in self._tasks if n > keep]:
            self._end(self._tasks.pop(number))
