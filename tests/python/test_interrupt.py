"""Ctrl-C, and other signals, while the main thread waits for other ranks in a call of the library."""

import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import threading
import time

import pytest
import torch

import switchyard
from conftest import ROOT
from conftest import started as started_process
from switchyard import SymmetricHeap, World

# The time that users are promised, and the time that a machine with other load may take.
ANSWER, ANSWER_ON_A_BUSY_MACHINE = 0.2, 0.5

# A rank of three. For each kind of call it makes a world, says "waiting" and waits in that call for rank 2, which does
# not come. Then it says how the call ended, and when.
RANK = """
import json, numpy, os, signal, sys, time
from switchyard import Exchange, Experts, Placement, SymmetricHeap, Workspace, World

rank, name, kinds = int(sys.argv[1]), sys.argv[2], sys.argv[3:]
E, I, H, K = 6, 32, 64, 2


def say(**what):
    print(json.dumps(what), flush=True)


def noted(*_):
    # The next signal may come before this one's line has left print(), which cannot be called again within itself.
    os.write(1, (json.dumps(dict(handled=time.monotonic())) + "\\n").encode())


def bang(*_):
    raise LookupError("bang")


signal.signal(signal.SIGUSR1, noted)
signal.signal(signal.SIGUSR2, bang)
x, ids, weights = numpy.ones((5, H), "f4"), numpy.array([[0, 5]] * 5), numpy.ones((5, 2), "f4")


def experts(world, threads=1):
    return Experts(
        numpy.ones((2, 2 * I, H), "f4"), numpy.ones((2, H, I), "f4"), top_k=K, max_tokens=8,
        placement=Placement(num_experts=E, world=world, num_threads=threads),
    )


def exchange(world):
    return Exchange(world, hidden=H, num_experts=E, top_k=K, max_tokens=8, dispatch="f16", num_threads=1)


def prepared(kind, world):
    '''The call that rank 2 does not make.'''
    if kind == "barrier":
        return world.barrier
    if kind == "layer":
        return lambda: experts(world)
    if kind == "workspace":
        sizes = dict(hidden=H, intermediate=I, experts=E, top_k=K, max_tokens=8, compute="f32")
        return lambda: Workspace(world, **sizes)
    if kind.startswith("pass"):
        layer = experts(world, int(kind[4:]))
        layer(x, ids, weights)
        return lambda: layer(x, ids, weights)
    if kind == "exchange":
        return lambda: exchange(world)
    if kind in ("dispatch", "combine"):
        made = exchange(world)
        half = x.astype("f2")
        received = made.dispatch(half, ids, weights)
        if kind == "dispatch":
            return lambda: made.dispatch(half, ids, weights)
        return lambda: made.combine(received.rows, received.handle)
    if kind == "heap":
        return lambda: SymmetricHeap(world, 1 << 16)
    heap = SymmetricHeap(world, 1 << 16)
    flag = heap.empty(1, "int64")
    heap.barrier()
    return heap.barrier if kind == "heap_barrier" else lambda: heap.wait(flag, 1, 2)


for kind in kinds:
    world = None
    try:
        where = dict(rendezvous=f"{name} {kind}", deadline=100)
        if kind == "world":
            call = lambda: World.processes(rank, 3, **where)
        else:
            world = World.processes(rank, 3, **where)
            call = prepared(kind, world)
        if rank == 2:
            word = sys.stdin.readline()
            if word == "come\\n":
                call()
            if word == "abort\\n":
                world.abort()
            continue
        say(waiting=kind)
        call()
        say(ended="", at=time.monotonic())
    except BaseException as error:
        words = dict(peer=getattr(error, "peer", None), phase=getattr(error, "phase", None))
        say(ended=type(error).__name__, at=time.monotonic(), text=str(error), **words)
        again = ""
        if world is not None:
            try:
                world.barrier()
            except Exception as error:
                again = f"{type(error).__name__} {error}"
            say(again=again)
"""


class Ranks:
    def __init__(self, kinds):
        self.name = f"test_interrupt {os.getpid()} {time.monotonic()}"
        self.of = [
            subprocess.Popen(
                [sys.executable, "-c", RANK, str(r), self.name, *kinds],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT,
            )
            for r in range(3)
        ]  # fmt: skip

    def hear(self, rank):
        line = self.of[rank].stdout.readline()
        assert line, f"rank {rank} ended"
        return json.loads(line)

    def await_waiting(self, kind):
        for rank in range(2):
            assert self.hear(rank) == {"waiting": kind}
        # A busy machine may let them run late. A signal before the call would not be one during the call.
        for rank in range(2):
            for _ in range(4):
                while self.state(rank) != "S":
                    time.sleep(0.01)
                time.sleep(0.07)

    def state(self, rank):
        with open(f"/proc/{self.of[rank].pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0]

    def send(self, rank, number):
        self.of[rank].send_signal(number)
        return time.monotonic()

    def tell_last(self, word):
        self.of[2].stdin.write(word + "\n")
        self.of[2].stdin.flush()


@contextlib.contextmanager
def ranks(*kinds):
    """Two ranks that wait, and a third that does not come."""
    made = Ranks(kinds)
    try:
        yield made
        for process in made.of:
            process.stdin.close()
            assert process.wait(60) == 0
    finally:
        for process in made.of:
            process.kill()
            process.wait()
            process.stdin.close()
            process.stdout.close()


KINDS = [
    *("world", "barrier", "layer", "workspace", "pass1", "pass2", "exchange", "dispatch", "combine"),
    *("heap", "heap_wait", "heap_barrier"),
]


@pytest.mark.parametrize("victim", [0, 1])
def test_a_wait_is_interrupted_and_the_others_are_told(victim):
    answers = []
    with ranks(*KINDS) as started:
        for kind in KINDS:
            started.await_waiting(kind)
            sent = started.send(victim, signal.SIGINT)
            mine, theirs = started.hear(victim), started.hear(1 - victim)
            assert mine["ended"] == "KeyboardInterrupt", (kind, mine)
            # The other one learns it from the first, at once.
            assert theirs["ended"] == "Aborted", (kind, theirs)
            assert f"rank {victim} was interrupted" in theirs["text"], (kind, theirs)
            assert (theirs["peer"], theirs["phase"]) == (victim, "abort"), (kind, theirs)
            answers += [mine["at"] - sent, theirs["at"] - sent]
            assert max(answers[-2:]) < 10 * ANSWER_ON_A_BUSY_MACHINE, (kind, answers[-2:])
            if kind != "world":
                # The world is dead, and says why, on both.
                for rank in range(2):
                    again = started.hear(rank)["again"]
                    assert again.startswith("Aborted") and f"rank {victim} was interrupted" in again, (kind, rank, again)
            started.tell_last("go on")
    assert statistics.median(answers) < ANSWER and sorted(answers)[-3] < ANSWER_ON_A_BUSY_MACHINE, answers


def test_a_handler_that_returns_does_not_end_the_wait():
    kinds, answers = ["world", "barrier", "pass1", "pass2", "dispatch", "heap_barrier"], []
    with ranks(*kinds) as started:
        for kind in kinds:
            started.await_waiting(kind)
            for _ in range(2):
                sent = started.send(0, signal.SIGUSR1)
                heard = started.hear(0)
                assert "handled" in heard, (kind, heard)
                answers.append(heard["handled"] - sent)
            started.tell_last("come")
            assert started.hear(0)["ended"] == started.hear(1)["ended"] == "", kind
    assert statistics.median(answers) < ANSWER, answers


def test_what_a_handler_raises_comes_out():
    kinds = ["world", "barrier", "pass2", "heap_wait"]
    with ranks(*kinds) as started:
        for kind in kinds:
            started.await_waiting(kind)
            started.send(1, signal.SIGUSR2)
            raised, theirs = started.hear(1), started.hear(0)
            assert (raised["ended"], raised["text"]) == ("LookupError", "bang")
            assert theirs["ended"] == "Aborted" and "rank 1 was interrupted" in theirs["text"], kind
            if kind != "world":
                assert all("rank 1 was interrupted" in started.hear(rank)["again"] for rank in range(2)), kind
            started.tell_last("go on")


# One of four ranks of two hosts interrupts itself in a call that rank 3 does not make.
HOSTS = """
import json, numpy, os, signal, sys, threading, time
from switchyard import Experts, Placement, World

rank, kind = int(os.environ["RANK"]), sys.argv[1]
x, ids, weights = numpy.ones((5, 64), "f4"), numpy.array([[0, 7]] * 5), numpy.ones((5, 2), "f4")


def prepared(world):
    if kind == "barrier":
        return world.barrier
    layer = Experts(
        numpy.ones((2, 64, 64), "f4"), numpy.ones((2, 64, 32), "f4"), top_k=2, max_tokens=8,
        placement=Placement(num_experts=8, world=world, num_threads=1),
    )
    layer(x, ids, weights)
    return lambda: layer(x, ids, weights)


said = "returned"
try:
    world = World.from_env(deadline=100)
    call = prepared(world)
    world.barrier()
    if rank == 3:
        time.sleep(4)
    else:
        if rank == 1:
            threading.Timer(1, os.kill, (os.getpid(), signal.SIGINT)).start()
        call()
except BaseException as error:
    said = f"{type(error).__name__} {error}"
sys.stdout.write(f"rank {rank} {said}\\n")
sys.stdout.flush()
time.sleep(4)  # so that nobody is told by the end of a connection
"""


@pytest.mark.parametrize("kind", ["barrier", "pass"])
def test_ranks_of_other_hosts_are_told(kind):
    launch = [sys.executable, "-m", "switchyard", "launch", "-n", "4", "--namespaces", "2", "--"]
    probe = started_process(*launch, "true", timeout=60)
    if probe.returncode != 0:
        pytest.skip("no network namespaces: " + probe.stderr.strip()[:200])
    done = started_process(*launch, sys.executable, "-c", HOSTS, kind, SWITCHYARD_SECRET="0123456789abcdef")
    if "joins ranks of one host only" in done.stdout:
        pytest.skip("this build of Switchyard joins ranks of one host only")
    assert done.returncode == 0, done.stderr + done.stdout
    assert "rank 1 KeyboardInterrupt" in done.stdout
    for rank in (0, 2):
        assert f"rank {rank} Aborted rank 1 was interrupted" in done.stdout, done.stdout


def test_a_rank_that_aborts_the_world_says_so():
    """It has not been interrupted, nor lost."""
    kinds = ["barrier", "pass1"]
    with ranks(*kinds) as started:
        for kind in kinds:
            started.await_waiting(kind)
            sent = time.monotonic()
            started.tell_last("abort")
            for rank in range(2):
                told = started.hear(rank)
                assert told["ended"] == "Aborted" and "rank 2 called World::abort()" in told["text"], told
                assert (told["peer"], told["phase"]) == (2, "abort")
                assert told["at"] - sent < 10 * ANSWER_ON_A_BUSY_MACHINE
            for rank in range(2):
                assert started.hear(rank)["again"].startswith("Aborted")


# ------------------------------------------------------------------------- ranks that are threads


@contextlib.contextmanager
def handler(number, function):
    before = signal.signal(number, function)
    try:
        yield
    finally:
        signal.signal(number, before)


@contextlib.contextmanager
def signalled(number, after=0.2):
    """Sends this process a signal in a while."""
    timer = threading.Timer(after, os.kill, (os.getpid(), number))
    timer.start()
    try:
        yield
    finally:
        timer.join()


def failure_of(call):
    try:
        call()
    except switchyard.Error as error:
        return error
    return None


def test_threads_of_an_interrupted_rank_are_told():
    worlds = World.threads(3, deadline=100)
    failures = []
    other = threading.Thread(target=lambda: failures.append(failure_of(worlds[1].barrier)))
    other.start()
    start = time.monotonic()
    with signalled(signal.SIGINT), pytest.raises(KeyboardInterrupt):
        worlds[0].barrier()
    other.join()
    assert time.monotonic() - start < 10
    assert isinstance(failures[0], switchyard.Aborted) and failures[0].peer == 0
    assert "rank 0 was interrupted" in str(failures[0])


def test_the_exception_has_the_traceback_of_its_handler():
    def raises(*_):
        raise LookupError("of a handler")

    worlds = World.threads(2, deadline=100)
    with handler(signal.SIGUSR1, raises), signalled(signal.SIGUSR1):
        with pytest.raises(LookupError, match="of a handler") as found:
            worlds[0].barrier()
    assert any(entry.name == "raises" for entry in found.traceback)


def test_another_thread_waits_on():
    worlds = World.threads(2, deadline=100)
    results = []

    def barrier():
        results.append(failure_of(worlds[1].barrier))

    other = threading.Thread(target=barrier)
    other.start()
    with signalled(signal.SIGINT), pytest.raises(KeyboardInterrupt):
        time.sleep(10)
    time.sleep(0.2)
    assert other.is_alive()
    worlds[0].barrier()
    other.join()
    assert results == [None]


def test_a_handler_may_abort_the_world():
    worlds = World.threads(2, deadline=100)
    with handler(signal.SIGUSR1, lambda *_: worlds[0].abort()), signalled(signal.SIGUSR1):
        with pytest.raises(switchyard.Aborted, match="rank 0 called World::abort"):
            worlds[0].barrier()


def test_a_handler_may_not_wait():
    worlds = World.threads(2, deadline=100)
    refusals = []

    def waits(*_):
        refusals.append(failure_of(worlds[0].barrier))
        threading.Thread(target=worlds[1].barrier).start()

    with handler(signal.SIGUSR1, waits), signalled(signal.SIGUSR1):
        worlds[0].barrier()
    assert isinstance(refusals[0], switchyard.InvalidArgument) and "handler of a signal" in str(refusals[0])


@pytest.mark.parametrize("what", ["wait", "barrier"])
def test_a_handler_may_close_what_waits(what):
    worlds = World.threads(2, deadline=100)
    made = [None, None]

    def make(rank):
        made[rank] = SymmetricHeap(worlds[rank], 1 << 12)

    other = threading.Thread(target=make, args=(1,))
    other.start()
    make(0)
    other.join()
    heap = made[0]
    flag = heap.empty(1, "int64")

    def closes(*_):
        heap.close()
        raise LookupError("closed")

    with handler(signal.SIGUSR1, closes), signalled(signal.SIGUSR1), pytest.raises(LookupError, match="closed"):
        heap.wait(flag, 1, 1) if what == "wait" else heap.barrier()
    assert heap.closed


def test_a_child_of_fork_answers_too():
    """Its main thread may be another one than the parent's."""
    status = []

    def forks():
        child = os.fork()
        if child == 0:
            code = 1
            try:
                threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
                worlds = World.threads(2, deadline=20)
                worlds[0].barrier()
            except KeyboardInterrupt:
                code = 0
            finally:
                os._exit(code)
        status.append(os.waitpid(child, 0)[1])

    thread = threading.Thread(target=forks)
    thread.start()
    thread.join()
    assert status == [0]


def test_a_pass_of_one_rank_is_as_before():
    """A signal during a call that waits for nobody is handled afterwards."""
    layer = switchyard.Experts(torch.randn(4, 64, 32), torch.randn(4, 32, 32), top_k=2, max_tokens=64)
    x, ids = torch.randn(64, 32), torch.tensor([[0, 3]] * 64)
    with pytest.raises(KeyboardInterrupt), signalled(signal.SIGINT, 0.1):
        while True:
            layer(x, ids, torch.ones(64, 2))
    assert layer(x, ids, torch.ones(64, 2)).shape == (64, 32)
