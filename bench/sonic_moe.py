#!/usr/bin/env python3
"""Layers in bf16 on one GPU, beside SonicMoE: same weights and tokens, same process, same clock.

    PYTHONPATH=python SWITCHYARD_LIBRARY=build/src/c_api/libswitchyard_c.so \\
        bench/sonic_moe.py [--model olmoe,qwen3-30b,deepseek-v3] [--tokens 2048,32768] [--json sonic_moe.json]

- olmoe and qwen3-30b: gate, top-k and experts. Ours is switchyard.MoeLayer over a block of transformers,
  SonicMoE's is its layer for softmax and top-k, on that block's weights.
- deepseek-v3: 256 experts, top-8, with the routing given, because SonicMoE has no gate of that kind.

SonicMoE wants the rows of gate and up in turn, so it gets such a copy of the first weights. Each way is
captured in a CUDA graph of one pass, and the two are timed in turn, twice. Of both outputs 32 tokens are
compared with fp64. There logits are bf16, as SonicMoE has them (ours are fp32), and of layers with a gate the
three worst tokens are left out: their logits may be alike, and their experts others. --shrink N divides all
sizes, to try it: without a GPU that has our part.

Exit codes: 0 done; 1 a result is wrong; 77 there is no PyTorch, transformers or switchyard.
"""

import contextlib
import dataclasses
import importlib.metadata
import pathlib
import statistics
import sys

from result_rows import merge, percentile
from script_arguments import command_of, numbers, parser_of
from torch_chain import CUDA, DEVICE, Clock, machine, relative_error, replay_of  # which ends with 77 without PyTorch

import torch
import torch.nn.functional as F

try:
    import transformers

    import switchyard
except ImportError as missing:
    print(f"sonic_moe: {missing}; install it, or set PYTHONPATH to python/", file=sys.stderr)
    sys.exit(77)

KEY = ["suite", "model", "tokens_per_rank"]
CHECKED_TOKENS = 32
# A token whose logits are alike may go to another expert, and then counts as wrong in both.
MOST_OTHER_TOKENS = 0.1
# Twice the error of rounding the hidden values and the result once each.
BOUND = 2 * 2 * 2.0**-8


@dataclasses.dataclass(frozen=True)
class Model:
    hidden: int
    intermediate: int
    experts: int
    top_k: int
    block: str | None = None  # of transformers; None: the routing is given
    renormalize: bool = False

    def shrunk(self, by):
        return dataclasses.replace(self, hidden=max(self.hidden // by, 64), intermediate=max(self.intermediate // by, 64),
                                   experts=max(self.experts // by, self.top_k))


MODELS = {
    "olmoe": Model(2048, 1024, 64, 8, "Olmoe"),
    "qwen3-30b": Model(2048, 768, 128, 8, "Qwen3Moe", renormalize=True),
    "deepseek-v3": Model(7168, 2048, 256, 8),
}


class Layer:
    """The weights of a model, and how each way calls them."""

    def __init__(self, model, most_tokens):
        self.model = model
        random = lambda *shape: torch.randn(*shape, device=DEVICE, dtype=torch.bfloat16)  # noqa: E731
        self.w13 = random(model.experts, 2 * model.intermediate, model.hidden).mul_(model.hidden**-0.5)
        self.w2 = random(model.experts, model.hidden, model.intermediate).mul_(model.intermediate**-0.5)
        self.router = random(model.experts, model.hidden).mul_(model.hidden**-0.5)
        if model.block is None:
            self.ours = switchyard.Experts(self.w13, self.w2, top_k=model.top_k, max_tokens=most_tokens)
        else:
            self.ours = switchyard.MoeLayer.from_hf(self.block_of(model), max_tokens=most_tokens)

    def block_of(self, model):
        """The block over these weights."""
        module = getattr(transformers.models, {"Olmoe": "olmoe", "Qwen3Moe": "qwen3_moe"}[model.block])
        config = getattr(module, f"{model.block}Config")(
            hidden_size=model.hidden, intermediate_size=model.intermediate, moe_intermediate_size=model.intermediate,
            num_experts=model.experts, num_experts_per_tok=model.top_k, norm_topk_prob=model.renormalize,
            experts_implementation="eager")
        source = getattr(module, f"modeling_{module.__name__.rsplit('.', 1)[1]}")
        with torch.device("meta"):
            block = getattr(source, f"{model.block}SparseMoeBlock")(config)
        names = {"gate.weight": self.router, "experts.gate_up_proj": self.w13, "experts.down_proj": self.w2}
        block.load_state_dict(names, assign=True)
        return block.eval()

    def route(self, x):
        """Ids and weights of tokens, as the model has them."""
        probabilities = F.linear(x, self.router).float().softmax(-1)
        weights, ids = probabilities.topk(self.model.top_k)
        if self.model.renormalize or self.model.block is None:
            weights = weights / weights.sum(-1, keepdim=True)
        return ids.to(torch.int32), weights

    def exact(self, x, ids, weights):
        out = torch.zeros(x.shape, dtype=torch.float64, device=DEVICE)
        for t in range(x.shape[0]):
            for id, weight in zip(ids[t].tolist(), weights[t].double()):
                gate, up = (self.w13[id].double() @ x[t].double()).chunk(2)
                out[t] += weight * (self.w2[id].double() @ (F.silu(gate) * up))
        return out

    def our_call(self, x, routing):
        if self.model.block is None:
            out = torch.empty_like(x)
            return lambda: self.ours(x, *routing, out=out)
        return lambda: self.ours(x)

    def sonic_call(self, sonic, x, routing):
        model = self.model
        gate, up = self.w13.chunk(2, dim=1)
        w1 = torch.stack((gate, up), dim=2).flatten(1, 2).permute(1, 2, 0)
        w2 = self.w2.permute(1, 2, 0)
        stream = lambda: torch.cuda.current_stream().cuda_stream  # noqa: E731
        if model.block is not None:
            return lambda: sonic.functional.moe_TC_softmax_topk_layer(
                x, self.router, w1, None, w2, None, model.top_k, stream(), sonic.enums.ActivationType.SWIGLU, True,
                is_softmax_over_topk=model.renormalize)[0]
        ids, weights = routing
        tokens = torch.arange(x.shape[0], device=DEVICE, dtype=torch.int32).repeat_interleave(model.top_k)
        return lambda: sonic.functional.moe_general_routing_inputs(
            x, weights.flatten(), tokens, ids.flatten(), w1, None, w2, None, model.experts, stream(),
            sonic.enums.ActivationType.SWIGLU, True)[0]


def load_sonic():
    try:
        import sonicmoe
        import sonicmoe.enums
        import sonicmoe.functional
    except ImportError as missing:
        print(f"sonic_moe: SonicMoE is left out: {missing}", file=sys.stderr)
        return None, None
    versions = [f"{title} {importlib.metadata.version(name)}"
                for title, name in [("SonicMoE", "sonic-moe"), ("quack", "quack-kernels")]]
    return sonicmoe, ", ".join(versions)


def captured(call):
    """Replays a graph of one call; the second value is the tensor that it writes."""
    if not CUDA:
        return call, call()
    outs = []
    replay = replay_of(lambda: outs.append(call()), lambda: [call() for _ in range(3)])
    return replay, outs[0]


def error_of(layer, x, routing, out):
    """Of some tokens, but for the few whose experts are others because their logits are alike."""
    at = torch.linspace(0, x.shape[0] - 1, min(CHECKED_TOKENS, x.shape[0]), device=DEVICE).long()
    exact = layer.exact(x[at], routing[0][at], routing[1][at])
    if not out.isfinite().all():
        return float("inf")
    errors = torch.tensor([relative_error(out[t], exact[i]) for i, t in enumerate(at.tolist())])
    allowed = int(MOST_OTHER_TOKENS * len(at)) if layer.model.block is not None else 0
    kept = errors.sort().values[: len(at) - allowed]
    return float(kept.max())


def measure(name, layer, tokens, sonic, version, clock, args):
    x = torch.randn(tokens, layer.model.hidden, device=DEVICE, dtype=torch.bfloat16)
    routing = layer.route(x)
    calls = {"switchyard": layer.our_call(x, routing)}
    if sonic is not None:
        calls["SonicMoE"] = layer.sonic_call(sonic, x, routing)
    replays, errors, times = {}, {}, {way: [] for way in calls}
    for way, call in calls.items():
        replays[way], out = captured(call)
        replays[way]()
        errors[way] = error_of(layer, x, routing, out)
        if not errors[way] <= BOUND:
            print(f"sonic_moe: {name}, {tokens} tokens: the error of {way} against fp64 is {errors[way]:.2e}, and the "
                  f"bound {BOUND:.2e}", file=sys.stderr)
            return None
    for _ in range(2):
        for way, replay in replays.items():
            for _ in range(3):
                replay()
            times[way] += clock.time(replay, args.repeats, every_time=False)
    ours, theirs = times["switchyard"], times.get("SonicMoE")
    flops = 6 * tokens * layer.model.top_k * layer.model.hidden * layer.model.intermediate
    row = {
        "suite": "sonic_moe",
        "machine": machine(),
        "commit": args.commit,
        "command": args.command,
        "model": name,
        "dtype": "bf16",
        "gate": layer.model.block is not None,
        "tokens_per_rank": tokens,
        "median_us": round(statistics.median(ours), 2),
        "p10_us": round(percentile(ours, 0.1), 2),
        "p90_us": round(percentile(ours, 0.9), 2),
        "tflops": round(flops / statistics.median(ours) / 1e6, 1),
        "rival": version,
        "rival_us": theirs and round(statistics.median(theirs), 2),
        "error": errors["switchyard"],
        "rival_error": errors.get("SonicMoE"),
        "error_bound": BOUND,
        "times_us": [round(us, 2) for us in ours],
        "rival_times_us": theirs and [round(us, 2) for us in theirs],
    }
    beside = f"{row['rival_us']:>10.1f} {row['rival_us'] / row['median_us']:>6.3f}x" if theirs else f"{'-':>10} {'-':>7}"
    print(f"{name:<12} {tokens:>6} {row['median_us']:>10.1f} {row['tflops']:>8.1f} {beside}", flush=True)
    return row


def main():
    parser = parser_of(__doc__)
    parser.add_argument("--model", default="olmoe,qwen3-30b,deepseek-v3", help="with , between them")
    parser.add_argument("--tokens", type=numbers, default=[512, 2048, 8192, 32768])
    parser.add_argument("--repeats", type=int, default=15, help="of each way, twice")
    parser.add_argument("--shrink", type=int, default=1, help="divide all sizes of the models by this")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--json", type=pathlib.Path)
    args = parser.parse_args()
    names = args.model.split(",")
    if unknown := set(names) - set(MODELS):
        parser.error(f"--model has '{min(unknown)}'; use some of {', '.join(MODELS)}")
    args.command = command_of("bench/sonic_moe.py", sys.argv[1:])
    torch.manual_seed(args.seed)
    sonic, version = load_sonic()
    clock = Clock(4 * torch.cuda.get_device_properties(0).L2_cache_size if CUDA else 0)
    print(f"{machine()}, PyTorch {torch.__version__}, {version or 'without SonicMoE'}\n\n"
          f"{'model':<12} {'tokens':>6} {'time us':>10} {'TFLOP/s':>8} {'rival us':>10} {'ahead':>7}", flush=True)
    wrong = False
    with torch.no_grad():
        for name in names:
            layer = Layer(MODELS[name].shrunk(args.shrink), max(args.tokens))
            for tokens in args.tokens:
                row = measure(name, layer, tokens, sonic, version, clock, args)
                wrong |= row is None
                if row is not None and args.json:
                    merge(args.json, [row], KEY)
            layer.ours.close()
            del layer
            if CUDA:
                with contextlib.suppress(RuntimeError):
                    torch.cuda.empty_cache()
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
