#!/usr/bin/env python3
"""FlashInfer's moe_ep for SM90 that pushes (several launches, CUDA IPC), at points of suites ep_fp8 and ep_bf16.

    flashinfer_push.py --dtype bf16 --ranks 4 --json FILE [--models v4-flash-routed,v3-routed] [--tokens 8,64]

Version 0.7.2.post1, with the defaults of its configurations. fp8: sm90_fp8_fp8_bf16_push_cuda, whose input is
quantised in dispatch, and whose results come back in FP8, summed per rank; its first product is fused with the
activation (--fused 1) or not (0). bf16: sm90_bf16_bf16_bf16_push_cake, whose results come back in bf16, summed per
rank. A token goes once to each rank. Timed as mega_moe.py times; one copy of the weights, since each pass touches
more than the L2 cache holds.
"""

import pathlib
import statistics
import sys
import time

import mega_moe
import rank_processes
import torch
import torch.distributed as dist
from result_rows import write
from script_arguments import command_of, numbers, parser_of

NAMES = {"fp8": "FlashInfer 0.7.2.post1 push FP8", "bf16": "FlashInfer 0.7.2.post1 push BF16"}
BOUNDS = {"fp8": mega_moe.BOUND, "bf16": 0.02}  # of the error over the norm


def interleaved(weights, intermediate):
    """[gate | up] in turns of 128 rows, as its fused first product wants them."""
    values, scales = weights
    each, n, k = values.shape
    turns = intermediate // 128
    return (values.view(each, 2, turns, 128, k).transpose(1, 2).reshape(each, n, k).contiguous(),
            scales.view(each, 2, turns, k // 128).transpose(1, 2).reshape(each, n // 128, k // 128).contiguous())


def random_bf16(experts, n, k):
    values = torch.empty((experts, n, k), dtype=torch.bfloat16, device="cuda")
    for e in range(experts):
        values[e] = torch.randn((n, k), device="cuda") * k**-0.5
    return values


class Layer(mega_moe.Layer):
    """The weights alone: without DeepGEMM's copies."""

    def __init__(self, shape, rank, ranks, dtype):
        self.dtype = dtype
        self.hidden, self.intermediate, self.experts, self.top_k = shape
        each = self.experts // ranks
        self.first = rank * each
        torch.manual_seed(rank + 1)
        make = mega_moe.random_weights if dtype == "fp8" else random_bf16
        self.up = make(each, 2 * self.intermediate, self.hidden)
        self.down = make(each, self.hidden, self.intermediate)

    def matrix(self, which, e):
        return super().matrix(which, e) if self.dtype == "fp8" else which[e].float()


def runner_of(push, layer, args, fused, rank):
    """The pipe and the runner that plays passes over it."""
    from flashinfer.comm.mnnvl import TorchDistBackend

    fp8 = args.dtype == "fp8"
    wire = (push.Sm90PushPayload.FP8, push.Sm90PushCombine.FP8) if fp8 else (push.Sm90PushPayload.BF16, push.Sm90PushCombine.BF16)
    pipe = push.Sm90PushPipe(
        ep_size=args.ranks, rank=rank, num_local_experts=layer.experts // args.ranks, hidden_size=layer.hidden,
        top_k=layer.top_k, token_capacity=max(args.tokens), device_index=rank, comm_backend=TorchDistBackend(),
        config=push.Sm90PushConfig(payload_dtype=wire[0], combine_dtype=wire[1], fuse_act=True, capacity_factor=1.0,
                                   dedup_dispatch=True, grouped_combine=fp8, fuse_fc1_epilogue=fp8 and bool(fused)),
        out_dtype=torch.bfloat16)
    if fp8:
        up = interleaved(layer.up, layer.intermediate) if fused else layer.up
        return push.Sm90PushMoERunner(pipe, push.Sm90PushWeights(*up, *layer.down, w13_interleaved=bool(fused)))
    import flashinfer.moe_ep.kernel_src.sm90.cake_bf16_megamoe as cake

    return cake.Sm90CakeBf16MoERunner(pipe, cake.make_sm90_cake_bf16_weights(layer.up, layer.down))


def rank_main(rank, args, rendezvous):
    import flashinfer.moe_ep.kernel_src.sm90.push_style_megamoe as push
    from flashinfer.comm.mnnvl import SymmDeviceMemory

    def refuse(*_):
        raise RuntimeError("NVLink multicast must stay off here")

    SymmDeviceMemory._setup_multicast = refuse  # the pipe does not ask for it

    machine = mega_moe.start_rank(rank, args, rendezvous)
    rows, wrong, began = [], 0, time.monotonic()
    for model in args.models:
        layer = Layer(mega_moe.MODELS[model], rank, args.ranks, args.dtype)
        for fused in args.fused:
            runner = runner_of(push, layer, args, fused, rank)
            if rank == 0:
                print(f"{model}, fused {fused}: ready at {time.monotonic() - began:.0f} s", flush=True)
            for tokens in args.tokens:
                batch = mega_moe.Batch(layer, tokens, rank, args.ranks)
                out = torch.full_like(batch.x, float("nan"))

                def forward(_):
                    runner.stage_inputs(batch.x, batch.ids, batch.weights)
                    runner.compute(output=out)

                forward(0)
                torch.cuda.synchronize()
                error, times = batch.error(out), mega_moe.timed(forward)
                if rank != 0:
                    continue
                right = error <= BOUNDS[args.dtype]
                print(f"{model:<16} {tokens:>5} tokens  fused {fused}  {statistics.median(times):>9.1f} us  error "
                      f"{error:.2e} {'ok' if right else 'WRONG'}  at {time.monotonic() - began:.0f} s", flush=True)
                if not right:
                    wrong = 1
                    continue
                rows.append(mega_moe.row_of(args, machine, model, args.dtype, tokens, NAMES[args.dtype], times, error)
                            | {"fused": bool(fused)})
                if args.json:
                    write(args.json, rows)
            runner.destroy()
            del runner
            torch.cuda.empty_cache()
            dist.barrier()
        del layer
    rank_processes.end(wrong)


def main():
    parser = parser_of(__doc__)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--dtype", choices=["fp8", "bf16"], default="fp8")
    parser.add_argument("--models", type=lambda text: text.split(","), default=["v4-flash-routed", "v3-routed"])
    parser.add_argument("--tokens", type=numbers, default=[8, 64, 512, 2048, 8192])
    parser.add_argument("--fused", type=numbers, default=[1], help="1: the first product with the activation; 0: without")
    parser.add_argument("--json", type=pathlib.Path)
    args = parser.parse_args()
    if args.dtype == "bf16":
        args.fused = [1]
    args.command = command_of("flashinfer_push.py", sys.argv[1:])
    rank_processes.require_no_multicast("flashinfer_push.py")
    return rank_processes.spawn(rank_main, args)


if __name__ == "__main__":
    sys.exit(main())
