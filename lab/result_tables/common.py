"""Reading results by card, cells, and the line about a table's origin."""

import functools
import json
import pathlib
import re
import statistics

from result_rows import card_of

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
RESULTS = ROOT / "results"

# The GPU of tables whose titles name none.
MAIN_CARD = "NVIDIA H200"

# The card of the table that is being made, if a file's cards have a table each.
of_card = None


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


def keyed(rows, key_of):
    """{key: row}. Two rows of one key would leave one of them out of a table without a word."""
    found = {}
    for row in rows:
        key = key_of(row)
        if key in found:
            raise ValueError(f"two rows of {key}: '{found[key]['command']}' and '{row['command']}'")
        found[key] = row
    return found


def by_ranks(rows):
    """{number of ranks: rows}, ascending. Tables of several numbers stand one below the other."""
    return {ranks: [row for row in rows if row["ranks"] == ranks] for ranks in sorted({row["ranks"] for row in rows})}


def natural(item):
    """Sort key of a benchmark name: its numbers as numbers."""
    return [int(number) for number in re.findall(r"\d+", item[0])]


def provenance(result):
    about = result["switchyard"]
    return f"*{about['machine']}; commit {about['commit']}; `{about['command']}`*"


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


def rival_of(row):
    """A row's rival in words. All chains of PyTorch are one rival, the fastest of them."""
    return "PyTorch" if row["rival"].startswith("torch ") else row["rival"]


def rivals_of(rows):
    """{rival: the rows that have it}."""
    found = {}
    for row in rows:
        if row.get("rival_us") is not None:
            found.setdefault(rival_of(row), []).append(row)
    return found


def gain_of(row):
    return row["rival_us"] / row["median_us"]


def gpu_summary(rows):
    """One sentence for each claim about all rows."""
    overs = [over for over in map(time_over_floor, rows) if over is not None]
    said = []
    if overs:
        said.append(
            f"Time over the floor: geometric mean {statistics.geometric_mean(overs):.2f}, "
            f"worst {max(overs):.2f} ({len(overs)} points)."
        )
    for rival, beside in rivals_of(rows).items():
        gains = [gain_of(row) for row in beside]
        said.append(
            f"Speed-up over {rival}: geometric mean {statistics.geometric_mean(gains):.2f}×, "
            f"least {min(gains):.2f}× ({len(gains)} points)."
        )
    return " ".join(said)


def gpu_provenance(rows):
    """Every run that rows come from: a paragraph for each machine, with all of its commits and commands."""
    machines = {}
    for row in rows:
        commands = machines.setdefault(row["machine"], {}).setdefault(row["commit"], [])
        if row["command"] not in commands:
            commands.append(row["command"])
    said = []
    for machine, commits in machines.items():
        runs = [f"commit {commit}; " + ", ".join(f"`{command}`" for command in commands)
                for commit, commands in commits.items()]
        said.append("; ".join([machine, *runs]))
    if any("--keep-rival" in row["command"] and row.get("rival_us") for row in rows):
        said[-1] += "; PyTorch's times are those of an earlier run"
    return "\n\n".join(f"*{of_machine}*" for of_machine in said)


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


def rate_cells(row):
    """| floor / time | TFLOP/s | TB/s of weights |"""
    over, us = time_over_floor(row), row["median_us"]
    tflops, tbs = row["flops"] / us / 1e6, row["touched_bytes"] / us / 1e6
    return ["–" if over is None else f"{100 / over:.0f} %", f"{tflops:.{0 if tflops >= 10 else 1}f}", f"{tbs:.2f}"]


NOT_MEASURED = "Nothing is measured yet: the file of this table is not there."
