#!/usr/bin/env python3
"""Plays the trials of ranks over hosts that fail or have a chaotic network, and keeps their counts.

  bench/hosts_chaos.py --build build --json hosts_chaos.json [--seeds 1000] [--stops 100]
                       [--sanitizer thread] [--jobs 2]

The trials are those of tests/network/chaos_test.cpp and host_experts_test.cpp (layers and exchanges over a network in one process that
reorders, delays, refuses and breaks) and of tests/network/hosts_test.cpp (processes in network namespaces
that are killed or stopped). A row of the same kind and sanitizer is replaced.
"""

import argparse
import concurrent.futures
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile

from result_rows import commit_here

# kind, executable, test, the variable that says how many trials
KINDS = [
    ("layers, chaotic network", "hosts_chaos_test", "HostsChaos.LayersHaveTheBitsOfOneHost", "SWITCHYARD_CHAOS_SEEDS"),
    ("exchanges, chaotic network", "hosts_chaos_test", "HostsChaos.ExchangesBringEveryRowAndSum", "SWITCHYARD_CHAOS_SEEDS"),
    ("cut link, chaotic network", "hosts_chaos_test", "HostsChaos.ACutLinkEndsAllRanks", "SWITCHYARD_CHAOS_SEEDS"),
    ("layers in two levels, chaotic network", "hosts_chaos_test", "HostsChaos.LayersInTwoLevelsAreRight", "SWITCHYARD_CHAOS_SEEDS"),
    ("kill -9, namespaces", "hosts_test", "Namespaces/HostsStops.EveryRankNamesTheOneThatStopped/Kill", "SWITCHYARD_HOSTS_TRIALS"),
    ("SIGSTOP, namespaces", "hosts_test", "Namespaces/HostsStops.EveryRankNamesTheOneThatStopped/Stop", "SWITCHYARD_HOSTS_TRIALS"),
    ("kill -9, in two levels", "hosts_test", "Namespaces/HostsStops.EveryRankNamesTheOneThatStopped/KillInTwoLevels", "SWITCHYARD_HOSTS_TRIALS"),
    ("SIGSTOP, in two levels", "hosts_test", "Namespaces/HostsStops.EveryRankNamesTheOneThatStopped/StopInTwoLevels", "SWITCHYARD_HOSTS_TRIALS"),
]


BATCH = 50  # trials of one run of a test: what has ended is kept when the rest is cut off


def play(build, kind, executable, test, variable, trials, first):
    """Plays some trials, and returns what the test told of them; None if it was skipped."""
    with tempfile.TemporaryDirectory() as directory:
        report = pathlib.Path(directory) / "report.json"
        environment = dict(os.environ, **{variable: str(trials)})
        environment["SWITCHYARD_CHAOS_FIRST"] = environment["SWITCHYARD_HOSTS_SEED"] = str(first)
        command = [build / "tests/network" / executable, f"--gtest_filter={test}", f"--gtest_output=json:{report}"]
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if not report.exists():
            sys.exit(f"{kind}: the test ended with {done.returncode} and no report\n{done.stdout[-2000:]}")
        cases = [case for suite in json.loads(report.read_text())["testsuites"] for case in suite["testsuite"]]
    [case] = [case for case in cases if case["status"] == "RUN"]
    if case["result"] == "SKIPPED":
        return None
    # A sanitizer that found something tells it by the exit code alone.
    if done.returncode != 0:
        print(done.stdout, file=sys.stderr)
    return case | {"failed": done.returncode != 0}


def row_of(kind, cases):
    row = {"suite": "hosts_chaos", "kind": kind}
    for name in ("trials", "hangs", "wrong_words", "wrong_names", "two_verdicts"):
        row[name] = sum(int(case[name]) for case in cases) if name in cases[0] else None
    if delays := [float(ms) for case in cases for ms in case.get("delays_ms", "").split()]:
        row |= {"median_ms": round(statistics.median(delays), 1), "longest_ms": round(max(delays), 1)}
    return row | {"failed": any(case["failed"] for case in cases)}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", type=pathlib.Path, default=pathlib.Path("build"))
    parser.add_argument("--json", type=pathlib.Path, required=True)
    parser.add_argument("--seeds", type=int, default=1000, help="of each kind with a chaotic network; 0: none")
    parser.add_argument("--stops", type=int, default=100, help="of each kind with processes that fail; 0: none")
    parser.add_argument("--jobs", type=int, default=1, help="batches of trials that run at once")
    parser.add_argument("--first", type=int, default=1, help="the first seed")
    parser.add_argument("--only", default="", help="only kinds whose name has this in it")
    parser.add_argument("--sanitizer", default="", help="what the build has: thread or address")
    options = parser.parse_args()
    commit = commit_here()
    rows = json.loads(options.json.read_text()) if options.json.exists() else []
    failed = False
    for kind, executable, test, variable in KINDS:
        trials = options.seeds if executable == "hosts_chaos_test" else options.stops
        if trials == 0 or options.only not in kind:
            continue
        end = options.first + trials
        cases = []
        with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
            batches = [
                pool.submit(play, options.build, kind, executable, test, variable, min(BATCH, end - first), first)
                for first in range(options.first, end, BATCH)
            ]
            for batch in concurrent.futures.as_completed(batches):
                if batch.result() is None:
                    print(f"{kind}: skipped, namespaces may not be made here")
                    for other in batches:
                        other.cancel()
                    break
                cases.append(batch.result())
                row = row_of(kind, cases)
                row |= {"sanitizer": options.sanitizer, "first_seed": options.first, "commit": commit}
                rows = [old for old in rows if (old["kind"], old["sanitizer"]) != (kind, options.sanitizer)] + [row]
                text = ",\n".join(json.dumps(row, separators=(",", ":")) for row in rows)
                options.json.write_text(f"[\n{text}\n]\n")
        if cases:
            failed = failed or row["failed"]
            print(json.dumps(row))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
