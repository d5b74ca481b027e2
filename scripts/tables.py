#!/usr/bin/env python3
"""Rewrites the generated parts of README.md and docs/decisions from results/.

    scripts/tables.py            rewrite
    scripts/tables.py --check    exit 1 if anything would change
"""

import functools
import json
import pathlib
import re
import statistics
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
RESULTS = ROOT / "results"


@functools.cache
def load(name):
    path = RESULTS / name
    return json.loads(path.read_text()) if path.exists() else None


def medians(result):
    """{benchmark name: (median ms, spread ms, counters of the median repetition)}"""
    runs = {}
    for row in result["benchmarks"]:
        if row.get("run_type") == "iteration" and not row.get("error_occurred"):
            runs.setdefault(row["run_name"].removesuffix("/manual_time").replace("/min_time:0.200", ""), []).append(row)
    table = {}
    for name, rows in runs.items():
        rows.sort(key=lambda row: row["real_time"])
        middle = rows[len(rows) // 2]
        times = [row["real_time"] for row in rows]
        table[name] = (statistics.median(times), max(times) - min(times), middle)
    return table


def natural(item):
    """Sort key of a benchmark name: its numbers as numbers."""
    return [int(number) for number in re.findall(r"\d+", item[0])]


def provenance(result):
    about = result["switchyard"]
    return f"*{about['machine']}; commit {about['commit']}; `{about['command']}`*"


def cpu_table():
    result = load("cpu_bench.json")
    if result is None:
        return ""
    rows = medians(result)
    rate = rows["library_tiles/2048"][2]["flops"]
    read = rows["memory_read"][2]["weight_bytes"]
    lines = [
        "**CPU engine, OLMoE geometry (H 2048, I 1024, 64 experts, top-8), bf16, gate and combine "
        f"included.** In the same run the library multiplies the same tiles at {rate / 1e9:.0f} GFLOP/s "
        f"and memory is read at {read / 1e9:.1f} GB/s.",
        "",
        "| tokens | ranks | median ms | spread ms | GFLOP/s | share of the library | weights GB/s "
        "| share of the read rate |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, (median, spread, row) in sorted(rows.items(), key=natural):
        match = re.fullmatch(r"layer/tokens:(\d+)/ranks:(\d+)", name)
        if not match:
            continue
        lines.append(
            f"| {match[1]} | {match[2]} | {median:.2f} | {spread:.2f} | {row['flops'] / 1e9:.0f} "
            f"| {100 * row['flops'] / rate:.0f} % | {row['weight_bytes'] / 1e9:.1f} "
            f"| {100 * row['weight_bytes'] / read:.0f} % |"
        )
    return "\n".join(lines + ["", provenance(result)])


def library_table():
    result = load("gemm_libraries.json")
    if result is None:
        return ""
    rows = medians(result)
    names = ["onednn_bf16", "libxsmm_bf16", "onednn_f32", "libxsmm_f32", "openblas_f32"]
    shapes = sorted({name.partition("/")[2] for name in rows}, key=lambda s: natural((s,)))
    lines = [
        "**Tile products, GFLOP/s on all cores** (m weight rows, n tokens, depth k).",
        "",
        "| tile | " + " | ".join(name.replace("_", " ") for name in names) + " |",
        "|---" * (len(names) + 1) + "|",
    ]
    for shape in shapes:
        cells = [
            f"{rows[f'{name}/{shape}'][2]['flops'] / 1e9:.0f}" if f"{name}/{shape}" in rows else "–"
            for name in names
        ]
        lines.append(f"| {shape.replace('/', ' ').replace(':', ' ')} | " + " | ".join(cells) + " |")
    return "\n".join(lines + ["", provenance(result)])


MODEL_NAMES = {
    "olmoe": "OLMoE",
    "qwen3-30b": "Qwen3-30B-A3B",
    "mixtral-8x7b": "Mixtral 8x7B",
    "deepseek-v3-ep8": "DeepSeek-V3, 32 experts of one rank of EP8",
    "mixtral-8x22b": "Mixtral 8x22B",
    "phi-3.5-moe": "Phi-3.5-MoE",
    "jamba-1.5-mini": "Jamba-1.5-mini",
    "dbrx": "DBRX",
    "thesis": "FlashDMoE's layer",
    "v4-flash-routed": "DeepSeek-V4-Flash, routed experts",
    "v4-pro-routed": "DeepSeek-V4-Pro, routed experts",
    "v3-routed": "DeepSeek-V3, routed experts",
    "glm-5-routed": "GLM-5, routed experts",
}


def describe_layer(row):
    name = MODEL_NAMES.get(row["model"], row["model"])
    sizes = f"H {row['hidden']}, I {row['intermediate']}, {row['experts']} experts, top-{row['top_k']}"
    return f"{name} ({sizes})"


def time_over_floor(row):
    return row["median_us"] / row["floor_us"] if row.get("floor_us") else None


def microseconds(value):
    return "–" if value is None else f"{value:.1f}" if value < 1000 else f"{value:.0f}"


def gpu_row_cells(row):
    over = time_over_floor(row)
    rival = row.get("rival_us")
    return [
        microseconds(row["median_us"]),
        "–" if over is None else f"{100 / over:.0f} %",
        microseconds(rival),
        "–" if rival is None else f"{rival / row['median_us']:.2f}×",
    ]


def gpu_summary(rows):
    """One sentence per thing that can be said of all rows."""
    overs = [over for over in map(time_over_floor, rows) if over is not None]
    rivals = [row for row in rows if row.get("rival_us") is not None]
    said = []
    if overs:
        said.append(
            f"Time over floor F: geometric mean {statistics.geometric_mean(overs):.2f}, "
            f"worst {max(overs):.2f} ({len(overs)} points)."
        )
    if rivals:
        gains = [row["rival_us"] / row["median_us"] for row in rivals]
        said.append(
            f"Speed-up over PyTorch: geometric mean {statistics.geometric_mean(gains):.2f}×, "
            f"least {min(gains):.2f}× ({len(gains)} points)."
        )
    return " ".join(said)


def gpu_provenance(rows):
    """What differs between rows is listed; a file that was measured at once has one of each."""
    machines = ", ".join(sorted({row["machine"] for row in rows}))
    commits = ", ".join(sorted({row["commit"] for row in rows}))
    command = max((row["command"] for row in rows), key=[row["command"] for row in rows].count)
    kept = any("--keep-rival" in row["command"] and row.get("rival_us") for row in rows)
    of_rival = "; PyTorch's times are those of an earlier run" if kept else ""
    return f"*{machines}; commit {commits}; `{command}`{of_rival}*"


# The constants and their source are in src/cli/bench_rows.h.
TFLOPS = {"bf16": 750, "fp8": 1300}


def gpu_floor(rows):
    # Rows that do not tell what they were computed in are older than FP8.
    rate = TFLOPS[rows[0].get("compute", "bf16")]
    return (
        f"F = max(7 µs + touched weights / 4.6 TB/s, FLOPs / {rate} TFLOP/s), without the gate, which is in the "
        "time. β is the balancedness of the routing; where ln K / ln E is more than it, it stands for that."
    )


def gpu_method(rows):
    flushed = all(row.get("rotation_passes", 1) == 1 for row in rows)
    if flushed:
        return "Each pass by itself, behind a flush of the L2 cache, in a CUDA graph."
    return "Passes in a row in a CUDA graph, on copies of the layer in turn; ours and PyTorch's alike."


def gpu_table(suite, title, note=""):
    rows = load(f"{suite}.json")
    rows = [row for row in rows or [] if row.get("routing", "gate") == "gate"]
    if not rows:
        return ""
    betas = sorted({row["beta"] for row in rows}, reverse=True)
    names = ["share of F", "PyTorch µs", "speed-up"]
    heads = [head for beta in betas for head in (f"β {beta:g}: time µs", *names)]
    absent = ["–"] * (1 + len(names))
    said = [f"**{title}**", gpu_summary(rows), gpu_method(rows), gpu_floor(rows), note]
    lines = [" ".join(text for text in said if text)]
    layers = {}
    for row in rows:
        layers.setdefault(describe_layer(row), {}).setdefault(row["tokens_per_rank"], {})[row["beta"]] = row
    for layer, by_tokens in layers.items():
        lines += ["", layer, "", "| tokens | " + " | ".join(heads) + " |", "|---" * (len(heads) + 1) + "|"]
        for tokens, by_beta in sorted(by_tokens.items()):
            cells = []
            for beta in betas:
                cells += gpu_row_cells(by_beta[beta]) if beta in by_beta else absent
            lines.append(f"| {tokens} | " + " | ".join(cells) + " |")
    return "\n".join(lines + ["", gpu_provenance(rows)])


def products_table():
    ours, cold, theirs = load("products.json"), load("products_cold.json"), load("deepgemm.json")
    if not (ours and cold and theirs):
        return ""
    ours, cold, theirs = (
        {(row["compute"], row["tokens_per_rank"]): row for row in rows} for rows in (ours, cold, theirs)
    )
    points = sorted(ours.keys() & cold.keys() & theirs.keys(), key=lambda point: (point[0] != "fp8", point[1]))
    first = theirs[points[0]]
    lines = [
        f"**Beside DeepGEMM {first['deepgemm']}.** {describe_layer(first)}: a whole pass of ours (given routing; "
        "dispatch, quantisation, activation and combine included) and DeepGEMM's two grouped products alone, on the "
        "same loads of the experts. In a row, at the clock that the power limit leaves; cold, one at a time behind a "
        "flush of the L2 cache.",
        "",
        "| | tokens | in a row: ours µs | TFLOP/s | DeepGEMM µs | TFLOP/s | cold: ours µs | TFLOP/s | DeepGEMM µs | TFLOP/s |",
        "|---" * 10 + "|",
    ]
    for point in points:
        times = [ours[point]["median_us"], theirs[point]["in_a_row_us"], cold[point]["median_us"], theirs[point]["cold_us"]]
        cells = [cell for us in times for cell in (microseconds(us), f"{ours[point]['flops'] / us / 1e6:.0f}")]
        lines.append(f"| {'FP8' if point[0] == 'fp8' else point[0]} | {point[1]} | " + " | ".join(cells) + " |")
    return "\n".join(lines + ["", gpu_provenance(ours.values())])


def published(row, ranks):
    """{rival: us} of what others publish of the row's layer and tokens on so many GPUs."""
    found = {}
    for series in load("published.json"):
        beside = all(series[key] == row[key] for key in ["model", "experts", "compute"] if key in series)
        if beside and series["ranks"] == ranks and str(row["tokens_per_rank"]) in series["time_us"]:
            found[series["rival"]] = series["time_us"][str(row["tokens_per_rank"])]
    return found


def others_cells(row):
    """{column: cell} of what others publish beside the row."""
    if row["model"] == "thesis":
        theirs = published(row, row["ranks"]).get("FlashDMoE")
        cells = ["–", "–"] if theirs is None else [f"{theirs:.0f}", f"{theirs / row['median_us']:.1f}×"]
        return dict(zip(["FlashDMoE µs", "speed-up"], cells))
    if row["compute"] == "fp8":
        best = min(published(row, 8).items(), key=lambda item: item[1], default=None)
        return {"best of others on 8 GPUs, µs": "–" if best is None else f"{best[1]:.0f} ({best[0]})"}
    return {}


def ranks_row_cells(row):
    over = time_over_floor(row)
    seconds = row["median_us"] * 1e-6
    cells = [
        microseconds(row["median_us"]),
        "–" if over is None else f"{100 / over:.0f} %",
        f"{row['flops'] / seconds / 1e12:.0f}",
        f"{row['touched_bytes'] / seconds / 1e12:.2f}",
        f"{row['nvlink_bytes'] / 1e6:.2f}",
    ]
    return cells + list(others_cells(row).values())


def ranks_table(suite, title):
    """Expert parallelism: a table for every layer and number of ranks."""
    rows = load(f"{suite}.json")
    if not rows:
        return ""
    heads = ["time µs", "share of F", "TFLOP/s per GPU", "weights TB/s", "sent MB per GPU"]
    rate = TFLOPS[rows[0].get("compute", "bf16")]
    floor = (
        f"F = max(10 µs + touched weights / 4.6 TB/s, FLOPs / {rate} TFLOP/s, sent bytes / 330 GB/s) of the most "
        "loaded rank. Time of the slowest rank, routing given, β 1."
    )
    if rate == TFLOPS["fp8"]:
        floor += (
            " Others' times are published ones or measured (`results/published.json`), on 8 GPUs, of which each has the weights "
            "of fewer experts to read and as much to compute: they compare where arithmetic is the floor."
        )
    lines = [" ".join(text for text in [f"**{title}**", gpu_summary(rows), floor] if text)]
    layers = {}
    for row in rows:
        layers.setdefault((describe_layer(row), row["ranks"]), []).append(row)
    for (layer, ranks), of_layer in layers.items():
        columns = [*heads, *others_cells(of_layer[0])]
        lines += ["", f"{layer}, {ranks} GPUs", "", "| tokens per GPU | " + " | ".join(columns) + " |"]
        lines.append("|---" * (len(columns) + 1) + "|")
        for row in sorted(of_layer, key=lambda row: row["tokens_per_rank"]):
            lines.append(f"| {row['tokens_per_rank']} | " + " | ".join(ranks_row_cells(row)) + " |")
    return "\n".join(lines + ["", gpu_provenance(rows)])


FP8_SCALES = (
    "Weights have a scale per 128 × 128, activations are bf16 and quantised in the layer; PyTorch's chain "
    "quantises likewise, with a scale per row, which is what its grouped product takes."
)


def run_output():
    path = RESULTS / "run.txt"
    return "```\n" + path.read_text().rstrip() + "\n```" if path.exists() else ""


def main():
    parts = {
        "cpu": cpu_table(),
        "libraries": library_table(),
        "run": run_output(),
        "one_gpu_bf16": gpu_table("one_gpu_bf16", "One H200, bf16, gate and combine included."),
        "one_gpu_fp8": gpu_table(
            "one_gpu_fp8", "One H200, FP8, gate, quantisation and combine included.", FP8_SCALES
        ),
        "one_gpu_fp8_more": gpu_table("one_gpu_fp8_more", "Fewer, larger experts on one H200, FP8."),
        "products": products_table(),
        "ep_fp8": ranks_table("ep_fp8", "Expert parallelism in FP8, dispatch and combine inside the kernel."),
        "ep_bf16": ranks_table("ep_bf16", "Expert parallelism in bf16."),
        "ep_thesis": ranks_table("ep_thesis", "FlashDMoE's own layer over several H200, bf16."),
        "one_gpu_thesis": gpu_table("one_gpu_thesis", "FlashDMoE's own layer on one H200, bf16."),
    }
    stale = False
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        before = path.read_text()
        after = before
        for name, text in parts.items():
            after = re.sub(
                rf"<!-- begin: {name} -->.*?<!-- end: {name} -->",
                lambda _: f"<!-- begin: {name} -->\n{text + chr(10) if text else ''}<!-- end: {name} -->",
                after,
                flags=re.S,
            )
        if after != before:
            stale = True
            if "--check" in sys.argv:
                print(f"{path.relative_to(ROOT)} is not what scripts/tables.py makes of results/")
            else:
                path.write_text(after)
    return 1 if stale and "--check" in sys.argv else 0


if __name__ == "__main__":
    sys.exit(main())
