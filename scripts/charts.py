#!/usr/bin/env python3
"""Draws the charts of README.md and docs/benchmarks.md from results/ into docs/images/, for light and for dark pages.

    scripts/charts.py            draw
    scripts/charts.py --check    exit 1 if anything would change

The SVG is written by hand: no library has to be installed, and the same results give the same bytes.
"""

import collections
import math
import sys

from generated import ROOT, write_or_check

sys.path += [str(ROOT / "lab"), str(ROOT / "bench")]

from result_tables.common import MODEL_NAMES, load
from result_tables.four_gpus import scaled, scaling_points

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


def svg(label, parts):
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
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


def main():
    rows = load("one_gpu_fp8.json")
    charts = {IMAGES / f"over-the-floor-{name}.svg": over_floor_chart(rows, theme) for name, theme in THEMES.items()}
    charts |= {IMAGES / f"scaling-{name}.svg": scaling_chart(theme) for name, theme in THEMES.items()}
    return write_or_check(charts)


if __name__ == "__main__":
    sys.exit(main())
