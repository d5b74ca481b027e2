"""Layers over ranks beside all-reduces on another stream, in an order that every rank draws for itself.

    nccl_ranks.py [--seconds 10] [--seed 1] [--reserved-sms 2] [--tokens 300] [--cpu]

A GPU launches kernels in the order of its ranks' calls where it has no room for both. So a rank whose layer is
launched before its all-reduce waits in the layer for a rank that may wait in the all-reduce. Every round, each rank
calls some passes, some replays of a graph and some all-reduces in its own order, and waits for none before all
are called. Ranks have other numbers of tokens, one of them none, and one may replay a graph where the other calls the
layer. Layers and all-reduces have the same results as alone, or the script fails. With --cpu ranks are on
the processor, with Gloo in place of NCCL.
"""

import argparse
import contextlib
import datetime
import functools
import os
import random
import tempfile
import time

import torch
import torch.distributed as dist
import torch.multiprocessing

from reference import error, experts, routing
from switchyard import Activation, Diagnostics, Experts, Placement, World

RANKS, E, H, I, K = 2, 8, 512, 256, 2
IN_GRAPHS = 8  # tokens


class Passes:
    """A layer, batches of some sizes, and what each must become."""

    def __init__(self, rank, device, args):
        torch.manual_seed(args.seed)
        world = World.from_process_group(deadline=args.deadline)
        w13, w2 = torch.randn(E, 2 * I, H) / H**0.5, torch.randn(E, H, I) / I**0.5
        w13, w2 = (w.to(device, torch.bfloat16) for w in (w13, w2))
        own = world.own_experts(E)
        here = slice(own.start, own.stop)
        self.layer = Experts(
            w13[here].clone(), w2[here].clone(), top_k=K, max_tokens=args.tokens,
            placement=Placement(
                world=world, num_experts=E, reserved_sms=args.reserved_sms, num_threads=1 if args.cpu else 0
            ),
            diagnostics=Diagnostics(deadline=args.deadline),
        )
        torch.manual_seed(args.seed + 1 + rank)
        others = [0, 1, args.tokens // 3, args.tokens]
        sizes = [IN_GRAPHS, *others[rank:], *others[:rank]]
        self.batches, self.out, self.right = [], [], []
        for tokens in sizes:
            x = torch.randn(tokens, H).to(device, torch.bfloat16)
            ids, weights = (t.to(device) for t in routing(tokens, E, K))
            self.batches.append((x, ids, weights))
            self.out.append(torch.full_like(x, torch.nan))
        for i in range(len(sizes)):
            self.run(i)
        for batch, out in zip(self.batches, self.out, strict=True):
            few = [t[:IN_GRAPHS].cpu() for t in batch]
            if len(few[0]):
                exact = experts(few[0], *w13.cpu().chunk(2, 1), w2.cpu(), *few[1:], Activation())
                assert error(out[:IN_GRAPHS].cpu(), exact) < 0.02
            self.right.append(out.clone())
        self.graph = None
        if device.type == "cuda":
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph, capture_error_mode="thread_local"):  # NCCL has threads of its own
                self.run(0)

    def run(self, i):
        self.layer(*self.batches[i], out=self.out[i])

    def replay(self):
        if self.graph is None:
            self.run(0)
        else:
            self.graph.replay()

    def check(self, i):
        assert torch.equal(self.out[i], self.right[i]), f"a pass of {len(self.out[i])} tokens has other bits"
        self.out[i].fill_(torch.nan)


class Sums:
    """All-reduces of whole numbers, on a stream of their own."""

    def __init__(self, device):
        self.on_stream = contextlib.nullcontext()
        if device.type == "cuda":
            self.on_stream = torch.cuda.stream(torch.cuda.Stream())
        self.values = [torch.empty(size, device=device) for size in (1, 1000, 1 << 16, 1 << 22)]

    def call(self, i, rank, number):
        with self.on_stream:
            self.values[i].fill_(number + rank)
            return dist.all_reduce(self.values[i], async_op=True)

    def check(self, i, number):
        assert bool((self.values[i] == RANKS * number + 1).all()), f"all-reduce {i} has a wrong sum"


def round_of(rank, device, passes, sums, order, shared, number):
    """The same work on each rank, in other orders: NCCL's own calls, and the layer's, keep theirs."""
    # An output is there once a round, so that it can be looked at.
    layers = list(dict.fromkeys(shared.randrange(len(passes.batches)) for _ in range(shared.randint(1, 6))))
    reduces = list(dict.fromkeys(shared.randrange(len(sums.values)) for _ in range(shared.randint(1, 4))))
    left = iter([
        passes.replay if i == 0 and order.random() < 0.5 else functools.partial(passes.run, i) for i in layers
    ])  # fmt: skip
    waiting = iter([functools.partial(sums.call, i, rank, number) for i in reduces])
    calls = [left] * len(layers) + [waiting] * len(reduces)
    order.shuffle(calls)
    for work in [next(call)() for call in calls]:
        if work is not None:
            work.wait()
    if device.type == "cuda":
        torch.cuda.synchronize()
    for i in layers:
        passes.check(i)
    for i in reduces:
        sums.check(i, number)
    return len(layers), len(reduces)


def in_a_rank(rank, args, rendezvous):
    device = torch.device("cpu") if args.cpu else torch.device("cuda", rank)
    if not args.cpu:
        torch.cuda.set_device(device)
    dist.init_process_group(
        "gloo" if args.cpu else "nccl", init_method=rendezvous, rank=rank, world_size=RANKS,
        timeout=datetime.timedelta(seconds=60), device_id=None if args.cpu else device,
    )
    passes, sums = Passes(rank, device, args), Sums(device)
    shared, order = random.Random(args.seed), random.Random(f"{args.seed} {rank}")
    done, number = [0, 0], 0
    end = time.monotonic() + args.seconds
    more = torch.ones(1, device=device)
    while more.item():
        for _ in range(20):
            number += 1
            found = round_of(rank, device, passes, sums, order, shared, number % 1000)
            done = [a + b for a, b in zip(done, found, strict=True)]
        more.fill_(time.monotonic() < end)
        dist.all_reduce(more, op=dist.ReduceOp.MIN)
    if rank == 0:
        print(f"agrees: {number} rounds, {done[0]} passes of a layer and {done[1]} all-reduces a rank", flush=True)
    dist.destroy_process_group()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=10)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--reserved-sms", type=int, default=2, help="and as many for NCCL (default: 2)")
    parser.add_argument("--tokens", type=int, default=300)
    parser.add_argument("--deadline", type=float, default=20.0, help="seconds")
    parser.add_argument("--cpu", action="store_true")
    args = parser.parse_args()
    if args.cpu:
        args.reserved_sms = 0
    else:
        os.environ["NCCL_MAX_CTAS"] = str(args.reserved_sms)
    with tempfile.TemporaryDirectory() as directory:
        torch.multiprocessing.spawn(in_a_rank, (args, f"file://{directory}/rendezvous"), nprocs=RANKS)


if __name__ == "__main__":
    main()
