"""What plugins of servers share under expert parallelism, on processes over gloo.

    serving_ranks.py passes|late|lost|lost_within|mistaken|stopped
"""

import datetime
import os
import pathlib
import signal
import sys
import tempfile
import time

import torch
import torch.distributed as dist
import torch.multiprocessing

import switchyard
from reference import error, experts, routing
from switchyard import _serving
from switchyard._serving import Binding, Options, Ranks

E, H, I, K, T = 7, 64, 32, 2, 9  # experts that two ranks do not share evenly


def in_a_group(rank, ranks, rendezvous, body):
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=ranks)
    torch.manual_seed(0)
    globals()[body](rank)
    os._exit(0)  # as bench/rank_processes.py ends ranks, and why


def passes(rank):
    ranks = Ranks.of(dist.group.WORLD)
    assert Ranks.of(dist.group.WORLD) is ranks and ranks.world.rank == rank
    assert ranks.world.deadline == _serving.FUSED_DEADLINE
    own = ranks.world.own_experts(E)
    expert_map = torch.full((E,), -1)
    expert_map[own.start : own.stop] = torch.arange(len(own))
    ranks.refuse_placement(E, expert_map)
    try:
        ranks.refuse_placement(E, expert_map.roll(1))
        raise AssertionError("other experts were taken")
    except switchyard.Unsupported as refusal:
        assert "linear placement" in str(refusal)
    w13, w2 = torch.randn(E, 2 * I, H) / H**0.5, torch.randn(E, H, I) / I**0.5
    mine = w13[own.start : own.stop].clone(), w2[own.start : own.stop].clone()

    def bound():
        return Binding(
            Options(num_threads=1), activation=switchyard.Activation(), order="gate_up", top_k=K, max_tokens=T,
            ranks=ranks, num_experts=E,
        )

    layers = [bound(), bound()]
    for layer in layers:
        layer.weights_loaded(*mine)
    assert len({layer._workspace for layer in layers}) == 1
    ranks.meet()
    for step in range(12):
        tokens = 0 if step % 3 == 2 * rank else (5 * step + 3 * rank) % (T + 1)
        x, (ids, weights) = torch.randn(tokens, H), routing(tokens, E, K)
        ids[::4] = -1
        for layer in layers:
            out = layer.bind(*mine, tokens=tokens)(x, ids, weights)
            _serving.check_passes()
            expected = experts(x, *w13.chunk(2, 1), w2, ids, weights, switchyard.Activation())
            assert out.shape == x.shape and (not tokens or error(out, expected) < 1e-5)
    try:
        layers[0].bind(*mine, tokens=T + 1)
        raise AssertionError("more tokens than a layer over ranks has room for")
    except switchyard.CapacityExceeded as refusal:
        assert f"more than max_tokens {T} of a layer over 2 ranks" in str(refusal)


def lost(rank):
    """Rank 1's process ends before a collective that is not Switchyard's."""
    ranks = Ranks.of(dist.group.WORLD)
    agree = ranks.meeting_first(dist.all_reduce)
    given = torch.ones(1)
    agree(given)
    assert given == 2
    try:
        agree("no tensor")
        raise AssertionError("a text was added up")
    except TypeError:
        pass  # the caller's own mistake
    if rank == 1:
        os._exit(0)
    names_rank_1(lambda: agree(given), switchyard.Aborted)
    os._exit(0)  # the group ends with both ranks


def lost_within(rank):
    """Rank 1's process ends when the ranks have met, in the collective."""
    ranks = Ranks.of(dist.group.WORLD)
    agree = ranks.meeting_first(lambda given: dist.all_reduce(given) if rank == 0 else os._exit(0))
    failure = names_rank_1(lambda: agree(torch.ones(1)), switchyard.Aborted)
    assert isinstance(failure.__cause__, RuntimeError)
    os._exit(0)


def mistaken(rank):
    """A failure of rank 0's own is nobody else's."""
    ranks = Ranks.of(dist.group.WORLD, deadline=2.0)
    store = dist.distributed_c10d._get_default_store()
    if rank == 1:
        ranks.meeting_first(lambda: None)()
        store.wait(["failed"], datetime.timedelta(seconds=60))
        return
    try:
        ranks.meeting_first(lambda: torch.ones(2) + torch.ones(3))()
        raise AssertionError("it did not fail")
    except RuntimeError as failure:
        assert "size of tensor" in str(failure), failure
    store.set("failed", "1")


def stopped(rank):
    """Rank 1's process stops before a collective that is not Switchyard's, whose own limit is half an hour."""
    ranks = Ranks.of(dist.group.WORLD, deadline=2.0)
    serves = [False]
    agree = ranks.meeting_first(dist.all_reduce, lambda: serves[0])
    if rank == 1:
        time.sleep(3)  # a rank that compiles may be late before they serve
    agree(torch.ones(1))
    serves[0] = True
    agree(torch.ones(1))
    store = dist.distributed_c10d._get_default_store()
    if rank == 1:
        store.set("process", str(os.getpid()))
        os.kill(os.getpid(), signal.SIGSTOP)
        os._exit(0)
    process = int(store.get("process"))
    names_rank_1(lambda: agree(torch.ones(1)), switchyard.Timeout)
    os.kill(process, signal.SIGCONT)
    os._exit(0)


def names_rank_1(collective, kind):
    start = time.monotonic()
    try:
        collective()
        raise AssertionError("rank 1 was there")
    except switchyard.Error as failure:
        assert type(failure) is kind and "rank 1" in str(failure), failure
        assert time.monotonic() - start < 10
        return failure


def late(rank):
    """Rank 1 does not come."""
    _serving.START_DEADLINE = 1.0
    if rank == 1:
        dist.distributed_c10d._get_default_store().wait(["missed"], datetime.timedelta(seconds=60))
        return
    try:
        Ranks.of(dist.group.WORLD)
        raise AssertionError("rank 1 came")
    except switchyard.Timeout as missed:
        assert "came within 1 s" in str(missed) and "anks 1 failed" in str(missed), missed
    dist.distributed_c10d._get_default_store().set("missed", "1")


def main():
    with tempfile.TemporaryDirectory() as directory:
        rendezvous = f"file://{pathlib.Path(directory) / 'rendezvous'}"
        torch.multiprocessing.spawn(in_a_group, (2, rendezvous, sys.argv[1]), nprocs=2)
    print("agrees")


if __name__ == "__main__":
    main()
