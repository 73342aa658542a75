"""Reports of traces: Chrome's format, the summary, the page, and the command."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fullshard.cli import main
from fullshard.errors import ConfigError
from fullshard.trace import rankfile, report, summary
from fullshard.trace.chrome import chrome_events, chrome_text
from fullshard.trace.summary import summarize, thinned
from tests.kit.trace_report import Page, busy_ranks, busy_step, short_rank
from tests.pure.import_rules import imports_of_torch, package_sources
from tests.pure.trace_files import MB, rank_file, step, total, unit

CHROMIUM = shutil.which("chromium")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "trace").mkdir()
    for rank in busy_ranks():
        rankfile.write(tmp_path / "trace", rank["rank"], rank)
    return tmp_path


def test_what_reports_are_made_of_needs_no_torch() -> None:
    names = "chrome findings rankfile report shortage spans steps summary text".split()
    found = imports_of_torch(package_sources(), {"plan"})
    assert [line for line in found for name in names if f"plan/{name}.py" in line] == []


# Chrome's format.


def test_events_are_of_chromes_format() -> None:
    whole = json.loads("".join(chrome_text(busy_ranks())))
    events = whole["traceEvents"]
    assert {event["pid"] for event in events} == {0, 1}
    assert Counter(e["ph"] for e in events if e["ph"] in "be")["b"] == 2 * 2 * 6
    for event in events:
        assert {"ph", "pid", "name"} <= event.keys()
        if event["ph"] != "M":
            assert event["ts"] >= 0
    opened = Counter(event["id"] for event in events if event["ph"] in "be")
    assert set(opened.values()) == {2}
    names = {e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert names == {"model", "exposed", "gathers", "reductions", "actions"}


def test_what_is_on_one_thread_is_nested() -> None:
    for tid in (0, 1, 4):
        events = [e for e in chrome_events(busy_ranks()[0]) if e["ph"] == "X" and e["tid"] == tid]
        ends: list[float] = []
        for event in sorted(events, key=lambda e: (e["ts"], -e["dur"])):
            while ends and ends[-1] <= event["ts"] + 0.05:
                ends.pop()
            assert not ends or event["ts"] + event["dur"] <= ends[-1] + 0.2
            ends.append(event["ts"] + event["dur"])


def test_buffers_are_counted_as_they_are_held() -> None:
    counters = [e["args"] for e in chrome_events(busy_ranks()[0]) if e["ph"] == "C"]
    assert max(sum(held.values()) for held in counters) == 64 * MB
    assert sum(counters[-1].values()) == 0


# The summary.


def test_ranks_are_aligned_by_the_wall_clock(folder: Path) -> None:
    first, second = rankfile.read_all(folder)
    assert (first["shift_s"], second["shift_s"]) == (0.0, 1e-6)


def test_memory_is_stacked_by_kind_with_the_plan_beside_it() -> None:
    found = summary.memory(busy_ranks()[0], 2)
    assert found is not None
    assert found["kinds"] == ["parameters", "unsharded", "reduce_input"]
    assert found["most"]["nbytes"] == (16 * 3 + 2 + 64) * MB
    assert all(len(point) == 4 for point in found["points"])
    last = found["planned"]["points"][-1]
    assert last == [pytest.approx(0.1), 50 * MB, 170 * MB]  # stretched to the length of the step


@given(st.lists(st.integers(0, 100), min_size=1, max_size=5000))
def test_thinning_keeps_the_largest_and_both_ends(values: list[int]) -> None:
    points = [(float(i), {"kind": value}) for i, value in enumerate(values)]
    few = thinned(points)
    assert len(few) <= summary.MOST_POINTS + 2
    assert (few[0], few[-1]) == (points[0], points[-1])
    assert max(one["kind"] for _, one in few) == max(values)


def test_the_summary_says_where_a_step_departs_from_the_plan() -> None:
    found = summarize(busy_ranks())["plan"]
    assert found["difference"] == {
        "index": 2,
        "recorded": "wait blocks.0",
        "planned": "wait blocks.</script><b>1",
    }


def test_a_summary_of_many_ranks_and_long_steps_is_small() -> None:
    work = [["forward", n % 3, 1e-6 * n, 1e-6] for n in range(20_000)]
    buffers = [[1e-6 * n, "unsharded", 1, 0] for n in range(20_000)]
    steps = [step(1, work=work, buffers=buffers)]
    ranks = [rank_file(rank, steps=steps, world=100) for rank in range(100)]
    found = summarize(ranks)
    assert len(found["lanes"]) == summary.MOST_RANKS
    assert max(len(row) for row in found["lanes"][0]["lanes"].values()) == summary.MOST_SPANS
    assert len(json.dumps(found)) < 2_000_000


def test_ranks_with_other_units_do_not_count_in_the_table() -> None:
    stage = rank_file(1, waited_s=0.5, units=[unit("blocks.9")])
    stage |= {"totals": stage["totals"][:1]}
    rows = summarize([rank_file(0, waited_s=0.02), stage])["units"]
    assert (rows[0]["name"], rows[0]["exposed_s"]) == ("blocks.0", 0.02)


def test_the_last_step_and_the_slowest_ones_can_be_looked_at() -> None:
    steps = [busy_step(n) | {"duration_s": 0.1 + 0.01 * (n % 5)} for n in range(1, 8)]
    ranks = [rank_file(rank, steps=steps) for rank in range(2)]
    ranks[1]["steps"] = ranks[1]["steps"][:3] + ranks[1]["steps"][4:]  # rank 1 did not keep step 4
    found = summarize(ranks)
    assert found["memory"]["step"] == 7
    assert [one["memory"]["step"] for one in found["others"]] == [3, 2, 1]
    assert all(len(one["lanes"]) == 2 for one in found["others"])
    assert summarize([short_rank()])["others"] == []


def test_means_leave_out_the_first_step() -> None:
    found = summarize([rank_file(world=1, first_s=0.9)])["steps"]
    assert (found["count"], found["mean_s"], found["first_s"]) == (2, 0.1, 0.9)


def test_a_file_of_an_earlier_version_has_a_report(folder: Path) -> None:
    old = busy_ranks()[0]
    del old["about"], old["first_s"]
    rankfile.write(folder / "trace", 0, old)
    found = report.combine(folder).summary
    assert found["about"] == {"wall_ns": 10**18} and found["steps"]["count"] == 2


def test_a_trace_without_a_step_has_a_report() -> None:
    rank = rank_file(world=1)
    rank |= {"steps": []}
    rank["spent"]["step"] = total()
    found = summarize([rank])
    assert (found["memory"], found["lanes"], found["steps"]["count"]) == (None, [], 0)


# Files.


def test_files_of_ranks_that_an_earlier_run_had_are_passed_over(folder: Path) -> None:
    rankfile.write(folder / "trace", 5, rank_file(5, world=8))
    assert [one["rank"] for one in rankfile.read_all(folder)] == [0, 1]


def test_a_folder_without_a_trace_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="found no rank-00000"):
        report.combine(tmp_path)


@pytest.mark.parametrize("text", ["{", "[]", '{"version": 99}'])
def test_a_file_of_another_kind_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "rank-00000.json").write_text(text)
    with pytest.raises(ConfigError, match=r"rank-00000\.json: .*trace again"):
        report.combine(tmp_path)


# The page.


def test_the_page_holds_the_summary_and_loads_nothing(folder: Path) -> None:
    combined = report.combine(folder)
    page = Page(combined.page.read_text())
    written = json.loads((folder / "trace" / "summary.json").read_text())
    assert json.loads(page.data) == written == json.loads(json.dumps(combined.summary))
    assert page.loaded == ["data:,"]
    text = combined.page.read_text().replace("http://www.w3.org/2000/svg", "")
    assert not re.search(r"https?:|@import|url\(|fetch\(|XMLHttp", text)


@pytest.mark.skipif(
    CHROMIUM is None,
    reason="no Chromium: the figures in report.html of a trace are NOT TESTED",
)
@pytest.mark.parametrize("name", ["busy", "short", "empty"])
def test_a_browser_shows_the_figures_of_the_summary(tmp_path: Path, name: str) -> None:
    empty = rank_file(world=1, steps=[]) | {"steps": []}
    empty["spent"]["step"] = total()
    ranks = {"busy": busy_ranks(), "short": [short_rank()], "empty": [empty]}[name]
    found = json.loads(json.dumps(summarize(ranks)))
    path = tmp_path / "report.html"
    path.write_text(report.page(found))
    shown = Page(rendered(path))
    for where, (value, text) in shown.figures.items():
        of: Any = found
        for key in where.split("."):
            of = of[int(key)] if isinstance(of, list) else of[key]
        assert float(value) == pytest.approx(of), where
        assert same_number(text, of), (where, text, of)
    assert ("memory.most.nbytes" in shown.figures) == (name != "empty")
    assert (shown.count["svg"] == 2) == (name != "empty")
    assert shown.count["tr"] >= 2 + len(ranks) + len(found["units"])


def rendered(path: Path) -> str:
    """Return the page as drawn by a browser without a network, which must log no errors."""
    assert CHROMIUM is not None
    done = subprocess.run(
        [
            *(CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom"),
            *("--enable-logging=stderr", "--host-resolver-rules=MAP * ~NOTFOUND"),
            *(f"--user-data-dir={path.parent / 'profile'}", path.as_uri()),
        ],
        capture_output=True,
        text=True,
        timeout=60,
    )
    complaints = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    assert complaints == []
    return done.stdout


def same_number(text: str, value: float) -> bool:
    """Return whether a text with a unit equals ``value``, to three digits."""
    factors = {"B": 1, "kB": 1e3, "MB": 1e6, "GB": 1e9, "s": 1, "ms": 1e-3, "µs": 1e-6, "": 1}
    number, _, named = text.replace(",", "").partition(" ")
    return float(number) * factors[named] == pytest.approx(value, rel=5e-3)


# The command.


def test_the_command_writes_the_report_and_prints_what_was_found(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["trace", str(folder)]) == 0
    out = capsys.readouterr().out
    assert "2 rank(s), 2 complete step(s), 100 ms in the mean" in out
    assert "rank 1 (here) waits 10 ms a step, the others 30 ms: they wait for it" in out
    assert str(folder / "trace" / "report.html") in out


def test_the_command_prints_the_summary_for_programs(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["trace", str(folder), "--json"]) == 0
    written = json.loads((folder / "trace" / "summary.json").read_text())
    assert json.loads(capsys.readouterr().out) == written


def test_the_command_tells_of_a_shortage(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rankfile.write(tmp_path, 0, short_rank())
    assert main(["trace", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "out of memory on rank 0: CUDA out of memory." in out
    assert "set_prefetch_budget(32000000)" in out


def test_the_command_refuses_a_folder_without_a_trace(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["trace", str(tmp_path)]) == 2
    assert "found no rank-00000.json" in capsys.readouterr().err


def test_units_that_are_many_are_cut_in_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    units = [unit(f"blocks.{n}") for n in range(30)]
    waits = {"gathers": 1, "gather": total(), "reduction": total()}
    rankfile.write(tmp_path, 0, rank_file(units=units, totals=[waits] * 30, world=1))
    assert main(["trace", str(tmp_path)]) == 0
    assert "and 10 more units" in capsys.readouterr().out
