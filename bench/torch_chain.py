#!/usr/bin/env python3
"""The PyTorch chain that `switchyard bench --against torch` compares with: gate, top-k, sort,
grouped GEMM, activation, grouped GEMM, weighted sum per token, all in one CUDA graph.

    torch_chain.py JOB OUT     time every point of JOB, rewriting OUT after each
    torch_chain.py --check     compare every variant with a loop over experts in fp64, small shapes

The job names the files of the activations and routers that Switchyard itself used, so that both gate
the same tokens to the same experts; expert weights are random here as there. Each point is timed in
every variant, and the fastest counts.

Exit codes: 0 done; 1 a variant is wrong, or not one could be timed; 77 there is no PyTorch.
"""

import argparse
import contextlib
import copy
import dataclasses
import json
import pathlib
import statistics
import sys
import time

try:
    import torch
    import torch.nn.functional as F
except ImportError:
    print("torch_chain: this python has no torch", file=sys.stderr)
    sys.exit(77)

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
# Points with at most this many (token, expert) rows are also compared with fp64.
MAX_CHECKED_ROWS = 1024


@dataclasses.dataclass(frozen=True)
class Spec:
    name: str
    hidden: int
    intermediate: int
    experts: int
    top_k: int
    gated: bool = True
    activation: str = "silu"
    bias: bool = False
    score: str = "softmax"
    renormalize: bool = False
    scale: float = 1.0


class Layer:
    """One layer's weights on the device, in the layout of a checkpoint: [out, in] per expert."""

    def __init__(self, spec, router, correction_bias=None, dtype=torch.bfloat16):
        self.spec = spec
        width = (2 if spec.gated else 1) * spec.intermediate
        self.router = router.to(DEVICE)
        self.correction_bias = None
        if correction_bias is not None:
            self.correction_bias = torch.tensor(correction_bias, dtype=torch.float32, device=DEVICE)
        self.up = self.random((spec.experts, width, spec.hidden), spec.hidden**-0.5, dtype)
        self.down = self.random((spec.experts, spec.hidden, spec.intermediate), spec.intermediate**-0.5, dtype)
        self.up_bias = self.down_bias = None
        if spec.bias:
            self.up_bias = self.random((spec.experts, width), 0.05, dtype)
            self.down_bias = self.random((spec.experts, spec.hidden), 0.05, dtype)

    def copy(self):
        other = copy.copy(self)
        other.router, other.up, other.down = self.router.clone(), self.up.clone(), self.down.clone()
        return other

    @staticmethod
    def random(shape, deviation, dtype):
        # One expert after the other: an fp32 temporary of the whole matrix would be twice its size.
        out = torch.empty(shape, dtype=dtype, device=DEVICE)
        for part in out:
            part.copy_(torch.randn(part.shape, device=DEVICE) * deviation)
        return out


ACTIVATIONS = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda v: F.gelu(v, approximate="tanh"),
    "relu": F.relu,
    "relu2": lambda v: F.relu(v).square(),
    "identity": lambda v: v,
}


def activate(spec, v):
    """[rows, width] -> [rows, intermediate]; gate rows come first."""
    f = ACTIVATIONS[spec.activation]
    if not spec.gated:
        return f(v)
    return f(v[:, : spec.intermediate]) * v[:, spec.intermediate :]


def choose(layer, logits):
    """Weights (fp32) and ids (int64) of the top-k experts, [T, K]."""
    spec = layer.spec
    if spec.score == "softmax" and spec.renormalize and layer.correction_bias is None:
        # softmax(all), top-k, divided by their sum = softmax over the top-k logits.
        top, ids = torch.topk(logits, spec.top_k, sorted=False)
        weights = torch.softmax(top, dim=-1)
    else:
        scores = torch.softmax(logits, dim=-1) if spec.score == "softmax" else torch.sigmoid(logits)
        if layer.correction_bias is None:
            weights, ids = torch.topk(scores, spec.top_k, sorted=False)
        else:
            ids = torch.topk(scores + layer.correction_bias, spec.top_k, sorted=False).indices
            weights = scores.gather(1, ids)
        if spec.renormalize:
            weights = weights / weights.sum(-1, keepdim=True)
    return (weights * spec.scale if spec.scale != 1 else weights), ids


def gate(layer, x):
    if x.is_cuda and x.dtype == torch.bfloat16:
        logits = torch.mm(x, layer.router.t(), out_dtype=torch.float32)
    else:
        logits = x.float() @ layer.router.float().t()
    return choose(layer, logits)


def order_by_expert(layer, ids):
    """Slots in the order of their experts, those experts, and where each expert's rows end."""
    # One radix pass: expert numbers fit a byte in every layer of the suites.
    keys = ids.flatten().to(torch.uint8 if layer.spec.experts <= 256 else torch.int16)
    experts, slots = torch.sort(keys, stable=True)
    every = torch.arange(layer.spec.experts, device=ids.device, dtype=torch.int32)
    # bincount() would read its result back to the host.
    ends = torch.searchsorted(experts.int(), every, right=True, out_int32=True)
    return slots, experts, ends


def grouped_mm(x, weights, ends):
    return torch._grouped_mm(x, weights.transpose(1, 2), offs=ends)


def add_bias(v, bias, experts):
    return v if bias is None else v + bias[experts.int()]


def run_experts(layer, x, slots, experts, ends, activation):
    rows = x[slots // layer.spec.top_k]
    v = grouped_mm(rows, layer.up, ends)
    h = activation(layer.spec, v, layer.up_bias, experts)
    return grouped_mm(h, layer.down, ends)


def eager_activation(spec, v, bias, experts):
    return activate(spec, add_bias(v, bias, experts))


def index_add_chain(layer, x):
    weights, ids = gate(layer, x)
    slots, experts, ends = order_by_expert(layer, ids)
    y = add_bias(run_experts(layer, x, slots, experts, ends, eager_activation), layer.down_bias, experts)
    weighted = y * weights.flatten()[slots].unsqueeze(1).to(y.dtype)
    return torch.zeros_like(x).index_add_(0, slots // layer.spec.top_k, weighted)


def ordered_chain(layer, x):
    """Sums a token's rows in the order of its slots, with one small matrix product per token."""
    weights, ids = gate(layer, x)
    slots, experts, ends = order_by_expert(layer, ids)
    y = add_bias(run_experts(layer, x, slots, experts, ends, eager_activation), layer.down_bias, experts)
    cells = torch.empty_like(y)
    cells[slots] = y
    cells = cells.view(x.shape[0], layer.spec.top_k, -1)
    return torch.bmm(weights.unsqueeze(1).to(y.dtype), cells).squeeze(1)


def fused_activation(spec, v, bias, experts):
    return activate(spec, add_bias(v, bias, experts).float()).to(v.dtype)


def fused_combine(y, places, weights, bias, ids):
    cells = y[places].view(*weights.shape, -1).float()
    if bias is not None:
        cells = cells + bias[ids]
    return (cells * weights.unsqueeze(-1)).sum(1).to(y.dtype)


class Compiled:
    """The ordered chain with its element-wise parts compiled, one kernel each."""

    def __init__(self):
        torch._dynamo.reset()  # the limit on recompilations counts the layers before
        self.activation = torch.compile(fused_activation, dynamic=True)
        self.combine = torch.compile(fused_combine, dynamic=True)
        self.choose = torch.compile(choose, dynamic=True)

    def __call__(self, layer, x):
        weights, ids = gate(layer, x)
        slots, experts, ends = order_by_expert(layer, ids)
        y = run_experts(layer, x, slots, experts, ends, self.activation)
        places = torch.empty_like(slots)
        places[slots] = torch.arange(slots.numel(), device=slots.device)
        return self.combine(y, places, weights, layer.down_bias, ids)


def make_variants(names):
    known = {"index_add": lambda: index_add_chain, "ordered": lambda: ordered_chain, "compiled": Compiled}
    return {name: known[name]() for name in names}


def plain_loop(layer, x, dtype):
    """The layer expert by expert in `dtype`, for the routing that the chain's gate chooses."""
    spec = layer.spec
    weights, ids = gate(layer, x)
    out = torch.zeros(x.shape, dtype=torch.promote_types(dtype, torch.float32), device=x.device)
    for expert in range(spec.experts):
        tokens, k = torch.nonzero(ids == expert, as_tuple=True)
        if tokens.numel() == 0:
            continue
        v = x[tokens].to(dtype) @ layer.up[expert].to(dtype).t()
        if spec.bias:
            v = v + layer.up_bias[expert].to(dtype)
        y = activate(spec, v) @ layer.down[expert].to(dtype).t()
        if spec.bias:
            y = y + layer.down_bias[expert].to(dtype)
        out.index_add_(0, tokens, y.to(out.dtype) * weights[tokens, k].unsqueeze(1).to(out.dtype))
    return out


def relative_error(actual, expected):
    return ((actual.double() - expected).norm() / expected.norm()).item()


class Clock:
    """Times one call at a time. Before the first, or with every_time before each, it flushes the
    cache, which is not timed."""

    def __init__(self, flush_bytes):
        self.flush_bytes = flush_bytes
        if CUDA:
            # As Switchyard's own flush: write a buffer larger than the cache, then read it.
            self.buffer = torch.empty(flush_bytes // 4, dtype=torch.int32, device=DEVICE)
            self.sink = torch.empty((), dtype=torch.int32, device=DEVICE)

    def flush(self):
        self.buffer.zero_()
        torch.amax(self.buffer, dim=0, out=self.sink)

    def on_device(self, call, repeats, every_time):
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
        for index, (begin, end) in enumerate(events):
            if index == 0 or every_time:
                self.flush()
            begin.record()
            call()
            end.record()
        torch.cuda.synchronize()
        return [begin.elapsed_time(end) * 1e3 for begin, end in events]

    def on_host(self, call, repeats):
        times = []
        for _ in range(repeats):
            begin = time.perf_counter()
            call()
            times.append((time.perf_counter() - begin) * 1e6)
        return times

    def time(self, call, repeats, every_time):
        """Microseconds of each repetition."""
        return self.on_device(call, repeats, every_time) if CUDA else self.on_host(call, repeats)


def captured(chain, layers, x, passes):
    """`passes` calls of the chain, on the layers in turn, as a callable without host work: a graph's
    replay where there are graphs."""
    def run():
        for index in range(passes):
            chain(layers[index % len(layers)], x)

    if not CUDA:
        return run
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):  # compiles, tunes and allocates outside the graph
            chain(layers[0], x)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def percentile(values, share):
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def measure(layers, x, variants, repeats, passes, clock):
    """Every variant's times for a pass, of `passes` in a row on the layers in turn; variants that fail
    are told and left out."""
    times = {}
    for name, chain in variants.items():
        try:
            with torch.no_grad():
                call = captured(chain, layers, x, passes)
                call()
                times[name] = [t / passes for t in clock.time(call, repeats, every_time=passes == 1)]
                del call
        except Exception as problem:  # whatever a compiler or a kernel cannot do here
            print(f"torch_chain: {layers[0].spec.name}, {x.shape[0]} tokens, {name}: {problem}", file=sys.stderr)
            if CUDA:
                with contextlib.suppress(RuntimeError):
                    torch.cuda.synchronize()
    return times


def point_result(layers, x, point, variants, clock):
    layer = layers[0]
    times = measure(layers[: point["copies"]], x, variants, point["repeats"], point["passes"], clock)
    result = {"tag": point["tag"], "tokens": point["tokens"], "beta": point["beta"]}
    with torch.no_grad():
        _, ids = gate(layer, x)
        result["experts_hit"] = int(torch.unique(ids).numel())
        if times and ids.numel() <= MAX_CHECKED_ROWS:
            exact = plain_loop(layer, x, torch.float64)
            result["errors"] = {name: relative_error(variants[name](layer, x), exact) for name in times}
    if times:
        medians = {name: statistics.median(values) for name, values in times.items()}
        best = min(medians, key=medians.get)
        result |= {
            "rival": f"torch {torch.__version__.partition('+')[0]} {best}",
            "rival_us": medians[best],
            "rival_p10_us": percentile(times[best], 0.1),
            "rival_p90_us": percentile(times[best], 0.9),
            "medians": medians,
        }
    return result


def read_bf16(path, rows, cols):
    data = bytearray(pathlib.Path(path).read_bytes()[: 2 * rows * cols])
    return torch.frombuffer(data, dtype=torch.bfloat16).view(rows, cols)


def load_layer(about):
    names = {field.name for field in dataclasses.fields(Spec)}
    spec = Spec(**{name: about[name] for name in names if name in about})
    router = read_bf16(about["router"], spec.experts, spec.hidden)
    return Layer(spec, router, about.get("correction_bias"))


def write_json(path, value):
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(value, indent=1))
    partial.replace(path)


def run_job(job_path, out_path, names):
    job = json.loads(job_path.read_text())
    clock = Clock(job["flush_bytes"])
    out = {"device": torch.cuda.get_device_name() if CUDA else "CPU", "torch": torch.__version__, "points": []}
    for index, about in enumerate(job["layers"]):
        points = [point for point in job["points"] if point["layer"] == index]
        if not points:
            continue
        layer = load_layer(about)
        most = max(point["tokens"] for point in points)
        activations = read_bf16(about["activations"], most, layer.spec.hidden).to(DEVICE)
        variants = make_variants(names)
        layers = [layer] + [layer.copy() for _ in range(1, max(point["copies"] for point in points))]
        for point in points:
            x = activations[: point["tokens"]].clone()
            x[:, 0] = point["skew"]
            result = point_result(layers, x, point, variants, clock)
            out["points"].append(result)
            write_json(out_path, out)
            print(
                f"{layer.spec.name:16} T {point['tokens']:6} beta {point['beta']:.2f} "
                f"{result.get('rival_us', float('nan')):10.1f} us  {result.get('rival', 'failed')}",
                flush=True,
            )
        del layer, layers, activations
        if CUDA:
            torch.cuda.empty_cache()
    return 0 if any("rival_us" in point for point in out["points"]) else 1


CHECKED = [
    Spec("softmax", 128, 64, 16, 4),
    Spec("renormalized", 128, 192, 8, 2, renormalize=True),
    Spec("deepseek", 256, 128, 32, 8, score="sigmoid", renormalize=True, scale=2.5),
    Spec("plain", 128, 256, 16, 2, gated=False, activation="gelu", bias=True, renormalize=True),
]


def check(names):
    """Every variant against fp64, with twice the error of a plain bf16 loop as the bound."""
    variants = make_variants(names)
    wrong = 0
    for spec in CHECKED:
        for tokens in (1, 7, 64):
            torch.manual_seed(tokens)
            router = (torch.randn(spec.experts, spec.hidden) * spec.hidden**-0.5).bfloat16()
            bias = torch.randn(spec.experts).mul(0.05).tolist() if spec.score == "sigmoid" else None
            layer = Layer(spec, router, bias)
            x = torch.randn(tokens, spec.hidden, device=DEVICE).bfloat16()
            with torch.no_grad():
                exact = plain_loop(layer, x, torch.float64)
                bound = 2 * relative_error(plain_loop(layer, x, torch.bfloat16), exact)
                for name, chain in variants.items():
                    error = relative_error(chain(layer, x), exact)
                    bad = not error <= max(bound, 1e-3)
                    wrong += bad
                    print(f"{spec.name:14} T {tokens:3} {name:10} error {error:.2e} bound {bound:.2e}"
                          f"{'  WRONG' if bad else ''}")
    return 1 if wrong else 0


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("job", nargs="?", type=pathlib.Path, help="what to time; written by switchyard bench")
    parser.add_argument("out", nargs="?", type=pathlib.Path, help="where to write the times")
    parser.add_argument("--check", action="store_true", help="check the variants instead")
    parser.add_argument("--variants", default="index_add,ordered,compiled", help="which, with commas")
    arguments = parser.parse_args()
    names = arguments.variants.split(",")
    if arguments.check:
        return check(names)
    if arguments.job is None or arguments.out is None:
        parser.error("give JOB and OUT, or --check")
    return run_job(arguments.job, arguments.out, names)


if __name__ == "__main__":
    sys.exit(main())
