"""Tables of four GPUs: beside rivals (those of two GPUs, too), beside published figures, over one to four GPUs, skewed."""

import statistics

from result_tables.common import (
    MODEL_NAMES, NOT_MEASURED, gain_of, gpu_provenance, keyed, load, microseconds, table,
    time_over_floor,
)

# Figures of others, per GPU. FlashMoE's README: its own layer of 32 experts, top-2, on 4 H100, ms by tokens.
FLASHMOE_MS = {
    "FlashMoE": {4096: 2.1, 8192: 3.4, 16384: 6.2},
    "Comet": {4096: 3.0, 8192: 5.4, 16384: 10.0},
    "Megatron-LM, TE": {4096: 5.1, 8192: 9.0, 16384: 17.2},
}
# LigerCute's README: forward passes on 4 H200, 8192 tokens on each, TFLOP/s per GPU, read off its charts.
LIGER_TFLOPS = {
    "qwen3-30b": {"LigerCute": 274, "Comet": 203, "Megatron-LM, TE": 138, "DeepEP": 135, "FlashMoE": 106},
    "mixtral-8x7b": {"LigerCute": 548, "Comet": 394, "Megatron-LM, TE": 499, "DeepEP": 486, "FlashMoE": 211},
}

# A rival whose input lies quantised in its buffers before the time begins, which ours is not.
IN_PLACE = ", input in place"


def short_name(model):
    return MODEL_NAMES[model].removesuffix(", routed experts")


def by_model_and_tokens(rows):
    return keyed(rows, lambda row: (row["compute"], row["model"], row["tokens_per_rank"]))


def on(ranks, suite):
    return [row for row in load(f"{suite}.json") or [] if row["ranks"] == ranks]


def on_four(suite):
    return on(4, suite)


def beside(ranks):
    """{rival: rows of ours with rival_us} on so many GPUs, of the points that results/ranks_rivals.json has."""
    ours = by_model_and_tokens(on(ranks, "ep_fp8") + on(ranks, "ep_bf16"))
    found = {}
    for row in on(ranks, "ranks_rivals"):
        own = ours.get((row["compute"], row["model"], row["tokens_per_rank"]))
        if own is None:
            continue
        found.setdefault(row["rival"], []).append({**own, "rival_us": row["rival_us"], "theirs": row})
        if row.get("rival_in_place_us"):
            found.setdefault(row["rival"] + IN_PLACE, []).append(
                {**own, "rival_us": row["rival_in_place_us"], "theirs": row})
    return found


def ranks_rivals(ranks):
    """Speed-ups over each rival: a line for a layer, a column for a number of tokens."""
    rivals = beside(ranks)
    if not rivals:
        return NOT_MEASURED
    lines = ["| rival | points | speed-up: mean | least | most | ours slower at (tokens) | rival's error |", "|---" * 7 + "|"]
    for rival, rows in rivals.items():
        gains = [gain_of(row) for row in rows]
        slower = [f"{short_name(row['model'])} {row['tokens_per_rank']}" for row in rows if gain_of(row) < 1]
        errors = [row["theirs"]["rival_error"] for row in rows]
        lines.append(
            f"| {rival} | {len(rows)} | {statistics.geometric_mean(gains):.2f}× | {min(gains):.2f}× | {max(gains):.2f}× | "
            f"{', '.join(slower) or '–'} | {min(errors):.1e} to {max(errors):.1e} |"
        )
    tokens = sorted({row["tokens_per_rank"] for rows in rivals.values() for row in rows})
    cells = []
    for rival, rows in rivals.items():
        if rival.endswith(IN_PLACE):
            continue
        found = keyed(rows, lambda row: (row["model"], row["tokens_per_rank"]))
        for model in dict.fromkeys(row["model"] for row in rows):
            points = [found.get((model, count)) for count in tokens]
            cells.append([rival, short_name(model), *("–" if row is None else f"{gain_of(row):.2f}×" for row in points)])
    lines += ["", *table(["speed-up over", "layer", *(f"{count} token{'s' if count > 1 else ''}" for count in tokens)], cells), ""]
    lines.append(gpu_provenance([row for rows in rivals.values() for row in rows]))
    commands = dict.fromkeys(row["theirs"]["command"] for rows in rivals.values() for row in rows)
    lines += ["", "*The rivals, on the same machine: " + ", ".join(f"`{command}`" for command in commands) + "*"]
    return "\n".join(lines)


def four_flashinfer():
    """The times of FlashInfer's FP8 backend, which the rows of ep_fp8 do not have: their rival is another."""
    rows = next((rows for rival, rows in beside(4).items() if rival.endswith("push FP8")), [])
    if not rows:
        return NOT_MEASURED
    lines = [[short_name(row["model"]), str(row["tokens_per_rank"]), microseconds(row["median_us"]),
              microseconds(row["rival_us"]), f"{gain_of(row):.2f}×"] for row in rows]
    heads = ["layer", "tokens per GPU", "ours: µs", f"{rows[0]['theirs']['rival']}: µs", "speed-up"]
    return "\n".join(table(heads, lines))


def mean_tflops(row):
    """TFLOP/s of the mean GPU: `flops` of a row are those of the most loaded one. Three matrices, gated."""
    flops = row["tokens_per_rank"] * row["top_k"] * 6 * row["hidden"] * row["intermediate"]
    return flops / row["median_us"] / 1e6


def four_published():
    rows = on_four("beside_published")
    if not rows:
        return NOT_MEASURED
    flash = [row for row in rows if row["model"] == "thesis"]
    lines = []
    for row in flash:
        theirs = [f"{of[row['tokens_per_rank']]:.1f}" if row["tokens_per_rank"] in of else "–" for of in FLASHMOE_MS.values()]
        ms = row["median_us"] / 1000
        lines.append([str(row["tokens_per_rank"]), f"{ms:.2f}", f"{1.5 * ms:.2f}", *theirs])
    heads = ["tokens per GPU", "ours, 4 H200: ms", "ours × 1.5", *(f"{name}, 4 H100: ms" for name in FLASHMOE_MS)]
    said = [f"**Beside FlashMoE's README: {flash[0]['experts']} experts, top-{flash[0]['top_k']}, H {flash[0]['hidden']}, "
            f"I {flash[0]['intermediate']} of ours, bf16, gate included.**", "", *table(heads, lines), ""]
    liger = [row for row in rows if row["model"] in LIGER_TFLOPS]
    names = list(dict.fromkeys(name for of in LIGER_TFLOPS.values() for name in of))
    lines = []
    for row in liger:
        of = LIGER_TFLOPS[row["model"]] if row["tokens_per_rank"] == 8192 else {}
        lines.append([MODEL_NAMES[row["model"]], str(row["tokens_per_rank"]), f"{row['median_us'] / 1000:.2f}",
                      f"{mean_tflops(row):.0f}", *(str(of.get(name, "–")) for name in names)])
    heads = ["layer", "tokens per GPU", "ours: ms", "ours: TFLOP/s per GPU", *names]
    said += ["**Beside LigerCute's README: forward passes on 4 H200, bf16, TFLOP/s per GPU; gate included in ours.**", "",
             *table(heads, lines), "", gpu_provenance(rows)]
    return "\n".join(said)


def scaling_rows():
    """{(ranks, tokens per rank): row} of results/scaling.json."""
    return keyed(load("scaling.json") or [], lambda row: (row["ranks"], row["tokens_per_rank"]))


def scaling_points():
    """Ranks, and the numbers of tokens that one rank was measured with."""
    found = scaling_rows()
    return sorted({ranks for ranks, _ in found}), sorted(tokens for ranks, tokens in found if ranks == 1)


def scaled(tokens, ranks, strong):
    """The rows of one rank and of `ranks`: as many tokens in all (strong), or on each rank (weak)."""
    found = scaling_rows()
    return found[1, tokens], found.get((ranks, tokens // ranks if strong else tokens))


def scaling_table():
    if not scaling_rows():
        return NOT_MEASURED
    ranks, tokens = scaling_points()
    several = [count for count in ranks if count > 1]
    text = []
    for strong, title in [(True, "Strong scaling: as many tokens in all"), (False, "Weak scaling: as many tokens on each GPU")]:
        heads = ["tokens in all" if strong else "tokens per GPU", "1 GPU: µs"]
        for count in several:
            heads += [f"{count} GPUs: µs", "time of 1 GPU over it" if strong else "tokens/s over 1 GPU's", "the same of the floor"]
        lines = []
        for of_one in tokens:
            cells = [str(of_one), microseconds(scaled(of_one, 1, strong)[0]["median_us"])]
            for count in several:
                one, row = scaled(of_one, count, strong)
                more = 1 if strong else count
                cells += ["–"] * 3 if row is None else [
                    microseconds(row["median_us"]), f"{more * one['median_us'] / row['median_us']:.2f}×",
                    f"{more * one['floor_us'] / row['floor_us']:.2f}×"]
            lines.append(cells)
        text += [f"**{title}**", "", *table(heads, lines), ""]
    return "\n".join([*text, gpu_provenance(list(scaling_rows().values()))])


def skewed_table():
    """Rows of results/ep_skewed.json, with the balanced rows of the suites before them."""
    skewed = on_four("ep_skewed")
    if not skewed:
        return NOT_MEASURED
    point = lambda row: (row["compute"], row["model"], row["tokens_per_rank"], row["beta"])
    measured = {(row["compute"], row["model"], row["tokens_per_rank"]) for row in skewed}
    even = [row for row in on_four("ep_fp8") + on_four("ep_bf16") if point(row)[:3] in measured]
    found = keyed([*even, *skewed], point)
    betas = sorted({row["beta"] for row in found.values()}, reverse=True)
    heads = ["layer", "tokens per GPU", *(head for beta in betas for head in (f"β {beta:g}: µs", "floor / time", "TFLOP/s"))]
    lines = []
    for compute, model, tokens in dict.fromkeys(point(row)[:3] for row in skewed if row["beta"] < 1):
        cells = [f"{short_name(model)}, {'FP8' if compute == 'fp8' else compute}", str(tokens)]
        for beta in betas:
            row = found.get((compute, model, tokens, beta))
            cells += ["–"] * 3 if row is None else [
                microseconds(row["median_us"]), f"{100 / time_over_floor(row):.0f} %", f"{mean_tflops(row):.0f}"]
        lines.append(cells)
    return "\n".join([*table(heads, lines), "", gpu_provenance([*skewed, *even])])
