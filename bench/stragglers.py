#!/usr/bin/env python3
"""Late ranks: a layer of switchyard beside a synchronous chain of PyTorch and NCCL, under the same jitter.

    export PYTHONPATH=python SWITCHYARD_LIBRARY=build/src/c_api/libswitchyard_c.so
    export SWITCHYARD_COMMAND=build/src/cli/switchyard
    bench/stragglers.py [--ranks 2] [--jitter 0,200,1000] [--json stragglers.json]

Each rank is a process with a GPU of its own; --cpu has ranks on the processor, with Gloo in place of NCCL.
The layer is that of the FlashDMoE thesis (H 1024, I 4096, plain FFN with GELU and biases, top-2), in bf16.
Both ways read the same checkpoint and get the same tokens, and the gate is in the pass:

- switchyard: `MoeLayer`, one kernel per GPU.
- chain: gate, top-k, sort, an exchange of counts that the host reads, all_to_all_single, grouped products,
  all_to_all_single back, weighted sum; every step an operator of PyTorch, as frameworks have it.

Before each pass all ranks agree on a moment, and each rank waits from there for a random time of at most
--jitter microseconds. Both ways get the same draws, one pass of each in turn. A rank's pass begins when its
host is about to launch, and ends when its host has seen the stream's end; the clock is CLOCK_MONOTONIC, which
all processes of a host share. `times_us` are from the last rank's start to the last rank's end.

The output of every timed pass is compared with the layer in fp64, token by token, with twice the error of a
plain loop in bf16 as the bound. If one is wrong, no time is told or kept.

Exit codes: 0 done; 1 a result is wrong; 2 unusable arguments; 3 a rank failed or did not come in time;
77 there is no PyTorch, no safetensors or no switchyard.
"""

import dataclasses
import datetime
import math
import os
import pathlib
import random
import statistics
import subprocess
import sys
import tempfile
import time

from result_rows import merge, percentile
from script_arguments import command_of, numbers, parser_of

try:
    import torch
    import torch.distributed as dist
    from safetensors.torch import load_file

    import rank_processes
    import switchyard
    import torch_chain
    from rival_timing import Wrong
except ImportError as missing:
    print(f"stragglers: {missing}; install it, or set PYTHONPATH to python/", file=sys.stderr)
    sys.exit(77)

KEY = ("way", "machine", "hidden", "intermediate", "experts", "top_k", "ranks", "tokens_per_rank", "jitter_us")
LAYER = "model.layers.0.mlp."
WRONG, UNUSABLE, FAILED = 1, 2, 3


def read_checkpoint(directory):
    """{name: tensor} of all safetensors files."""
    tensors = {}
    for path in sorted(pathlib.Path(directory).glob("*.safetensors")):
        tensors |= load_file(path)
    return tensors


@dataclasses.dataclass
class Layer:
    """Weights of some of a layer's experts, in the form that torch_chain's functions take."""

    spec: torch_chain.Spec
    router: torch.Tensor  # [E, H]
    up: torch.Tensor  # [n, I, H]
    up_bias: torch.Tensor  # [n, I]
    down: torch.Tensor  # [n, H, I]
    down_bias: torch.Tensor  # [n, H]
    correction_bias: None = None


def load_layer(spec, tensors, experts, device):
    def stacked(name):
        return torch.stack([tensors[f"{LAYER}experts.{e}.{name}"] for e in experts]).to(device)

    return Layer(spec, tensors[LAYER + "gate.weight"].to(device), stacked("up_proj.weight"), stacked("up_proj.bias"),
                 stacked("down_proj.weight"), stacked("down_proj.bias"))


class Reference:
    """The layer in fp64, and what a plain loop in bf16 makes of it."""

    def __init__(self, spec, tensors, x):
        logits = x.double() @ tensors[LAYER + "gate.weight"].to(x.device).double().t()
        top, ids = logits.topk(spec.top_k + 1)
        weights = torch.softmax(top[:, : spec.top_k], -1)
        kept, next_best = top[:, -2], top[:, -1]
        gap = (kept - next_best) / torch.maximum(kept.abs(), next_best.abs())
        # As routing_margin_bound() of lab/run/verify.cpp: below it fp32 logits may decide either way.
        self.decided = gap >= 16 * 2.0**-24 * math.sqrt(spec.hidden)
        ids = ids[:, : spec.top_k]
        self.exact = self._loop(spec, tensors, x, ids, weights, torch.float64)
        self.bound = 2 * self.error(self._loop(spec, tensors, x, ids, weights, torch.bfloat16))

    @staticmethod
    def _loop(spec, tensors, x, ids, weights, dtype):
        out = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
        for expert in range(spec.experts):
            tokens, k = torch.nonzero(ids == expert, as_tuple=True)
            if tokens.numel() == 0:
                continue

            def of(name):
                return tensors[f"{LAYER}experts.{expert}.{name}"].to(x.device, dtype)

            v = torch_chain.activate(spec, x[tokens].to(dtype) @ of("up_proj.weight").t() + of("up_proj.bias"))
            y = v @ of("down_proj.weight").t() + of("down_proj.bias")
            out.index_add_(0, tokens, y.double() * weights[tokens, k].unsqueeze(1))
        return out

    def error(self, out):
        """Of the worst token, over its norm; NaN if a value is none."""
        if not self.decided.any():
            return 0.0
        difference = (out.double() - self.exact).norm(dim=1) / self.exact.norm(dim=1)
        return difference[self.decided].max().item()


class Ours:
    name = "switchyard"

    def __init__(self, spec, checkpoint, _tensors, x, args):
        self.world = switchyard.World.from_process_group(deadline=args.deadline)
        self.layer = switchyard.MoeLayer.from_checkpoint(
            checkpoint, 0, world=self.world, max_tokens=args.tokens, device=x.device)
        self.out = torch.empty_like(x)

    def poison(self):
        self.out.fill_(float("nan"))

    def run(self, x):
        self.layer(x, out=self.out)

    def check(self):
        self.layer.check()

    def close(self):
        self.layer.close()
        self.world.close()


class Chain:
    """Every step waits for all ranks that it exchanges with."""

    def __init__(self, spec, _checkpoint, tensors, x, args):
        self.name = f"{'NCCL' if x.is_cuda else 'Gloo'} chain"
        self.ranks, self.each = args.ranks, spec.experts // args.ranks
        first = dist.get_rank() * self.each
        self.layer = load_layer(spec, tensors, range(first, first + self.each), x.device)
        self.number = torch.arange(self.each, device=x.device).repeat(self.ranks)  # of experts, for each source
        self.returned = torch.empty((args.tokens * args.top_k, args.hidden), dtype=x.dtype, device=x.device)
        self.sums = torch.empty((args.tokens, 1, args.hidden), dtype=x.dtype, device=x.device)
        self.out = self.sums.squeeze(1)

    def poison(self):
        self.returned.fill_(float("nan"))
        self.sums.fill_(float("nan"))

    def products(self, rows, experts, ends):
        """The FFN of rows in the order of experts."""
        layer, spec = self.layer, self.layer.spec
        if not hasattr(torch, "_grouped_mm"):
            out, begin = torch.empty_like(rows), 0
            for expert, end in enumerate(ends.tolist()):
                v = torch.nn.functional.linear(rows[begin:end], layer.up[expert], layer.up_bias[expert])
                out[begin:end] = torch.nn.functional.linear(
                    torch_chain.activate(spec, v), layer.down[expert], layer.down_bias[expert])
                begin = end
            return out
        v = torch_chain.add_bias(torch_chain.grouped_mm(rows, layer.up, ends), layer.up_bias, experts)
        y = torch_chain.grouped_mm(torch_chain.activate(spec, v), layer.down, ends)
        return torch_chain.add_bias(y, layer.down_bias, experts)

    def run(self, x):
        spec = self.layer.spec
        weights, ids = torch_chain.gate(self.layer, x)
        slots, _, ends = torch_chain.order_by_expert(self.layer, ids)
        sent = ends.diff(prepend=ends.new_zeros(1))
        came = torch.empty_like(sent)  # [ranks * each]: of each source, rows for each expert here
        dist.all_to_all_single(came, sent)
        # The splits of the exchanges are numbers of the host.
        splits = torch.stack([sent, came]).view(2, self.ranks, self.each).sum(2).tolist()
        rows = x[slots // spec.top_k]
        received = rows.new_empty((sum(splits[1]), spec.hidden))
        dist.all_to_all_single(received, rows, splits[1], splits[0])
        experts, order = torch.repeat_interleave(self.number, came, output_size=len(received)).sort(stable=True)
        results = torch.empty_like(received)
        if len(received) > 0:
            ends = came.view(self.ranks, self.each).sum(0).cumsum(0, dtype=torch.int32)
            results[order] = self.products(received[order], experts, ends)
        dist.all_to_all_single(self.returned, results, splits[0], splits[1])
        cells = torch.empty_like(rows)
        cells[slots] = self.returned
        torch.bmm(weights.unsqueeze(1).to(x.dtype), cells.view(len(x), spec.top_k, -1), out=self.sums)

    def check(self):
        pass

    def close(self):
        pass


def draws_of(seed, jitter, passes, ranks):
    """[passes][ranks]: by how many nanoseconds each rank is late."""
    source = random.Random(f"{seed} {jitter}")
    return [[int(source.uniform(0, jitter) * 1e3) for _ in range(ranks)] for _ in range(passes)]


def wait_until(moment):
    # Sleeping is too coarse for the end of the wait.
    early = moment - time.monotonic_ns() - 500_000
    if early > 0:
        time.sleep(early * 1e-9)
    while time.monotonic_ns() < moment:
        pass


class Ranks:
    """What the ranks tell one another beside the exchanges that are timed."""

    def __init__(self, device, deadline):
        self.group = dist.new_group(backend="gloo", timeout=datetime.timedelta(seconds=deadline))
        # How long it takes until all ranks know the moment.
        self.lead_ns = 2_000_000 if device.type == "cuda" else 5_000_000

    def agree_on_moment(self):
        moment = torch.tensor([time.monotonic_ns() + self.lead_ns])
        dist.all_reduce(moment, op=dist.ReduceOp.MAX, group=self.group)
        return moment.item()

    def gather(self, value):
        values = [None] * dist.get_world_size()
        dist.all_gather_object(values, value, group=self.group)
        return values


def time_pass(way, x, late_ns, ranks):
    """When the pass began and ended on this rank, in ns of the host's clock."""
    way.poison()
    if x.is_cuda:
        torch.cuda.synchronize()
    wait_until(ranks.agree_on_moment() + late_ns)
    begin = time.monotonic_ns()
    way.run(x)
    if x.is_cuda:
        torch.cuda.current_stream().synchronize()
    return begin, time.monotonic_ns()


def time_jitter(ways, x, reference, draws, warm_ups, rank, ranks):
    """{way: ([(begin, end)] of this rank, worst error)}"""
    found = {way.name: ([], 0.0) for way in ways}
    for draw in [[0] * len(draws[0])] * warm_ups + draws:
        for way in ways:
            span = time_pass(way, x, draw[rank], ranks)
            way.check()
            spans, worst = found[way.name]
            error = reference.error(way.out)
            worst = error if not error <= worst else worst  # a NaN stays
            found[way.name] = (spans + [span], worst)
    return {name: (spans[warm_ups:], worst) for name, (spans, worst) in found.items()}


def shares(values):
    """Mean, median and p95 of times in microseconds."""
    mean, p95 = statistics.fmean(values), percentile(values, 0.95)
    return {"mean_us": round(mean, 2), "median_us": round(percentile(values, 0.5), 2), "p95_us": round(p95, 2),
            "p95_over_mean": round(p95 / mean, 4)}


def row_of(way, jitter, spans, error, bound, about):
    """`spans`: [passes][ranks] of (begin, end) in ns."""
    last = [(max(e for _, e in of) - max(b for b, _ in of)) * 1e-3 for of in spans]
    first = [(max(e for _, e in of) - min(b for b, _ in of)) * 1e-3 for of in spans]
    # Figure 3.1 of the thesis: the slowest rank's own step beside the fastest's.
    slowest = [max(e - b for b, e in of) * 1e-3 for of in spans]
    fastest = [min(e - b for b, e in of) * 1e-3 for of in spans]
    start = [min(b for b, _ in of) for of in spans]
    return {
        "suite": "stragglers", **about, "way": way, "jitter_us": jitter, **shares(last),
        "after_first_start": shares(first),
        "p95_slowest_over_mean_fastest": round(percentile(slowest, 0.95) / statistics.fmean(fastest), 4),
        "error": error, "error_bound": bound, "times_us": [round(us, 2) for us in last],
        "starts_us": [[round((b - s) * 1e-3, 2) for b, _ in of] for of, s in zip(spans, start)],
        "ends_us": [[round((e - s) * 1e-3, 2) for _, e in of] for of, s in zip(spans, start)],
    }


def print_row(row):
    first = row["after_first_start"]
    spans = [f"from the {name} start: mean {of['mean_us']:>9.1f} us, p95 {of['p95_us']:>9.1f} us "
             f"({of['p95_over_mean']:.2f} x)" for name, of in (("last", row), ("first", first))]
    print(f"{row['way']:>11}  jitter {row['jitter_us']:>5} us   {'   '.join(spans)}   error {row['error']:.1e}, bound "
          f"{row['error_bound']:.1e}", flush=True)


def refuse_wrong(name, found):
    """`found`: (error, bound) of every rank. Throws Wrong."""
    for rank, (error, bound) in enumerate(found):
        if not error <= bound:
            raise Wrong(f"{name}, rank {rank}: a token's error is {error:.2e} of fp64, beyond {bound:.2e}")


def over_bound(pair):
    error, bound = pair
    return error / bound if bound > 0 else 0.0


def measure(rank, args, checkpoint, device, ranks):
    """{(way, jitter): ([passes][ranks] of spans, (error, bound))} of all seeds, with the error that is nearest
    to its bound; and how many tokens fp32 logits cannot decide. Throws Wrong on every rank."""
    spec = torch_chain.Spec("thesis", args.hidden, args.intermediate, args.experts, args.top_k, gated=False,
                            activation="gelu", bias=True, renormalize=True)
    tensors = read_checkpoint(checkpoint)
    x = torch.empty((args.tokens, args.hidden), dtype=torch.bfloat16, device=device)
    ways = [make(spec, checkpoint, tensors, x, args) for make in (Ours, Chain)]
    all_spans, all_errors, undecided = {}, {}, 0
    for seed in args.seeds:
        generator = torch.Generator().manual_seed(seed * 1000 + rank)
        x.copy_(torch.randn(x.shape, generator=generator))
        reference = Reference(spec, tensors, x)
        undecided += sum(ranks.gather(int((~reference.decided).sum())))
        for jitter in args.jitter:
            draws = draws_of(seed, jitter, args.passes, args.ranks)
            for name, (spans, error) in time_jitter(ways, x, reference, draws, args.warm_ups, rank, ranks).items():
                everyone = ranks.gather((spans, (error, reference.bound)))
                errors = [of_rank for _, of_rank in everyone]
                refuse_wrong(f"{name}, seed {seed}, jitter {jitter}", errors)
                all_spans.setdefault((name, jitter), []).extend(zip(*(of_rank for of_rank, _ in everyone)))
                all_errors.setdefault((name, jitter), []).extend(errors)
    ranks.gather(None)  # nobody closes while others work
    for way in ways:
        way.close()
    return {key: (spans, max(all_errors[key], key=over_bound)) for key, spans in all_spans.items()}, undecided


def report(found, undecided, args):
    about = {"machine": machine(args), "commit": args.commit, "command": args.command, "model": "thesis",
             "dtype": "bf16", "hidden": args.hidden, "intermediate": args.intermediate, "experts": args.experts,
             "top_k": args.top_k, "ranks": args.ranks, "tokens_per_rank": args.tokens, "seeds": args.seeds,
             "passes": args.passes * len(args.seeds), "undecided_tokens": undecided,
             "grouped_products": hasattr(torch, "_grouped_mm")}
    rows = [row_of(way, jitter, spans, *errors, about) for (way, jitter), (spans, errors) in found.items()]
    for row in rows:
        print_row(row)
    if args.json:
        merge(args.json, rows, KEY)


def run_rank(rank, args, checkpoint, rendezvous):
    try:
        device = torch.device("cpu") if args.cpu else torch.device("cuda", rank)
        # All ranks are on this host, whatever its name resolves to.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        if args.cpu:
            torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // args.ranks))
        else:
            torch.cuda.set_device(device)
        dist.init_process_group(
            "gloo" if args.cpu else "nccl", init_method=f"file://{rendezvous}", rank=rank, world_size=args.ranks,
            timeout=datetime.timedelta(seconds=args.deadline))
        ranks = Ranks(device, args.deadline)
        with torch.no_grad():
            found, undecided = measure(rank, args, checkpoint, device, ranks)
        if rank == 0:
            report(found, undecided, args)
        ranks.gather(None)
        rank_processes.end(0)
    except Wrong as problem:
        if rank == 0:
            print(f"stragglers: {problem}", file=sys.stderr, flush=True)
        rank_processes.leave(WRONG)
    except Exception as problem:  # whatever a rank, a library or a deadline fails with
        print(f"stragglers: rank {rank}: {type(problem).__name__}: {problem}", file=sys.stderr, flush=True)
        rank_processes.leave(FAILED)


def machine(args):
    if args.cpu:
        return f"processor, {os.cpu_count()} hardware threads, by PyTorch {torch.__version__}"
    return rank_processes.gpus_with_nccl(args.ranks)


def parse(words):
    parser = parser_of(__doc__)
    rank_processes.add_options(parser)
    parser.add_argument("--tokens", type=int, default=8192, help="of each rank")
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--intermediate", type=int, default=4096)
    parser.add_argument("--experts", type=int, default=64)
    parser.add_argument("--top-k", type=int, default=2)
    parser.add_argument("--jitter", type=numbers, default=[0, 200, 1000], help="most microseconds that a rank is late")
    parser.add_argument("--seeds", type=numbers, default=[0, 1, 2], help="of tokens and of jitter")
    parser.add_argument("--passes", type=int, default=100, help="timed, for each way, jitter and seed")
    parser.add_argument("--warm-ups", type=int, default=5, help="passes before them")
    parser.add_argument("--deadline", type=float, default=60, help="seconds that a rank waits for another")
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--json", type=pathlib.Path)
    args = parser.parse_args(words)
    rank_processes.choose_ranks(args, parser)
    if args.ranks < 2 or args.experts % args.ranks != 0 or not 0 < args.top_k < args.experts:
        parser.error(f"{args.ranks} ranks and top-{args.top_k} of {args.experts} experts; use 2 ranks or more, which "
                     "must divide the experts, and fewer --top-k than experts")
    for name in ("tokens", "hidden", "intermediate", "passes"):
        if getattr(args, name) < 1:
            parser.error(f"--{name} is {getattr(args, name)}; use 1 or more")
    if min(args.jitter) < 0 or args.warm_ups < 0:
        parser.error(f"--jitter is {args.jitter} and --warm-ups {args.warm_ups}; use 0 or more")
    if not max(args.jitter) * 1e-6 < args.deadline:
        parser.error(f"--deadline is {args.deadline} s and --jitter up to {max(args.jitter)} us; use a longer deadline")
    args.command = command_of("bench/stragglers.py", words)
    return args


def make_checkpoint(args, directory):
    sizes = {"--hidden": args.hidden, "--intermediate": args.intermediate, "--experts": args.experts,
             "--top-k": args.top_k}
    words = [str(word) for pair in sizes.items() for word in pair]
    done = subprocess.run(
        [sys.executable, "-m", "switchyard", "make-checkpoint", "--model", "thesis", "--dtype", "bf16", "--quiet"]
        + ["--out", directory, *words], capture_output=True, text=True)
    if done.returncode != 0:
        print(f"stragglers: the layer's checkpoint could not be made: {done.stderr.strip()}", file=sys.stderr)
    return done.returncode == 0


def main():
    args = parse(sys.argv[1:])
    print(f"{machine(args)}, PyTorch {torch.__version__}", flush=True)
    with tempfile.TemporaryDirectory() as directory:
        checkpoint = f"{directory}/checkpoint"
        if not make_checkpoint(args, checkpoint):
            return UNUSABLE
        try:
            torch.multiprocessing.spawn(run_rank, (args, checkpoint, f"{directory}/rendezvous"), nprocs=args.ranks)
        except torch.multiprocessing.ProcessExitedException as ended:
            if ended.exit_code in (WRONG, FAILED):
                return ended.exit_code
            print(f"stragglers: {ended}", file=sys.stderr)
            return FAILED
    return 0


if __name__ == "__main__":
    sys.exit(main())
