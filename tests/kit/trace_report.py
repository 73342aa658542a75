"""Traced steps, and the page of the report."""

from __future__ import annotations

from collections import Counter
from html.parser import HTMLParser
from typing import Any

from tests.pure.trace_files import MB, action, rank_file, step


def busy_step(number: int) -> dict[str, Any]:
    """Return a step with forwards and backwards of blocks, and all actions that a report draws."""
    work: list[Any] = [["forward", 3, 0.0, 0.045]]
    actions: list[Any] = [["fence", -1, 0.0, 1e-6, None, None]]
    buffers: list[Any] = []
    for n in range(3):
        at_s = 0.01 + 0.01 * n
        work += [["forward", n, at_s, 0.009], ["backward", n, 0.08 - at_s, 0.009]]
        actions += [action("unshard", n, at_s - 0.006), action("wait", n, at_s, 0.002)]
        actions += [action("reduce_scatter", n, 0.089 - at_s)]
        actions += [action("finish_reduce", n, 0.093 - at_s, 0.003)]
        buffers += [
            [at_s - 0.006, "unsharded", 32 * MB, n],
            [at_s + 0.009, "unsharded", -32 * MB, n],
        ]
        buffers += [[0.089 - at_s, "reduce_input", 32 * MB, n]]
        buffers += [[0.096 - at_s, "reduce_input", -32 * MB, n]]
    for rows, when in ((work, 2), (actions, 2), (buffers, 0)):
        rows.sort(key=lambda row, when=when: row[when])
    return step(number, work=work, actions=actions, buffers=buffers)


def planned() -> dict[str, Any]:
    peak = {"nbytes": 200 * MB, "held": {"activations": 150 * MB}, "where": "backward of blocks.1"}
    moments = [
        {"at_s": 0.02 * n, "held": {"parameters": 50 * MB, "activations": 30 * MB * n}, "where": ""}
        for n in range(5)
    ]
    actions = ["fence", "unshard 0", "wait 1"]
    return {"step_s": 0.08, "hardware": "h100", "peak": peak, "memory": moments, "actions": actions}


def busy_ranks() -> list[dict[str, Any]]:
    ranks = []
    for number in range(2):
        rank = rank_file(number, waited_s=0.03 - 0.02 * number, steps=map(busy_step, (1, 2)))
        rank["units"][1]["name"] = "blocks.</script><b>1"
        rank |= {"missed": [[1, 0, 2, 3]], "plan": planned()}
        ranks.append(rank)
    return ranks


def short_rank() -> dict[str, Any]:
    held = [[0, "unsharded", 32 * MB], [1, "unsharded", 32 * MB], [-1, "full", MB]]
    shortage = {
        "message": "CUDA out of memory.",
        "where": 0,
        "tried_nbytes": 40 * MB,
        "allocated_nbytes": None,
        "held": held + [[n, "parameters", 16 * MB] for n in range(3)],
    }
    return rank_file(shortage=shortage, unfinished=busy_step(3), world=1)


class Page(HTMLParser):
    """The data of a page, its figures, and its attributes."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.data = ""
        self.figures: dict[str, tuple[str, str]] = {}
        self.loaded: list[str] = []
        self.count: Counter[str] = Counter()
        self._in: tuple[str, str | None] = ("", None)
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.count[tag] += 1
        self.loaded += [found[key] or "" for key in ("src", "href") if key in found]
        self._in = tag, found.get("id")
        if path := found.get("data-path"):
            self.figures[path] = (found["data-value"] or "", "")
            self._in = "figure", path

    def handle_data(self, data: str) -> None:
        where, name = self._in
        if where == "figure" and name and not self.figures[name][1]:
            self.figures[name] = (self.figures[name][0], data)
        if (where, name) == ("script", "data"):
            self.data += data

    def handle_endtag(self, tag: str) -> None:
        self._in = ("", None)
