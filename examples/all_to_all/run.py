"""Runs the problem's cases, and says what is wrong and how long they take.

    python run.py --ranks 8                        # ranks are threads of this process
    torchrun --nproc-per-node 8 run.py             # ... or processes, of any launcher

It ends with 1 where a case is wrong. Times are those of a rank's host, from a barrier to its result,
the slowest rank's; the geometric mean is that of the benchmark cases' medians.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import math
import os
import statistics
import sys
import time

import torch

import switchyard
from problem import BENCHMARKS, CASES, TESTS, Case, largest_fault, make_rank_data
from solution import custom_kernel, use


class Outcome:
    """Of one case on one rank."""

    def __init__(self, fault: float, seconds: list[float]) -> None:
        self.fault = fault
        self.seconds = seconds


def play(world: switchyard.World, case: Case, arguments: argparse.Namespace) -> Outcome:
    data = make_rank_data(
        case, world.rank, world.size, random_experts=arguments.experts == "random", device=arguments.device
    )
    call = (case.config, data, world.rank, world.size)
    seconds, faults = [], []
    for _ in range(1 + arguments.repeat):
        world.barrier()
        start = time.perf_counter()
        y = custom_kernel(call, padded=arguments.padded)
        if y.is_cuda:
            torch.cuda.synchronize(y.device)
        seconds.append(time.perf_counter() - start)
        faults.append(largest_fault(case, data, y, world.size, arguments.experts == "random"))
    return Outcome(max(faults), seconds[1:])


def play_all(world: switchyard.World, cases: list[Case], arguments: argparse.Namespace) -> list[Outcome]:
    use(world)
    return [play(world, case, arguments) for case in cases]


def on_threads(cases: list[Case], arguments: argparse.Namespace) -> list[list[Outcome]]:
    worlds = switchyard.World.threads(arguments.ranks)

    def rank(world: switchyard.World) -> list[Outcome]:
        try:
            return play_all(world, cases, arguments)
        except BaseException:
            world.abort()
            raise

    with concurrent.futures.ThreadPoolExecutor(len(worlds)) as pool:
        return list(pool.map(rank, worlds))


def report(cases: list[Case], outcomes: list[list[Outcome]]) -> bool:
    """Of all ranks that this process knows. Returns whether all is right."""
    right, medians = True, []
    for i, case in enumerate(cases):
        of_ranks = [outcome[i] for outcome in outcomes]
        fault = max(outcome.fault for outcome in of_ranks)
        slowest = [max(times) for times in zip(*(outcome.seconds for outcome in of_ranks))]
        line = f"{'ok   ' if fault <= 1 else 'WRONG'} {case}: {fault:.3f} of the tolerance"
        if slowest:
            median = statistics.median(slowest) * 1e6
            line += f", {median:,.0f} us"
            if case in BENCHMARKS:
                medians.append(median)
        print(line)
        right = right and fault <= 1
    if len(medians) == len(BENCHMARKS):
        mean = math.exp(statistics.fmean(math.log(median) for median in medians))
        print(f"geometric mean of the benchmarks: {mean:,.1f} us")
    return right


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2, help="threads, where no launcher made ranks")
    parser.add_argument("--cases", default="all", help="all, tests, benchmarks, or numbers: 0,3,13")
    parser.add_argument("--experts", choices=["rank", "random"], default="rank", help="the stand-ins")
    parser.add_argument("--padded", action="store_true", help="rows in [local experts, max * world, H]")
    parser.add_argument("--repeat", type=int, default=5, help="calls that are timed, after one")
    parser.add_argument("--device", default="cpu", help="cpu, or cuda")
    arguments = parser.parse_args()
    named = {"all": CASES, "tests": TESTS, "benchmarks": BENCHMARKS}
    cases = named.get(arguments.cases) or [CASES[int(n)] for n in arguments.cases.split(",")]
    ranks = int(os.environ.get("WORLD_SIZE", arguments.ranks))
    for case in cases:
        if case.config.num_experts % ranks != 0:
            parser.error(f"{ranks} ranks do not divide the experts of: {case}; use 1, 2, 4 or 8")
    if "WORLD_SIZE" not in os.environ:
        return 0 if report(cases, on_threads(cases, arguments)) else 1
    with_launcher = switchyard.World.from_env()
    mine = play_all(with_launcher, cases, arguments)
    right = all(outcome.fault <= 1 for outcome in mine)
    if with_launcher.rank == 0 or not right:
        report(cases, [mine])
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
