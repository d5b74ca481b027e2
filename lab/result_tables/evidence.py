"""What rows show of the four texts' tables and figures: their number, ours, and the rows that ours come from.

An extractor has the name that the item has in docs/evidence.md, takes the rows of a directory, and returns lines. It
returns none where the directory has no rows for it.
"""

import dataclasses
import json
import math
import statistics

from result_rows import card_of
from result_tables.thesis import THESIS_LAUNCHES, THESIS_MEMORY_MB, THESIS_RIVALS, padded_bytes
from result_tables.tuner import RAMP_REGRETS


@dataclasses.dataclass
class Line:
    point: str
    theirs: float | None
    ours: float
    unit: str
    row: dict  # the machine, the commit and the command of ours
    same_type: bool = True

    @property
    def ratio(self):
        """Ours over theirs, if both are of GPUs, in types of as many bits."""
        comparable = self.same_type and self.theirs and "NVIDIA" in self.row["machine"]
        return self.ours / self.theirs if comparable else None


class Measured:
    """The rows of a directory's files."""

    def __init__(self, directory, published):
        self.directory = directory
        self.published = json.loads(published.read_text())

    def rows(self, name, **wanted):
        path = self.directory / f"{name}.json"
        rows = json.loads(path.read_text()) if path.exists() else []
        return [row for row in rows if all(row.get(key) == value for key, value in wanted.items())]


def world(row):
    """"2 × H200", or the processor."""
    card, ranks = card_of(row["machine"]), row.get("ranks", 1)
    if "NVIDIA" not in card and not row["machine"].startswith("GPU"):
        return f"{ranks} ranks, CPU" if ranks > 1 else "CPU"
    words = row["machine"].replace("(", " ").replace(",", " ").split()
    short = words[words.index("NVIDIA") + 1]
    return short if ranks == 1 else f"{ranks} × {short}"


def geomean(values):
    return statistics.geometric_mean(values)


# The thesis. Its time is of fp32, ours of bf16.


def launches(measured):
    counted = [row for row in measured.rows("thesis") if row["graph_nodes"] is not None]
    most = {row["ranks"]: row for row in sorted(counted, key=lambda row: row["graph_nodes"])}
    return [Line(f"operations of a pass, {world(row)}; the most of {sum(r['ranks'] == ranks for r in counted)} points",
                 THESIS_LAUNCHES["FlashDMoE"], row["graph_nodes"], "", row) for ranks, row in sorted(most.items())]


def thesis_memory(measured):
    lines = []
    for row in measured.rows("thesis_memory"):
        theirs = THESIS_MEMORY_MB.get((row["tokens_per_rank"], row["experts"]))
        ours = (row["heap_reserved_bytes"] + row["workspace_bytes"]) * 1e-6
        lines.append(Line(f"{row['tokens_per_rank']} tokens, {row['experts']} experts, {world(row)}",
                          theirs and sum(theirs), ours, "MB", row, False))
    return lines


def thesis_times(points):
    """Times of (experts, tokens of a GPU, their GPUs): FlashDMoE's, and the fastest of the others in 16 bits."""

    def extract(measured):
        lines = []
        for experts, tokens, gpus in points:
            theirs = {}
            for series in measured.published:
                if series["model"] == "thesis" and (series["experts"], series["ranks"]) == (experts, gpus):
                    theirs.update({series["rival"]: series["time_us"][str(tokens)] / 1000}
                                  if str(tokens) in series["time_us"] else {})
            others = {name: theirs[name] for name in THESIS_RIVALS[1:] if name in theirs}
            fastest = min(others, key=others.get)
            for row in measured.rows("thesis", experts=experts, tokens_per_rank=tokens):
                point = f"{experts} experts, {tokens} tokens a GPU, {world(row)}; theirs {gpus} H100"
                ours = row["median_us"] / 1000
                lines.append(Line(f"{point}, FlashDMoE in fp32", theirs["FlashDMoE"], ours, "ms", row, False))
                lines.append(Line(f"{point}, {fastest} in fp16", theirs[fastest], ours, "ms", row))
        return lines

    return extract


def stragglers(measured):
    lines = []
    for row in measured.rows("stragglers"):
        theirs = 1.32 if row["jitter_us"] == 0 else None
        lines.append(Line(f"{row['way']}, jitter {row['jitter_us']} µs, {world(row)}; theirs 32 A100, all-to-all alone", theirs,
                          row["p95_slowest_over_mean_fastest"], "×", row))
    return lines


def idle_time(measured):
    """A late rank's pass from its start on, over a pass without one. Waiting makes it 1 and more."""
    rows = [row for row in measured.rows("late", jitter=False) if row["late_us"] >= 2000]
    return [Line(f"{row['model']}, {row['tokens_per_rank']} tokens, a rank late by {row['late_us'] / 1000:g} ms, the others "
                 f"{'work' if row['policy'] == 'works' else 'wait'}, {world(row)}",
                 None, row["after_start_us"] / row["prompt_us"], "× a pass", row)
            for row in rows if row["tokens_per_rank"] == max(r["tokens_per_rank"] for r in rows if r["machine"] == row["machine"])]


def utilisation(measured):
    return [Line(f"units with work in flight, {row['tokens_per_rank']} tokens, {row['experts']} experts, {world(row)}", 93.17,
                 100 * row["active"], "%", row) for row in measured.rows("thesis_utilisation")]


def bytes_sent(measured):
    return [Line(f"{row['experts']} experts, {row['tokens_per_rank']} tokens, {world(row)}; in place of theirs a padded all-to-all",
                 padded_bytes(row) * 1e-6, row["nvlink_bytes"] * 1e-6, "MB", row)
            for row in measured.rows("thesis") if row["nvlink_bytes"] and row["experts"] == 64]


# RaMP.

STATIC_GAINS = {16: 1.27, 32: 1.33, 64: 1.70, 128: 1.40, 256: 1.27}  # DSv3-TP8 at β 0.5


def by(rows, key):
    found = {}
    for row in rows:
        found.setdefault(key(row), []).append(row)
    return found


def wave_loss(measured):
    """What skew leaves idle of the last wave, from histograms alone: OLMoE, tiles of 16 rows, blocks of 256 of N's 2048."""

    def occupancy(point):
        waves = sum(-(-count // 16) for count in point["counts"]) * 8 / 132
        return waves / math.ceil(waves)

    lines = []
    for path in sorted([*measured.directory.glob("*.profile.json"), *measured.directory.glob("profiles/*.profile.json")])[-1:]:
        profile = json.loads(path.read_text())
        at = {(point["tokens"], point["beta"]): occupancy(point) for point in profile["points"] if point["model"] == "ramp-olmoe"}
        row = {"machine": "computed from histograms", "commit": "none", "command": path.name}
        lines += [Line(f"{tokens} tokens, occupancy lost at β 0.5; theirs 15 to 30 % for small batches", 22.5 if tokens <= 32 else None,
                       100 * (1 - at[tokens, 0.5] / at[tokens, 1.0]), "%", row)
                  for tokens in sorted({tokens for tokens, _ in at}) if {(tokens, 0.5), (tokens, 1.0)} <= at.keys()]
    return lines


def regret(measured):
    lines = []
    rows = [row for row in measured.rows("ramp", generator="distinct") if row["kernel"].startswith("grouped")]
    for (kernel, model), points in by(rows, lambda row: (row["kernel"], row["model"])).items():
        regrets = [100 * (row["chosen_us"] / row["exhaustive_us"] - 1) for row in points]
        mean, most = RAMP_REGRETS.get(model, (None, None))
        where = f"{kernel}, {model.removeprefix('ramp-')}, {world(points[0])}, {len(points)} points"
        lines += [Line(f"mean: {where}", mean, statistics.mean(regrets), "%", points[0]),
                  Line(f"worst: {where}", most, max(regrets), "%", points[0])]
    return lines


def static_gain(beta, theirs):
    def extract(measured):
        lines = []
        rows = [row for row in measured.rows("ramp", beta=beta) if row["kernel"].startswith("grouped") and row["static_us"]]
        for row in rows:
            if row["generator"] == "repeated" and row["model"] == "ramp-dsv3-tp8" and row["tokens_per_rank"] in theirs:
                lines.append(Line(f"DSv3-TP8, {row['tokens_per_rank']} tokens, {row['kernel']}, {world(row)}",
                                  theirs[row["tokens_per_rank"]], row["static_us"] / row["chosen_us"], "×", row))
        for (kernel, generator), points in by(rows, lambda row: (row["kernel"], row["generator"])).items():
            gain = geomean([row["static_us"] / row["chosen_us"] for row in points])
            lines.append(Line(f"geometric mean of {len(points)} points, {kernel}, {generator}, {world(points[0])}",
                              {0.5: 1.22, 0.8: 1.03}[beta], gain, "×", points[0]))
        return lines

    return extract


def foreign_kernel(measured):
    rows = [row for row in measured.rows("ramp", kernel="triton_bf16") if row["rule_us"] and row["beta"] == 0.5]
    return [Line(f"over its own dispatch, β 0.5, {len(rows)} points; theirs Alpha-MoE, ours Triton", 1.14,
                 geomean([row["rule_us"] / row["chosen_us"] for row in rows]), "×", rows[0])] if rows else []


def whole_kernel(measured):
    return [Line(f"OLMoE, {row['tokens_per_rank']} tokens, β 0.5, {world(row)}; ours a whole layer",
                 {32: 72, 1024: 319}[row["tokens_per_rank"]], row["chosen_us"], "µs", row)
            for row in measured.rows("ramp", kernel="layer_fp8", model="olmoe", beta=0.5) if row["tokens_per_rank"] in (32, 1024)]


def split_k(measured):
    expected = {"ramp-dsv3-ep8": 1.115, "ramp-dsv3-tp8": 1.115, "ramp-mixtral": 0.855, "ramp-dbrx": 0.855}
    return [Line(f"{row['model'].removeprefix('ramp-')}, {row['kernel']}, {row['generator']}, where it should "
                 f"{'help' if row['predicted'] else 'not help'}, {world(row)}", expected[row["model"]], row["measured_ratio"], "×", row)
            for row in measured.rows("ramp_regions", prediction="split_k") if row["model"] in expected]


def group_m(measured):
    return [Line(f"{row['kernel']}, {row['points']} points, {world(row)}; theirs 1.15 to 1.29 from 128 tokens", 1.22,
                 row["measured_ratio"], "×", row)
            for row in measured.rows("ramp_regions", prediction="group_m", model="ramp-mixtral", generator="distinct")]


def served(measured):
    """Time per token and to the first one: another kernel's over Switchyard's, in vLLM."""
    theirs = {("tpot_ms", "triton"): 1.30, ("tpot_ms", "deep_gemm"): 1.41, ("ttft_ms", "triton"): 1.17, ("ttft_ms", "deep_gemm"): 1.17}
    return engine_gains(measured, theirs, engine="vllm", model="olmoe", dtype="fp8")


def engine_gains(measured, theirs, **cell):
    rows = [row for row in measured.rows("engines", **cell) if row["error"] is None]
    lines = []
    for time in ("tpot_ms", "ttft_ms"):
        key = lambda row: (row["engine"], row["model"], row["dtype"], row["topology"], row["batch"], row["prompt"])
        ours = {key(row): row for row in rows if row["backend"] == "switchyard" and row.get(time)}
        for row in rows:
            if row["backend"] in ("switchyard", "none", "zeroed") or not row.get(time) or key(row) not in ours:
                continue
            mine = ours[key(row)]
            what = "time per token" if time == "tpot_ms" else "time to the first token"
            lines.append(Line(f"{row['engine']}, {row['model']}, {row['dtype']}, batch {row['batch']}, prompt {row['prompt']}: {what}, "
                              f"{row['backend']} over ours", theirs.get((time, row["backend"])), row[time] / mine[time], "×", mine))
    return lines


# AsteroMoE. Its text has no numbers.


def whole_layer(measured):
    return [Line(f"{row['tokens_per_rank']} tokens, {row['compute']}, {world(row)}", None, row["flops"] / row["median_us"] / 1e6,
                 "TFLOP/s", row) for row in measured.rows("astero")]


def sonic(measured):
    return [Line(f"{row['model']}, {row['tokens_per_rank']} tokens, bf16: SonicMoE's time over ours, {world(row)}", None,
                 row["rival_us"] / row["median_us"], "×", row) for row in measured.rows("sonic_moe")]


def grouped_rate(measured):
    rows = measured.rows("grouped", activation="none")
    return [Line(f"{row['implementation']}, {row['experts']} experts, N {row['n']}, K {row['k']}, {row['rows_per_expert']} rows each, "
                 f"{row['dtype']}, {world(row)}", None, row["flops"] / row["median_us"] / 1e6, "TFLOP/s", row)
            for row in rows if row["implementation"].startswith("switchyard") and row["beta"] is None]


# The all-to-all text.


def rung(name, theirs):
    def extract(measured):
        lines = []
        for rows in by(measured.rows("all_to_all", rung=name), lambda row: (row["ranks"], row["gpus"], row["machine"], row["stand_in"])).values():
            place = f"{rows[0]['ranks']} ranks on {rows[0]['gpus']} GPUs" if rows[0]["gpus"] else f"{rows[0]['ranks']} ranks, CPU"
            lines.append(Line(f"{name}, {place}, experts {rows[0]['stand_in']}, mean of {len(rows)} cases; theirs 8 MI300X", theirs,
                              geomean([row["median_us"] for row in rows]), "µs", rows[0]))
        return lines

    return extract


def least_time(measured):
    theirs = {6144: 6.33, 2048: 7.37, 2880: 14.98, 4096: 61.78, 7168: 104.36}
    seen = {}
    for row in measured.rows("all_to_all"):
        if row["floor_us"]:
            seen[row["case"], row["ranks"], row["gpus"]] = row
    return [Line(f"H {row['hidden']}, {row['ranks']} ranks on {row['gpus']} GPUs; theirs 8 MI300X", theirs[row["hidden"]],
                 row["floor_us"], "µs", row) for row in seen.values()]


# Serving engines, which are no text's: theirs is the time of the engine's other kernels.


def in_engine(engine):
    return lambda measured: engine_gains(measured, {}, engine=engine)


@dataclasses.dataclass
class Shown:
    extract: object
    needs: str  # to measure it


EXTRACTORS = {
    "thesis": {
        "Table 1.1": Shown(launches, "a GPU: a CPU has no GPU operations to count"),
        "Table 6.2": Shown(thesis_memory, "the command"),
        "Table 6.3": Shown(thesis_times([(32, tokens, 8) for tokens in (1024, 2048, 4096, 8192)]), "the command"),
        "Table 6.4": Shown(thesis_times([(experts, 8192, 8) for experts in (16, 32, 64, 128)]), "8192 tokens a rank, which only a GPU's run has"),
        "Table 6.5": Shown(thesis_times([(32, 8192, 2), (32, 8192, 4)]), "8192 tokens a rank, which only a GPU's run has"),
        "Figure 3.1": Shown(stragglers, "PyTorch, for the chain beside ours"),
        "Figure 3.2": Shown(idle_time, "the command"),
        "Figure 6.3a": Shown(utilisation, "the command; on GPUs a build that traces plain FFNs"),
        "Figure 6.3b": Shown(bytes_sent, "two GPUs"),
    },
    "ramp": {
        "Figure 3": Shown(wave_loss, "the command"),
        "Table IV": Shown(regret, "the command"),
        "Table V, β 0.5": Shown(static_gain(0.5, STATIC_GAINS), "the command"),
        "Table V, β 0.8": Shown(static_gain(0.8, {}), "the command"),
        "Table VI": Shown(foreign_kernel, "a GPU, PyTorch and Triton"),
        "Table VII": Shown(whole_kernel, "a GPU: FP8 layers of OLMoE"),
        "Table IX": Shown(served, "a GPU and vLLM"),
        "split K by 4": Shown(split_k, "a GPU: on a CPU no configuration splits K"),
        "GROUP_M on Mixtral": Shown(group_m, "a GPU: on a CPU no configuration has bands"),
    },
    "astero": {
        "chart: DeepSeek-V3 end to end, TFLOP/s over batch": Shown(whole_layer, "a GPU with room for DeepSeek-V3's layer"),
        "ahead of sonic-moe at all batches": Shown(sonic, "a GPU, PyTorch and SonicMoE"),
        "three layouts in, blocked or packed out": Shown(grouped_rate, "the command"),
    },
    "all-to-all": {
        "ladder: a flag for a rank, v4 (in the text only)": Shown(rung("flag_per_rank", 116000), "the command"),
        "ladder: a flag for a token, v5": Shown(rung("flag_per_token", 517), "the command"),
        "ladder: experts fused (in the text only)": Shown(rung("fused", 421), "the command"),
        "ladder: tuned, v7": Shown(rung("tuned", 345), "the command"),
        "ladder: no allocation, no memset, v7b": Shown(rung("epochs", 303), "the command"),
        "ladder: flattened, v9": Shown(rung("flattened", 292), "the command"),
        "problem: least time of the five cases": Shown(least_time, "GPUs, whose roofs are known"),
    },
    "engines": {
        "vLLM": Shown(in_engine("vllm"), "a GPU and vLLM"),
        "SGLang": Shown(in_engine("sglang"), "a GPU and SGLang"),
    },
}
