"""Make jobs fail, and report how they ended.

python -m tests.faults --kills 1000           # kill jobs that save; report lost steps
python -m tests.faults table [words] --write  # every fault on one rank
python -m tests.faults table --device         # on a fake device, whose host never waits
python -m tests.faults random --count 1000    # faults drawn at random
python -m tests.faults recover --count 100    # jobs that continue without killed ranks
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence

from tests.faults import at_random, recovery, table
from tests.faults.jobs import Result
from tests.faults.judge import Kind, Verdict
from tests.faults.kills import Failed, Killer
from tests.faults.rank import ON_CPUS, Engine, Wire


def kill(arguments: Sequence[str]) -> int:
    """Kill jobs that save checkpoints."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults")
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    start_s = time.monotonic()

    def tell(killer: Killer) -> None:
        seconds = time.monotonic() - start_s
        print(f"{killer.kills.total()} kills, {seconds / 60:.0f} min", flush=True)

    killer = Killer(options.seed)
    try:
        killer.run(options.kills, tell)
    except Failed as error:
        print(f"FAILED after {killer.kills.total()} kills, seed {options.seed}: {error}")
        return 1
    for what, count in sorted(killer.kills.items()):
        print(f"{count:5} {what}")
    print(f"{killer.kills.total()} kills: nothing was lost, final weights equal")
    return 0


def tabulate(arguments: Sequence[str]) -> int:
    """Run the table of faults, or some of its rows."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults table")
    parser.add_argument("words", nargs="*", help="only rows with one of these words in their title")
    parser.add_argument("--engine", nargs="*", choices=[one.name.lower() for one in Engine])
    parser.add_argument("--worlds", nargs="*", type=int, default=table.WORLDS, metavar="RANKS")
    parser.add_argument("--nccl", action="store_true", help="all ranks on the first GPU")
    parser.add_argument("--device", action="store_true", help="on the fake device")
    parser.add_argument("--at-once", type=int, default=4, help="number of simultaneous jobs")
    parser.add_argument("--show", action="store_true", help="print the messages of failed jobs")
    parser.add_argument("--write", action="store_true", help=f"write {table.PAGE.name}")
    options = parser.parse_args(arguments)
    if options.write and (options.nccl or options.device):
        parser.error("--write needs the transports of CPUs, which the table shows")
    engines = [Engine[one.upper()] for one in options.engine or []] or list(Engine)
    wires = [Wire.NCCL] * options.nccl + [Wire.DEVICE] * options.device or ON_CPUS
    if options.device and Engine.TORCH in engines:
        engines.remove(Engine.TORCH)  # its streams and collectives are not those of the fake device

    def tell(case: table.Case, result: Result, verdict: Verdict) -> None:
        print(f"{case} | {verdict}", flush=True)
        if options.show and verdict.kind is not Kind.NAMED:
            print(said(result), flush=True)

    cases = table.cases(engines, wires, options.worlds)
    found = table.run_table(options.words, cases, options.at_once, tell)
    if options.write:
        seen = {key: table.cell(verdicts) for key, verdicts in found.items()}
        table.PAGE.write_text(table.written(seen))
    failed = table.failures(found)
    print(f"{sum(map(len, found.values()))} jobs, of fullshard {failed} did not name the fault")
    return int(failed > 0)


def parser_of_numbers(command: str, *, count: int, shows: str) -> argparse.ArgumentParser:
    """Return a parser for a command whose jobs are drawn, each from a number."""
    parser = argparse.ArgumentParser(prog=f"python -m tests.faults {command}")
    parser.add_argument("--count", type=int, default=count)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="the number of the first job")
    parser.add_argument("--show", action="store_true", help=shows)
    return parser


def strike(arguments: Sequence[str]) -> int:
    """Run jobs with random faults."""
    parser = parser_of_numbers("random", count=1000, shows="print the messages of failed jobs")
    parser.add_argument("--at-once", type=int, default=4, help="number of simultaneous jobs")
    options = parser.parse_args(arguments)

    def tell(number: int, result: Result, verdict: Verdict) -> None:
        if verdict.kind is not Kind.NAMED:
            print(f"{number} | {result.job} | {verdict}", flush=True)
            if options.show:
                print(said(result), flush=True)
        elif number % 100 == 0:
            print(f"{number} | {verdict}", flush=True)

    numbers = range(options.first, options.first + options.count)
    found = at_random.run_random(options.seed, numbers, options.at_once, tell)
    print(", ".join(f"{count} {what}" for what, count in sorted(found.items())))
    return int(found[Kind.NAMED.value] < options.count)


def recover(arguments: Sequence[str]) -> int:
    """Run jobs that continue after losing ranks."""
    parser = parser_of_numbers("recover", count=100, shows="print the diaries of all jobs")
    options = parser.parse_args(arguments)
    seconds = []

    def tell(number: int, plan: recovery.Plan, seen: recovery.Seen) -> None:
        seconds.append(seen.seconds)
        print(f"{number} | {seen.seconds:.0f} s | {seen.wrong or 'goes on'} | {plan}", flush=True)
        if seen.wrong or options.show:
            print(seen.told, flush=True)

    numbers = range(options.first, options.first + options.count)
    wrong = recovery.run_random(options.seed, numbers, tell)
    print(f"{options.count} jobs, {wrong} went wrong, the longest took {max(seconds):.0f} s")
    return int(wrong > 0)


def said(result: Result) -> str:
    """Return the errors and logs of each rank of a job, shortened."""
    return "\n".join(
        f"    rank {rank}: {one.kind or 'normal end'}: {one.text[-2000:]}"
        + "".join(f"\n        {level}: {text}" for level, text in one.logs + one.caught)
        for rank, one in enumerate(result.endings)
    )


COMMANDS: dict[str, Callable[[Sequence[str]], int]] = {
    "table": tabulate,
    "random": strike,
    "recover": recover,
}


def main() -> int:
    name = sys.argv[1] if len(sys.argv) > 1 else ""
    if name in COMMANDS:
        return COMMANDS[name](sys.argv[2:])
    return kill(sys.argv[1:])


if __name__ == "__main__":
    raise SystemExit(main())
