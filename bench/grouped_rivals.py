#!/usr/bin/env python3
"""switchyard.GroupedGemm beside the grouped GEMMs of others: same inputs, same process, same clock.

    PYTHONPATH=python SWITCHYARD_LIBRARY=build/src/c_api/libswitchyard_c.so \\
        bench/grouped_rivals.py [--dtype bf16,fp8] [--rows 4,64] [--json grouped.json]

The points are those of `switchyard bench grouped`. Beside our own operator it times what can be
imported of torch._grouped_mm, torch._scaled_grouped_mm (FP8), DeepGEMM (contiguous and masked) and quack,
the grouped GEMM of SonicMoE, and says what it leaves out. Some rows of every output are compared with
fp64, and whole outputs of implementations with equal operands with each other. Then a CUDA graph of
several calls is replayed, over so many copies of the weights that the L2 cache does not hold them; with
--cold, one call behind a flush of the cache. Every repetition is kept.

FP8 is E4M3. Switchyard and DeepGEMM have a scale per 128 columns of a row and per 128 x 128 weights;
PyTorch's operator takes one scale per row of both, so there it is a rival in time, not in values. Nobody's
quantisation is timed. DeepGEMM's rows are padded as its layouts want it; FLOPs are those of the real rows.
With SwiGLU, rivals without that epilogue are left out, and PyTorch runs its activation behind the product.

Exit codes: 0 done; 1 a result is wrong; 77 there is no PyTorch or no switchyard.
"""

import argparse
import dataclasses
import json
import math
import pathlib
import sys
import typing

from result_rows import merge
from rival_timing import LeftOut, Wrong, rotation_of, timed
from script_arguments import command_of, parser_of
from torch_chain import CUDA, DEVICE, Clock, machine, quantise, relative_error  # which ends with 77 without PyTorch

import torch
import torch.nn.functional as F

try:
    import switchyard
except ImportError as missing:
    print(f"grouped_rivals: {missing}; install it, or set PYTHONPATH to python/", file=sys.stderr)
    sys.exit(77)

ROOT = pathlib.Path(__file__).resolve().parent.parent
BLOCK = 128  # columns, and of weights also rows, that share a scale
FP8 = torch.float8_e4m3fn
FP8_MAX = torch.finfo(FP8).max
# Sums of FP8 products that stay in Hopper's tensor cores have about 14 bits: over thousands of columns up
# to 2 % of error, which is what the speed of use_fast_accum costs.
FAST_ACCUMULATION = 2e-2
# The masked layout has room for as many rows of every expert as the largest has. It is for decoding.
MOST_MASKED_ROWS = 1024

# As in grouped_suite() of lab/bench/grouped.cpp: experts, n, k, rows per expert, rows with SwiGLU.
SHAPES = [
    (32, 4096, 7168, [4, 16, 64, 128, 512, 2048], [4, 128, 2048]),
    (32, 7168, 2048, [4, 16, 64, 128, 512, 2048], []),
    (64, 2048, 2048, [1, 8, 64, 512], [8, 512]),
    (128, 1536, 2048, [1, 8, 64, 512], [8, 512]),
    (8, 28672, 4096, [4, 64, 512, 2048], [64, 2048]),
    (4, 4096, 7168, [256, 8192], []),
    (4, 7168, 2048, [256, 8192], []),
]


@dataclasses.dataclass(frozen=True)
class Point:
    experts: int
    n: int
    k: int
    rows: int  # per expert, or their mean
    swiglu: bool = False
    uneven: bool = False

    def __str__(self):
        return f"E {self.experts} N {self.n} K {self.k}, {self.rows} rows{', SwiGLU' if self.swiglu else ''}"


def counts_of(point, seed):
    """Rows of every expert: equal, or dealt by tokens that choose experts of different popularity."""
    if not point.uneven:
        return [point.rows] * point.experts
    generator = torch.Generator().manual_seed(seed)
    top_k = min(max(point.experts // 4, 1), 8)
    tokens = max(point.experts * point.rows // top_k, 1)
    popularity = torch.randn(point.experts, generator=generator)
    # The largest of logits with Gumbel noise are a draw without replacement.
    noise = -torch.log(-torch.log(torch.rand((tokens, point.experts), generator=generator).clamp(1e-9, 1 - 1e-7)))
    ids = (0.75 * popularity + noise).topk(top_k).indices
    return torch.bincount(ids.flatten(), minlength=point.experts).tolist()


def balancedness(counts):
    if len(counts) == 1:
        return 1.0
    shares = [count / sum(counts) for count in counts if count > 0]
    return -sum(share * math.log(share) for share in shares) / math.log(len(counts))


def quantise_groups(x):
    """Rows with a scale per 128 columns."""
    groups = x.float().unflatten(-1, (-1, BLOCK))
    scales = groups.abs().amax(-1).clamp(min=2.0**-100) / FP8_MAX
    return (groups / scales.unsqueeze(-1)).flatten(-2).to(FP8), scales


def quantise_blocks(w):
    """[E, N, K] with a scale per 128 x 128, one expert after the other."""
    values = torch.empty(w.shape, dtype=FP8, device=w.device)
    scales = torch.empty((w.shape[0], w.shape[1] // BLOCK, w.shape[2] // BLOCK), device=w.device)
    for e, matrix in enumerate(w):
        blocks = matrix.float().unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK))
        scales[e] = blocks.abs().amax((1, 3)).clamp(min=2.0**-100) / FP8_MAX
        values[e] = (blocks / scales[e][:, None, :, None]).flatten(2, 3).flatten(0, 1).to(FP8)
    return values, scales


class Problem:
    """A point's operands on the device, in bf16, and in FP8 where that is asked for."""

    def __init__(self, point, dtype, seed, tune=False):
        self.point, self.dtype, self.tune = point, dtype, tune
        self.counts = counts_of(point, seed)
        self.rows = sum(self.counts)
        self.ends_list = torch.tensor(self.counts).cumsum(0).tolist()
        self.ends = torch.tensor(self.ends_list, dtype=torch.int32, device=DEVICE)
        torch.manual_seed(seed)
        self.x = torch.randn((self.rows, point.k), device=DEVICE, dtype=torch.bfloat16)
        w = torch.empty((point.experts, point.n, point.k), device=DEVICE, dtype=torch.bfloat16)
        for matrix in w:
            matrix.copy_(torch.randn(matrix.shape, device=DEVICE) * point.k**-0.5)
        self.w = w
        size = 1 if dtype == "fp8" else 2
        matrix_bytes = point.n * point.k * size
        if dtype == "fp8":
            matrix_bytes += 4 * (point.n // BLOCK) * (point.k // BLOCK)
            self.x_blocks, self.w_blocks = quantise_groups(self.x), quantise_blocks(w)
        self.touched_bytes = matrix_bytes * sum(count > 0 for count in self.counts)
        self.flops = 2 * self.rows * point.n * point.k

    @property
    def columns(self):
        return self.point.n // 2 if self.point.swiglu else self.point.n

    def empty_output(self):
        return torch.full((self.rows, self.columns), float("nan"), device=DEVICE, dtype=torch.bfloat16)

    def exact_x(self, rows):
        if self.dtype == "bf16":
            return self.x[rows].double()
        values, scales = self.x_blocks
        return values[rows].double() * scales[rows].double().repeat_interleave(BLOCK, 1)

    def exact_w(self, expert):
        if self.dtype == "bf16":
            return self.w[expert].double()
        values, scales = self.w_blocks
        return values[expert].double() * scales[expert].double().repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)

    def sample(self, most=4):
        """{expert: rows}: some rows of some experts, the first and the last among them."""

        def spread(items):
            count = min(len(items), most)
            return [items[0] if count == 1 else items[i * (len(items) - 1) // (count - 1)] for i in range(count)]

        hit = [e for e, count in enumerate(self.counts) if count > 0]
        return {e: spread(range(self.ends_list[e] - self.counts[e], self.ends_list[e])) for e in spread(hit)}


class Candidate(typing.NamedTuple):
    """An implementation on one problem."""

    calls: list  # one for every copy of the weights
    output: typing.Callable  # the packed result of the last call
    version: str
    fused: bool = True  # the product is not rounded before an activation
    same_operands: bool = True  # its operands are the problem's
    exact_x: typing.Optional[typing.Callable] = None  # if they are not
    exact_w: typing.Optional[typing.Callable] = None
    bound: typing.Optional[float] = None  # of its error, if it does more than round the result


def copies_of(tensors, count):
    """The tensors themselves, and count - 1 copies."""
    return [tensors] + [tuple(t.clone() for t in tensors) for _ in range(count - 1)]


def ours(problem, copies, place=None, **how):
    """place: where each packed row is in x; the rows of x in other places are NaN, and must not be read."""
    activation = switchyard.Activation("silu") if problem.point.swiglu else None
    out = problem.empty_output()

    def spread_rows(rows):
        if place is None:
            return rows
        room = int(place.max()) + 1 if "layout" not in how else problem.point.experts * how["layout"][1]
        spread = torch.full((room, *rows.shape[1:]), float("nan"), device=DEVICE).to(rows.dtype)
        # Not every type can be scattered; bytes can.
        spread.view(torch.uint8)[place] = rows.contiguous().view(torch.uint8)
        return spread

    if problem.dtype == "fp8":
        x, x_scale = (spread_rows(tensor) for tensor in problem.x_blocks)
        how["x_scale"] = x_scale
    else:
        x = spread_rows(problem.x)
    calls = []
    for weights in copies_of(problem.w_blocks if problem.dtype == "fp8" else (problem.w,), copies):
        scales = {"w_scale": weights[1]} if problem.dtype == "fp8" else {}
        most = len(x) if "index" not in how else len(how["index"])
        gemm = switchyard.GroupedGemm(weights[0], activation=activation, max_rows=max(most, 1), **scales)
        calls.append(lambda gemm=gemm: gemm(x, problem.ends, out=out, **how))
    return Candidate(calls, lambda: out, switchyard.__version__)


def ours_indexed(problem, copies):
    """Tokens that are not gathered, in another order than the rows'."""
    generator = torch.Generator().manual_seed(1)
    index = torch.randperm(problem.rows, generator=generator).to(DEVICE)
    return ours(problem, copies, place=index, index=index.int())


def ours_padded(problem, copies):
    """The layout of decoding: each expert has room for as many rows as the largest has."""
    most = max(problem.counts)
    if most > MOST_MASKED_ROWS:
        raise LeftOut(f"an expert has {most} rows, and this layout is for decoding")
    room = -(-most // 64) * 64
    place = torch.cat([torch.arange(count) + e * room for e, count in enumerate(problem.counts)]).to(DEVICE)
    return ours(problem, copies, place=place, layout=("padded", room), out_layout="packed")


def torch_bf16(problem, copies):
    results = [None]

    def call(w):
        y = torch._grouped_mm(problem.x, w.transpose(1, 2), offs=problem.ends)
        if problem.point.swiglu:
            gate, up = y.chunk(2, dim=1)
            y = F.silu(gate) * up
        results[0] = y

    calls = [lambda w=w: call(w) for (w,) in copies_of((problem.w,), copies)]
    return Candidate(calls, lambda: results[0], torch.__version__, fused=not problem.point.swiglu)


def torch_fp8(problem, copies):
    if problem.point.swiglu:
        raise LeftOut("it has no SwiGLU, and the layer's next product would want its result quantised")
    if not CUDA:
        raise LeftOut("it needs a GPU")
    x = quantise(problem.x)
    rows = [quantise(matrix) for matrix in problem.w]
    weights = torch.stack([q.values for q in rows]), torch.stack([q.scales for q in rows])
    results = [None]

    def call(w, scales):
        results[0] = torch._scaled_grouped_mm(
            x.values, w.transpose(1, 2), x.scales, scales, offs=problem.ends, out_dtype=torch.bfloat16,
            use_fast_accum=True,
        )

    return Candidate(
        [lambda w=w, s=s: call(w, s) for w, s in copies_of(weights, copies)],
        lambda: results[0],
        torch.__version__,
        same_operands=False,
        exact_x=lambda at: x.values[at].double() * x.scales[at].double().unsqueeze(1),
        exact_w=lambda e: rows[e].values.double() * rows[e].scales.double().unsqueeze(1),
        bound=FAST_ACCUMULATION,
    )


def import_deepgemm(problem):
    if problem.point.swiglu:
        raise LeftOut("it has no SwiGLU")
    try:
        import deep_gemm
    except (ImportError, OSError) as missing:  # OSError: its library is of another PyTorch
        raise LeftOut(missing) from missing
    return deep_gemm


def deepgemm_contiguous(problem, copies):
    deep_gemm = import_deepgemm(problem)
    alignment = deep_gemm.get_theoretical_mk_alignment_for_contiguous_layout()
    deep_gemm.set_mk_alignment_for_contiguous_layout(alignment)
    padded = [-(-count // alignment) * alignment for count in problem.counts]
    layout = torch.full((sum(padded),), -1, dtype=torch.int32, device=DEVICE)
    places, first = [], 0
    for e, count in enumerate(problem.counts):
        layout[first : first + count] = e
        places.append(torch.arange(first, first + count))
        first += padded[e]
    places = torch.cat(places).to(DEVICE)
    y = torch.full((len(layout), problem.point.n), float("nan"), device=DEVICE, dtype=torch.bfloat16)

    def spread_rows(rows):
        out = torch.zeros((len(layout), *rows.shape[1:]), dtype=rows.dtype, device=DEVICE)
        # Not every type can be scattered; bytes can.
        out.view(torch.uint8)[places] = rows.contiguous().view(torch.uint8)
        return out

    if problem.dtype == "bf16":
        x = spread_rows(problem.x)
        call = deep_gemm.m_grouped_bf16_gemm_nt_contiguous
        calls = [lambda w=w: call(x, w, y, layout) for (w,) in copies_of((problem.w,), copies)]
    else:
        x = spread_rows(problem.x_blocks[0])
        scales = mn_major(spread_rows(problem.x_blocks[1]))
        call = deep_gemm.m_grouped_fp8_gemm_nt_contiguous
        calls = [lambda w=w: call((x, scales), w, y, layout) for w in copies_of(problem.w_blocks, copies)]
    return Candidate(calls, lambda: y[places], getattr(deep_gemm, "__version__", "unknown"))


def deepgemm_masked(problem, copies):
    deep_gemm = import_deepgemm(problem)
    room = -(-max(problem.counts) // 64) * 64
    if max(problem.counts) > MOST_MASKED_ROWS:
        raise LeftOut(f"an expert has {max(problem.counts)} rows, and this layout is for decoding")
    experts = problem.point.experts
    masked = torch.tensor(problem.counts, dtype=torch.int32, device=DEVICE)
    y = torch.full((experts, room, problem.point.n), float("nan"), device=DEVICE, dtype=torch.bfloat16)
    expected = max(-(-problem.rows // experts), 1)

    def spread_rows(rows):
        out = torch.zeros((experts, room, *rows.shape[1:]), dtype=rows.dtype, device=DEVICE)
        for e, count in enumerate(problem.counts):
            out[e, :count] = rows[problem.ends_list[e] - count : problem.ends_list[e]]
        return out

    if problem.dtype == "bf16":
        x = spread_rows(problem.x)
        call = deep_gemm.m_grouped_bf16_gemm_nt_masked
        calls = [lambda w=w: call(x, w, y, masked, expected) for (w,) in copies_of((problem.w,), copies)]
    else:
        x = spread_rows(problem.x_blocks[0])
        scales = mn_major(spread_rows(problem.x_blocks[1]))
        # The name in newer versions, and in older ones.
        call = getattr(deep_gemm, "fp8_m_grouped_gemm_nt_masked", None) or deep_gemm.m_grouped_fp8_gemm_nt_masked
        calls = [lambda w=w: call((x, scales), w, y, masked, expected) for w in copies_of(problem.w_blocks, copies)]

    def packed():
        return torch.cat([y[e, :count] for e, count in enumerate(problem.counts)])

    return Candidate(calls, packed, getattr(deep_gemm, "__version__", "unknown"))


def quack_bf16(problem, copies):
    if problem.point.swiglu:
        raise LeftOut("its SwiGLU wants gate and up in turn, which are other operands")
    try:
        import quack
        from quack.gemm_interface import gemm
    except ImportError as missing:
        raise LeftOut(missing) from missing
    out = problem.empty_output()
    zero = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    bounds = torch.cat([zero, problem.ends])

    def call(w):
        gemm(problem.x, w.transpose(1, 2), out=out, cu_seqlens_m=bounds, tuned=problem.tune)

    calls = [lambda w=w: call(w) for (w,) in copies_of((problem.w,), copies)]
    version = getattr(quack, "__version__", "unknown")
    return Candidate(calls, lambda: out, f"{version}, {'tuned' if problem.tune else 'default'} configuration")


IMPLEMENTATIONS = {
    "bf16": {
        "switchyard": ours, "switchyard, index": ours_indexed, "switchyard, padded": ours_padded,
        "torch._grouped_mm": torch_bf16, "DeepGEMM contiguous": deepgemm_contiguous,
        "DeepGEMM masked": deepgemm_masked, "quack": quack_bf16,
    },
    "fp8": {
        "switchyard": ours,
        "switchyard, index": ours_indexed,
        "switchyard, padded": ours_padded,
        "torch._scaled_grouped_mm": torch_fp8,
        "DeepGEMM contiguous": deepgemm_contiguous,
        "DeepGEMM masked": deepgemm_masked,
    },
}


# The layout of the rows that an implementation takes; of others it is packed.
LAYOUTS = {
    "switchyard, index": "index", "switchyard, padded": "padded", "DeepGEMM contiguous": "blocked",
    "DeepGEMM masked": "padded",
}


def mn_major(scales):
    """Scales of rows [..., rows, groups] as DeepGEMM loads them: a group's side by side, 16 bytes aligned."""
    *outer, rows, groups = scales.shape
    spread = torch.zeros((*outer, groups, -(-rows // 4) * 4), dtype=scales.dtype, device=scales.device)
    spread[..., :rows] = scales.transpose(-1, -2)
    return spread.transpose(-1, -2)[..., :rows, :]


def swiglu(products):
    gate, up = products.chunk(2, dim=-1)
    return F.silu(gate) * up


def check(problem, candidate):
    """The error of some rows against fp64, and its bound: twice that of rounding to bf16 where the
    candidate does so."""
    exact_x, exact_w = candidate.exact_x or problem.exact_x, candidate.exact_w or problem.exact_w
    output = candidate.output()
    if output.shape != (problem.rows, problem.columns):
        raise Wrong(f"the result is {tuple(output.shape)}")
    if not output.isfinite().all():
        raise Wrong("values are not finite, or were not written")
    exact, rounded, actual = [], [], []
    for expert, rows in problem.sample().items():
        at = torch.tensor(rows, device=DEVICE)
        products = exact_x(at) @ exact_w(expert).T
        exact.append(swiglu(products) if problem.point.swiglu else products)
        rounded.append(exact[-1].bfloat16() if candidate.fused else swiglu(products.bfloat16()))
        actual.append(output[at])
    exact, rounded, actual = torch.cat(exact), torch.cat(rounded), torch.cat(actual)
    error, bound = relative_error(actual, exact), candidate.bound or 2 * relative_error(rounded, exact)
    if not error <= bound:
        raise Wrong(f"the error against fp64 is {error:.2e}, and the bound {bound:.2e}")
    return error, bound


def floor_us(problem):
    """As machine::floor_us(); None where the GPU's roofs are not known."""
    if not CUDA:
        return None
    for path in sorted((ROOT / "lab/machine/facts").glob("*.json")):
        facts = json.loads(path.read_text())
        if facts["gpu"] != torch.cuda.get_device_name(0):
            continue
        roofs = {name: roof["value"] for name, roof in facts["roofs"].items()}
        reading = roofs["launch_us"] + problem.touched_bytes / roofs["read_gb_per_s"] / 1e3
        return max(reading, problem.flops / roofs[f"{problem.dtype}_tflop_per_s"] / 1e6)
    return None


def percentile(values, share):
    return sorted(values)[round(share * (len(values) - 1))]


def row_of(problem, name, version, times, accuracy, rotation, args):
    point = problem.point
    reached = round(balancedness(problem.counts), 4) if point.uneven else None
    limit = floor_us(problem)
    return {
        "suite": "grouped", "machine": machine(), "commit": args.commit, "command": args.command,
        "implementation": name, "version": version, "experts": point.experts, "n": point.n,
        "k": point.k, "rows_per_expert": point.rows,
        "activation": "swiglu" if point.swiglu else "none", "dtype": problem.dtype,
        "compute": problem.dtype, "layout": LAYOUTS.get(name, "packed"),
        "beta": None if reached is None else round(reached, 2), "beta_reached": reached,
        "rows": problem.rows, "experts_hit": sum(count > 0 for count in problem.counts),
        "median_us": round(percentile(times, 0.5), 2), "p10_us": round(percentile(times, 0.1), 2),
        "p90_us": round(percentile(times, 0.9), 2), "repeats": len(times),
        "touched_bytes": problem.touched_bytes, "flops": problem.flops,
        "tflops": round(problem.flops / percentile(times, 0.5) / 1e6, 1),
        "floor_us": None if limit is None else round(limit, 2), "median_us_no_graph": None,
        "rotation_copies": rotation[0], "rotation_passes": rotation[1], "error": accuracy[0],
        "error_bound": accuracy[1], "times_us": [round(us, 2) for us in times],
    }


KEY = ["suite", "implementation", "experts", "n", "k", "rows_per_expert", "activation", "dtype", "compute", "beta"]


def measure(point, dtype, args, clock, said):
    """The rows of one point, and what was wrong."""
    problem = Problem(point, dtype, args.seed, args.tune)
    rotation = rotation_of(problem.touched_bytes, args.cold)
    rows, wrong, first = [], [], None
    for name, make in IMPLEMENTATIONS[dtype].items():
        if args.implementations and name not in args.implementations:
            continue
        candidate = None
        try:
            candidate = make(problem, rotation[0])
            for call in candidate.calls:
                call()
            accuracy = check(problem, candidate)
            if candidate.same_operands:
                output = candidate.output()
                if first is None:
                    first = name, output.clone(), accuracy[1]
                # Each is within its bound of the exact result.
                apart, most = relative_error(output, first[1].double()), accuracy[1] + first[2]
                if not apart <= most:
                    raise Wrong(f"its result is {apart:.2e} apart from that of {first[0]}, which may be {most:.2e}")
            times = timed(candidate.calls, rotation[1], args.repeats, clock)
        except (LeftOut, switchyard.Unsupported) as reason:
            line = f"{name} ({dtype}) is left out: {reason}"
            if line not in said:
                print(f"grouped_rivals: {line}", file=sys.stderr)
            said.add(line)
            continue
        except (Wrong, RuntimeError, AssertionError, AttributeError, TypeError, switchyard.Error) as problem_found:
            # A rival that breaks must not take the others along.
            wrong.append(name)
            print(f"grouped_rivals: {point}, {dtype}, {name}: {problem_found}", file=sys.stderr)
            continue
        finally:
            version = candidate.version if candidate else ""
            candidate = None  # its copies of the weights
            if CUDA:
                torch.cuda.empty_cache()
        row = row_of(problem, name, version, times, accuracy, rotation, args)
        rows.append(row)
        print_row(row)
    note_rivals(rows)
    return rows, wrong


def note_rivals(rows):
    """Each of our rows gets the fastest other implementation of the point."""
    others = [row for row in rows if not row["implementation"].startswith("switchyard")]
    best = min(others, key=lambda row: row["median_us"], default=None)
    for row in rows:
        if row["implementation"].startswith("switchyard"):
            row["rival"] = best and best["implementation"]
            row["rival_us"] = best and best["median_us"]


HEADING = (
    f"{'exp.':>4} {'N':>6} {'K':>6} {'rows':>5} {'act.':>6} {'type':>4}  {'implementation':<24} {'time us':>9} "
    f"{'p10 .. p90 us':>19} {'TFLOP/s':>7} {'TB/s':>5} {'roof':>5}"
)


def print_row(row):
    us = row["median_us"]
    roof = f"{100 * row['floor_us'] / us:.0f} %" if row["floor_us"] else "-"
    print(
        f"{row['experts']:>4} {row['n']:>6} {row['k']:>6} {row['rows_per_expert']:>5} "
        f"{'-' if row['activation'] == 'none' else row['activation']:>6} {row['dtype']:>4}  {row['implementation']:<24} "
        f"{us:>9.1f} {row['p10_us']:>8.1f} .. {row['p90_us']:>7.1f} {row['flops'] / us / 1e6:>7.1f} "
        f"{row['touched_bytes'] / us / 1e6:>5.2f} {roof:>5}",
        flush=True,
    )


def shape(text):
    sizes = text.split("x")
    if len(sizes) != 3 or not all(size.isdigit() and int(size) > 0 for size in sizes):
        raise argparse.ArgumentTypeError(f"'{text}' is no shape; give experts x N x K, as in 32x4096x7168")
    return tuple(map(int, sizes))


def points_of(args):
    chosen = [(*args.shape, args.rows or [4, 16, 64, 128, 512], args.rows or [64])] if args.shape else SHAPES
    for experts, n, k, plain, gated in chosen:
        for is_gated, all_rows in [(False, plain), (True, gated)]:
            for rows in all_rows:
                if not args.rows or rows in args.rows:
                    yield Point(experts, n, k, rows, is_gated, args.uneven)


def main():
    parser = parser_of(__doc__)
    parser.add_argument("--dtype", default="bf16,fp8", help="bf16, fp8 or both")
    parser.add_argument("--shape", type=shape, help="experts x N x K instead of the suite's, as in 32x4096x7168")
    parser.add_argument("--rows", type=lambda text: [int(word) for word in text.split(",")], help="per expert")
    parser.add_argument("--uneven", action="store_true", help="rows as a router with favourites deals them")
    parser.add_argument(
        "--implementations", type=lambda text: text.split(";"), help="only these, by name, with ; between them"
    )
    parser.add_argument("--cold", action="store_true", help="one call at a time behind a flush of the L2 cache")
    parser.add_argument("--tune", action="store_true", help="let quack try its configurations, which takes minutes")
    parser.add_argument("--repeats", type=int, default=0, help="default 12 to 200 on a GPU")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--json", type=pathlib.Path)
    args = parser.parse_args()
    dtypes = args.dtype.split(",")
    if not set(dtypes) <= set(IMPLEMENTATIONS):
        parser.error(f"--dtype is '{args.dtype}'; use bf16, fp8 or bf16,fp8")
    args.command = command_of("bench/grouped_rivals.py", sys.argv[1:])
    clock = Clock(4 * torch.cuda.get_device_properties(0).L2_cache_size if CUDA else 0)
    print(f"{machine()}, PyTorch {torch.__version__}\n\n{HEADING}", flush=True)
    wrong, said = [], set()
    for point in points_of(args):
        for dtype in dtypes:
            rows, failed = measure(point, dtype, args, clock, said)
            wrong += failed
            if args.json and rows:
                merge(args.json, rows, KEY)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
