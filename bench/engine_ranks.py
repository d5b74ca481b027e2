"""Engines for bench/engines.py: a process each, of which several may be the ranks of one deployment."""

import contextlib
import copy
import multiprocessing
import multiprocessing.connection
import os
import signal
import socket
import sys
import time
import traceback

TOPOLOGIES = {"1": 1, "dp2ep2": 2, "dp4ep4": 4}  # GPUs
GRACE_S = 90  # that the others get when one has failed


class Rank:
    """One of the engines of a topology.

    Attributes
    ----------
    number, size : int
    port : int
        Where they meet.
    """

    def __init__(self, number, size, port, barrier):
        self.number, self.size, self.port, self._barrier = number, size, port, barrier

    def meet(self, seconds=600):
        self._barrier.wait(seconds)

    def share(self, items):
        """This rank's part of a list, which ranks have in order: the first has more than the others."""
        sizes = [len(items) // (self.size + 1)] * self.size
        sizes[0] = len(items) - sum(sizes[1:])
        start = sum(sizes[: self.number])
        return items[start : start + sizes[self.number]]


def in_processes(function, args, *arguments):
    """What function(args, *arguments) returns in forks, of each of args.engines.

    A server was imported once, and a GPU's memory comes back. Where a rank fails, the others get GRACE_S to say
    why. RuntimeError tells what each failed with.
    """
    context, size = multiprocessing.get_context("fork"), args.engines
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    barrier = context.Barrier(size)
    pipes, processes = [], []
    for number in range(size):
        here, there = context.Pipe(duplex=False)
        own = copy.copy(args)
        own.rank = Rank(number, size, port, barrier) if size > 1 else None
        process = context.Process(target=_run, args=(function, own, arguments, there))
        process.start()
        there.close()
        pipes.append(here)
        processes.append(process)
    results, problems = _collect(pipes)
    for process in processes:
        process.join(60)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # and what it has started
        process.join()
    if problems:
        raise RuntimeError("\n".join(f"rank {number}: {text}" for number, text in sorted(problems.items())))
    return [results[number] for number in range(size)]


def _run(function, args, arguments, there):
    os.setsid()
    try:
        there.send((function(args, *arguments), None))
    except BaseException:
        there.send((None, traceback.format_exc()))
    finally:
        sys.stdout.flush()
        there.close()
        os._exit(0)


def _collect(pipes):
    results, problems, waiting, end = {}, {}, dict(enumerate(pipes)), None
    while waiting:
        left = None if end is None else max(0.0, end - time.monotonic())
        ready = multiprocessing.connection.wait(list(waiting.values()), left)
        if not ready:
            problems.update({number: "said nothing while another rank failed" for number in waiting})
            break
        for number in [number for number, pipe in waiting.items() if pipe in ready]:
            try:
                results[number], problem = waiting.pop(number).recv()
            except EOFError:
                problem = "the process died"
            if problem:
                problems[number] = problem
                end = end or time.monotonic() + GRACE_S
    return results, problems


def joined_times(ranks):
    """Rows of all ranks as one: the slower rank's times, and the sum of what they got done."""
    joined = {}
    for key, first in ranks[0].items():
        rows = [rank[key] for rank in ranks]
        row = joined[key] = dict(first)
        for name in first:
            if name == "times_ms":
                row[name] = [max(times) for times in zip(*(other[name] for other in rows), strict=True)]
            elif name in ("tokens_per_s", "requests_per_s"):
                row[name] = round(sum(other[name] for other in rows), 3)
            else:
                row[name] = max(other[name] for other in rows)
    return joined
