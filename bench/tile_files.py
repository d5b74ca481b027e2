#!/usr/bin/env python3
"""Finds tiles for vLLM's Triton kernel on shapes that vLLM ships no tuned file for, among those that it ships for others.

    PYTHONPATH=bench bench/tile_files.py olmoe:bf16 gpt-oss-20b:bf16 --out tiles
    VLLM_TUNED_CONFIG_FOLDER=tiles bench/engines.py olmoe:bf16:triton olmoe:bf16:switchyard

A rival must not be timed with its defaults. For each number of tokens every distinct choice that a file for a Hopper
GPU makes nearest to it is timed on this shape, in a CUDA graph over several copies of the weights, and the best is
written. Processes compile first, so that none is timed while it does. Exit codes: 0; 77 there is no vLLM or no GPU.
"""

import argparse
import json
import multiprocessing
import pathlib
import re
import sys

import engine_models

SKIPPED = 77
TOKENS = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 2048, 8192]
COPIES = 6


def shape_of(model):
    """(experts, top_k, hidden, intermediate, has biases)"""
    config = engine_models.MODELS[model]
    experts = config.get("num_experts") or config["num_local_experts"]
    intermediate = config.get("moe_intermediate_size") or config["intermediate_size"]
    return experts, config["num_experts_per_tok"], config["hidden_size"], intermediate, model.startswith("gpt-oss")


def candidates(folder, fp8):
    """{tokens: distinct choices of all files of this type for Hopper GPUs}"""
    found = {tokens: {} for tokens in TOKENS}
    for path in sorted(folder.glob("*.json")):
        device, dtype = re.search(r"device_name=([^,.]*)", path.name), "dtype=fp8_w8a8,block_shape=[128,128]" in path.name
        if not device or not re.match(r"NVIDIA_H(100|200|20\b)", device[1]) or dtype != fp8 or ("dtype" in path.name) != fp8:
            continue
        table = {int(k): v for k, v in json.loads(path.read_text()).items() if k.isdecimal()}
        for tokens in TOKENS:
            choice = table[min(table, key=lambda at: abs(at - tokens))]
            found[tokens][json.dumps(choice, sort_keys=True)] = choice
    return {tokens: list(choices.values()) for tokens, choices in found.items()}


class Problem:
    def __init__(self, model, fp8, copies):
        import torch

        experts, top_k, hidden, intermediate, biased = shape_of(model)
        self.experts, self.top_k, self.hidden = experts, top_k, hidden
        dtype = torch.float8_e4m3fn if fp8 else torch.bfloat16
        draw = lambda *shape: torch.randn(shape, device="cuda", dtype=torch.bfloat16)
        self.weights = []
        for _ in range(copies):
            named = {"w1": (draw(experts, 2 * intermediate, hidden) / hidden**0.5).to(dtype),
                     "w2": (draw(experts, hidden, intermediate) / intermediate**0.5).to(dtype)}
            if fp8:
                named |= {"use_fp8_w8a8": True, "block_shape": [128, 128]}
                for name in ("w1", "w2"):
                    blocks = [-(-n // 128) for n in named[name].shape[1:]]
                    named[name + "_scale"] = torch.rand(experts, *blocks, device="cuda") + 0.5
            if biased:
                named |= {"w1_bias": draw(experts, 2 * intermediate), "w2_bias": draw(experts, hidden)}
                named["activation"] = "swigluoai"
            self.weights.append(named)

    def batch(self, tokens):
        import torch

        x = torch.randn(tokens, self.hidden, device="cuda", dtype=torch.bfloat16)
        ids = torch.rand(tokens, self.experts, device="cuda").topk(self.top_k).indices.int()
        return {"hidden_states": x, "topk_ids": ids, "topk_weights": torch.rand(tokens, self.top_k, device="cuda")}

    def run(self, choice, batch):
        from vllm.model_executor.layers.fused_moe import override_config
        from vllm.model_executor.layers.fused_moe.fused_moe import fused_experts_op

        with override_config(choice):
            for named in self.weights:
                fused_experts_op(**batch, **named)


def compile_some(model, fp8, work):
    problem = Problem(model, fp8, 1)
    for tokens, choice in work:
        try:
            problem.run(choice, problem.batch(tokens))
        except Exception:  # a tile that does not fit this shape is not timed either
            pass


def time_of(problem, choice, batch):
    """µs of a layer; None: it does not run."""
    import torch

    try:
        problem.run(choice, batch)
        torch.cuda.synchronize()
    except Exception:
        return None
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        problem.run(choice, batch)
    graph.replay()
    times = []
    for _ in range(9):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / len(problem.weights))
    return sorted(times)[len(times) // 2]


def tune(model, fp8, out):
    from vllm.model_executor.layers.fused_moe import fused_moe

    found = candidates(pathlib.Path(fused_moe.__file__).parent / "configs", fp8)
    problem, table = Problem(model, fp8, COPIES), {}
    for tokens, choices in found.items():
        batch = problem.batch(tokens)
        timed = [(time, i) for i, choice in enumerate(choices) if (time := time_of(problem, choice, batch)) is not None]
        best, i = min(timed)
        default = time_of(problem, None, batch)
        table[str(tokens)] = choices[i]
        print(f"{model}: {tokens} tokens: {best:.1f} µs, the best of {len(timed)}; vLLM's own choice {default:.1f}", flush=True)
    experts, _, _, intermediate, _ = shape_of(model)
    block = [128, 128] if fp8 else None
    name = fused_moe.get_config_file_name(experts, intermediate, "fp8_w8a8" if fp8 else None, block)
    (out / name).write_text(json.dumps(table, indent=1))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shapes", nargs="+", metavar="MODEL:bf16|fp8")
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("--processes", type=int, default=12, help="that compile")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    try:
        import torch
        from vllm.model_executor.layers.fused_moe import fused_moe
    except ImportError as error:
        print(f"tile_files: {error}", file=sys.stderr)
        sys.exit(SKIPPED)
    if not torch.cuda.device_count():
        print("tile_files: there is no GPU", file=sys.stderr)
        sys.exit(SKIPPED)
    folder = pathlib.Path(fused_moe.__file__).parent / "configs"
    context = multiprocessing.get_context("spawn")
    for shape in args.shapes:
        model, dtype = shape.split(":")
        fp8 = dtype == "fp8"
        work = [(tokens, choice) for tokens, choices in candidates(folder, fp8).items() for choice in choices]
        processes = [context.Process(target=compile_some, args=(model, fp8, work[i :: args.processes]))
                     for i in range(args.processes)]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        once = context.Process(target=tune, args=(model, fp8, args.out))
        once.start()
        once.join()
        if once.exitcode:
            sys.exit(1)


if __name__ == "__main__":
    main()
