#!/usr/bin/env python3
"""Kernels of others through switchyard.tuner: profiles of a fused-MoE kernel in Triton, and of PyTorch.

    PYTHONPATH=python SWITCHYARD_LIBRARY=build/src/c_api/libswitchyard_c.so \\
        bench/tune_triton.py --kernel triton --out triton --budget 150 --prune 0.25
    switchyard tune --evaluate triton.profile.json --json ramp.json

--kernel triton is a grouped GEMM as serving engines have it: rows are gathered through an index that is
padded to whole tiles of each expert, one tile height serves all experts, and the products come out without
an activation. Its configurations are tiles, stages and GROUP_M, the row tiles that share weights in turn.
The kernel's own rule is the choice by the number of tokens alone.
--kernel torch is torch._grouped_mm beside one torch.mm for each expert that has rows.

Both compute in bf16 on RaMP's eight models, with the histograms and the protocol of `switchyard tune`. Every
configuration's rows are compared with fp64 before its first time on a model: the error must be below twice
that of torch's own bf16 product. Times are medians of replays of a CUDA graph of several calls, over so many
copies of the weights that the L2 cache does not hold them. Where the first replay takes half again as long
as the best configuration at the point, it is the only one.

--list prints the configurations. Exit codes: 0 done, or the budget ended; 1 a result is wrong; 2 unusable
arguments; 77 there is no PyTorch, no Triton, no GPU or no switchyard, and a line says which.
"""

import argparse
import dataclasses
import pathlib
import statistics
import sys

SKIPPED = 77
VERSION = 1  # of the kernels below: to be increased when their times change
# As choose_rotation() of lab/bench/rotation.cpp; passes as `switchyard tune --quick`.
TIMES_CACHE, MOST_COPIES, LEAST_PASSES = 8, 16, 4
FAR_FROM_BEST, MOST_REPLAYS, ENOUGH_US = 1.5, 7, 8000
SHARED_BYTES = 227 * 1024  # of a block on Hopper
CHECKED_ROWS = 16


class Wrong(Exception):
    pass


def stop(message, code=SKIPPED):
    print(f"tune_triton: {message}", file=sys.stderr)
    sys.exit(code)


try:
    from switchyard import tuner
except ImportError as missing:
    stop(f"{missing}; install it, or set PYTHONPATH to python/")

# These models are those of ramp_models() in lab/bench/tune.cpp.
SHAPES = [
    tuner.Model("ramp-olmoe", 64, 8, 2048, 2048),
    tuner.Model("ramp-qwen3", 128, 8, 1536, 2048),
    tuner.Model("ramp-dsv3-ep8", 32, 8, 512, 7168),
    tuner.Model("ramp-dsv3-tp8", 256, 8, 512, 7168),
    tuner.Model("ramp-mixtral", 8, 2, 32768, 6144),
    tuner.Model("ramp-phi", 16, 2, 12800, 4096, True),
    tuner.Model("ramp-jamba", 16, 2, 16384, 4096, True),
    tuner.Model("ramp-dbrx", 16, 4, 21504, 6144, True),
]


# ------------------------------------------------------------------------------------------- Triton


def triton_configurations():
    """(name, values) of each: tiles of all heights and widths, by two orders."""
    found = []
    for m in (16, 32, 64, 128):
        for n in (64, 128, 256):
            for k in (64, 128):
                if k == 128 and not (m in (16, 64) and n == 128):
                    continue
                stages = 4 if k == 64 else 3
                while stages * (m + n) * k * 2 > SHARED_BYTES:
                    stages -= 1
                warps = 4 if m * n <= 64 * 128 else 8
                for group in (1, 8):
                    values = {
                        "BLOCK_M": m, "BLOCK_N": n, "BLOCK_K": k, "GROUP_M": group, "num_warps": warps,
                        "num_stages": stages,
                    }
                    found.append((f"m{m} n{n} k{k} group{group}", values))
    return found


def rule_by_tokens(tokens, num_experts):
    """What fused MoE kernels choose where nothing was tuned: by the number of tokens alone."""
    m, n, k, group = (16, 64, 64, 1) if tokens <= num_experts else (64, 64, 64, 8)
    return {"BLOCK_M": m, "BLOCK_N": n, "BLOCK_K": k, "GROUP_M": group, "num_warps": 4, "num_stages": 4}


def align(counts, block_m):
    """Rows in the order of experts, each expert's padded to whole blocks.

    Returns the row of each place, -1 where there is none, and the expert of each block.
    """
    places, experts, row = [], [], 0
    for expert, count in enumerate(counts):
        blocks = -(-count // block_m)
        places += list(range(row, row + count)) + [-1] * (blocks * block_m - count)
        experts += [expert] * blocks
        row += count
    return places, experts


def make_triton_kernel():
    import triton
    import triton.language as tl

    # N and K are arguments, and so is GROUP_M: one compilation for each tile serves all models.
    @triton.jit(do_not_specialize=["num_blocks", "group_m"])
    def fused_moe(
        x, w, y, places, tokens, experts, num_blocks, N, K, group_m,
        BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    ):
        # Programs of `group_m` row blocks go through all columns together.
        program = tl.program_id(0)
        column_blocks = tl.cdiv(N, BLOCK_N)
        of_group = group_m * column_blocks
        first = program // of_group * group_m
        size = min(num_blocks - first, group_m)
        block = first + (program % of_group) % size
        column_block = (program % of_group) // size

        place = tl.load(places + block * BLOCK_M + tl.arange(0, BLOCK_M))
        there = place >= 0
        token = tl.load(tokens + place, mask=there, other=0).to(tl.int64)
        expert = tl.load(experts + block).to(tl.int64)
        column = column_block * BLOCK_N + tl.arange(0, BLOCK_N)
        depth = tl.arange(0, BLOCK_K)
        # (Columns past the last take the first ones' weights, and are not stored.)
        weights = w + expert * N * K + (column % N)[None, :].to(tl.int64) * K
        acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for k in range(0, tl.cdiv(K, BLOCK_K)):
            inside = k * BLOCK_K + depth < K
            a = tl.load(
                x + token[:, None] * K + (k * BLOCK_K + depth)[None, :],
                mask=there[:, None] & inside[None, :], other=0.0,
            )
            b = tl.load(weights + (k * BLOCK_K + depth)[:, None], mask=inside[:, None], other=0.0)
            acc += tl.dot(a, b)
        to = y + place[:, None].to(tl.int64) * N + column[None, :]
        tl.store(to, acc.to(y.dtype.element_ty), mask=there[:, None] & (column < N)[None, :])

    return fused_moe


class TritonCall:
    """One configuration on one histogram; called with a copy of the weights."""

    def __init__(self, kernel, values, problem):
        import torch

        self.kernel, self.values, self.problem = kernel, values, problem
        places, experts = align(problem.counts, values["BLOCK_M"])
        place = lambda list_: torch.tensor(list_, dtype=torch.int32, device=problem.device)
        self.places, self.experts, self.num_blocks = place(places), place(experts), len(experts)

    def __call__(self, weights):
        p, v = self.problem, self.values
        grid = (self.num_blocks * -(-p.shape.n // v["BLOCK_N"]),)
        self.kernel[grid](
            p.x, weights, p.y, self.places, p.tokens, self.experts, self.num_blocks, p.shape.n, p.shape.k,
            v["GROUP_M"], BLOCK_M=v["BLOCK_M"], BLOCK_N=v["BLOCK_N"], BLOCK_K=v["BLOCK_K"],
            num_warps=v["num_warps"], num_stages=v["num_stages"],
        )


# ------------------------------------------------------------------------------------------ PyTorch

TORCH_WAYS = {"grouped": 0, "loop": 1}


class TorchCall:
    def __init__(self, way, problem):
        import torch

        self.way, self.problem = way, problem
        ends, total = [], 0
        for count in problem.counts:
            ends.append(total := total + count)
        self.ends = ends
        self.offsets = torch.tensor(ends, dtype=torch.int32, device=problem.device)
        self.rows = problem.x[problem.tokens.long()].contiguous()

    def __call__(self, weights):
        import torch

        if self.way == TORCH_WAYS["grouped"]:
            out = torch._grouped_mm(self.rows, weights.transpose(1, 2), self.offsets)
            self.problem.y[: out.shape[0]].copy_(out)
            return
        begin = 0
        for expert, end in enumerate(self.ends):
            if end > begin:
                torch.mm(self.rows[begin:end], weights[expert].T, out=self.problem.y[begin:end])
            begin = end


# ------------------------------------------------------------------------------------------- timing


class Problem:
    """A model's operands, and the rows of one histogram of it."""

    def __init__(self, shape, copies, device, seed=0):
        import torch

        generator = torch.Generator(device=device).manual_seed(seed)
        self.shape, self.device = shape, device
        size = (shape.num_experts, shape.n, shape.k)
        self.weights = [torch.empty(size, dtype=torch.bfloat16, device=device) for _ in range(copies)]
        # (Of random values: power, and so clocks, depend on the bits that toggle.)
        self.weights[0].normal_(0, shape.k**-0.5, generator=generator)
        for copy in self.weights[1:]:
            copy.copy_(self.weights[0])
        self.generator = generator
        self.counts = None

    def set_counts(self, counts):
        import torch

        self.counts = list(counts)
        rows = sum(self.counts)
        num_tokens = -(-rows // self.shape.top_k)
        self.x = torch.empty((num_tokens, self.shape.k), dtype=torch.bfloat16, device=self.device)
        self.x.normal_(0, 1, generator=self.generator)
        # Rows are those of tokens in any order, as behind a router.
        order = torch.randperm(rows, generator=self.generator, device=self.device) % num_tokens
        self.tokens = order.to(torch.int32)
        self.y = torch.empty((rows, self.shape.n), dtype=torch.bfloat16, device=self.device)

    def experts_of_rows(self):
        import torch

        ids = torch.arange(self.shape.num_experts, device=self.device)
        return torch.repeat_interleave(ids, torch.tensor(self.counts, device=self.device))

    def check(self, name):
        """Compares rows of y with fp64."""
        import torch

        rows = torch.linspace(0, len(self.y) - 1, min(CHECKED_ROWS, len(self.y))).long().to(self.device)
        experts = self.experts_of_rows()[rows]
        x = self.x[self.tokens.long()[rows]]
        exact = torch.stack([x[i].double() @ self.weights[0][e].double().T for i, e in enumerate(experts)])
        torchs = torch.stack([(x[i : i + 1] @ self.weights[0][e].T)[0] for i, e in enumerate(experts)])
        error = lambda found: float((found.double() - exact).norm() / exact.norm())
        mine, bound = error(self.y[rows]), 2 * error(torchs)
        if not mine <= bound:
            raise Wrong(f"'{name}' on {self.shape.name}: an error of {mine:.2e}, and {bound:.2e} is allowed")


class Bench:
    def __init__(self, make_call, device):
        self.make_call, self.device = make_call, device
        self.problem, self.checked, self.best = None, set(), float("inf")

    def prepare(self, shape, counts):
        import torch

        if self.problem is None or self.problem.shape != shape:
            self.problem = None  # before the next one needs its memory
            torch.cuda.empty_cache()
            touched = min(sum(1 for c in counts if c > 0), shape.num_experts) * shape.n * shape.k * 2
            cache = torch.cuda.get_device_properties(self.device).L2_cache_size
            free = torch.cuda.mem_get_info(self.device)[0]
            whole = shape.num_experts * shape.n * shape.k * 2
            copies = max(2, min(-(-TIMES_CACHE * cache // touched), MOST_COPIES, int(0.7 * free // whole)))
            self.problem, self.checked = Problem(shape, copies, self.device), set()
        if self.problem.counts != list(counts):
            self.problem.set_counts(counts)
            self.best = float("inf")

    def time(self, shape, name, values, counts):
        import torch

        self.prepare(shape, counts)
        call = self.make_call(values, self.problem)
        self.problem.y.fill_(float("nan"))
        call(self.problem.weights[0])  # compiles outside of the graph
        if name not in self.checked:
            self.problem.check(name)
            self.checked.add(name)
        weights = self.problem.weights
        passes = max(len(weights), LEAST_PASSES)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for i in range(passes):
                call(weights[i % len(weights)])
        first = self.replays(graph, passes, 1)[0]
        if first > FAR_FROM_BEST * self.best:
            return first, 0.0
        count = int(min(max(ENOUGH_US / (first * passes), 3), MOST_REPLAYS))
        times = self.replays(graph, passes, count)
        median = statistics.median(times)
        self.best = min(self.best, median)
        return median, statistics.pstdev(times) / statistics.fmean(times)

    def replays(self, graph, passes, count):
        import torch

        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(count)]
        for begin, end in events:
            begin.record()
            graph.replay()
            end.record()
        torch.cuda.synchronize()
        return [begin.elapsed_time(end) * 1e3 / passes for begin, end in events]


# ------------------------------------------------------------------------------------------ program


def tuner_kernel(name, machine, num_sms, l2_bytes):
    if name == "torch":
        found = [
            tuner.Configuration(way, token_rows=128, weight_rows=128, values={"way": number})
            for way, number in TORCH_WAYS.items()
        ]
    else:
        rule = tuner.Configuration("rule", token_rows=64, weight_rows=64, is_rule=True)
        found = [rule] + [
            tuner.Configuration(
                text, token_rows=v["BLOCK_M"], weight_rows=v["BLOCK_N"], group_m=v["GROUP_M"], values=v
            )
            for text, v in triton_configurations()
        ]
    # With the type, as this library's own kernels: regions depend on an element's bytes.
    return tuner.Kernel(f"{name}_bf16", VERSION, found, machine, num_sms, l2_bytes)


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kernel", choices=("triton", "torch"), default="triton")
    parser.add_argument("--models", help="of RaMP's, separated by commas (default: all)")
    parser.add_argument("--out", help="what the file's name begins with (default: the kernel)")
    parser.add_argument("--generator", choices=("distinct", "repeated"), default="distinct")
    parser.add_argument("--budget", type=float, default=float("inf"), help="seconds after which no timing begins")
    parser.add_argument("--prune", type=float, help="as of switchyard tune")
    parser.add_argument("--resume", action="store_true", help="go on with the profile of an earlier run")
    parser.add_argument("--list", action="store_true", help="print the configurations, and time nothing")
    return parser.parse_args()


def shapes_named(names):
    if not names:
        return SHAPES
    known = {shape.name: shape for shape in SHAPES}
    for name in names.split(","):
        if name not in known:
            stop(f"--models has '{name}'; use some of {', '.join(known)}", 2)
    return [known[name] for name in names.split(",")]


def main():
    options = arguments()
    shapes = shapes_named(options.models)
    if options.list:
        for c in tuner_kernel(options.kernel, "", 1, 0).configurations:
            print(c.name, dict(c.values))
        return
    try:
        import torch
    except ImportError as missing:
        stop(f"{missing}; install PyTorch")
    if not torch.cuda.is_available():
        stop("there is no GPU that PyTorch can use")
    if options.kernel == "triton":
        try:
            import triton
        except ImportError as missing:
            stop(f"{missing}; install Triton, which PyTorch for CUDA brings along")
        compiled, package = make_triton_kernel(), f"Triton {triton.__version__}"

        def make_call(values, problem):
            tokens = -(-sum(problem.counts) // problem.shape.top_k)
            rule = rule_by_tokens(tokens, problem.shape.num_experts)
            return TritonCall(compiled, values or rule, problem)
    else:
        if not hasattr(torch, "_grouped_mm"):
            stop(f"PyTorch {torch.__version__} has no torch._grouped_mm; install 2.8 or later")
        package = f"PyTorch {torch.__version__}"

        def make_call(values, problem):
            return TorchCall(values["way"], problem)

    device = torch.device("cuda", torch.cuda.current_device())
    about = torch.cuda.get_device_properties(device)
    machine = f"{about.name}, {about.multi_processor_count} SMs, CUDA {torch.version.cuda}, {package}"
    kernel = tuner_kernel(options.kernel, machine, about.multi_processor_count, about.L2_cache_size)
    bench = Bench(make_call, device)
    by_name = {shape.name: shape for shape in shapes}
    file = pathlib.Path(f"{options.out or options.kernel}.profile.json")

    def time(model, configuration, counts):
        try:
            return timed(model, configuration, counts)
        except Exception as error:  # Triton's own class is not there without it
            if type(error).__name__ != "OutOfResources":
                raise
            raise tuner.Unsupported(str(error)) from error

    def timed(model, configuration, counts):
        return bench.time(by_name[model.name], configuration.name, dict(configuration.values), counts)

    last = []

    def told(progress):
        if progress.model and (not last or last[0] != progress.model):
            last[:] = [progress.model]
            print(f"{progress.model}: {progress.done} of {progress.total} timings, {progress.seconds:.0f} s", flush=True)

    try:
        complete = tuner.profile(
            kernel, shapes, time, file, generator=options.generator, budget=options.budget,
            prune=options.prune, resume=options.resume, progress=told,
        )
    except Wrong as wrong:
        stop(str(wrong), 1)
    except tuner.InvalidArgument as error:
        stop(str(error), 2)
    print(f"{file}: {'complete' if complete else 'the budget ended; --resume goes on'}")


if __name__ == "__main__":
    main()
