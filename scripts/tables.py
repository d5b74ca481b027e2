#!/usr/bin/env python3
"""Rewrites the generated parts of README.md and docs/decisions from results/.

    scripts/tables.py            rewrite
    scripts/tables.py --check    exit 1 if anything would change
"""

import json
import pathlib
import re
import statistics
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
RESULTS = ROOT / "results"


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


def run_output():
    path = RESULTS / "run.txt"
    return "```\n" + path.read_text().rstrip() + "\n```" if path.exists() else ""


def main():
    parts = {"cpu": cpu_table(), "libraries": library_table(), "run": run_output()}
    stale = False
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        before = path.read_text()
        after = before
        for name, text in parts.items():
            after = re.sub(
                rf"<!-- begin: {name} -->.*?<!-- end: {name} -->",
                lambda _: f"<!-- begin: {name} -->\n{text}\n<!-- end: {name} -->",
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
