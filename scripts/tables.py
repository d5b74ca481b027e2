#!/usr/bin/env python3
"""Rewrites the generated parts of README.md and docs/: tables from results/, code from examples/.

    scripts/tables.py            rewrite
    scripts/tables.py --check    exit 1 if anything would change

A part stands between <!-- begin: NAME --> and <!-- end: NAME -->.
"""

import functools
import json
import re
import statistics
import sys

from generated import ROOT, write_or_check

RESULTS = ROOT / "results"


# The GPU of tables whose titles name none.
MAIN_CARD = "NVIDIA H200"
# The card of the table that is being made, if a file's cards have a table each.
of_card = None


def card_of(machine):
    """"NVIDIA H200" of "2 x NVIDIA H200, 132 SMs, CUDA 13.0", as in lab/results/row_file.cpp."""
    return re.sub(r"^\d+ x ", "", machine).split(",")[0]


def cards_of(rows):
    return list(dict.fromkeys(card_of(row["machine"]) for row in rows))


@functools.cache
def read(name):
    path = RESULTS / name
    return json.loads(path.read_text()) if path.exists() else None


def load(name):
    """A file. Of rows, those of the table's card, or those that are not of other GPUs than the main one."""
    rows = read(name)
    if not isinstance(rows, list) or not all("machine" in row for row in rows):
        return rows
    if of_card is not None:
        return [row for row in rows if card_of(row["machine"]) == of_card]
    others = {card for card in cards_of(rows) if card.startswith("NVIDIA ")} if MAIN_CARD in cards_of(rows) else {}
    return [row for row in rows if card_of(row["machine"]) == MAIN_CARD or card_of(row["machine"]) not in others]


def for_each_card(name, make):
    """make() for each card that a file has rows of. No table mixes cards."""
    global of_card
    texts = []
    for of_card in cards_of(read(name) or []):
        texts.append(make())
    of_card = None
    return "\n\n".join(texts) if texts else make()


def short_card(rows):
    """"H200"."""
    return card_of(rows[0]["machine"]).removeprefix("NVIDIA ").split(" ")[0]


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
        "**OLMoE's geometry (H 2048, I 1024, 64 experts, top-8), bf16, gate and combine included.** In the "
        f"same run oneDNN alone multiplies the same tiles at {rate / 1e9:.0f} GFLOP/s, and memory is read at "
        f"{read / 1e9:.1f} GB/s.",
        "",
        "| tokens | ranks | median ms | spread ms | GFLOP/s | share of oneDNN alone | weights GB/s "
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


def table(heads, lines):
    """Lines of cells, all of them texts."""
    return ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|", *("| " + " | ".join(c) + " |" for c in lines)]


def gpu_row_cells(row, has_rival):
    over = time_over_floor(row)
    rival = row.get("rival_us")
    cells = [microseconds(row["median_us"]), "–" if over is None else f"{100 / over:.0f} %"]
    if has_rival:
        cells += [microseconds(rival), "–" if rival is None else f"{rival / row['median_us']:.2f}×"]
    return cells


def gpu_summary(rows):
    """One sentence for each claim about all rows."""
    overs = [over for over in map(time_over_floor, rows) if over is not None]
    rivals = [row for row in rows if row.get("rival_us") is not None]
    said = []
    if overs:
        said.append(
            f"Time over the floor: geometric mean {statistics.geometric_mean(overs):.2f}, "
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
    """Machine, commit and command; a file measured in several runs lists all of its machines and commits."""
    machines = " and ".join(sorted({row["machine"] for row in rows}))
    commits = ", ".join(sorted({row["commit"] for row in rows}))
    command = max((row["command"] for row in rows), key=[row["command"] for row in rows].count)
    kept = any("--keep-rival" in row["command"] and row.get("rival_us") for row in rows)
    of_rival = "; PyTorch's times are those of an earlier run" if kept else ""
    return f"*{machines}; commit {commits}; `{command}`{of_rival}*"


@functools.cache
def roofs_of(machine):
    """The roofs of a row's GPU by name, from lab/machine/facts/, or None if nobody has measured them."""
    gpu = card_of(machine)
    for path in sorted((ROOT / "lab/machine/facts").glob("*.json")):
        facts = json.loads(path.read_text())
        if facts["gpu"] == gpu:
            return {name: roof["value"] for name, roof in facts["roofs"].items()}
    return None


def compute_of(rows):
    # Rows that do not say what they were computed in are older than FP8.
    return rows[0].get("compute", "bf16")


def floor_terms(rows, launch):
    """The two terms of the floor that every pass has: reading and arithmetic."""
    roofs = roofs_of(rows[0]["machine"])
    return (
        f"{roofs[launch]:g} µs + touched weights / {roofs['read_gb_per_s'] / 1000:g} TB/s, "
        f"FLOPs / {roofs[compute_of(rows) + '_tflop_per_s']:g} TFLOP/s"
    )


def gpu_method(rows):
    """How the passes were timed and what the floor is."""
    by_themselves = all(row.get("rotation_passes", 1) == 1 for row in rows)
    method = (
        "Each pass is timed by itself, in a CUDA graph, after a flush of the L2 cache."
        if by_themselves
        else "Passes follow one another in a CUDA graph, over several copies of the layer."
    )
    if roofs_of(rows[0]["machine"]) is None:
        return f"{method} The roofs of this GPU are not measured."
    return f"{method} Floor: max({floor_terms(rows, 'launch_us')})."


def gpu_table(suite, title, note=""):
    rows = load(f"{suite}.json")
    rows = [row for row in rows or [] if row.get("routing", "gate") == "gate"]
    if not rows:
        return ""
    betas = sorted({row["beta"] for row in rows}, reverse=True)
    has_rival = any(row.get("rival_us") is not None for row in rows)
    names = ["floor / time", *(["PyTorch µs", "speed-up"] if has_rival else [])]
    heads = [head for beta in betas for head in (f"β {beta:g}: time µs", *names)]
    absent = ["–"] * (1 + len(names))
    said = [f"**{title.format(card=short_card(rows))}**", gpu_summary(rows), gpu_method(rows), note]
    lines = [" ".join(text for text in said if text)]
    layers = {}
    for row in rows:
        layers.setdefault(describe_layer(row), {}).setdefault(row["tokens_per_rank"], {})[row["beta"]] = row
    for layer, by_tokens in layers.items():
        cells = []
        for tokens, by_beta in sorted(by_tokens.items()):
            cells.append([str(tokens)])
            for beta in betas:
                cells[-1] += gpu_row_cells(by_beta[beta], has_rival) if beta in by_beta else absent
        lines += ["", layer, "", *table(["tokens", *heads], cells)]
    return "\n".join(lines + ["", gpu_provenance(rows)])


def products_points():
    """[(compute, tokens)] that all three files have, and {point: row} of each file; or None."""
    files = [load(name) for name in ("products.json", "products_cold.json", "deepgemm.json")]
    if not all(files):
        return None
    ours, cold, theirs = ({(row["compute"], row["tokens_per_rank"]): row for row in rows} for rows in files)
    points = sorted(ours.keys() & cold.keys() & theirs.keys(), key=lambda point: (point[0] != "fp8", point[1]))
    return points, ours, cold, theirs


def products_table():
    found = products_points()
    if found is None:
        return ""
    points, ours, cold, theirs = found
    first = theirs[points[0]]
    lines = [
        f"**{describe_layer(first)}: a whole pass of Switchyard beside the two grouped products of DeepGEMM "
        f"{first['deepgemm']} alone.** Our pass has its routing given, and includes dispatch, quantisation, "
        "activation and combine. Both multiply the same loads of the experts. In a row: back to back, at the clock "
        "that the power limit leaves. Cold: one at a time, after a flush of the L2 cache.",
        "",
        "| | tokens | in a row: ours µs | TFLOP/s | DeepGEMM µs | TFLOP/s | cold: ours µs | TFLOP/s | DeepGEMM µs | TFLOP/s |",
        "|---" * 10 + "|",
    ]
    for point in points:
        times = [ours[point]["median_us"], theirs[point]["in_a_row_us"], cold[point]["median_us"], theirs[point]["cold_us"]]
        cells = [cell for us in times for cell in (microseconds(us), f"{ours[point]['flops'] / us / 1e6:.0f}")]
        lines.append(f"| {'FP8' if point[0] == 'fp8' else point[0]} | {point[1]} | " + " | ".join(cells) + " |")
    return "\n".join(lines + ["", gpu_provenance(ours.values())])


def rate_cells(row):
    """| floor / time | TFLOP/s | TB/s of weights |"""
    over, us = time_over_floor(row), row["median_us"]
    tflops, tbs = row["flops"] / us / 1e6, row["touched_bytes"] / us / 1e6
    return ["–" if over is None else f"{100 / over:.0f} %", f"{tflops:.{0 if tflops >= 10 else 1}f}", f"{tbs:.2f}"]


def grouped_table(file):
    """GroupedGemm alone, beside other grouped GEMMs where bench/grouped_rivals.py timed them in the same run."""
    rows = load(file)
    if not rows:
        return ""
    lines = [
        "**One grouped GEMM alone.** Rows are those of every expert, or their mean. Calls follow one another in a "
        "CUDA graph, over several copies of the weights. Roof: the least time by the floor's formula over the time, "
        "weights and arithmetic alone.",
    ]
    tables = {}
    for row in rows:
        tables.setdefault((row["dtype"], row["experts"], row["n"], row["k"]), []).append(row)
    for (dtype, experts, n, k), of_table in sorted(tables.items()):
        rivals = list(dict.fromkeys(r["implementation"] for r in of_table if r["implementation"] != "switchyard"))
        name = {"fp8": "FP8"}.get(dtype, dtype)
        heads = ["rows", "ours: time µs", "roof", "TFLOP/s", "weights TB/s"]
        # Other layouts of ours are there with their time over that of packed rows.
        heads += [
            head
            for rival in rivals
            for head in (
                (rival.removeprefix("switchyard, ") + " µs", "over packed")
                if rival.startswith("switchyard, ")
                else (f"{rival} µs", "speed-up")
            )
        ]
        points, of_points = {}, []
        for row in of_table:
            point = (row["activation"] != "none", row["rows_per_expert"], -(row.get("beta") or 2))
            points.setdefault(point, {})[row["implementation"]] = row
        for (gated, per_expert, beta), found in sorted(points.items()):
            what = f"{per_expert}{', SwiGLU' if gated else ''}{f', β {-beta:g}' if beta > -2 else ''}"
            ours = found.get("switchyard")
            cells = ["–"] * 4 if ours is None else [microseconds(ours["median_us"]), *rate_cells(ours)]
            for rival in rivals:
                theirs = found.get(rival)
                cells.append(microseconds(theirs and theirs["median_us"]))
                cells.append("–" if not (ours and theirs) else f"{theirs['median_us'] / ours['median_us']:.2f}×")
            of_points.append([what, *cells])
        lines += ["", f"{name}, {experts} experts, N {n}, K {k}", "", *table(heads, of_points)]
    return "\n".join(lines + ["", gpu_provenance(rows)])


def sonic_moe_rows():
    return [row for row in load("sonic_moe.json") or [] if row["rival_us"]]


def sonic_moe_table():
    """Layers beside SonicMoE, of bench/sonic_moe.py."""
    rows = sonic_moe_rows()
    if not rows:
        return NOT_MEASURED
    lines = [[row["model"], "in the time" if row["gate"] else "given", str(row["tokens_per_rank"]),
              microseconds(row["median_us"]), f"{row['tflops']:.0f}", microseconds(row["rival_us"]),
              f"{row['rival_us'] / row['median_us']:.2f}×"] for row in rows]
    heads = ["layer", "routing", "tokens", "ours: time µs", "TFLOP/s", f"{rows[0]['rival']}: time µs", "speed-up"]
    # Each row has the command of its own call.
    rows = [{**row, "command": "bench/sonic_moe.py"} for row in rows]
    return "\n".join([*table(heads, lines), "", gpu_provenance(rows)])


NOT_MEASURED = "Nothing is measured yet: the file of this table is not there."


def exchange_table():
    """Exchange beside the rivals of bench/exchange_rivals.py."""
    rows = load("exchange.json")
    if not rows:
        return NOT_MEASURED
    lines = [
        "**Dispatch and combine alone.** Times are those of a call among several in a CUDA graph, of the slowest rank. "
        "Floor: two flags of 1.37 µs, and the bytes of the busiest rank at 330 GB/s.",
    ]
    tables = {}
    for row in rows:
        if not row["pre_sum"]:
            key = (row["ranks"], row["hidden"], row["top_k"], row["experts"], row["dtype"])
            tables.setdefault(key, {}).setdefault(row["tokens_per_rank"], {})[row["stage"]] = row
    heads = ["time µs", "floor / time", "rival µs", "speed-up"]
    for (ranks, hidden, top_k, experts, dtype), by_tokens in sorted(tables.items()):
        columns = [f"{stage}: {head}" for stage in ("dispatch", "combine") for head in heads]
        rivals = sorted({row["rival"] for found in by_tokens.values() for row in found.values() if row.get("rival")})
        name = {"fp8": "FP8 there, bf16 back"}.get(dtype, dtype)
        beside = f". Rival, the fastest: {' or '.join(rivals)}" if rivals else ""
        lines += ["", f"{ranks} ranks, H {hidden}, top-{top_k} of {experts}, {name}{beside}", ""]
        cells = []
        for tokens, found in sorted(by_tokens.items()):
            cells.append([str(tokens)])
            for stage in ("dispatch", "combine"):
                row = found.get(stage)
                cells[-1] += gpu_row_cells(row, True) if row else ["–"] * 4
        lines += table(["tokens per rank", *columns], cells)
    return "\n".join(lines + ["", gpu_provenance(rows)])


def hosts_table():
    """What crosses hosts, beside the model of its way."""
    rows = load("hosts.json")
    if not rows:
        return NOT_MEASURED
    tables = {}
    for row in rows:
        tables.setdefault((row["engine"], row["hosts"], row["ranks"], row["link"]), []).append(row)
    lines = []
    for (engine, hosts, ranks, link), found in sorted(tables.items()):
        of_stage = {row["stage"]: row for row in found if row.get("tokens_per_rank") is None}
        rate = of_stage["stream"]["link_bytes"] / of_stage["stream"]["median_us"]
        groups = [{"dispatch": "dispatch", "combine": "combine", "combine_summed": "summed"}]
        if engine == "cuda":
            groups.append({"layer": "layer", "layer_summed": "layer, summed", "layer_summed_fp8": "FP8, summed"})
        lines += [
            f"{'GPUs' if engine == 'cuda' else 'CPUs'}, {hosts} hosts, {ranks} ranks, {link}: "
            f"a flag and back {microseconds(of_stage['flag']['median_us'])} µs, a host's stream {rate:.0f} MB/s",
            "",
        ]
        by_tokens = {}
        for row in found:
            if row.get("tokens_per_rank") is not None:
                by_tokens.setdefault(row["tokens_per_rank"], {})[row["stage"]] = row
        for names in groups:
            lines += [
                "| tokens per rank | " + "".join(f"{name}: µs | model µs | MB a host | " for name in names.values()) + "wrong |",
                "|---" * (3 * len(names) + 2) + "|",
            ]
            for tokens, stages in sorted(by_tokens.items()):
                cells = []
                for stage in names:
                    row = stages.get(stage)
                    if row is None:
                        cells += ["–"] * 3
                        continue
                    cells += [microseconds(row["median_us"]), microseconds(row["model_us"]), f"{row['link_bytes'] * 1e-6:.3g}"]
                wrong = sum(stages[stage]["wrong"] for stage in names if stage in stages)
                lines.append(f"| {tokens} | " + " | ".join(cells) + f" | {wrong} |")
            lines.append("")
        lines.append(f"*{found[0]['machine']}; commit {', '.join(sorted({row['commit'] for row in found}))}; "
                     f"`switchyard launch -n RANKS --namespaces HOSTS -- switchyard {found[0]['command'].split(' ', 1)[1]}`*")
        lines.append("")
    return "\n".join(lines[:-1])


def hosts_on_paper_table():
    """The model of hosts.json's rows for a network that nobody here has: no measurement."""
    hidden, top_k, tokens, ranks, flag_us, bytes_per_us = 7168, 8, 4096, 8, 5, 50_000
    lines = [
        f"**On paper**, not measured: DeepSeek-V3's routing (H {hidden}, top-{top_k}, bf16), {tokens} tokens on each of "
        f"{ranks} ranks a host, a link of 400 Gb/s for each rank, a flag's way {flag_us} µs. \"Summed\" is combine "
        "with `pre_sum_per_host`. A world has at most 64 ranks today, 8 such hosts.",
        "",
        "| hosts | other hosts of a token | dispatch: MB a rank | µs | combine: MB a rank | µs | summed: MB a rank | µs |",
        "|---" * 8 + "|",
    ]
    for hosts in (2, 4, 8, 16, 32, 64):
        # A token's experts are dealt evenly: how many other hosts have one, and how many rows are there.
        reached = (hosts - 1) * (1 - (1 - 1 / hosts) ** top_k)
        rows = top_k * (hosts - 1) / hosts
        row_bytes = 2 * hidden + 32
        times = [flag_us + tokens * count * row_bytes / bytes_per_us for count in (reached, rows, reached)]
        lines.append(
            f"| {hosts} | {reached:.2f} | {tokens * reached * row_bytes * 1e-6:.0f} | {times[0]:.0f} | "
            f"{tokens * rows * row_bytes * 1e-6:.0f} | {times[1]:.0f} | "
            f"{tokens * reached * row_bytes * 1e-6:.0f} | {times[2]:.0f} |"
        )
    return "\n".join(lines)


def hosts_chaos_table():
    """Trials of ranks over hosts that fail, or have a chaotic network."""
    rows = load("hosts_chaos.json")
    if not rows:
        return NOT_MEASURED
    lines = [
        "| trials | sanitizer | number | hangs | wrong words | wrong names | median (longest) until named |",
        "|---" * 7 + "|",
    ]
    for row in rows:
        words, names = ("–" if row[of] is None else row[of] for of in ("wrong_words", "wrong_names"))
        time = f"{row['median_ms']:.0f} ms ({row['longest_ms']:.0f} ms)" if "median_ms" in row else "–"
        lines.append(
            f"| {row['kind']} | {row['sanitizer'] or '–'} | {row['trials']:,} | {row['hangs']} | {words} | "
            f"{names} | {time} |"
        )
    commits = ", ".join(sorted({row["commit"] for row in rows}))
    return "\n".join(lines + ["", f"*Commit {commits}; `bench/hosts_chaos.py`*"])


def all_to_all_table():
    """The rungs of the all-to-all problem: a column for each case, and their geometric mean."""
    rows = load("all_to_all.json")
    if not rows:
        return NOT_MEASURED
    tables = {}
    for row in rows:
        tables.setdefault((row["ranks"], row.get("gpus") or 0, row["stand_in"]), []).append(row)
    lines = [
        "**The all-to-all problem, rung by rung:** µs of the slowest rank, in brackets how often the floor goes into "
        "it. Each rung has one step more than the one above it; `_alone` is a step without the others.",
    ]
    for (ranks, gpus, stand_in), found in sorted(tables.items()):
        cases = list(dict.fromkeys(row["case"] for row in found))
        where = f"{gpus} GPU{'s' if gpus > 1 else ''}" if gpus else "the processor"
        random = ", experts multiply by random weights" if stand_in == "random" else ""
        lines += ["", f"{ranks} ranks on {where}{random}", "", "| rung | " + " | ".join(cases) + " | geometric mean |"]
        lines.append("|---" * (len(cases) + 2) + "|")
        for rung in dict.fromkeys(row["rung"] for row in found):
            of_rung = {row["case"]: row for row in found if row["rung"] == rung}
            cells = []
            for case in cases:
                row = of_rung.get(case)
                over = time_over_floor(row) if row else None
                times = f" ({over:.2f}×)" if over is not None else ""
                cells.append("–" if row is None else microseconds(row["median_us"]) + times)
            # A mean of other cases would not compare with the other rungs' means.
            whole = len(of_rung) == len(cases)
            mean = statistics.geometric_mean([row["median_us"] for row in of_rung.values()])
            cells.append(microseconds(mean if whole else None))
            lines.append(f"| {rung} | " + " | ".join(cells) + " |")
    return "\n".join(lines + ["", gpu_provenance(rows)])


def astero_table():
    """DeepSeek-V3's whole layer on one GPU: TFLOP/s over the batch, a pair of columns for every type."""
    rows = load("astero.json")
    if not rows:
        return ""
    types = sorted({row["compute"] for row in rows}, reverse=True)
    heads = []
    for compute in types:
        heads += [f"{'FP8' if compute == 'fp8' else compute}: time µs", "floor / time", "TFLOP/s", "weights TB/s"]
    by_tokens = {}
    for row in rows:
        by_tokens.setdefault(row["tokens_per_rank"], {})[row["compute"]] = row
    lines = [
        f"**DeepSeek-V3's whole layer on one GPU** (H {rows[0]['hidden']}, I {rows[0]['intermediate']}, "
        f"{rows[0]['experts']} experts, top-{rows[0]['top_k']}, one shared expert): gate, quantisation and combine "
        "included.",
    ]
    cells = []
    for tokens, found in sorted(by_tokens.items()):
        cells.append([str(tokens)])
        for compute in types:
            row = found.get(compute)
            cells[-1] += ["–"] * 4 if row is None else [microseconds(row["median_us"]), *rate_cells(row)]
    return "\n".join([*lines, "", *table(["tokens", *heads], cells), "", gpu_provenance(rows)])


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
        return {"best of others, 8 GPUs, µs": "–" if best is None else f"{best[1]:.0f} ({best[0]})"}
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
    heads = ["time µs", "floor / time", "TFLOP/s per GPU", "weights TB/s", "sent MB per GPU"]
    method = f"On {short_card(rows)}s. The time is that of the slowest rank, with routing given and β 1."
    if roofs := roofs_of(rows[0]["machine"]):
        method += (
            f" Floor, of the most loaded rank: max({floor_terms(rows, 'ranks_launch_us')}, "
            f"sent bytes / {roofs['nvlink_gb_per_s']:g} GB/s)."
        )
    if compute_of(rows) == "fp8":
        method += (
            " The last column has the best time of others, published or measured (`results/published.json`), on 8 "
            "GPUs. There each GPU reads the weights of fewer experts and computes as much, so the two compare only "
            "where arithmetic is the floor."
        )
    lines = [" ".join(text for text in [f"**{title}**", gpu_summary(rows), method] if text)]
    layers = {}
    for row in rows:
        layers.setdefault((describe_layer(row), row["ranks"]), []).append(row)
    for (layer, ranks), of_layer in layers.items():
        columns = [*heads, *others_cells(of_layer[0])]
        cells = [[str(row["tokens_per_rank"]), *ranks_row_cells(row)]
                 for row in sorted(of_layer, key=lambda row: row["tokens_per_rank"])]
        lines += ["", f"{layer}, {ranks} GPUs", "", *table(["tokens per GPU", *columns], cells)]
    return "\n".join(lines + ["", gpu_provenance(rows)])


FP8_SCALES = (
    "Weights have a scale per 128 × 128; activations arrive in bf16 and the layer quantises them. PyTorch's chain "
    "quantises too, with one scale per row, which is what its grouped product takes."
)


def comparison_row(rows, what, rival=None, gains=()):
    """| what was run | points | time over the floor | beside whom | speed-up |"""
    overs = [over for over in map(time_over_floor, rows) if over is not None]
    floor = f"{statistics.geometric_mean(overs):.2f} ({max(overs):.2f})" if overs else "–"
    gain = "–"
    if gains:
        mean = statistics.geometric_mean(gains)
        gain = f"{mean:.2f}× ({min(gains):.2f} to {max(gains):.2f})"
    return f"| {what} | {len(rows)} | {floor} | {rival or '–'} | {gain} |"


def comparisons_table():
    """The short table of README.md: a row for every claim, in detail in docs/benchmarks.md."""
    lines = [
        "| measured on H200 | points | time over floor: mean (worst) | beside | speed-up: mean (range) |",
        "|---" * 5 + "|",
    ]
    torch_suites = [
        ("one_gpu_bf16", "1 GPU, bf16, four models, 1 to 8192 tokens"),
        ("one_gpu_fp8", "1 GPU, FP8, the same"),
        ("one_gpu_thesis", "1 GPU, bf16, FlashDMoE's layer"),
    ]
    for suite, what in torch_suites:
        rows = [row for row in load(f"{suite}.json") or [] if row.get("routing", "gate") == "gate"]
        gains = [row["rival_us"] / row["median_us"] for row in rows if row.get("rival_us")]
        if rows:
            lines.append(comparison_row(rows, what, "PyTorch, fastest chain", gains))
    for compute, name in [("fp8", "FP8"), ("bf16", "bf16")]:
        points, ours, _, theirs = products_points() or ([], {}, {}, {})
        points = [point for point in points if point[0] == compute]
        gains = [theirs[point]["in_a_row_us"] / ours[point]["median_us"] for point in points]
        if points:
            tokens = [point[1] for point in points]
            what = f"1 GPU, {name}, DeepSeek-V3's share, {min(tokens)} to {max(tokens)} tokens"
            rival = f"DeepGEMM {theirs[points[0]]['deepgemm']}, its two products alone"
            lines.append(comparison_row([ours[point] for point in points], what, rival, gains))
    if rows := sonic_moe_rows():
        gains = [row["rival_us"] / row["median_us"] for row in rows]
        tokens = [row["tokens_per_rank"] for row in rows]
        what = f"1 GPU, bf16, OLMoE, Qwen3-30B, DeepSeek-V3's experts, {min(tokens)} to {max(tokens)} tokens"
        lines.append(comparison_row(rows, what, rows[0]["rival"].split(",")[0], gains))
    # No speed-up over FlashDMoE: its times are of fp32.
    if rows := load("ep_thesis.json"):
        lines.append(comparison_row(rows, "2 and 4 GPUs, bf16, FlashDMoE's layer, routing given"))
    for suite, name in [("ep_fp8", "FP8"), ("ep_bf16", "bf16")]:
        if rows := load(f"{suite}.json"):
            what = f"2 and 4 GPUs, {name}, DeepSeek-V4 and V3, GLM-5, routing given"
            lines.append(comparison_row(rows, what))
    return "\n".join(lines)


THESIS_RIVALS = ["FlashDMoE", "Comet", "FasterMoE", "Megatron", "DeepEP"]
# Table 1.1 of the thesis.
THESIS_LAUNCHES = {"FlashDMoE": 1, "Comet": 33, "Megatron-LM, CUTLASS": 85, "Megatron-LM, TE": 261,
                   "Megatron-LM, DeepEP": 432, "DeepSpeedMoE": 550}
# Table 6.2 of the thesis: {(tokens per GPU, experts): (Size(L), bookkeeping)} in MB.
THESIS_MEMORY_MB = {
    (4096, 16): (64.00, 64.57),
    (4096, 32): (64.00, 64.55),
    (4096, 64): (128.01, 128.90),
    (4096, 128): (256.02, 257.96),
    (8192, 16): (128.01, 128.95),
    (8192, 32): (128.01, 128.90),
    (8192, 64): (128.01, 128.90),
    (8192, 128): (256.02, 258.15),
    (16384, 16): (256.02, 257.89),
    (16384, 32): (256.02, 257.79),
    (16384, 64): (256.02, 257.80),
    (16384, 128): (256.02, 258.53),
}


def thesis_rows():
    """Of results/thesis.json, those of several GPUs."""
    return [row for row in load("thesis.json") or [] if row["ranks"] > 1 and row["graph_nodes"] is not None]


def by_tokens_and_experts(rows):
    return {(row["tokens_per_rank"], row["experts"]): row for row in rows}


def thesis_grid(unit, points, cell):
    """Lines of tokens and columns of experts. `cell` is called for every pair, also one that `points` lacks."""
    experts = sorted({count for _, count in points})
    lines = [[str(tokens), *(cell((tokens, count)) for count in experts)] for tokens in sorted({t for t, _ in points})]
    return table(["tokens per GPU", *(f"{count} experts: {unit}" for count in experts)], lines)


def milliseconds(us):
    return "–" if us is None else f"{us / 1000:.2f}"


def thesis_times():
    """Every point of the suite thesis, and the outputs' errors."""
    rows = thesis_rows()
    if not rows:
        return NOT_MEASURED
    found = by_tokens_and_experts(rows)

    def cell(point):
        row = found.get(point)
        return "–" if row is None else f"{row['median_us']:.0f} ({row['p10_us']:.0f} to {row['p90_us']:.0f})"

    worst = max(rows, key=lambda row: row["error"] / row["error_bound"])
    checked = (
        f"The outputs of all {len(rows)} points' timed passes were compared with fp64. The one nearest to its bound has an "
        f"error of {worst['error']:.2e}. Its bound, twice the error of a straightforward bf16 program, is "
        f"{worst['error_bound']:.2e}."
    )
    return "\n".join([*thesis_grid("µs", found, cell), "", checked, "", gpu_provenance(rows)])


def thesis_beside():
    """Tables 6.3, 6.4 and 6.5 beside ours on two GPUs."""
    rows = {(row["experts"], row["tokens_per_rank"]): row for row in thesis_rows() if row["ranks"] == 2}

    def beside(what, experts, tokens, gpus):
        row = rows.get((experts, tokens))
        theirs = published({"model": "thesis", "experts": experts, "tokens_per_rank": tokens}, gpus)
        return [what, f"{experts}", f"{tokens}", milliseconds(row and row["median_us"]), f"{gpus}",
                *(milliseconds(theirs.get(name)) for name in THESIS_RIVALS)]

    lines = [beside("6.3", 32, tokens, 8) for tokens in (1024, 2048, 4096, 8192)]
    lines += [beside("6.4", experts, 8192, 8) for experts in (16, 64, 128)]
    lines.append(beside("6.5", 32, 8192, 2))
    heads = ["table", "experts", "tokens per GPU", "ours, 2 GPUs: ms", "theirs: GPUs", *THESIS_RIVALS]
    return "\n".join(table(heads, lines))


def thesis_launches():
    rows = thesis_rows()
    if not rows:
        return NOT_MEASURED
    nodes = " or ".join(map(str, sorted({row["graph_nodes"] for row in rows})))
    heads = [f"Switchyard, {len(rows)} points", *THESIS_LAUNCHES]
    return "\n".join(table(heads, [[nodes, *map(str, THESIS_LAUNCHES.values())]]))


def padded_bytes(row):
    """The least that a padded all-to-all would send from one rank, as cpu::Engine::finish() counts
    padded_all_to_all_bytes: (experts elsewhere) x (the fullest block of one rank's rows for one expert) x (bytes of
    a row there and back). A row keeps the loads of experts over all ranks; the fullest block has at least the
    fullest expert's load over the ranks."""
    elsewhere = row["experts"] - row["experts"] // row["ranks"]
    fullest = max(row["expert_load"]) * row["tokens_per_rank"] * row["top_k"] / row["experts"]
    return elsewhere * fullest * 2 * row["hidden"] * 2


def thesis_bytes():
    rows = thesis_rows()
    if not rows:
        return NOT_MEASURED
    found = by_tokens_and_experts(rows)

    def cell(point):
        if point not in found:
            return "–"
        sent, padded = found[point]["nvlink_bytes"], padded_bytes(found[point])
        return f"{sent * 1e-6:.1f} of {padded * 1e-6:.1f} ({100 * sent / padded:.0f} %)"

    return "\n".join(thesis_grid("MB", found, cell))


def thesis_utilisation():
    rows = [row for row in load("thesis_utilisation.json") or [] if row["backend"] == "cuda"]
    if not rows:
        return NOT_MEASURED
    lines = []
    for row in rows:
        spread = f"{100 * min(row['all_active']):.1f} to {100 * max(row['all_active']):.1f}"
        lost = f"; {row['dropped_events']} events had no room" if row["dropped_events"] else ""
        lines.append([f"Switchyard, {row['ranks']} GPUs, {row['tokens_per_rank']} tokens per GPU, "
                      f"{row['experts']} experts{lost}",
                      f"{100 * row['active']:.1f} % ({spread})", f"{100 * row['busy']:.1f} %"])
    lines += [["FlashDMoE, 2 H100", "93.17 %", "–"], ["DeepEP, 2 H100", "20.61 %", "–"]]
    heads = ["layer", "active: a warp in flight", "busy: in tasks of the math role"]
    return "\n".join([*table(heads, lines), "", gpu_provenance(rows)])


def thesis_memory():
    rows = [row for row in load("thesis_memory.json") or [] if row["backend"] == "cuda"]
    if not rows:
        return NOT_MEASURED
    found = by_tokens_and_experts(rows)

    def cell(point):
        tensor, bookkeeping = THESIS_MEMORY_MB[point]
        theirs = f"({tensor:.0f} + {bookkeeping:.0f})"
        if point not in found:
            return f"– {theirs}"
        row = found[point]
        return f"{row['heap_reserved_bytes'] * 1e-6:.0f} + {row['workspace_bytes'] * 1e-6:.0f} {theirs}"

    # Each row has the command of its own point.
    rows = [{**row, "command": "bench/thesis_tables.py memory"} for row in rows]
    return "\n".join([*thesis_grid("MB", THESIS_MEMORY_MB, cell), "", gpu_provenance(rows)])


def stragglers_table():
    """Both ways of bench/stragglers.py for each jitter; those of GPUs only."""
    rows = [row for row in load("stragglers.json") or [] if not row["way"].startswith("Gloo")]
    # Where ranks are on the processor, so is the chain.
    machines = {row["machine"] for row in rows if row["way"] != "switchyard"}
    rows = [row for row in rows if row["machine"] in machines]
    if not rows:
        return NOT_MEASURED
    lines = []
    layer = ("ranks", "experts", "tokens_per_rank")
    order = (*layer, "jitter_us")
    for row in sorted(rows, key=lambda row: (*(row[name] for name in order), row["way"] != "switchyard")):
        first = row["after_first_start"]
        lines.append([
            "{} GPUs, {} experts, {} tokens".format(*(row[name] for name in layer)), str(row["jitter_us"]), row["way"],
            microseconds(row["mean_us"]), microseconds(row["p95_us"]), f"{row['p95_over_mean']:.2f}×",
            microseconds(first["mean_us"]), microseconds(first["p95_us"]), f"{first['p95_over_mean']:.2f}×",
            f"{row['p95_slowest_over_mean_fastest']:.2f}×",
        ])
    heads = ["layer", "jitter µs", "way", "from the last start: mean µs", "p95", "p95 / mean",
             "from the first: mean µs", "p95", "p95 / mean", "slowest rank's p95 / fastest's mean"]
    seeds = ", ".join(map(str, rows[0]["seeds"]))
    said = f"{rows[0]['passes']} passes a row, seeds {seeds}; every output checked."
    return "\n".join([*table(heads, lines), "", said, "", gpu_provenance(rows)])


def example(path):
    """The part of an example between its "README: begin" and "README: end" lines."""
    text = (ROOT / path).read_text()
    return "```cpp\n" + re.search(r"// README: begin\n(.*?)// README: end\n", text, re.S)[1].strip() + "\n```"


def transformers_table():
    """Whole models of transformers, from bench/transformers_e2e.py."""
    found = load("transformers.json")
    if not found:
        return ""
    models = list(dict.fromkeys((r["model"], r["dtype"]) for r in found))
    text = []
    for model, dtype in models:
        rows = [r for r in found if (r["model"], r["dtype"]) == (model, dtype)]
        decoded = sorted({(r["batch"], r["graph"]) for r in rows if "tpot_ms" in r})
        head = f"| {model}, {dtype} | first token |"
        head += "".join(f" batch {batch}{', graph' if graph else ''} |" for batch, graph in decoded)
        lines = [head + " error |", "|---|" + "---:|" * (len(decoded) + 2)]
        reasons, absent = [], []
        for implementation in dict.fromkeys(r["implementation"] for r in rows):
            own = [r for r in rows if r["implementation"] == implementation]
            first = next((r["ttft_ms"] for r in own if "ttft_ms" in r), None)
            cells = [f"{first:.1f}" if first is not None else "–"]
            for batch, graph in decoded:
                value = next((r["tpot_ms"] for r in own if (r.get("batch"), r.get("graph")) == (batch, graph)
                              and "tpot_ms" in r), None)
                cells.append("–" if value is None else f"{value:.2f}")
            error = next((r["error"] for r in own if "error" in r), None)
            cells.append("–" if error is None else f"{error:.1e}")
            reason = next((r["refused"] for r in own if "refused" in r), None)
            if set(cells) == {"–"}:
                # Nothing was measured: the reason is all there is to say.
                absent.append(f"{implementation} ({(reason or 'not run').split('. ')[0]})")
                continue
            lines.append(f"| {implementation} | " + " | ".join(cells) + " |")
            if reason is not None:
                reasons.append(f"{implementation}: {reason.split('. ')[0]}")
        row = next(r for r in rows if "prompt" in r and "ttft_ms" in r)
        prompt = next(r["prompt"] for r in rows if "tpot_ms" in r)
        text.append("\n".join(lines))
        text.append(
            f"Milliseconds on one {row['machine']}, torch {row['torch']}, transformers {row['transformers']}, commit "
            f"{row['commit']}; random weights, {row['layers']} layers. First token: one prompt of {row['prompt']} "
            f"tokens. Batches: one decoding step after {prompt} tokens, without and in a CUDA graph. Error: of the "
            f"prompt's logits against the first line's."
            + (" –: " + "; ".join(reasons) + "." if reasons else "")
            + (" Did not run: " + "; ".join(absent) + "." if absent else "")
        )
    return "\n\n".join(text)


def engines_table():
    """Whole models in serving engines, from bench/engines.py."""
    heads = {"tpot_ms": "batch {batch}", "ttft_ms": "first token, {prompt}", "requests_per_s": "requests/s"}
    groups = {}
    for row in load("engines.json") or []:
        groups.setdefault(tuple(row[k] for k in ("engine", "model", "dtype", "topology", "machine")), []).append(row)
    text = []
    for (engine, model, dtype, topology, machine), rows in groups.items():
        # By what was measured, batch, prompt and backend.
        found = {(name, row["batch"], row["prompt"], row["backend"]): row
                 for name in heads for row in rows if name in row}
        points = sorted({key[:3] for key in found}, key=lambda p: (list(heads).index(p[0]), p[1:]))
        backends = list(dict.fromkeys(row["backend"] for row in rows if row["backend"] != "none"))
        titles = [heads[name].format(batch=batch, prompt=prompt) for name, batch, prompt in points]
        lines = [f"| {model}, {dtype} | " + " | ".join(titles) + " | error |", "|---|" + "---:|" * (len(points) + 1)]
        for backend in backends:
            cells = [found.get((*point, backend), {}).get(point[0]) for point in points]
            error = next((r["error"] for r in rows if r["backend"] == backend and r.get("error") is not None), None)
            lines.append(f"| {backend} | " + " | ".join("–" if c is None else f"{c:.2f}" for c in cells)
                         + (" | – |" if error is None else f" | {error:.4f} |"))
        gains, shares = [], []
        for point in points:
            name = point[0]
            ours = found.get((*point, "switchyard"), {})
            others = [found[(*point, b)][name] for b in backends if b != "switchyard" and (*point, b) in found]
            gain = None
            if others and ours:
                gain = ours[name] / max(others) if name == "requests_per_s" else min(others) / ours[name]
            part = ours.get("moe_share")
            gains.append("–" if gain is None else f"**{gain:.2f} ×**")
            shares.append("–" if part is None or part <= 0 else f"{part:.0%}")
        lines.append("| best other / switchyard | " + " | ".join(gains) + " | |")
        lines.append("| experts' share of the time | " + " | ".join(shares) + " | |")
        row = next((r for r in rows if r["backend"] == "switchyard"), rows[0])
        made = (f" Switchyard's {row['made_layers']} layers took {row['made_s']:.2f} s of the start and "
                f"{row['made_mib']:.0f} MiB." if "made_s" in row else "")
        text += ["\n".join(lines),
                 f"{engine} {row['version']}, one {machine}, {row['layers']} layers, topology {topology}, torch "
                 f"{row['torch']}, commit {row['commit']}. Milliseconds a token after a prompt of 128, milliseconds to "
                 f"the first token, and requests of 512 tokens in and 128 out with 64 under way.{made}"]
    return "\n\n".join(text)


def check_hf():
    """Expert classes of transformers, from `python -m switchyard check-hf` with the newest transformers and with
    the one that the other tests run with."""
    found, older = load("check_hf.json"), load("check_hf_older.json")
    if found is None or older is None:
        return ""

    def table(rows, refused=False):
        if refused:
            head = "| family | class | why not |\n|---|---|---|\n"
            return head + "\n".join(f"| {r['family']} | `{r['name']}` | {r['reason']} |" for r in rows)
        head = "| family | class | activation | order of w13 | error f32 | bf16 | eager's own bf16 |\n"
        head += "|---|---|---|---|---|---|---|\n"
        return head + "\n".join(
            f"| {r['family']} | `{r['name']}` | {r['activation']} | {r['layout']} | {r['f32_error']:.0e} "
            f"| {r['bf16_error']:.0e} | {r['bf16_error_of_eager']:.0e} |"
            for r in rows
        )

    def agreeing(document, reached_by):
        return [r for r in document["classes"] if r["status"] == "agrees" and r["reached_by"] == reached_by]

    def counts(document):
        through = [r for r in document["classes"] if r["reached_by"] == "experts_implementation"]
        refused = [r for r in document["classes"] if r["status"] == "refused"]
        return (
            f"With transformers {document['transformers']}, {len(agreeing(document, 'experts_implementation'))} of the "
            f"{len(through)} expert classes that go through `experts_implementation` agree with eager, and "
            f"{len(agreeing(document, 'patch'))} that need `patch()`; {len(refused)} are refused."
        )

    others = [r for r in found["classes"] if r["status"] != "agrees"]
    return (
        f"{counts(found)} {counts(older)} The tables are of {found['transformers']}.\n\n"
        f"**`experts_implementation=\"switchyard\"`**\n\n{table(agreeing(found, 'experts_implementation'))}\n\n"
        f"**`switchyard.patch(model)`**\n\n{table(agreeing(found, 'patch'))}\n\n"
        f"**Refused**\n\n{table(others, refused=True)}"
    )


def run_output():
    path = RESULTS / "run.txt"
    return "```\n" + path.read_text().rstrip() + "\n```" if path.exists() else ""


def main():
    parts = {
        "run": run_output(),
        "comparisons": comparisons_table(),
        "example": example("examples/forward/main.cpp"),
        "check-hf": check_hf(),
        "transformers": transformers_table(),
        "engines": engines_table(),
        "cpu": cpu_table(),
        "one_gpu_bf16": for_each_card("one_gpu_bf16.json", lambda: gpu_table("one_gpu_bf16", "One {card}, bf16, gate and combine included.")),
        "one_gpu_fp8": for_each_card("one_gpu_fp8.json", lambda: gpu_table(
            "one_gpu_fp8", "One {card}, FP8, gate, quantisation and combine included.", FP8_SCALES
        )),
        "one_gpu_fp8_more": for_each_card("one_gpu_fp8_more.json", lambda: gpu_table("one_gpu_fp8_more", "One {card}, FP8, four models with fewer and larger experts.")),
        "products": products_table(),
        "grouped": for_each_card("grouped.json", lambda: grouped_table("grouped.json")),
        "grouped_quack": for_each_card("grouped_quack.json", lambda: grouped_table("grouped_quack.json")),
        "sonic_moe": sonic_moe_table(),
        "exchange": for_each_card("exchange.json", exchange_table),
        "all_to_all": for_each_card("all_to_all.json", all_to_all_table),
        "hosts": hosts_table(),
        "hosts_on_paper": hosts_on_paper_table(),
        "hosts_chaos": hosts_chaos_table(),
        "astero": astero_table(),
        "ep_fp8": for_each_card("ep_fp8.json", lambda: ranks_table("ep_fp8", "FP8, dispatch and combine inside the kernel.")),
        "ep_bf16": for_each_card("ep_bf16.json", lambda: ranks_table("ep_bf16", "bf16, dispatch and combine inside the kernel.")),
        "ep_thesis": for_each_card("ep_thesis.json", lambda: ranks_table("ep_thesis", "FlashDMoE's layer, bf16.")),
        "one_gpu_thesis": for_each_card("one_gpu_thesis.json", lambda: gpu_table("one_gpu_thesis", "FlashDMoE's layer on one {card}, bf16.")),
        "thesis_times": thesis_times(),
        "thesis_beside": thesis_beside(),
        "thesis_launches": thesis_launches(),
        "thesis_bytes": thesis_bytes(),
        "thesis_utilisation": thesis_utilisation(),
        "thesis_memory": thesis_memory(),
        "stragglers": stragglers_table(),
    }
    pages = {path: path.read_text() for path in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]}
    for path in pages:
        for name, text in parts.items():
            pages[path] = re.sub(
                rf"<!-- begin: {name} -->.*?<!-- end: {name} -->",
                lambda _: f"<!-- begin: {name} -->\n{text + chr(10) if text else ''}<!-- end: {name} -->",
                pages[path],
                flags=re.S,
            )
    return write_or_check(pages)


if __name__ == "__main__":
    sys.exit(main())
