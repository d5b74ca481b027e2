#!/usr/bin/env python3
"""Draws the charts of README.md, docs/benchmarks.md and the site from results/ into docs/images/, for light and for dark pages.

    scripts/charts.py            draw
    scripts/charts.py --check    exit 1 if anything would change

The SVG is written by hand: no library has to be installed, and the same results give the same bytes.
"""

import collections
import math
import re
import sys

from generated import ROOT, write_or_check

sys.path += [str(ROOT / "lab"), str(ROOT / "bench")]

from result_tables.common import MODEL_NAMES, load
from result_tables.four_gpus import scaled, scaling_points
from result_tables.layers import comparisons_table
from result_tables.thesis import THESIS_MEMORY_MB

IMAGES = ROOT / "docs" / "images"

THEMES = {
    "light": {"text": "#1f2328", "faint": "#59636e", "grid": "#d1d9e0", "ours": "#0969da", "rival": "#bc4c00"},
    "dark": {"text": "#f0f6fc", "faint": "#9198a1", "grid": "#3d444d", "ours": "#4493f8", "rival": "#f0883e"},
}
FONT = "-apple-system, 'Segoe UI', 'Noto Sans', Helvetica, Arial, 'DejaVu Sans', sans-serif"

WIDTH, HEIGHT = 960, 316
LEFT, RIGHT, TOP, BOTTOM = 42, 8, 88, 50
GAP = 22
TOP_VALUE = 4.5
SHORT_NAMES = {"deepseek-v3-ep8": "DeepSeek-V3, 32 experts"}


def text(x, y, words, theme, color="text", size=13, anchor="start", weight="normal"):
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" fill="{theme[color]}" font-size="{size}" '
        f'text-anchor="{anchor}" font-weight="{weight}">{words}</text>'
    )


def line(x1, y1, x2, y2, color, width=1.0, dash=""):
    dashes = f' stroke-dasharray="{dash}"' if dash else ""
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{color}" stroke-width="{width}"{dashes}/>'


def curve(points, color):
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    dots = "".join(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.2" fill="{color}"/>' for x, y in points)
    return f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="2.2" stroke-linejoin="round"/>{dots}'


def short(tokens):
    return f"{tokens // 1024}k" if tokens >= 1024 else str(tokens)


def legend(entries, theme):
    """Dots and words in the upper right corner: [(x, color, words)]."""
    parts = []
    for x, color, words in entries:
        parts.append(f'<circle cx="{x}" cy="16" r="5" fill="{theme[color]}"/>')
        parts.append(text(x + 11, 20.5, words, theme, weight="600"))
    return parts


def svg(label, parts, height=HEIGHT):
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        f'font-family="{FONT}" role="img" aria-label="{label}">\n' + "\n".join(parts) + "\n</svg>\n"
    )


def over_floor_chart(rows, theme):
    """Time over the hardware's floor by number of tokens: a panel for every layer, ours and PyTorch's."""
    layers = collections.defaultdict(list)
    for row in rows:
        if row["beta"] == 1 and row.get("routing", "gate") == "gate":
            layers[row["model"]].append(row)
    for of_layer in layers.values():
        of_layer.sort(key=lambda row: row["tokens_per_rank"])
    highest = max(row["rival_us"] / row["floor_us"] for of_layer in layers.values() for row in of_layer)
    if highest > TOP_VALUE:
        raise SystemExit(f"charts.py: {highest:.2f} times the floor does not fit below TOP_VALUE = {TOP_VALUE}")

    plot_height = HEIGHT - TOP - BOTTOM
    panel_width = (WIDTH - LEFT - RIGHT - GAP * (len(layers) - 1)) / len(layers)

    def height_of(value):
        return TOP + plot_height * (1 - value / TOP_VALUE)

    parts = [
        text(0, 20, "Time of one MoE layer over the hardware's floor", theme, size=17, weight="600"),
        text(0, 41, "One H200, FP8, balanced routing, gate and combine included. 1 is the floor; lower is better.",
             theme, "faint"),
    ]
    parts += legend([(WIDTH - 212, "rival", "PyTorch"), (WIDTH - 112, "ours", "Switchyard")], theme)
    for tick in range(int(TOP_VALUE) + 1):
        parts.append(text(LEFT - 8, height_of(tick) + 4.5, f"{tick}×", theme, "faint", 12, "end"))
    for i, (model, of_layer) in enumerate(layers.items()):
        begin = LEFT + i * (panel_width + GAP)
        end = begin + panel_width
        name = SHORT_NAMES.get(model, MODEL_NAMES[model])
        parts.append(text(begin, TOP - 12, name, theme, weight="600"))
        for tick in range(int(TOP_VALUE) + 1):
            if tick != 1:
                parts.append(line(begin, height_of(tick), end, height_of(tick), theme["grid"]))
        parts.append(line(begin, height_of(1), end, height_of(1), theme["faint"], 1.6, "5 4"))
        if i == 0:
            parts.append(text(begin + 3, height_of(1) + 15, "floor", theme, "faint", 12))
        step = panel_width / len(of_layer)
        places = [begin + step * (k + 0.5) for k in range(len(of_layer))]
        for x, row in zip(places, of_layer):
            parts.append(text(x, HEIGHT - BOTTOM + 19, short(row["tokens_per_rank"]), theme, "faint", 12, "middle"))
        for key, color in [("rival_us", "rival"), ("median_us", "ours")]:
            points = [(x, height_of(row[key] / row["floor_us"])) for x, row in zip(places, of_layer)]
            parts.append(curve(points, theme[color]))
    parts.append(text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 8, "tokens in the pass", theme, "faint", 12, "middle"))
    return svg("Time of one MoE layer over the hardware's floor, Switchyard and PyTorch", parts)


def scaling_chart(theme):
    """Tokens per second over one GPU's, by number of GPUs, on logarithmic axes: a panel for every number of tokens."""
    ranks, tokens = scaling_points()
    ticks = [2**k for k in range(5)]
    highest = math.log2(ticks[-1])
    plot_height = HEIGHT - TOP - BOTTOM
    panel_width = (WIDTH - LEFT - RIGHT - GAP * (len(tokens) - 1)) / len(tokens)

    def height_of(value):
        if not 1 <= value <= ticks[-1]:
            raise SystemExit(f"charts.py: {value:.2f} times one GPU does not fit between {ticks[0]} and {ticks[-1]}")
        return TOP + plot_height * (1 - math.log2(value) / highest)

    parts = [
        text(0, 20, "Tokens per second over those of one GPU", theme, size=17, weight="600"),
        text(0, 41, "One to four H200, DeepSeek-V4-Flash's routed experts, FP8. Dashed: as many times as there are GPUs.",
             theme, "faint"),
        *legend([(WIDTH - 390, "ours", "as many tokens in all"), (WIDTH - 192, "rival", "as many on each GPU")], theme),
    ]
    for tick in ticks:
        parts.append(text(LEFT - 8, height_of(tick) + 4.5, f"{tick}×", theme, "faint", 12, "end"))
    for i, of_one in enumerate(tokens):
        begin = LEFT + i * (panel_width + GAP)
        end = begin + panel_width
        parts.append(text(begin, TOP - 12, f"{of_one} tokens", theme, weight="600"))
        parts += [line(begin, height_of(tick), end, height_of(tick), theme["grid"]) for tick in ticks]
        places = [begin + panel_width / len(ranks) * (k + 0.5) for k in range(len(ranks))]
        for x, count in zip(places, ranks):
            parts.append(text(x, HEIGHT - BOTTOM + 19, f"{count} GPU{'s' if count > 1 else ''}", theme, "faint", 12, "middle"))
        for (x1, first), (x2, second) in zip(zip(places, ranks), zip(places[1:], ranks[1:])):
            parts.append(line(x1, height_of(first), x2, height_of(second), theme["faint"], 1.6, "5 4"))
        for strong, color in [(False, "rival"), (True, "ours")]:
            points = []
            for x, count in zip(places, ranks):
                one, row = scaled(of_one, count, strong)
                points.append((x, height_of((1 if strong else count) * one["median_us"] / row["median_us"])))
            parts.append(curve(points, theme[color]))
    return svg("Tokens per second on one to four GPUs over those of one", parts)


def bar_chart(title, note, legend_entries, bars, theme, scale=float, unit=""):
    """A label and bars below each other: [(label, [(value, color, text, (low, high) or None)])], on one axis."""
    label_width, bar_height, gap, top = 372, 13, 9, 58
    values = [edge for _, of_label in bars for value, _, _, span in of_label for edge in (value, *(span or ()))]
    most = scale(max(values) * 1.02)

    def x(value):
        return label_width + (WIDTH - label_width - 96) * scale(value) / most

    parts = [text(0, 20, title, theme, size=17, weight="600"), text(0, 41, note, theme, "faint"), *legend(legend_entries, theme)]
    y = top
    for label, of_label in bars:
        middle = y + len(of_label) * (bar_height + 1) / 2
        parts.append(text(label_width - 10, middle + 4.5, label, theme, anchor="end"))
        for value, color, words, span in of_label:
            parts.append(f'<rect x="{label_width}" y="{y:.1f}" width="{x(value) - label_width:.1f}" height="{bar_height - 1}" fill="{theme[color]}"/>')
            end = x(value)
            if span:
                parts.append(line(x(span[0]), y + bar_height / 2 - 0.5, x(span[1]), y + bar_height / 2 - 0.5, theme["text"], 1.6))
                end = max(end, x(span[1]))
            parts.append(text(end + 7, y + bar_height - 2, f"{words}{unit}", theme, "faint", 12))
            y += bar_height + 1
        y += gap
    return svg(title, parts, y + 4)


def rivals_chart(theme):
    """The comparisons of README.md that have a rival."""
    bars = []
    for row in comparisons_table().splitlines()[2:]:
        what, _, _, rival, gain = (cell.strip() for cell in row.strip("|").split(" | "))
        found = re.match(r"([\d.]+)× \(([\d.]+) to ([\d.]+)\)", gain)
        if found:
            mean, low, high = map(float, found.groups())
            bars.append((f"{', '.join(what.split(', ')[:3])}: {re.split('[, ]', rival)[0]}",
                         [(mean, "ours" if mean >= 1 else "rival", f"{mean:.2f}×", (low, high))]))
    return bar_chart("Speed beside rivals", "H200. Their time over ours: geometric mean, and a line from the least to the most. 1 is as fast.",
                     [(WIDTH - 240, "ours", "ahead"), (WIDTH - 160, "rival", "behind in the mean")], bars, theme)


def decode_chart(theme):
    """A layer's time at one, eight and 32 tokens, with PyTorch's beside it."""
    bars = []
    for row in sorted(load("one_gpu_fp8.json"), key=lambda row: row["tokens_per_rank"]):
        if row["beta"] == 1 and row["tokens_per_rank"] <= 32:
            name = SHORT_NAMES.get(row["model"], MODEL_NAMES[row["model"]])
            bars.append((f"{name}, {row['tokens_per_rank']} token{'s' if row['tokens_per_rank'] > 1 else ''}",
                         [(row["median_us"], "ours", f"{row['median_us']:.0f}", None), (row["rival_us"], "rival", f"{row['rival_us']:.0f}", None)]))
    return bar_chart("Latency of one layer at decode", "One H200, FP8, balanced routing, gate and combine included, in µs.",
                     [(WIDTH - 212, "rival", "PyTorch"), (WIDTH - 112, "ours", "Switchyard")], bars, theme)


def memory_chart(theme):
    """Heap and workspace beside table 6.2 of the FlashDMoE thesis."""
    bars = []
    for row in sorted(load("thesis_memory.json"), key=lambda row: (row["tokens_per_rank"], row["experts"])):
        ours = (row["heap_reserved_bytes"] + row["workspace_bytes"]) * 1e-6
        theirs = sum(THESIS_MEMORY_MB[row["tokens_per_rank"], row["experts"]])
        bars.append((f"{row['tokens_per_rank']} tokens, {row['experts']} experts",
                     [(ours, "ours", f"{ours:.0f}", None), (theirs, "rival", f"{theirs:.0f}", None)]))
    return bar_chart("Memory of a layer beside its weights", "MB of one GPU. Ours: bf16, two H200 (the last: H100), nothing dropped. FlashDMoE: fp32, at least half dropped.",
                     [(WIDTH - 222, "rival", "FlashDMoE"), (WIDTH - 112, "ours", "Switchyard")], bars, theme)


def failures_chart(theme):
    """How long until every rank has the name of the one that failed, by what happened and where."""
    longest = collections.defaultdict(lambda: [0, 0])
    for row in load("failure_trials.json"):
        harm, _, rest = row["kind"].partition(" in ")
        scene, *where = rest.split(", ")
        place = "several hosts" if "several hosts" in where else "one host"
        if row["until_named_longest_us"]:
            of = longest["stops" if harm == "stop" else "dies", place, "while worlds start" if scene == "start" else ""]
            of[0], of[1] = max(of[0], row["until_named_longest_us"] / 1000), of[1] + row["trials"]
    bars = [(f"{', '.join(filter(None, key))}: {trials} trials", [(ms, "ours", f"{ms:,.0f}", None)]) for key, (ms, trials) in sorted(longest.items())]
    wrong = sum(row["wrong"] + row["hangs"] for row in load("failure_trials.json"))
    return bar_chart("A rank fails: the longest time until it is named",
                     f"ms, logarithmic; the deadline is 4 s. {wrong} wrong names and hangs.", [], bars, theme, lambda value: math.log10(max(value, 1)))


def main():
    rows = load("one_gpu_fp8.json")
    charts = {IMAGES / f"over-the-floor-{name}.svg": over_floor_chart(rows, theme) for name, theme in THEMES.items()}
    drawn = {"scaling": scaling_chart, "rivals": rivals_chart, "decode": decode_chart, "memory": memory_chart, "failures": failures_chart}
    for chart, draw in drawn.items():
        charts |= {IMAGES / f"{chart}-{name}.svg": draw(theme) for name, theme in THEMES.items()}
    return write_or_check(charts)


if __name__ == "__main__":
    sys.exit(main())
