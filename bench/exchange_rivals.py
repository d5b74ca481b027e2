#!/usr/bin/env python3
"""switchyard.Exchange beside NCCL's all-to-all and DeepEP: dispatch and combine, each by itself.

    PYTHONPATH=python SWITCHYARD_LIBRARY=build/src/c_api/libswitchyard_c.so \\
        bench/exchange_rivals.py [--ranks 8] [--dtype bf16,fp8] [--tokens 1,128] [--json exchange.json]

Each rank is a process with a GPU of its own; --cpu has ranks on the processor, with Gloo in place of NCCL.
The points are those of `switchyard bench exchange`: DeepSeek-V3's routing, tokens of equal number on
all ranks, experts chosen evenly. Everybody's dispatch ends with the rows in the order of experts, and
everybody's combine begins there; FP8 tokens are quantised beforehand, and results go back in bf16.

- switchyard: counts and routes in every call, as a layer needs it.
- "NCCL, known splits": all_to_all_single with the gathers before and behind it, where all counts and indices
  are known beforehand, which no layer has. It is NCCL's most favourable case, and can be in a CUDA graph.
- "NCCL, counted": the same behind an exchange of counts that the host reads. Indices are still given.
- DeepEP's kernels for one host, with a dispatch that is laid out beforehand, if deep_ep can be imported. Its
  combine sums a token's results of one rank before they travel, and its dispatch leaves the rows in the
  order of ranks: that is less than the others do.

A time is of one call among --calls in a CUDA graph, or in a row where there can be no graph, and of the
slowest rank. All results are compared with plain PyTorch. A row's `rival` is the fastest of the rivals, and
`rivals` has the median of each.

Exit codes: 0 done; 1 a result is wrong; 2 unusable arguments; 77 there is no PyTorch or no switchyard.
"""

import dataclasses
import pathlib
import statistics
import sys
import time

from result_rows import merge, percentile
from script_arguments import command_of, numbers, parser_of

try:
    import torch
    import torch.distributed as dist

    import rank_processes
    import switchyard
    from rival_timing import LeftOut, Wrong
    from torch_chain import replay_of
except ImportError as missing:
    print(f"exchange_rivals: {missing}; install it, or set PYTHONPATH to python/", file=sys.stderr)
    sys.exit(77)

BLOCK = 128  # columns that share a scale
FP8 = torch.float8_e4m3fn
# As links_floor_us() of lab/bench/floor.cpp: a flag's way, and what each of eight GPUs gets out.
FLAG_US, LINK_BYTES_PER_US = 1.37, 330e3
TOKENS = [1, 8, 32, 128, 512, 2048, 8192]
KEY = ("suite", "stage", "dtype", "hidden", "experts", "top_k", "ranks", "tokens_per_rank", "pre_sum")


@dataclasses.dataclass(frozen=True)
class Point:
    hidden: int
    experts: int
    top_k: int
    tokens: int  # of each rank
    dtype: str


def quantise(x):
    """Rows in E4M3 with a scale per 128 columns."""
    padded = torch.nn.functional.pad(x.float(), (0, -x.shape[1] % BLOCK)).unflatten(-1, (-1, BLOCK))
    scales = padded.abs().amax(-1).clamp(min=2.0**-100) / torch.finfo(FP8).max
    return (padded / scales.unsqueeze(-1)).flatten(-2)[:, : x.shape[1]].to(FP8).contiguous(), scales


def dequantise(values, scales):
    return values.float() * scales.repeat_interleave(BLOCK, 1)[:, : values.shape[1]]


def routing_of(point, rank, seed):
    """ids [T, K], distinct within a token, and weights [T, K]."""
    generator = torch.Generator().manual_seed(seed * 1000 + rank)
    ids = torch.rand((point.tokens, point.experts), generator=generator).topk(point.top_k).indices
    return ids.to(torch.int32), torch.rand((point.tokens, point.top_k), generator=generator)


def tokens_of(point, rank, seed):
    generator = torch.Generator().manual_seed(seed * 1000 + 500 + rank)
    return torch.randn((point.tokens, point.hidden), generator=generator).bfloat16()


@dataclasses.dataclass
class Plan:
    """What a rank sends and gets, with everybody's routing known. A token goes once to each rank with experts
    of it, and a result comes back for each of its experts."""

    send_tokens: torch.Tensor  # tokens to send, by receiver
    send_splits: list
    receive_splits: list
    expand: torch.Tensor  # of the rows in the order of experts: which of the received tokens each is
    return_rows: torch.Tensor  # rows to send back, by receiver
    return_splits: list
    result_splits: list
    places: torch.Tensor  # [T * K]: where each slot's result is among those that came back

    def to(self, device):
        moved = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return Plan(**{k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in moved.items()})


def plan_of(point, all_ids, rank):
    ranks, each = len(all_ids), point.experts // len(all_ids)
    owners = all_ids[rank].long() // each  # [T, K]
    by_receiver = [(owners == other).any(1).nonzero().flatten() for other in range(ranks)]
    experts = torch.stack(all_ids).long().flatten()  # of every slot, in the order of ranks, tokens and k
    token = torch.arange(len(experts)) // point.top_k  # among all ranks'
    mine = (experts // each == rank).nonzero().flatten()
    received, which = token[mine].unique(return_inverse=True)
    order = experts[mine].sort(stable=True).indices
    origins = token[mine][order] // point.tokens
    back = [(origins == other).nonzero().flatten() for other in range(ranks)]
    # A rank sends results in the order of its experts, and ranks have their experts in order.
    places = torch.empty(owners.numel(), dtype=torch.long)
    places[all_ids[rank].long().flatten().sort(stable=True).indices] = torch.arange(owners.numel())
    return Plan(
        send_tokens=torch.cat(by_receiver), send_splits=[len(t) for t in by_receiver],
        receive_splits=torch.bincount(received // point.tokens, minlength=ranks).tolist(),
        expand=which[order], return_rows=torch.cat(back), return_splits=[len(t) for t in back],
        result_splits=torch.bincount(owners.flatten(), minlength=ranks).tolist(), places=places,
    )


class Problem:
    """A rank's part of a point, on its device."""

    def __init__(self, point, rank, ranks, device, seed):
        self.point, self.rank, self.ranks, self.device = point, rank, ranks, device
        all_routing = [routing_of(point, r, seed) for r in range(ranks)]
        self.ids, self.weights = (t.to(device) for t in all_routing[rank])
        self.x = tokens_of(point, rank, seed).to(device)
        all_ids = [ids for ids, _ in all_routing]
        self.plan = plan_of(point, all_ids, rank).to(device)
        self.quantised = quantise(self.x) if point.dtype == "fp8" else None
        # Experts get and return rows in the order of experts, then ranks, then tokens.
        each = point.experts // ranks
        experts = torch.stack(all_ids).long().flatten()
        mine = (experts // each == rank).nonzero().flatten()
        slots = mine[experts[mine].sort(stable=True).indices] // point.top_k
        sources = {}
        for r in (slots // point.tokens).unique().tolist():
            sources[r] = tokens_of(point, r, seed)
        self.expected_rows = torch.empty((len(slots), point.hidden), dtype=torch.bfloat16)
        for r, tokens in sources.items():
            at = (slots // point.tokens == r).nonzero().flatten()
            self.expected_rows[at] = tokens[slots[at] % point.tokens]
        self.expected_rows = self.expected_rows.to(device)
        self.results = self.expected_rows
        # Experts return what they got before it was quantised: a token times the sum of its weights comes out.
        self.expected_sum = self.x.double() * self.weights.double().sum(1, keepdim=True)

    def check_rows(self, who, rows, scales=None):
        got = rows.float() if scales is None else dequantise(rows, scales)
        # E4M3 keeps three bits behind the point.
        allowed = 0 if scales is None else 2.0**-4
        self._check(who, "dispatch", got.double(), self.expected_rows.double(), allowed)

    def check_sum(self, who, out):
        # The results, the weights and the sum are rounded once each.
        size = self.x.double().abs() * self.weights.double().sum(1, keepdim=True)
        self._check(who, "combine", out.double(), self.expected_sum, 3 * 2.0**-8, size)

    @staticmethod
    def _check(who, stage, found, expected, allowed, size=None):
        if found.shape != expected.shape:
            raise Wrong(f"{who}, {stage}: {list(found.shape)} came instead of {list(expected.shape)}")
        size = expected.abs() if size is None else size
        # Small numbers of a group are rounded to steps of its scale.
        bound = allowed * size + (1e-2 if allowed == 2.0**-4 else 0)
        right = (found - expected).abs() <= bound  # not so for a NaN
        if not right.all():
            row, column = (int(i) for i in (~right).nonzero()[0])
            raise Wrong(f"{who}, {stage}: {found[row, column]} in row {row}, column {column}, instead of "
                        f"{expected[row, column]}")


class Ours:
    name, graphs = "switchyard", True

    def __init__(self, problem, world):
        p = problem.point
        self.problem = problem
        self.exchange = switchyard.Exchange(
            world, hidden=p.hidden, num_experts=p.experts, top_k=p.top_k, max_tokens=p.tokens,
            dispatch=p.dtype, combine="bf16", device=problem.device,
        )
        self.handle = self.exchange.make_handle()
        rows = self.exchange.rows_needed
        self.rows = torch.empty((rows, p.hidden), dtype=FP8 if p.dtype == "fp8" else torch.bfloat16,
                                device=problem.device)
        # Experts' results have room for all that may come.
        self.results = torch.full((rows, p.hidden), float("nan"), dtype=torch.bfloat16, device=problem.device)
        self.results[: len(problem.results)] = problem.results
        self.out = torch.empty((p.tokens, p.hidden), dtype=torch.bfloat16, device=problem.device)

    def dispatch(self):
        x, scale = self.problem.quantised or (self.problem.x, None)
        self.got = self.exchange.dispatch(
            x, self.problem.ids, self.problem.weights, x_scale=scale, handle=self.handle, out=self.rows)

    def combine(self):
        self.exchange.combine(self.results, self.handle, out=self.out)

    def poison(self):
        self.rows.view(torch.uint8).fill_(0xFF)
        self.out.fill_(float("nan"))

    def check_dispatch(self):
        self.exchange.check()
        rows = len(self.problem.expected_rows)
        if int(self.got.num_rows) != rows:
            raise Wrong(f"{self.name}, dispatch: {int(self.got.num_rows)} rows came instead of {rows}")
        scales = None if self.got.scales is None else self.got.scales[:rows]
        self.problem.check_rows(self.name, self.got.rows[:rows], scales)

    def check_combine(self):
        self.exchange.check()
        self.problem.check_sum(self.name, self.out)

    def bytes_sent(self):
        stats = self.exchange.stats()
        return {"dispatch": stats.dispatch_bytes, "combine": stats.combine_bytes}

    def close(self):
        self.exchange.close()


class Collective:
    """all_to_all_single, with all splits and indices known."""

    def __init__(self, problem, counted=False):
        library = "NCCL" if problem.device.type == "cuda" else "Gloo"
        self.name = f"{library}, {'counted' if counted else 'known splits'}"
        self.problem, self.counted, self.graphs = problem, counted, not counted
        p, plan, device = problem.point, problem.plan, problem.device
        if problem.quantised is None:
            self.tokens = problem.x
        else:
            # A row and its scales travel together.
            values, scales = problem.quantised
            self.tokens = torch.cat([values.view(torch.uint8), scales.contiguous().view(torch.uint8)], 1)
        width = self.tokens.shape[1]
        self.packed = torch.empty((len(plan.send_tokens), width), dtype=self.tokens.dtype, device=device)
        self.received = torch.empty((sum(plan.receive_splits), width), dtype=self.tokens.dtype, device=device)
        self.rows = torch.empty((len(plan.expand), width), dtype=self.tokens.dtype, device=device)
        self.back = torch.empty((len(plan.return_rows), p.hidden), dtype=torch.bfloat16, device=device)
        self.came = torch.empty((len(plan.places), p.hidden), dtype=torch.bfloat16, device=device)
        self.slots = torch.empty_like(self.came)
        self.out = torch.empty((p.tokens, 1, p.hidden), dtype=torch.bfloat16, device=device)
        self.weights = problem.weights.bfloat16().unsqueeze(1)
        self.counts = torch.tensor(plan.send_splits, dtype=torch.long, device=device)

    def _counts(self):
        """The receivers' splits as a layer learns them: by an exchange of counts, which the host reads."""
        counts = torch.empty_like(self.counts)
        dist.all_to_all_single(counts, self.counts)
        return counts.tolist()

    def dispatch(self):
        plan = self.problem.plan
        receive_splits = self._counts() if self.counted else plan.receive_splits
        torch.index_select(self.tokens, 0, plan.send_tokens, out=self.packed)
        dist.all_to_all_single(self.received, self.packed, receive_splits, plan.send_splits)
        torch.index_select(self.received, 0, plan.expand, out=self.rows)

    def combine(self):
        plan = self.problem.plan
        torch.index_select(self.problem.results, 0, plan.return_rows, out=self.back)
        dist.all_to_all_single(self.came, self.back, plan.result_splits, plan.return_splits)
        torch.index_select(self.came, 0, plan.places, out=self.slots)
        torch.bmm(self.weights, self.slots.view(-1, self.problem.point.top_k, self.problem.point.hidden), out=self.out)

    def poison(self):
        for tensor in (self.packed, self.received, self.rows, self.back, self.came, self.slots, self.out):
            tensor.view(torch.uint8).fill_(0xFF)

    def check_dispatch(self):
        rows, scales = self.rows, None
        if self.problem.quantised is not None:
            hidden = self.problem.point.hidden
            rows = self.rows[:, :hidden].contiguous().view(FP8)
            scales = self.rows[:, hidden:].contiguous().view(torch.float32)
        self.problem.check_rows(self.name, rows, scales)

    def check_combine(self):
        # One rounding more: weights are in bf16, too.
        self.problem.check_sum(self.name, self.out.squeeze(1))

    def close(self):
        pass


class DeepEP:
    name, graphs = "DeepEP", False

    def __init__(self, problem):
        try:
            import deep_ep
        except (ImportError, OSError) as missing:  # OSError: its library is of another PyTorch
            raise LeftOut(missing) from missing
        self.problem, p = problem, problem.point
        self.buffer = deep_ep.Buffer(dist.group.WORLD, 1 << 30, 0)
        ids = problem.ids.long()
        to_rank, _, to_expert, in_rank, _ = self.buffer.get_dispatch_layout(ids, p.experts)
        self.x = problem.x if problem.quantised is None else problem.quantised
        self.received, _, _, _, self.handle, _ = self.buffer.dispatch(
            self.x, num_tokens_per_rank=to_rank, is_token_in_rank=in_rank, num_tokens_per_expert=to_expert,
            topk_idx=ids, topk_weights=problem.weights)
        values = self.received if problem.quantised is None else dequantise(*self.received).bfloat16()
        self.results = values.contiguous()
        self.hit = (ids // (p.experts // problem.ranks)).sort(1).values  # of each token: its ranks

    def dispatch(self):
        self.received = self.buffer.dispatch(self.x, handle=self.handle)[0]

    def combine(self):
        self.out = self.buffer.combine(self.results, self.handle)[0]

    def poison(self):
        self.received = self.out = None

    def check_dispatch(self):
        # Tokens in the order of ranks: spread to experts' rows to be compared.
        parts = self.received if isinstance(self.received, tuple) else (self.received,)
        rows = [part[self.problem.plan.expand] for part in parts]
        self.problem.check_rows(self.name, *rows)

    def check_combine(self):
        ranks = 1 + (self.hit.diff(dim=1) != 0).sum(1, keepdim=True)
        expected = self.problem.x.double() * ranks
        # FP8 tokens came with one rounding more.
        allowed = 2.0**-4 if self.problem.quantised is not None else 3 * 2.0**-8
        self.problem._check(self.name, "combine", self.out.double(), expected, allowed)

    def close(self):
        self.buffer = None


def slowest(times, device):
    """Of each repetition the slowest rank's."""
    all_times = torch.tensor(times, dtype=torch.float64, device=device)
    dist.all_reduce(all_times, op=dist.ReduceOp.MAX)
    return all_times.tolist()


def time_calls(call, graphs, repeats, calls, device):
    """Microseconds of one call in each repetition, on the slowest rank."""
    def run():
        for _ in range(calls):
            call()

    replay = replay_of(run, call) if device.type == "cuda" and graphs else run
    times = []
    for i in range(2 + repeats):
        dist.barrier()
        if device.type == "cuda":
            torch.cuda.synchronize()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            replay()
            end.record()
            torch.cuda.synchronize()
            us = begin.elapsed_time(end) * 1e3
        else:
            start = time.perf_counter()
            replay()
            us = (time.perf_counter() - start) * 1e6
        if i >= 2:
            times.append(us / calls)
    return slowest(times, device)


def floor_us(sent, ranks, gpus):
    """Two flags and the bytes at the links' rate; None without a GPU for each rank."""
    return 2 * FLAG_US + sent / LINK_BYTES_PER_US if ranks > 1 and gpus >= ranks else None


def row_of(stage, point, ranks, ours, rivals, sent, gpus, about):
    """A row as `switchyard bench exchange` writes it. `rivals`: {name: times}."""
    medians = {name: statistics.median(times) for name, times in rivals.items()}
    best = min(medians, key=medians.get, default=None)
    row = {
        "suite": "exchange", **about, "stage": stage, "dtype": point.dtype, "hidden": point.hidden,
        "experts": point.experts, "top_k": point.top_k, "ranks": ranks, "tokens_per_rank": point.tokens,
        "pre_sum": False, "median_us": round(percentile(ours, 0.5), 2), "p10_us": round(percentile(ours, 0.1), 2),
        "p90_us": round(percentile(ours, 0.9), 2), "repeats": len(ours), "nvlink_bytes": int(sent),
    }
    floor = floor_us(sent, ranks, gpus)
    row["floor_us"] = None if floor is None else round(floor, 2)
    if best is not None:
        row["rival"], row["rival_us"] = best, round(medians[best], 2)
        row["rivals"] = {name: round(us, 2) for name, us in medians.items()}
        row["rivals_times_us"] = {name: [round(us, 2) for us in times] for name, times in rivals.items()}
    else:
        row["rival_us"] = None
    row["times_us"] = [round(us, 2) for us in ours]
    return row


def makers(problem, world):
    return [lambda: Ours(problem, world), lambda: Collective(problem), lambda: Collective(problem, counted=True),
            lambda: DeepEP(problem)]


def measure(point, rank, args, world, device, said):
    """{stage: {name: times}} and the bytes that the busiest rank sent. Throws Wrong on every rank."""
    problem = Problem(point, rank, args.ranks, device, args.seed)
    repeats = args.repeats or max(10, min(50, 8192 // point.tokens))
    times, sent = {"dispatch": {}, "combine": {}}, {}
    for make in makers(problem, world):
        try:
            candidate = make()
        except LeftOut as reason:
            if rank == 0 and str(reason) not in said:
                said.add(str(reason))
                print(f"exchange_rivals: DeepEP is left out: {reason}", flush=True)
            continue
        fault = ""  # kept for later: all ranks make the same calls
        for stage in ("dispatch", "combine"):
            candidate.poison()
            candidate.dispatch()
            candidate.combine()
            times[stage][candidate.name] = time_calls(
                getattr(candidate, stage), candidate.graphs, repeats, args.calls, device)
            try:
                getattr(candidate, f"check_{stage}")()
            except Wrong as wrong:
                fault = fault or str(wrong)
        if isinstance(candidate, Ours):
            sent = {stage: slowest([count], device)[0] for stage, count in candidate.bytes_sent().items()}
        faults = [None] * args.ranks
        dist.all_gather_object(faults, fault)
        found = [f"rank {r}: {text}" for r, text in enumerate(faults) if text]
        dist.barrier()
        candidate.close()
        if found:
            raise Wrong(found[0])
    return times, sent


def print_row(row):
    floor = "-" if row["floor_us"] is None else f"{100 * row['floor_us'] / row['median_us']:.0f} %"
    rivals = ", ".join(f"{name} {us:.1f}" for name, us in row.get("rivals", {}).items())
    print(f"{row['stage']:>8} {row['dtype']:>4} {row['tokens_per_rank']:>6} tokens {row['median_us']:>9.1f} us  "
          f"floor {floor:>5}  {row['nvlink_bytes'] * 1e-6:>8.2f} MB  {rivals}", flush=True)


def run_rank(rank, args, rendezvous):
    device = torch.device("cpu") if args.cpu else torch.device("cuda", rank)
    if not args.cpu:
        torch.cuda.set_device(device)
    dist.init_process_group("gloo" if args.cpu else "nccl", init_method=f"file://{rendezvous}", rank=rank,
                            world_size=args.ranks)
    world = switchyard.World.from_process_group(deadline=60.0)
    said, gpus = set(), 0 if args.cpu else torch.cuda.device_count()
    about = {"machine": machine(args), "commit": args.commit, "command": args.command}
    wrong = 0
    for dtype in args.dtype:
        for tokens in args.tokens:
            point = Point(args.hidden, args.experts, args.top_k, tokens, dtype)
            try:
                times, sent = measure(point, rank, args, world, device, said)
            except Wrong as problem:
                wrong = 1
                if rank == 0:
                    print(f"exchange_rivals: {point}: {problem}", file=sys.stderr)
                continue
            if rank != 0:
                continue
            rows = []
            for stage, of_stage in times.items():
                ours = of_stage.pop(Ours.name)
                rows.append(row_of(stage, point, args.ranks, ours, of_stage, sent[stage], gpus, about))
                print_row(rows[-1])
            if args.json:
                merge(args.json, rows, KEY)
    dist.barrier()
    world.close()
    rank_processes.end(wrong)


def machine(args):
    if args.cpu:
        return "processor, by PyTorch"
    return rank_processes.gpus_with_nccl(args.ranks)


def parse(words):
    parser = parser_of(__doc__)
    rank_processes.add_options(parser)
    parser.add_argument("--dtype", type=lambda text: text.split(","), default=["bf16", "fp8"], help="bf16, fp8 or both")
    parser.add_argument("--tokens", type=numbers, default=TOKENS, help="of each rank")
    parser.add_argument("--hidden", type=int, default=7168)
    parser.add_argument("--experts", type=int, default=256)
    parser.add_argument("--top-k", type=int, default=8)
    parser.add_argument("--calls", type=int, default=10, help="in a graph, or in a row")
    parser.add_argument("--repeats", type=int, default=0, help="default 10 to 50")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--json", type=pathlib.Path)
    args = parser.parse_args(words)
    if not set(args.dtype) <= {"bf16", "fp8"}:
        parser.error(f"--dtype is '{','.join(args.dtype)}'; use bf16, fp8 or bf16,fp8")
    rank_processes.choose_ranks(args, parser)
    if args.experts % args.ranks != 0 or args.top_k > args.experts:
        parser.error(f"{args.ranks} ranks and top-{args.top_k} of {args.experts} experts; ranks must divide the experts")
    args.command = command_of("bench/exchange_rivals.py", words)
    return args


def main():
    args = parse(sys.argv[1:])
    print(f"{machine(args)}, PyTorch {torch.__version__}", flush=True)
    return rank_processes.spawn(run_rank, args)


if __name__ == "__main__":
    sys.exit(main())
