"""Tables of the parts of a layer alone: grouped GEMM, exchange, hosts, all-to-all."""

import statistics

from result_tables.common import (
    NOT_MEASURED, gpu_provenance, gpu_row_cells, load, microseconds, rate_cells, table,
    time_over_floor,
)


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


def failure_trials_table():
    """Trials in which a rank is harmed amid anything, by what the world did."""
    rows = load("failure_trials.json")
    if not rows:
        return NOT_MEASURED
    counts = ("trials", "wrong", "innocents", "late", "hangs", "launcher", "nobody_failed")
    groups = {}
    for row in rows:
        harm, _, rest = row["kind"].partition(" in ")
        scene, *where = rest.split(", ")
        place = ", ".join(word for word in where if word != "launched")
        group = groups.setdefault((place, scene, harm == "stop"), dict.fromkeys((*counts, "named"), 0))
        for of in counts:
            group[of] += row[of]
        group["named"] = max(group["named"], row["until_named_longest_us"] or 0)
    lines = [
        "| harm | during | trials | wrong rank named | innocents accused | late | hangs | launcher wrong | nobody missed it | longest until named |",
        "|---" * 10 + "|",
    ]
    for (place, scene, stops), group in sorted(groups.items()):
        harm = "stopped" if stops else "killed, exited, returned or interrupted"
        numbers = " | ".join(f"{group[of]:,}" for of in counts)
        named = f"{group['named'] * 1e-3:,.0f} ms" if group["named"] else "–"
        lines.append(f"| {harm} | {scene}, {place} | {numbers} | {named} |")
    total = {of: sum(group[of] for group in groups.values()) for of in counts}
    lines.append("| all | | " + " | ".join(f"{total[of]:,}" for of in counts) + " | |")
    limits = ", ".join(sorted({f"deadline {row['deadline_ms']} ms, slack {row['slack_ms']} ms" for row in rows}))
    commits = ", ".join(sorted({row["commit"] for row in rows}))
    return "\n".join(lines + ["", f"*{limits}; commit {commits}; `failure_trials`*"])


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
    runs = {row["ranks"]: f"{row['ranks']} GPUs: {row['passes']} passes a row, seeds {', '.join(map(str, row['seeds']))}"
            for row in rows}
    said = f"{'; '.join(runs.values())}. Every output was checked."
    return "\n".join([*table(heads, lines), "", said, "", gpu_provenance(rows)])
