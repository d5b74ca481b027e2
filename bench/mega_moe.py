#!/usr/bin/env python3
"""sgl-deep-gemm's SM90 mega MoE (FP8, one kernel) at the points of suite ep_fp8, a process for each GPU.

    mega_moe.py --ranks 4 --json FILE [--models v4-flash-routed,v3-routed] [--tokens 1,8,64] [--routing FOLDER]

Timed as `switchyard bench` times ours: passes in a CUDA graph over copies of the weights in turn, so that no
weight is read from the cache; a pass that is not timed goes ahead, so that ranks begin together; the slowest
rank's time of each repetition. Experts are chosen evenly at random, or are those that `switchyard bench
layers --routing-to FOLDER` wrote: with few tokens the rank with most experts decides. Two ways:

- anew: the input is bf16 and quantised in every pass (mega_moe_pre_dispatch_sm90), as our layer does.
- in place: the quantised input lies in the kernel's buffer already. Less work than ours.

A point's time is that of the fastest right way to call the kernel anew; the script tells which ways are wrong. The kernel
is compiled for the size of its buffer: for 8192 tokens, for 512, and for no more than there are (to the next 128).
Newer versions (0.2.5) are also told how many tokens there are at most (num_tokens_bound), which chooses the schedule
instead of the buffer's size, and begin a kernel before the one ahead of it ends (set_pdl), as SGLang has it. Before
a model's first pass each rank compiles a share of its kernels; DG_JIT_CACHE_DIR keeps them. Outputs of some tokens
are compared with fp32 on dequantised weights.
"""

import importlib.metadata
import inspect
import pathlib
import statistics
import sys
import time
import typing

import rank_processes
import torch
import torch.distributed as dist
from result_rows import percentile, write
from script_arguments import command_of, numbers, parser_of
from torch_chain import replay_of

MODELS = {  # hidden, intermediate, experts, top-k: as in lab/bench/suite.cpp
    "v4-flash-routed": (4096, 2048, 256, 6),
    "v4-pro-routed": (7168, 3072, 384, 6),
    "v3-routed": (7168, 2048, 256, 8),
    "glm-5-routed": (6144, 2048, 256, 8),
}
TOKENS = [1, 8, 64, 256, 512, 1024, 2048, 4096, 8192]
F8 = torch.float8_e4m3fn
COPIES, PASSES = 3, 9
BOUND = 0.1  # of the error over the norm: both inputs of both products are in E4M3
PACKAGE = "sgl-deep-gemm"
STEP = 128  # buffers are for so many tokens, or a multiple


def random_weights(experts, n, k):
    values = torch.empty((experts, n, k), dtype=F8, device="cuda")
    for e in range(experts):
        values[e] = torch.randn((n, k), device="cuda").to(F8)
    scales = (0.5 + torch.rand((experts, n // 128, k // 128), device="cuda")) * k**-0.5
    return values, scales


def dequantised(values, scales):
    return values.float() * scales.repeat_interleave(128, 0).repeat_interleave(128, 1)


class Layer:
    def __init__(self, dg, shape, rank, ranks):
        self.hidden, self.intermediate, self.experts, self.top_k = shape
        each = self.experts // ranks
        self.first = rank * each
        torch.manual_seed(rank + 1)
        self.up = random_weights(each, 2 * self.intermediate, self.hidden)
        self.down = random_weights(each, self.hidden, self.intermediate)
        first, _ = dg.transform_weights_for_mega_moe_sm90(self.up, self.down)
        self.copies = [(first, self.down)]
        while len(self.copies) < COPIES:
            self.copies.append(tuple(tuple(t.clone() for t in pair) for pair in self.copies[0]))

    def matrix(self, which, e):
        return dequantised(which[0][e], which[1][e])

    def expected(self, x, ids, weights, ranks):
        """All ranks' sampled tokens through this rank's experts, summed over ranks. Returns [R, s, H] in fp32."""
        xs, all_ids, all_weights = (torch.empty((ranks, *t.shape), dtype=t.dtype, device="cuda") for t in (x, ids, weights))
        for everyone, mine in ((xs, x), (all_ids, ids), (all_weights, weights)):
            dist.all_gather_into_tensor(everyone.flatten(0, 1), mine)
        out = torch.zeros(xs.shape, device="cuda")
        for e in range(self.experts // ranks):
            where = (all_ids == self.first + e).nonzero()
            if len(where) == 0:
                continue
            rows = xs[where[:, 0], where[:, 1]].float()
            gate, up = (rows @ self.matrix(self.up, e).t()).chunk(2, 1)
            y = (torch.nn.functional.silu(gate) * up) @ self.matrix(self.down, e).t()
            out.index_put_((where[:, 0], where[:, 1]), y * all_weights[where[:, 0], where[:, 1], where[:, 2]].unsqueeze(1),
                           accumulate=True)
        dist.all_reduce(out)
        return out


class Way(typing.NamedTuple):
    """To call the kernel: the tokens that the buffer holds, and the most that this call may have, if it is told."""

    capacity: int
    bound: int | None

    def __str__(self):
        return f"{self.capacity}" if self.bound is None else f"{self.capacity}, bound {self.bound}"


def rounded(tokens):
    return -(-tokens // STEP) * STEP


def ways_of(tokens, capacities, bounded):
    """Of a call with so many tokens. bounded: whether the kernel can be told the most."""
    ways = []
    for capacity in sorted({*capacities, rounded(tokens)}):
        if capacity >= tokens:
            ways += [Way(capacity, bound) for bound in [None, tokens][: 2 if bounded and tokens < capacity else 1]]
    return ways


class Call:
    def __init__(self, dg, layer, buffer, way, batch):
        self.dg, self.layer, self.buffer, self.batch = dg, layer, buffer, batch
        self.bound = {} if way.bound is None else {"num_tokens_bound": way.bound}
        self.y = torch.empty_like(batch.x)

    def stage(self):
        b, batch = self.buffer, self.batch
        self.dg.mega_moe_pre_dispatch_sm90(batch.x, batch.ids, batch.weights, b.x, b.x_sf, b.topk_idx, b.topk_weights,
                                           len(batch.x))

    def kernel(self, copy):
        up, down = self.layer.copies[copy % COPIES]
        self.dg.fp8_mega_moe(self.y, up, down, self.buffer, **self.bound)

    def anew(self, copy):
        self.stage()
        self.kernel(copy)


def compile_share(calls, rank, ranks):
    """Compiles a rank's share of the kernels, which the others then find in the cache: captured calls do not run.
    Neighbours in `calls` are of one size and often one kernel, so they are of one share."""
    try:
        with torch.cuda.graph(torch.cuda.CUDAGraph(), capture_error_mode="relaxed"):
            for call in calls[rank * len(calls) // ranks : (rank + 1) * len(calls) // ranks]:
                call.anew(0)
    except RuntimeError as problem:
        print(f"rank {rank} compiles when it calls: {problem}", flush=True)
    torch.cuda.synchronize()
    dist.barrier()


def graph_of(run):
    return replay_of(run, run, errors="thread_local")  # NCCL has threads of its own


def repeats_of(us):
    return int(min(60, max(12, 60e3 / (us * PASSES))))


def timed(call):
    """Microseconds of a pass in each repetition, of the slowest rank."""
    def run():
        for i in range(PASSES):
            call(i)

    ahead, replay = graph_of(lambda: call(0)), graph_of(run)
    times, repeats = [], 3
    while len(times) < repeats:
        dist.barrier()
        torch.cuda.synchronize()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        ahead()
        begin.record()
        replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / PASSES)
        if len(times) == 3 and repeats == 3:  # a pilot: how many there are to be, the same on all ranks
            worst = torch.tensor(statistics.median(times), device="cuda")
            dist.all_reduce(worst, op=dist.ReduceOp.MAX)
            times, repeats = [], repeats_of(worst.item())
    slowest = torch.tensor(times, dtype=torch.float64, device="cuda")
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return slowest.tolist()


class Batch:
    """Random tokens of a rank, their routing, and what the first of them should become."""

    def __init__(self, layer, tokens, rank, ranks, routing=None):
        torch.manual_seed(1000 * tokens + rank)
        self.x = torch.randn((tokens, layer.hidden), device="cuda").bfloat16()
        if routing is None:
            self.ids = torch.rand((tokens, layer.experts), device="cuda").topk(layer.top_k).indices.to(torch.int32).contiguous()
        else:
            everyone = torch.from_file(str(routing), size=ranks * tokens * layer.top_k, dtype=torch.int32)
            self.ids = everyone.view(ranks, tokens, layer.top_k)[rank].cuda().contiguous()
        self.weights = torch.rand((tokens, layer.top_k), device="cuda")
        first = [t[: min(tokens, 2)].contiguous() for t in (self.x, self.ids, self.weights)]
        self.expected = layer.expected(*first, ranks)[rank]

    def error(self, y):
        """Relative, of the worst rank; infinite if anything in y is not finite."""
        error = (y[: len(self.expected)].float() - self.expected).norm() / self.expected.norm()
        error = torch.where(y.isfinite().all(), error, torch.tensor(float("inf"), device="cuda"))
        error = torch.nan_to_num(error, nan=float("inf"), posinf=float("inf"))
        dist.all_reduce(error, op=dist.ReduceOp.MAX)
        return error.item()


def measure(calls, batch):
    """{way: (times anew, error)} of the right ways, the times in place of the fastest, and the errors of the wrong ways."""
    right, wrong = {}, {}
    for way, call in calls.items():
        call.y.fill_(float("nan"))
        call.anew(0)
        torch.cuda.synchronize()
        error = batch.error(call.y)
        if error <= BOUND:
            right[way] = timed(call.anew), error
        else:
            wrong[way] = error
    if not right:
        return right, [], wrong
    call = calls[fastest(right)]
    call.stage()
    return right, timed(call.kernel), wrong


def fastest(right):
    return min(right, key=lambda way: statistics.median(right[way][0]))


def start_rank(rank, args, rendezvous):
    """Joins the ranks. Returns the machine, as rows tell it."""
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", init_method=f"file://{rendezvous}", rank=rank, world_size=args.ranks,
                            device_id=torch.device("cuda", rank))
    return rank_processes.gpus(args.ranks)


def row_of(args, machine, model, dtype, tokens, rival, times, error):
    hidden, intermediate, experts, top_k = MODELS[model]
    return {
        "suite": "ep_" + dtype, "machine": machine, "command": args.command, "model": model, "hidden": hidden,
        "intermediate": intermediate, "experts": experts, "top_k": top_k, "dtype": dtype, "compute": dtype,
        "ranks": args.ranks, "tokens_per_rank": tokens, "beta": 1.0, "rival": rival,
        "rival_us": round(statistics.median(times), 2), "rival_p10_us": round(percentile(times, 0.1), 2),
        "rival_p90_us": round(percentile(times, 0.9), 2), "rival_error": error,
        "rival_times_us": [round(t, 2) for t in times],
    }


def rank_main(rank, args, rendezvous):
    import deep_gemm as dg

    machine = start_rank(rank, args, rendezvous)
    name = f"{PACKAGE} {importlib.metadata.version(PACKAGE)}"
    bounded = "num_tokens_bound" in inspect.signature(dg.fp8_mega_moe).parameters
    if bounded:  # the kernel of older versions does not wait for the one ahead of it
        dg.set_pdl(True)
    rows, wrong_points, began = [], 0, time.monotonic()

    def tell(text):
        if rank == 0:
            print(f"{text}  at {time.monotonic() - began:.0f} s", flush=True)

    tell(f"{name} on {machine}")
    for model in args.models:
        hidden, intermediate, experts, top_k = MODELS[model]
        layer = Layer(dg, MODELS[model], rank, args.ranks)
        ways = {tokens: ways_of(tokens, args.capacities, bounded) for tokens in args.tokens}
        buffers = {capacity: dg.get_symm_buffer_for_sm90_mega_moe(dist.group.WORLD, experts, capacity, top_k, hidden,
                                                                  intermediate)
                   for capacity in sorted({way.capacity for each in ways.values() for way in each})}
        points = {}
        for tokens, each in ways.items():
            routing = args.routing / f"{model}-fp8-{args.ranks}x{tokens}.i32" if args.routing else None
            batch = Batch(layer, tokens, rank, args.ranks, routing)
            points[tokens] = batch, {way: Call(dg, layer, buffers[way.capacity], way, batch) for way in each}
        tell(f"{model}: weights, buffers and batches")
        calls = [(way.capacity, tokens, call) for tokens, (_, each) in points.items() for way, call in each.items()]
        compile_share([call for _, _, call in sorted(calls, key=lambda entry: entry[:2])], rank, args.ranks)
        tell(f"{model}: compiled")
        for tokens, (batch, each) in points.items():
            right, in_place, wrong = measure(each, batch)
            medians = {str(way): round(statistics.median(times), 2) for way, (times, _) in right.items()}
            for way, error in wrong.items():
                wrong_points = 1
                tell(f"{model:<16} {tokens:>5} tokens  {way}: error {error:.2e} WRONG")
            if rank != 0 or not right:
                continue
            best = fastest(right)
            times, error = right[best]
            tell(f"{model:<16} {tokens:>5} tokens  anew {statistics.median(times):>9.1f} us  in place "
                 f"{statistics.median(in_place):>9.1f} us  error {error:.2e}  of {best}  {medians}")
            rows.append(row_of(args, machine, model, "fp8", tokens, name, times, error) | {
                "rival_in_place_us": round(statistics.median(in_place), 2), "rival_way": str(best), "rival_by_way": medians})
            if args.json:
                write(args.json, rows)
        for buffer in buffers.values():
            buffer.destroy()
        del layer, buffers, points, calls, batch, each
        torch.cuda.empty_cache()
        dist.barrier()
    rank_processes.end(wrong_points)


def main():
    parser = parser_of(__doc__)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--models", type=lambda text: text.split(","), default=list(MODELS))
    parser.add_argument("--tokens", type=numbers, default=TOKENS)
    parser.add_argument("--capacities", type=numbers, default=[8192, 512])
    parser.add_argument("--routing", type=pathlib.Path, help="folder of `switchyard bench layers --routing-to`")
    parser.add_argument("--json", type=pathlib.Path)
    args = parser.parse_args()
    args.command = command_of("mega_moe.py", sys.argv[1:])
    rank_processes.require_no_multicast("mega_moe.py")
    return rank_processes.spawn(rank_main, args)


if __name__ == "__main__":
    sys.exit(main())
