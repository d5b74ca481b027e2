#!/usr/bin/env python3
"""DeepGEMM's grouped products on the experts' loads that `switchyard bench` had.

    deepgemm_products.py ROWS OUT    time both products of every row of ROWS (bench's --json)

A row's tokens are dealt to its experts as its `expert_load` says, each expert's rows padded to what
DeepGEMM's contiguous layout asks for. Timed are the product with gate and up and the one with down, one
behind the other: no gate, no dispatch, no activation, no quantisation, no combine. Both `in_a_row_us`, at
whatever clock the power limit leaves, and `cold_us`, one pair at a time behind a flush of the L2 cache,
as `bench --cold` does. Every operand is random; one row of each result is compared with fp64.

DeepGEMM (and PyTorch) must be importable: https://github.com/deepseek-ai/DeepGEMM

Exit codes: 0 done; 1 a product is wrong; 77 there is no DeepGEMM.
"""

import argparse
import json
import pathlib
import statistics
import sys

from result_rows import write
from rival_timing import Wrong
from torch_chain import Clock, relative_error  # which ends with 77 without PyTorch

import torch

try:
    import deep_gemm
    from deep_gemm.utils.math import per_block_cast_to_fp8, per_token_cast_to_fp8
except ImportError as missing:
    print(f"deepgemm_products: {missing}", file=sys.stderr)
    sys.exit(77)

BLOCK = 128  # columns, and of weights also rows, that share a scale
FLUSH_BYTES = 4 * (60 << 20)  # as gpu::flush_l2 of an H200
SECONDS = 0.4  # of warming up, and again of measuring, in a row


def random_rows(rows, columns):
    return torch.randn((rows, columns), device="cuda").bfloat16()


class Weights:
    """[experts, out, in], in bf16 or E4M3 with a scale per 128 x 128."""

    def __init__(self, experts, out, depth, fp8):
        kind = torch.float8_e4m3fn if fp8 else torch.bfloat16
        self.values = torch.empty((experts, out, depth), dtype=kind, device="cuda")
        self.scales = torch.empty((experts, -(-out // BLOCK), -(-depth // BLOCK)), device="cuda") if fp8 else None
        for e in range(experts):
            matrix = random_rows(out, depth)
            if fp8:
                self.values[e], self.scales[e] = per_block_cast_to_fp8(matrix, False)
            else:
                self.values[e] = matrix

    def exact(self, expert):
        values = self.values[expert].double()
        if self.scales is None:
            return values
        scales = self.scales[expert].double().repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
        return values * scales[: values.shape[0], : values.shape[1]]


class Product:
    def __init__(self, weights, rows_of_experts):
        self.weights = weights
        experts = torch.arange(len(rows_of_experts), dtype=torch.int32)
        self.layout = experts.repeat_interleave(torch.tensor(rows_of_experts)).cuda()
        _, out, depth = weights.values.shape
        self.x = random_rows(len(self.layout), depth)
        self.x_scales = None
        if weights.scales is not None:
            self.x, self.x_scales = per_token_cast_to_fp8(self.x, False)
            self.aligned = deep_gemm.get_mn_major_tma_aligned_tensor(self.x_scales)
        self.y = torch.full((len(self.layout), out), float("nan"), dtype=torch.bfloat16, device="cuda")

    def __call__(self):
        w = self.weights
        if w.scales is None:
            deep_gemm.m_grouped_bf16_gemm_nt_contiguous(self.x, w.values, self.y, self.layout)
        else:
            deep_gemm.m_grouped_fp8_gemm_nt_contiguous(
                (self.x, self.aligned), (w.values, w.scales), self.y, self.layout
            )

    def check(self):
        self()
        if self.y.isnan().any():
            raise Wrong("values were not written")
        row = len(self.layout) * 2 // 3
        x = self.x[row].double()
        if self.x_scales is not None:
            x = x * self.x_scales[row].double().repeat_interleave(BLOCK)[: len(x)]
        exact = self.weights.exact(int(self.layout[row])) @ x
        error = relative_error(self.y[row], exact)
        if not error < 4e-3:  # bf16 results have 1.7e-3
            raise Wrong(f"the error against fp64 is {error:.1e}")


def timed(call, passes):
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    events[0].record()
    for _ in range(passes):
        call()
    events[1].record()
    torch.cuda.synchronize()
    return events[0].elapsed_time(events[1]) * 1e3 / passes


def measure(row, clock):
    fp8 = row["compute"] == "fp8"
    mean = row["tokens_per_rank"] * row["top_k"] / row["experts"]
    alignment = deep_gemm.get_theoretical_mk_alignment_for_contiguous_layout()
    deep_gemm.set_mk_alignment_for_contiguous_layout(alignment)
    rows = [-(-round(load * mean) // alignment) * alignment for load in row["expert_load"]]
    rows += [0] * (row["experts"] - len(rows))
    hidden, intermediate = row["hidden"], row["intermediate"]
    products = [
        Product(Weights(row["experts"], 2 * intermediate, hidden, fp8), rows),
        Product(Weights(row["experts"], hidden, intermediate, fp8), rows),
    ]
    for product in products:
        product.check()

    def both():
        for product in products:
            product()

    passes = max(10, int(SECONDS * 1e6 / timed(both, 3)))
    timed(both, passes)
    in_a_row = [timed(both, passes // 5) for _ in range(5)]
    cold = clock.time(both, 30, every_time=True)
    kept = ("machine", "model", "hidden", "intermediate", "experts", "top_k", "compute", "tokens_per_rank", "flops")
    return {name: row[name] for name in kept} | {
        "padded_rows": sum(rows),
        "in_a_row_us": round(statistics.median(in_a_row), 2),
        "in_a_row_times_us": [round(t, 2) for t in in_a_row],
        "cold_us": round(statistics.median(cold), 2),
        "cold_times_us": [round(t, 2) for t in cold],
        "deepgemm": getattr(deep_gemm, "__version__", "unknown"),
        "torch": torch.__version__,
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", type=pathlib.Path)
    parser.add_argument("out", type=pathlib.Path)
    arguments = parser.parse_args()
    clock = Clock(FLUSH_BYTES)
    results = []
    for row in json.loads(arguments.rows.read_text()):
        try:
            result = measure(row, clock)
        except Wrong as problem:
            print(f"deepgemm_products: {row['model']}, {row['tokens_per_rank']} tokens: {problem}", file=sys.stderr)
            return 1
        torch.cuda.empty_cache()
        results.append(result)
        print(f"{row['compute']} {row['tokens_per_rank']:6} tokens: {result['in_a_row_us']:8.1f} us in a row, "
              f"{result['cold_us']:8.1f} us cold", flush=True)
        write(arguments.out, results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
