#!/usr/bin/env python3
"""GPU time of switchyard.Experts called from Python, beside the same layer timed by `switchyard bench`.

    PYTHONPATH=python SWITCHYARD_LIBRARY=build/src/c_api/libswitchyard_c.so \\
        bench/python_gpu.py --command build/src/cli/switchyard [--json python_gpu.json]

Both launch the same kernel, so any difference would be Python's. Both replay a CUDA graph of as many
passes over as many copies of the weights as the command's row says, which the L2 cache does not hold,
with the routing given: of OLMoE's geometry in bf16, K distinct experts for every token. Both are run
twice, in alternation, each time in a process of its own.
"""

import argparse
import json
import pathlib
import statistics
import subprocess
import sys
import tempfile

HIDDEN, INTERMEDIATE, EXPERTS, TOP_K = 2048, 1024, 64, 8


def by_command(command, tokens):
    with tempfile.TemporaryDirectory() as directory:
        file = pathlib.Path(directory) / "row.json"
        subprocess.run(
            [command, "bench", "--model", "olmoe", "--dtype", "bf16", "--tokens", str(tokens)]
            + ["--given-routing", "--graph", "--json", str(file)],
            check=True,
            stdout=subprocess.DEVNULL,
        )
        return json.loads(file.read_text())[-1]


def by_python(tokens, copies, passes, repeats):
    """Times of a pass in microseconds."""
    import torch

    import switchyard

    torch.manual_seed(tokens)
    layers = []
    memory = switchyard.Memory(
        switchyard.Workspace(
            hidden=HIDDEN, intermediate=INTERMEDIATE, experts=EXPERTS, top_k=TOP_K,
            max_tokens=tokens, compute="bf16", device="cuda",
        )
    )
    for _ in range(copies):
        w13 = torch.randn(EXPERTS, 2 * INTERMEDIATE, HIDDEN, device="cuda", dtype=torch.bfloat16) / 45
        w2 = torch.randn(EXPERTS, HIDDEN, INTERMEDIATE, device="cuda", dtype=torch.bfloat16) / 32
        layers.append(switchyard.Experts(w13, w2, top_k=TOP_K, max_tokens=tokens, memory=memory))
    x = torch.randn(tokens, HIDDEN, device="cuda", dtype=torch.bfloat16)
    weights, ids = torch.rand(tokens, EXPERTS, device="cuda").topk(TOP_K)
    weights, ids = weights.contiguous(), ids.to(torch.int32).contiguous()
    out = torch.empty_like(x)
    for layer in layers:
        layer(x, ids, weights, out=out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(passes):
            layers[i % copies](x, ids, weights, out=out)
    flush = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    # As the command does it: all is enqueued before anything is waited for.
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
    for i, (begin, end) in enumerate(events):
        if i == 0 or passes == 1:
            flush.fill_(i % 256)
        begin.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize()
    times = [begin.elapsed_time(end) * 1e3 / passes for begin, end in events]
    layers[0].check()
    return times


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--command", default="build/src/cli/switchyard")
    parser.add_argument("--tokens", default="1,512,4096")
    parser.add_argument("--commit", default="")
    parser.add_argument("--json", type=pathlib.Path)
    parser.add_argument("--time", nargs=4, type=int, help=argparse.SUPPRESS)  # in a process of its own
    args = parser.parse_args()
    if args.time:
        print(json.dumps(by_python(*args.time)))
        return
    rows = []
    for tokens in map(int, args.tokens.split(",")):
        command, python, row = [], [], {}
        for _ in range(2):
            row = by_command(args.command, tokens)
            command += row["times_us"]
            counts = [row["rotation_copies"], row["rotation_passes"], row["repeats"]]
            script = [sys.executable, __file__, "--time", *map(str, [tokens, *counts])]
            python += json.loads(subprocess.run(script, check=True, stdout=subprocess.PIPE).stdout)
        medians = statistics.median(command), statistics.median(python)
        print(
            f"{tokens:5} tokens   command {medians[0]:8.2f} us   Python {medians[1]:8.2f} us   "
            f"ratio {medians[1] / medians[0]:.4f}",
            flush=True,
        )
        rows.append(
            {
                "suite": "python_gpu", "machine": row["machine"], "commit": args.commit,
                "command": "bench/python_gpu.py", "model": "olmoe", "dtype": "bf16",
                "tokens_per_rank": tokens, "median_us": medians[1], "bench_us": medians[0],
                "times_us": python, "bench_times_us": command,
            }
        )
    if args.json:
        args.json.write_text(json.dumps(rows) + "\n")


if __name__ == "__main__":
    main()
