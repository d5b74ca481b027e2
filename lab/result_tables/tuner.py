"""Tables of the tuner's page, from the committed profiles' rows."""

import statistics

from result_tables.common import MODEL_NAMES, NOT_MEASURED, gpu_provenance, load, table

NAMES = {"ramp-olmoe": "OLMoE", "ramp-qwen3": "Qwen3-30B-A3B", "ramp-dsv3-ep8": "DeepSeek-V3, 32 experts",
         "ramp-dsv3-tp8": "DeepSeek-V3, 256 experts", "ramp-mixtral": "Mixtral-8x22B", "ramp-phi": "Phi-3.5-MoE",
         "ramp-jamba": "Jamba", "ramp-dbrx": "DBRX"}
# RaMP's table IV: mean and worst regret in %.
RAMP_REGRETS = {"ramp-olmoe": (1.0, 8.2), "ramp-qwen3": (1.1, 10.2), "ramp-mixtral": (1.0, 2.0), "ramp-dsv3-ep8": (0.9, 1.5),
                "ramp-dsv3-tp8": (0.8, 1.4), "ramp-phi": (1.0, 1.9), "ramp-jamba": (0.9, 1.6), "ramp-dbrx": (0.8, 1.6)}
RAMP_ALL = (0.93, 10.2)


def regrets(rows):
    return [100 * (row["chosen_us"] / row["exhaustive_us"] - 1) for row in rows]


def mean_and_worst(values):
    return f"{statistics.mean(values):.1f} / {max(values):.1f} %" if values else "–"


def gain(rows, other):
    """How many times as long the other way's choices take, in the geometric mean."""
    gains = [row[other] / row["chosen_us"] for row in rows if row[other] is not None]
    return f"{statistics.geometric_mean(gains):.2f}×" if gains else "–"


def grouped_rows(kernel):
    return [row for row in load("ramp.json") or [] if row["kernel"] == kernel and row["generator"] == "distinct"]


def tuner_table(kernel):
    """A model's regret and gains, with * where nothing was developed on it."""
    rows = grouped_rows(kernel)
    if not rows:
        return NOT_MEASURED
    models = list(dict.fromkeys(row["model"] for row in rows))

    def cells(name, points, theirs):
        at_half = [row for row in points if row["beta"] == 0.5]
        return [name, mean_and_worst(regrets(points)), mean_and_worst(regrets([row for row in points if row["held_out"]])),
                f"{theirs[0]} / {theirs[1]} %", gain(points, "static_us"), gain(points, "rule_us"),
                f"{gain(at_half, 'static_us')}, {gain(at_half, 'rule_us')}"]

    lines = []
    for model in models:
        points = [row for row in rows if row["model"] == model]
        name = NAMES.get(model) or MODEL_NAMES[model]
        lines.append(cells(name + (" *" if points[0]["unseen"] else ""), points, RAMP_REGRETS[model]))
    lines.append(cells("all", rows, RAMP_ALL))
    heads = ["model", "regret, mean / max", "held out", "RaMP's", "over static", "over the rule", "both at β = 0.5"]
    return "\n".join([*table(heads, lines), "", gpu_provenance(rows)])
