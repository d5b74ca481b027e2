"""Tables beside those of the FlashDMoE thesis."""

from result_tables.common import NOT_MEASURED, by_ranks, gpu_provenance, keyed, load, table
from result_tables.layers import published

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
    """{number of GPUs: rows} of results/thesis.json, of several GPUs."""
    return by_ranks([row for row in load("thesis.json") or [] if row["ranks"] > 1 and row["graph_nodes"] is not None])


def by_tokens_and_experts(rows):
    return keyed(rows, lambda row: (row["tokens_per_rank"], row["experts"]))


def thesis_grid(unit, points, cell):
    """Lines of tokens and columns of experts. `cell` is called for every pair, also one that `points` lacks."""
    experts = sorted({count for _, count in points})
    lines = [[str(tokens), *(cell((tokens, count)) for count in experts)] for tokens in sorted({t for t, _ in points})]
    return table(["tokens per GPU", *(f"{count} experts: {unit}" for count in experts)], lines)


def milliseconds(us):
    return "–" if us is None else f"{us / 1000:.2f}"


def thesis_times():
    """Every point of the suite thesis, and the outputs' errors: a table for every number of GPUs."""
    parts = []
    for ranks, rows in thesis_rows().items():
        found = by_tokens_and_experts(rows)

        def cell(point):
            row = found.get(point)
            return "–" if row is None else f"{row['median_us']:.0f} ({row['p10_us']:.0f} to {row['p90_us']:.0f})"

        worst = max(rows, key=lambda row: row["error"] / row["error_bound"])
        checked = (
            f"The outputs of all {len(rows)} points' timed passes were compared with fp64. The one nearest to its bound "
            f"has an error of {worst['error']:.2e}. Its bound, twice the error of a straightforward bf16 program, is "
            f"{worst['error_bound']:.2e}."
        )
        parts.append("\n".join([f"**{ranks} GPUs**", "", *thesis_grid("µs", found, cell), "", checked, "",
                                gpu_provenance(rows)]))
    return "\n\n".join(parts) or NOT_MEASURED


def thesis_beside():
    """Tables 6.3, 6.4 and 6.5 beside ours, whatever the number of GPUs."""
    ours = {ranks: by_tokens_and_experts(rows) for ranks, rows in thesis_rows().items()}

    def beside(what, experts, tokens, gpus):
        rows = [of_ranks.get((tokens, experts)) for of_ranks in ours.values()]
        theirs = published({"model": "thesis", "experts": experts, "tokens_per_rank": tokens}, gpus)
        return [what, f"{experts}", f"{tokens}", *(milliseconds(row and row["median_us"]) for row in rows), f"{gpus}",
                *(milliseconds(theirs.get(name)) for name in THESIS_RIVALS)]

    lines = [beside("6.3", 32, tokens, 8) for tokens in (1024, 2048, 4096, 8192)]
    lines += [beside("6.4", experts, 8192, 8) for experts in (16, 64, 128)]
    lines += [beside("6.5", 32, 8192, gpus) for gpus in (2, 4)]
    heads = ["table", "experts", "tokens per GPU", *(f"ours, {ranks} GPUs: ms" for ranks in ours), "theirs: GPUs",
             *THESIS_RIVALS]
    return "\n".join(table(heads, lines))


def thesis_launches():
    found = thesis_rows()
    if not found:
        return NOT_MEASURED
    lines = []
    for ranks, rows in found.items():
        nodes = " or ".join(map(str, sorted({row["graph_nodes"] for row in rows})))
        lines.append([f"{ranks} GPUs, {len(rows)} points", nodes, *map(str, THESIS_LAUNCHES.values())])
    return "\n".join(table(["ours", "Switchyard", *THESIS_LAUNCHES], lines))


def padded_bytes(row):
    """The least that a padded all-to-all would send from one rank, as cpu::Engine::finish() counts
    padded_all_to_all_bytes: (experts elsewhere) x (the fullest block of one rank's rows for one expert) x (bytes of
    a row there and back). A row keeps the loads of experts over all ranks; the fullest block has at least the
    fullest expert's load over the ranks."""
    elsewhere = row["experts"] - row["experts"] // row["ranks"]
    fullest = max(row["expert_load"]) * row["tokens_per_rank"] * row["top_k"] / row["experts"]
    return elsewhere * fullest * 2 * row["hidden"] * 2


def thesis_bytes():
    parts = []
    for ranks, rows in thesis_rows().items():
        found = by_tokens_and_experts(rows)

        def cell(point):
            if point not in found:
                return "–"
            sent, padded = found[point]["nvlink_bytes"], padded_bytes(found[point])
            return f"{sent * 1e-6:.1f} of {padded * 1e-6:.1f} ({100 * sent / padded:.0f} %)"

        parts.append("\n".join([f"**{ranks} GPUs**", "", *thesis_grid("MB", found, cell)]))
    return "\n\n".join(parts) or NOT_MEASURED


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
    rows = [row for row in load("thesis_memory.json") or [] if row["backend"] == "cuda" and row["ranks"] == 2]
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
