"""Tables of layers on one device and over ranks."""

import re
import statistics

from result_tables.common import (
    NOT_MEASURED, by_ranks, compute_of, describe_layer, floor_terms, gain_of, gpu_method,
    gpu_provenance, gpu_row_cells, gpu_summary, keyed, load, medians, microseconds, natural,
    provenance, rate_cells, rivals_of, roofs_of, short_card, table, time_over_floor,
)


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


def gpu_table(suite, title, note=""):
    rows = load(f"{suite}.json")
    rows = [row for row in rows or [] if row.get("routing", "gate") == "gate"]
    if not rows:
        return ""
    betas = sorted({row["beta"] for row in rows}, reverse=True)
    has_rival = bool(rivals_of(rows))
    names = ["floor / time", *([f"{' or '.join(rivals_of(rows))} µs", "speed-up"] if has_rival else [])]
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


def four_bit_kind(row):
    """", MXFP4, tokens in FP8"; nothing where the weights are not of four bits."""
    if not row.get("weights"):
        return ""
    return f", {row['weights'].upper()}, tokens in {'FP8' if row['tokens_in'] == 'fp8' else row['tokens_in']}"


def four_bit_table():
    """Layers of four-bit experts, a table for each model, beside the fastest of the rivals at each point."""
    rows = load("four_bit.json")
    if not rows:
        return NOT_MEASURED
    heads = ["tokens", "time µs", "floor / time", "TFLOP/s", "TB/s of weights", "fastest rival", "its µs", "speed-up"]
    lines = []
    for tokens_in in ("bf16", "fp8"):
        of_type = [row for row in rows if row["tokens_in"] == tokens_in]
        if not of_type:
            continue
        lines += ["", f"**One {short_card(rows)}, weights of four bits, tokens in {tokens_in}, routing given.** "
                      f"{gpu_summary(of_type)} {gpu_method(of_type)}"]
        layers = {}
        for row in of_type:
            layers.setdefault((describe_layer(row), row["weights"]), []).append(row)
        for (layer, weights), of_layer in layers.items():
            cells = []
            for row in sorted(of_layer, key=lambda row: row["tokens_per_rank"]):
                rival = ([row["rival"], microseconds(row["rival_us"]), f"{gain_of(row):.2f}×"] if row["rival_us"]
                         else ["–"] * 3)
                cells.append([str(row["tokens_per_rank"]), microseconds(row["median_us"]), *rate_cells(row), *rival])
            lines += ["", f"{layer}, {weights.upper()}", "", *table(heads, cells)]
        lines += ["", gpu_provenance(of_type)]
    return "\n".join(lines[1:])


def products_points():
    """[(compute, tokens)] that all three files have, and {point: row} of each file; or None."""
    files = [load(name) for name in ("products.json", "products_cold.json", "deepgemm.json")]
    if not all(files):
        return None
    ours, cold, theirs = (keyed(rows, lambda row: (row["compute"], row["tokens_per_rank"])) for rows in files)
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
    return "\n".join(lines + ["", gpu_provenance([*ours.values(), *cold.values()])])


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
        # No speed-up: its times are of fp32.
        theirs = published(row, row["ranks"]).get("FlashDMoE")
        return {"FlashDMoE in fp32, µs": "–" if theirs is None else f"{theirs:.0f}"}
    if row["compute"] == "fp8":
        best = min(published(row, 8).items(), key=lambda item: item[1], default=None)
        return {"best of others, 8 GPUs, µs": "–" if best is None else f"{best[1]:.0f} ({best[0]})"}
    return {}


def ranks_row_cells(row, rivals):
    over = time_over_floor(row)
    seconds = row["median_us"] * 1e-6
    cells = [
        microseconds(row["median_us"]),
        "–" if over is None else f"{100 / over:.0f} %",
        f"{row['flops'] / seconds / 1e12:.0f}",
        f"{row['touched_bytes'] / seconds / 1e12:.2f}",
        f"{row['nvlink_bytes'] / 1e6:.2f}",
    ]
    for of_rival in rivals.values():
        beside = row in of_rival
        cells += [microseconds(row["rival_us"]), f"{gain_of(row):.2f}×"] if beside else ["–", "–"]
    return cells + list(others_cells(row).values())


def ranks_table(suite, title):
    """Expert parallelism: for every number of ranks, a summary, a table for every layer, and the run's origin."""
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
    lines = [f"**{title}** {method}"]
    for ranks, of_ranks in by_ranks(rows).items():
        lines += ["", f"**{ranks} GPUs.** {gpu_summary(of_ranks)}"]
        layers = {}
        for row in of_ranks:
            layers.setdefault(describe_layer(row) + four_bit_kind(row), []).append(row)
        for layer, of_layer in layers.items():
            rivals = rivals_of(of_layer)
            columns = [*heads, *(head for rival in rivals for head in (f"{rival} µs", "speed-up")),
                       *others_cells(of_layer[0])]
            found = keyed(of_layer, lambda row: row["tokens_per_rank"])
            cells = [[str(tokens), *ranks_row_cells(row, rivals)] for tokens, row in sorted(found.items())]
            lines += ["", f"{layer}, {ranks} GPUs", "", *table(["tokens per GPU", *columns], cells)]
        lines += ["", gpu_provenance(of_ranks)]
    return "\n".join(lines)


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


def ranks_comparisons(suite, what):
    """A row for every number of GPUs. A rival that has not all of their points says how many."""
    lines = []
    for ranks, rows in by_ranks(load(f"{suite}.json") or []).items():
        rivals = rivals_of(rows) or {None: []}
        for rival, beside in rivals.items():
            named = f"{rival}, {len(beside)} points" if beside and len(beside) < len(rows) else rival
            lines.append(comparison_row(rows, f"{ranks} GPUs, {what}", named, [gain_of(row) for row in beside]))
    return lines


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
    lines += ranks_comparisons("ep_thesis", "bf16, FlashDMoE's layer, routing given")
    for suite, name in [("ep_fp8", "FP8"), ("ep_bf16", "bf16")]:
        lines += ranks_comparisons(suite, f"{name}, DeepSeek-V4 and V3, GLM-5, routing given")
    return "\n".join(lines)
