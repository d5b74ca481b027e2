#!/usr/bin/env python3
"""The PyTorch chain that `switchyard bench --against torch` compares with: gate, top-k, sort,
grouped GEMM, activation, grouped GEMM, weighted sum per token, all in one CUDA graph. For a layer
that computes in FP8 the activations are quantised before each grouped GEMM, in that graph.

    torch_chain.py JOB OUT     time every point of JOB, rewriting OUT after each
    torch_chain.py --check     compare every variant with a loop over experts in fp64, small shapes

The job names the files of the activations and routers that Switchyard itself used, so that both gate
the same tokens to the same experts; expert weights are random here as there. Each point is timed in
every variant, and the fastest counts.

FP8 is E4M3 with one scale per row of the activations and per row of the weights: what PyTorch's
grouped GEMM multiplies on Hopper. Switchyard's layers have a scale per 128 x 128 weights, so of FP8
this is a rival in time, not in values.

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
import typing

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

FP8 = torch.float8_e4m3fn
FP8_MAX = torch.finfo(FP8).max


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
    jitter: float = 0.01  # of score "sparse_mixer"
    compute: str = "bf16"  # or "fp8"


class Quantised(typing.NamedTuple):
    """values * scales: E4M3 [..., rows, columns], and fp32 [..., rows]."""

    values: torch.Tensor
    scales: torch.Tensor


def quantise(v):
    # Never zero, so that rows of zeros stay zeros. No value is beyond FP8_MAX by more than rounding
    # takes back.
    scales = v.abs().amax(-1, keepdim=True).float().clamp(min=1e-12) / FP8_MAX
    return Quantised((v / scales).to(FP8), scales.squeeze(-1))


def dequantised(q, dtype):
    return q.values.to(dtype) * q.scales.unsqueeze(-1).to(dtype)


class Layer:
    """One layer's weights on the device, in the layout of a checkpoint: [out, in] per expert."""

    def __init__(self, spec, router, correction_bias=None, dtype=torch.bfloat16):
        matrices = self.random_fp8 if spec.compute == "fp8" else self.random
        self.spec = spec
        width = (2 if spec.gated else 1) * spec.intermediate
        self.router = router.to(DEVICE)
        self.correction_bias = None
        if correction_bias is not None:
            self.correction_bias = torch.tensor(correction_bias, dtype=torch.float32, device=DEVICE)
        self.up = matrices((spec.experts, width, spec.hidden), spec.hidden**-0.5, dtype)
        self.down = matrices((spec.experts, spec.hidden, spec.intermediate), spec.intermediate**-0.5, dtype)
        self.up_bias = self.down_bias = None
        if spec.bias:
            self.up_bias = self.random((spec.experts, width), 0.05, dtype)
            self.down_bias = self.random((spec.experts, spec.hidden), 0.05, dtype)

    def copy(self):
        other = copy.copy(self)
        other.router, other.up, other.down = self.router.clone(), clone(self.up), clone(self.down)
        return other

    def matrix(self, weights, expert, dtype):
        """One expert's [out, in] in `dtype`."""
        if isinstance(weights, Quantised):
            return dequantised(Quantised(weights.values[expert], weights.scales[expert]), dtype)
        return weights[expert].to(dtype)

    @staticmethod
    def random(shape, deviation, dtype):
        # One expert after the other: an fp32 temporary of the whole matrix would be twice its size.
        out = torch.empty(shape, dtype=dtype, device=DEVICE)
        for part in out:
            part.copy_(torch.randn(part.shape, device=DEVICE) * deviation)
        return out

    @staticmethod
    def random_fp8(shape, deviation, dtype):
        out = Quantised(torch.empty(shape, dtype=FP8, device=DEVICE),
                        torch.empty(shape[:-1], dtype=torch.float32, device=DEVICE))
        for values, scales in zip(out.values, out.scales):
            part = quantise((torch.randn(values.shape, device=DEVICE) * deviation).to(dtype))
            values.copy_(part.values)
            scales.copy_(part.scales)
        return out


def clone(weights):
    if isinstance(weights, Quantised):
        return Quantised(weights.values.clone(), weights.scales.clone())
    return weights.clone()


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


def sparse_mixer(spec, logits):
    """Phi-3.5-MoE's inference path: each round takes the best logit left, and weighs it by a softmax
    over those left that are near it."""
    weights, ids = [], []
    for _ in range(spec.top_k):
        best, chosen = logits.max(-1, keepdim=True)
        far = (best - logits) / torch.maximum(logits.abs(), best) > 2 * spec.jitter
        weights.append(1 / torch.exp(logits - best).masked_fill(far, 0).sum(-1, keepdim=True))
        ids.append(chosen)
        logits = logits.scatter(-1, chosen, -torch.inf)
    return torch.cat(weights, -1), torch.cat(ids, -1)


def choose(layer, logits):
    """Weights (fp32) and ids (int64) of the top-k experts, [T, K]."""
    spec = layer.spec
    if spec.score == "sparse_mixer":
        return sparse_mixer(spec, logits)
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
    if not isinstance(weights, Quantised):
        return torch._grouped_mm(x, weights.transpose(1, 2), offs=ends)
    # Both scales multiply results, so the accumulation in between may be the fast one.
    return torch._scaled_grouped_mm(x.values, weights.values.transpose(1, 2), x.scales, weights.scales,
                                    offs=ends, out_dtype=torch.bfloat16, use_fast_accum=True)


def add_bias(v, bias, experts):
    return v if bias is None else v + bias[experts.int()]


def run_experts(layer, x, slots, experts, ends, steps):
    rows = steps.gather(x, slots // layer.spec.top_k)
    v = grouped_mm(rows, layer.up, ends)
    h = steps.activation(layer.spec, v, layer.up_bias, experts)
    return grouped_mm(h, layer.down, ends)


class Steps(typing.NamedTuple):
    """What is between the products: the rows of each expert, and its h, as the next product takes
    them."""

    gather: typing.Callable
    activation: typing.Callable


def eager_activation(spec, v, bias, experts):
    return activate(spec, add_bias(v, bias, experts))


def plain_gather(x, tokens):
    return x[tokens]


def gather_quantised(q, tokens):
    # As bytes: a gather of them is there in any version.
    return Quantised(q.values.view(torch.uint8)[tokens].view(FP8), q.scales[tokens])


EAGER = {
    "bf16": Steps(plain_gather, eager_activation),
    "fp8": Steps(lambda x, tokens: gather_quantised(quantise(x), tokens),
                 lambda *args: quantise(eager_activation(*args))),
}


def eager_experts(layer, x, slots, experts, ends):
    y = run_experts(layer, x, slots, experts, ends, EAGER[layer.spec.compute])
    return add_bias(y, layer.down_bias, experts)


def index_add_chain(layer, x):
    weights, ids = gate(layer, x)
    slots, experts, ends = order_by_expert(layer, ids)
    y = eager_experts(layer, x, slots, experts, ends)
    weighted = y * weights.flatten()[slots].unsqueeze(1).to(y.dtype)
    return torch.zeros_like(x).index_add_(0, slots // layer.spec.top_k, weighted)


def ordered_chain(layer, x):
    """Sums a token's rows in the order of its slots, with one small matrix product per token."""
    weights, ids = gate(layer, x)
    slots, experts, ends = order_by_expert(layer, ids)
    y = eager_experts(layer, x, slots, experts, ends)
    cells = torch.empty_like(y)
    cells[slots] = y
    cells = cells.view(x.shape[0], layer.spec.top_k, -1)
    return torch.bmm(weights.unsqueeze(1).to(y.dtype), cells).squeeze(1)


def fused_activation(spec, v, bias, experts):
    return activate(spec, add_bias(v, bias, experts).float()).to(v.dtype)


# Plain tuples out of compiled functions; run_experts() wants them named.
def fused_quantised_activation(spec, v, bias, experts):
    return tuple(quantise(activate(spec, add_bias(v, bias, experts).float())))


def fused_quantise(x):
    return tuple(quantise(x))


def fused_quantise_rows(x, tokens):
    return tuple(quantise(x[tokens]))


def fused_combine(y, places, weights, bias, ids):
    cells = y[places].view(*weights.shape, -1).float()
    if bias is not None:
        cells = cells + bias[ids]
    return (cells * weights.unsqueeze(-1)).sum(1).to(y.dtype)


class Compiled:
    """The ordered chain with its element-wise parts compiled, one kernel each. In FP8 the tokens are
    quantised and then gathered, or, with `by_row`, each gathered row by itself: one kernel less, and
    top_k times the quantising."""

    def __init__(self, by_row=False):
        torch._dynamo.reset()  # the limit on recompilations counts the layers before
        activation = torch.compile(fused_activation, dynamic=True)
        # Their sums over rows want the row's length as a constant: only what changes is dynamic.
        quantised_activation = torch.compile(fused_quantised_activation)
        quantise_rows = torch.compile(fused_quantise_rows if by_row else fused_quantise)

        def gather(x, tokens):
            if by_row:
                return Quantised(*quantise_rows(x, tokens))
            return gather_quantised(Quantised(*quantise_rows(x)), tokens)

        self.steps = {
            "bf16": Steps(plain_gather, activation),
            "fp8": Steps(gather, lambda *args: Quantised(*quantised_activation(*args))),
        }
        self.combine = torch.compile(fused_combine, dynamic=True)
        self.choose = torch.compile(choose, dynamic=True)

    def __call__(self, layer, x):
        weights, ids = gate(layer, x)
        slots, experts, ends = order_by_expert(layer, ids)
        y = run_experts(layer, x, slots, experts, ends, self.steps[layer.spec.compute])
        places = torch.empty_like(slots)
        places[slots] = torch.arange(slots.numel(), device=slots.device)
        return self.combine(y, places, weights, layer.down_bias, ids)


VARIANTS = {
    "index_add": lambda: index_add_chain,
    "ordered": lambda: ordered_chain,
    "compiled": Compiled,
    "compiled_rows": lambda: Compiled(by_row=True),
}
FP8_VARIANTS = ("compiled_rows",)


def make_variants(names, compute):
    return {name: VARIANTS[name]() for name in names if compute == "fp8" or name not in FP8_VARIANTS}


def plain_loop(layer, x, dtype, quantised=False):
    """The layer expert by expert in `dtype`, for the routing that the chain's gate chooses; with
    `quantised`, of activations rounded to FP8 before each product."""
    rounded = (lambda v: dequantised(quantise(v), dtype)) if quantised else (lambda v: v)
    spec = layer.spec
    weights, ids = gate(layer, x)
    out = torch.zeros(x.shape, dtype=torch.promote_types(dtype, torch.float32), device=x.device)
    for expert in range(spec.experts):
        tokens, k = torch.nonzero(ids == expert, as_tuple=True)
        if tokens.numel() == 0:
            continue
        v = rounded(x[tokens].to(dtype)) @ layer.matrix(layer.up, expert, dtype).t()
        if spec.bias:
            v = v + layer.up_bias[expert].to(dtype)
        y = rounded(activate(spec, v)) @ layer.matrix(layer.down, expert, dtype).t()
        if spec.bias:
            y = y + layer.down_bias[expert].to(dtype)
        out.index_add_(0, tokens, y.to(out.dtype) * weights[tokens, k].unsqueeze(1).to(out.dtype))
    return out


def relative_error(actual, expected):
    return ((actual.double() - expected).norm() / expected.norm()).item()


def machine():
    """This process's, as rows of scripts that time one GPU tell it."""
    if not CUDA:
        return "processor, by PyTorch"
    properties = torch.cuda.get_device_properties(0)
    return f"{properties.name}, {properties.multi_processor_count} SMs, CUDA {torch.version.cuda}"


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

    def warm_up():  # compiles, tunes and allocates outside the graph
        for _ in range(2):
            chain(layers[0], x)

    return replay_of(run, warm_up) if CUDA else run


def replay_of(run, warm_up, errors="global"):
    """What replays run() in a CUDA graph. `warm_up` runs before, on the stream that is captured. errors: the threads
    whose calls may spoil the capture."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        warm_up()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode=errors):
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


def layer_results(about, points, names, clock):
    """The results of a layer's points, each as it is found."""
    layer = load_layer(about)
    most = max(point["tokens"] for point in points)
    activations = read_bf16(about["activations"], most, layer.spec.hidden).to(DEVICE)
    variants = make_variants(names, layer.spec.compute)
    layers = [layer] + [layer.copy() for _ in range(1, max(point["copies"] for point in points))]
    for point in points:
        x = activations[: point["tokens"]].clone()
        x[:, 0] = point["skew"]
        result = point_result(layers, x, point, variants, clock)
        yield result
        print(
            f"{layer.spec.name:16} T {point['tokens']:6} beta {point['beta']:.2f} "
            f"{result.get('rival_us', float('nan')):10.1f} us  {result.get('rival', 'failed')}",
            flush=True,
        )


def run_job(job_path, out_path, names):
    job = json.loads(job_path.read_text())
    clock = Clock(job["flush_bytes"])
    out = {"device": torch.cuda.get_device_name() if CUDA else "CPU", "torch": torch.__version__, "points": []}
    for index, about in enumerate(job["layers"]):
        points = [point for point in job["points"] if point["layer"] == index]
        if not points:
            continue
        try:
            for result in layer_results(about, points, names, clock):
                out["points"].append(result)
                write_json(out_path, out)
        except RuntimeError as problem:  # too little memory, say; other layers may fit
            print(f"torch_chain: {about['name']}: {problem}", file=sys.stderr)
        if CUDA:
            torch.cuda.empty_cache()
    return 0 if any("rival_us" in point for point in out["points"]) else 1


CHECKED = [
    Spec("softmax", 128, 64, 16, 4),
    Spec("renormalized", 128, 192, 8, 2, renormalize=True),
    Spec("deepseek", 256, 128, 32, 8, score="sigmoid", renormalize=True, scale=2.5),
    Spec("sparse mixer", 128, 64, 16, 2, score="sparse_mixer"),
    Spec("plain", 128, 256, 16, 2, gated=False, activation="gelu", bias=True, renormalize=True),
]


def checked_specs():
    yield from CHECKED
    if not CUDA:
        print("fp8: skipped, for torch._scaled_grouped_mm needs a GPU")
        return
    for spec in CHECKED:
        yield dataclasses.replace(spec, name=f"{spec.name} fp8", compute="fp8")


def check(names):
    """Every variant against fp64, with twice the error of a plain loop as the bound: one in bf16, or one
    in fp32 that rounds activations to FP8."""
    wrong = 0
    for spec in checked_specs():
        variants = make_variants(names, spec.compute)
        fp8 = spec.compute == "fp8"
        for tokens in (1, 7, 64):
            torch.manual_seed(tokens)
            router = (torch.randn(spec.experts, spec.hidden) * spec.hidden**-0.5).bfloat16()
            bias = torch.randn(spec.experts).mul(0.05).tolist() if spec.score == "sigmoid" else None
            layer = Layer(spec, router, bias)
            x = torch.randn(tokens, spec.hidden, device=DEVICE).bfloat16()
            with torch.no_grad():
                exact = plain_loop(layer, x, torch.float64)
                dtype = torch.float32 if fp8 else torch.bfloat16
                bound = 2 * relative_error(plain_loop(layer, x, dtype, quantised=fp8), exact)
                for name, chain in variants.items():
                    error = relative_error(chain(layer, x), exact)
                    bad = not error <= max(bound, 1e-3)
                    wrong += bad
                    print(f"{spec.name:17} T {tokens:3} {name:13} error {error:.2e} bound {bound:.2e}"
                          f"{'  WRONG' if bad else ''}")
    return 1 if wrong else 0


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("job", nargs="?", type=pathlib.Path, help="what to time; written by switchyard bench")
    parser.add_argument("out", nargs="?", type=pathlib.Path, help="where to write the times")
    parser.add_argument("--check", action="store_true", help="check the variants instead")
    parser.add_argument("--variants", default=",".join(VARIANTS), help="which, with commas")
    arguments = parser.parse_args()
    names = arguments.variants.split(",")
    if arguments.check:
        return check(names)
    if arguments.job is None or arguments.out is None:
        parser.error("give JOB and OUT, or --check")
    return run_job(arguments.job, arguments.out, names)


if __name__ == "__main__":
    sys.exit(main())
