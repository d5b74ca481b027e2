"""Worlds: threads, processes, groups of torch.distributed."""

import os
import socket
import subprocess
import sys

import pytest
import torch

from conftest import python, run_ranks, started
import switchyard
from reference import error, experts, routing
from switchyard import Activation, Experts, Placement, World

E, I, H, K = 7, 32, 64, 2


def test_single():
    world = World.single(deadline=3)
    assert (world.rank, world.size, world.deadline) == (0, 1, 3.0)
    world.barrier()
    world.close()
    world.close()
    with pytest.raises(switchyard.InvalidArgument, match="closed"):
        world.barrier()


def test_worlds_that_make_no_sense():
    with pytest.raises(switchyard.InvalidArgument):
        World.threads(0)
    with pytest.raises(switchyard.InvalidArgument, match="deadline"):
        World.single(deadline=-1)


def test_network_options_that_make_no_sense():
    name = f"test_world {os.getpid()}"
    for options, message in (
        ({"network_chunk_bytes": 100}, "chunk_bytes is 100; use 2048"),
        ({"network_chunk_bytes": 2080}, "multiple of 64"),
        ({"network_chunk_bytes": 2**32}, "network_chunk_bytes is 4294967296"),
        ({"network_window": 32769}, "window is 32769; use 1 to 32768"),
        ({"network_window": -1}, "network_window is -1"),
    ):
        with pytest.raises(switchyard.InvalidArgument, match=message):
            World.processes(0, 1, rendezvous=name, **options)
    assert World.processes(0, 1, rendezvous=name, network_chunk_bytes=2048, network_window=1).size == 1
    assert World.from_env(network_window=2).size == 1


def test_ranks_share_experts():
    gate, up = torch.randn(2, E, I, H) / 8
    down = torch.randn(E, H, I) / 6
    w13 = torch.cat((gate, up), dim=1)
    tokens = [5, 0, 11]
    x = [torch.randn(t, H) for t in tokens]
    routings = [routing(t, E, K) if t else (torch.empty(0, K).long(), torch.empty(0, K)) for t in tokens]

    def body(world):
        # A rank needs its own experts only.
        own = world.own_experts(E)
        assert len(own) in (2, 3)
        layer = Experts(
            w13[own.start : own.stop], down[own.start : own.stop], top_k=K, max_tokens=16,
            placement=Placement(num_experts=E, world=world, num_threads=1),
        )
        outs = [layer(x[world.rank], *routings[world.rank]) for _ in range(3)]
        assert all(torch.equal(out, outs[0]) for out in outs)
        return outs[0], layer.stats().tokens_per_expert

    results, failures = run_ranks(World.threads(3), body)
    assert failures == [None] * 3
    counts = sum(torch.bincount(ids.flatten(), minlength=E) for ids, _ in routings).tolist()
    for (out, seen), part, r in zip(results, x, routings):
        assert list(seen) == counts
        if len(part):
            assert error(out, experts(part, gate, up, down, *r, Activation())) < 1e-5


def test_ranks_that_disagree():
    def body(world):
        count = 2
        return Experts(
            torch.zeros(count, 2 * I, H), torch.zeros(count, H, I), top_k=1 + world.rank,
            placement=Placement(num_experts=4, world=world),
        )

    _, failures = run_ranks(World.threads(2), body)
    assert all(isinstance(failure, switchyard.SpecMismatch) for failure in failures)
    assert "top_k" in str(failures[0])


def test_a_rank_that_does_not_come_is_named():
    def body(world):
        layer = Experts(
            torch.zeros(2, 2 * I, H), torch.zeros(2, H, I), top_k=1, max_tokens=4,
            placement=Placement(num_experts=4, world=world),
        )
        x, ids = torch.zeros(2, H), torch.tensor([[0], [3]])
        layer(x, ids, torch.ones(2, 1))
        if world.rank == 0:
            layer(x, ids, torch.ones(2, 1))

    _, failures = run_ranks(World.threads(2, deadline=0.3), body)
    failure = failures[0]
    assert isinstance(failure, switchyard.Timeout) and isinstance(failure, TimeoutError)
    assert (failure.waiter, failure.peer, failure.epoch) == (0, 1, 2)
    assert failure.phase and failure.code == "timeout"


def test_abort_ends_the_waits_of_all_ranks():
    def body(world):
        if world.rank == 0:
            world.abort()
        world.barrier()

    _, failures = run_ranks(World.threads(3, deadline=100), body)
    for failure in failures:
        assert isinstance(failure, switchyard.Aborted) and isinstance(failure, TimeoutError)
        assert failure.phase == "abort"
    assert {failures[1].peer, failures[2].peer} == {0}


def test_experts_of_all_ranks_must_be_told():
    with pytest.raises(switchyard.InvalidArgument, match="num_experts"):
        Experts(torch.zeros(2, 2 * I, H), torch.zeros(2, H, I), top_k=1, placement=Placement(world=World.threads(2)[0]))


GROUP = """
import os, sys, torch, torch.distributed as dist, switchyard
dist.init_process_group("gloo")
rank = dist.get_rank()
# Ranks 1 and 2 of three make a world of their own, over a subgroup.
group = dist.new_group([1, 2])
if rank == 0:
    try:
        switchyard.World.from_process_group(group)
    except switchyard.InvalidArgument:
        print("rank 0 is outside")
else:
    world = switchyard.World.from_process_group(group, deadline=60)
    assert (world.rank, world.size) == (rank - 1, 2)
    world.barrier()
    torch.manual_seed(0)
    w13, w2 = torch.randn(4, 64, 32) / 6, torch.randn(4, 32, 32) / 6
    x, ids, weights = torch.randn(5, 32), torch.tensor([[0, 3]] * 5), torch.ones(5, 2)
    mine = slice(2 * world.rank, 2 * world.rank + 2)
    layer = switchyard.Experts(w13[mine], w2[mine], top_k=2, placement=switchyard.Placement(num_experts=4, world=world, num_threads=1))
    out = layer(x, ids, weights)
    alone = switchyard.Experts(w13, w2, top_k=2)(x, ids, weights)
    assert torch.allclose(out, alone, atol=1e-5)
    print("rank", rank, "agrees")
whole = switchyard.World.from_process_group(deadline=60)
assert (whole.rank, whole.size) == (rank, 3)
whole.barrier()
group = None  # its threads end with it: test_gloo.py says why that matters
dist.destroy_process_group()
"""


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def test_process_group():
    port = str(free_port())
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", GROUP],
            env=os.environ | {"RANK": str(r), "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for r in range(3)
    ]
    outputs = [rank.communicate(timeout=300) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0, 0], outputs
    assert "rank 0 is outside" in outputs[0][0]
    assert "rank 1 agrees" in outputs[1][0] and "rank 2 agrees" in outputs[2][0]


# A rank of a group over two network namespaces. Arguments: ranks without the launcher's secret, how
# they find torch's store, and MASTER_ADDR from then on.
HOSTS = """
import os, sys, torch, torch.distributed as dist, switchyard
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
without, store, address = sys.argv[1:]
if str(rank) in without:
    del os.environ["SWITCHYARD_SECRET"]
if store == "env":
    os.environ["MASTER_PORT"] = "29123"
    dist.init_process_group("gloo")
else:
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=size)
if address:
    os.environ["MASTER_ADDR"] = address
else:
    del os.environ["MASTER_ADDR"]
before = dict(os.environ)

def agree(world):
    torch.manual_seed(0)
    w13, w2 = torch.randn(8, 64, 32) / 6, torch.randn(8, 32, 32) / 6
    x = torch.randn(5, 32)
    ids, weights = torch.tensor([[0, 3], [7, 1], [2, 6], [4, 5], [6, 0]]), torch.ones(5, 2)
    own = world.own_experts(8)
    layer = switchyard.Experts(
        w13[own.start : own.stop], w2[own.start : own.stop], top_k=2,
        placement=switchyard.Placement(num_experts=8, world=world, num_threads=1),
    )
    assert torch.equal(layer(x, ids, weights), switchyard.Experts(w13, w2, top_k=2)(x, ids, weights))

try:
    world = switchyard.World.from_process_group(deadline=100, network_window=2)
    assert (world.rank, world.size) == (rank, size)
    assert "2 hosts" in world.fabric, world.fabric
    agree(world)
    group = dist.new_group([1, 3]) if size == 4 else None  # one rank of each host
    if group is not None and rank in (1, 3):
        part = switchyard.World.from_process_group(group, deadline=100)
        assert (part.rank, part.size) == (rank // 2, 2)
        agree(part)
    said = "agrees"
except switchyard.Error as error:
    said = f"{type(error).__name__} {error}"
sys.stdout.write(f"rank {rank} {said}\\n")  # at once: ranks share the pipe
assert dict(os.environ) == before  # no secret is left in it
dist.barrier()
group = None
dist.destroy_process_group()
"""


def run_over_hosts(size, without, store, address):
    """What the ranks said, half of which are on each of two hosts."""
    launch = [sys.executable, "-m", "switchyard", "launch", "-n", str(size), "--namespaces", "2", "--"]
    probe = started(*launch, "true", timeout=60)
    if probe.returncode != 0:
        pytest.skip("no network namespaces: " + probe.stderr.strip()[:200])
    done = started(*launch, sys.executable, "-c", HOSTS, without, store, address, GLOO_SOCKET_IFNAME="eth0")
    if "joins ranks of one host only" in done.stdout:
        pytest.skip("this build of Switchyard joins ranks of one host only")
    assert done.returncode == 0, done.stderr + done.stdout
    return done.stdout


@pytest.mark.parametrize(
    ("size", "without", "store", "address"),
    [
        (4, "0123", "env", "10.77.0.1"),  # a fresh secret
        (2, "none", "env", "10.77.0.1"),  # the environment's
        (2, "01", "tcp://10.77.0.1:29123", ""),  # the address is that of torch's store
        (2, "01", "file", "10.77.0.2"),  # the address is the one on the way to another host
    ],
)
def test_process_group_over_hosts(size, without, store, address, tmp_path):
    said = run_over_hosts(size, without, f"file://{tmp_path}/store" if store == "file" else store, address)
    for rank in range(size):
        assert f"rank {rank} agrees" in said, said


def test_process_group_over_hosts_where_some_have_a_secret():
    said = run_over_hosts(2, "1", "env", "10.77.0.1")
    for rank in range(2):
        assert f"rank {rank} InvalidArgument" in said, said
    assert said.count("rank 1 of 2 has neither") == 2


def test_process_group_over_hosts_without_an_address(tmp_path):
    said = run_over_hosts(2, "01", f"file://{tmp_path}/store", "127.0.0.1")
    for rank in range(2):
        assert f"rank {rank} InvalidArgument rank 0 of the group:" in said, said
    assert said.count("set MASTER_ADDR") == 2 and "127.0.0.1" in said


def test_addresses_of_rank_0():
    from switchyard import _world

    useless = [("no-such-host.invalid", False), ("127.0.0.1", True), ("localhost", True)]
    with pytest.raises(switchyard.InvalidArgument, match="set MASTER_ADDR"):
        _world._own_address(useless)
    for address, written in (("10.0.0.1", "10.0.0.1"), ("node1", "node1"), ("fd00::1", "[fd00::1]")):
        rendezvous, kept = _world._keep_port(address)
        with kept:
            assert rendezvous == f"tcp://{written}:{kept.getsockname()[1]}"
            # The library listens at a port that nobody listens at yet.
            other = socket.socket(kept.family)
            with other:
                other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                other.bind(kept.getsockname())
                other.listen()


def test_secrets_that_make_no_sense():
    for secret, message in (("short", "has 5 bytes"), ("a zero byte \0 in it", "zero byte")):
        with pytest.raises(switchyard.InvalidArgument, match=message):
            World.processes(0, 2, rendezvous="tcp://127.0.0.1:29124", secret=secret, deadline=1)


def test_process_group_that_is_not_there():
    with pytest.raises(switchyard.InvalidArgument, match="init_process_group"):
        World.from_process_group()


def test_from_env_of_the_launcher():
    script = "import switchyard; w = switchyard.World.from_env(); w.barrier(); print(w)"
    done = python("-m", "switchyard", "launch", "-n", "2", "--", sys.executable, "-c", script)
    assert "rank 0 of 2" in done.stdout and "rank 1 of 2" in done.stdout
