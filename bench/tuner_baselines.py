#!/usr/bin/env python3
"""Regret of learned models beside the cost model's, on a profile of `switchyard tune`.

A Random Forest (50 trees of depth 5) and an MLP (32 x 16 hidden units) per configuration, with the
features g / SMs, g and log(g + 1), as RaMP (arXiv 2604.26039, section IV-B) compares them; and least
squares of T = a + b ceil(g / SMs) + c g + d log(g + 1) beside them, by the same code. They are fitted
on the same points and judged on the same others.

    switchyard tune --kernel grouped --dtype fp8 --out grouped
    bench/tuner_baselines.py grouped.profile.json

Needs scikit-learn (pip install scikit-learn). Exits with 77 and a line where there is none.
"""

import argparse
import json
import math
import statistics
import sys
import warnings

SKIPPED = 77
FEATURES = "g / SMs, g, log(g + 1)"


def read(path):
    with open(path) as file:
        profile = json.load(file)
    if not isinstance(profile, dict) or profile.get("file") != "switchyard profile":
        sys.exit(f"{path} is no profile of 'switchyard tune'; give one")
    return profile


def grid(configuration, model, counts):
    tiles = sum(-(-count // configuration["token_rows"]) for count in counts)
    blocks = -(-model["n"] // configuration["weight_rows"])
    return tiles * blocks * configuration["splits"] * configuration["blocks"]


def features(g, num_sms):
    return [g / num_sms, g, math.log(g + 1)]


class Forest:
    name = "random forest"

    def __init__(self, seed):
        from sklearn.ensemble import RandomForestRegressor

        self.model = RandomForestRegressor(n_estimators=50, max_depth=5, random_state=seed)

    def fit(self, grids, times, num_sms):
        self.num_sms = num_sms
        self.model.fit([features(g, num_sms) for g in grids], times)

    def predict(self, grids):
        return self.model.predict([features(g, self.num_sms) for g in grids])


class Network:
    """An MLP of logarithms, scaled: of plain times it does not converge on 25 points."""

    name = "MLP 32 x 16"

    def __init__(self, seed):
        from sklearn.neural_network import MLPRegressor
        from sklearn.pipeline import make_pipeline
        from sklearn.preprocessing import StandardScaler

        self.model = make_pipeline(
            StandardScaler(),
            MLPRegressor(hidden_layer_sizes=(32, 16), solver="lbfgs", max_iter=2000, random_state=seed),
        )

    def fit(self, grids, times, num_sms):
        self.num_sms = num_sms
        logs = [math.log(time) for time in times]
        self.middle, self.width = statistics.mean(logs), statistics.pstdev(logs) or 1.0
        self.model.fit(
            [features(g, num_sms) for g in grids], [(log - self.middle) / self.width for log in logs]
        )

    def predict(self, grids):
        scaled = self.model.predict([features(g, self.num_sms) for g in grids])
        return [math.exp(min(value * self.width + self.middle, 50)) for value in scaled]


class Squares:
    """The cost model, of relative errors, as a check of this program against the tuner's own."""

    name = "least squares"

    def __init__(self, seed):
        pass

    def terms(self, g):
        row = [1, math.ceil(g / self.num_sms), g]
        return row + [math.log(g + 1)] if self.with_log else row

    def fit(self, grids, times, num_sms):
        import numpy

        self.num_sms = num_sms
        self.with_log = sorted(grids)[len(grids) // 2] < num_sms
        rows = numpy.array([self.terms(g) for g in grids], dtype=float) / numpy.array(times)[:, None]
        lengths = numpy.maximum(numpy.linalg.norm(rows, axis=0), 1e-300)
        solution = numpy.linalg.lstsq(rows / lengths, numpy.ones(len(times)), rcond=1e-13)[0]
        self.solution = solution / lengths

    def predict(self, grids):
        return [float(sum(a * b for a, b in zip(self.terms(g), self.solution))) for g in grids]


def left_out(profile, points):
    """The configurations of a model that are not to be chosen, as src/tuner/fit.cpp leaves them out:
    those that are pruned, and where some are, those that are far from the best at every point."""
    count = len(profile["configurations"])
    pruned = {c for c in range(count) if any(p["times_us"][c] == -1 for p in points)}
    if not pruned:
        return pruned
    least = [math.inf] * count
    for point in points:
        times = point["times_us"]
        timed = [c for c in range(count) if times[c] is not None and times[c] > 0]
        best = min(
            (times[c] for c in timed if not profile["configurations"][c]["is_rule"]), default=math.inf
        )
        for c in timed if point["fit"] else []:
            least[c] = min(least[c], times[c] / best)
    return pruned | {c for c in range(count) if least[c] > 1.25}


def regrets_of(profile, kind, seed):
    """(regret, held out) of each point to judge by."""
    num_sms = profile["device"]["num_sms"]
    choices = [c for c, one in enumerate(profile["configurations"]) if not one["is_rule"]]
    found = []
    for model in profile["models"]:
        points = [p for p in profile["points"] if p["model"] == model["name"]]
        judged = [p for p in points if p["test"] and None not in p["times_us"]]
        fitted = [p for p in points if p["fit"]]
        if any(None in p["times_us"] for p in fitted):
            print(f"{model['name']} is not timed completely, and left out", file=sys.stderr)
            continue
        predicted = {}
        out = left_out(profile, points)
        for c in choices:
            if c in out:
                continue
            configuration = profile["configurations"][c]
            timed = [p for p in fitted if p["times_us"][c] > 0]
            if len(timed) < 4:
                continue
            regressor = kind(seed)
            regressor.fit(
                [grid(configuration, model, p["counts"]) for p in timed],
                [p["times_us"][c] for p in timed],
                num_sms,
            )
            if judged:
                predicted[c] = regressor.predict([grid(configuration, model, p["counts"]) for p in judged])
        for i, point in enumerate(judged):
            able = [c for c in predicted if point["times_us"][c] > 0]
            if not able:
                continue
            chosen = min(able, key=lambda c: predicted[c][i])
            best = min(point["times_us"][c] for c in choices if point["times_us"][c] > 0)
            found.append((point["times_us"][chosen] / best - 1, not point["fit"]))
    return found


def percent(values):
    if not values:
        return "-"
    return f"{100 * statistics.mean(values):.2f} / {100 * max(values):.2f}"


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("profile")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    profile = read(arguments.profile)
    try:
        import sklearn
    except ImportError:
        print("skipped: there is no scikit-learn; install it with: pip install scikit-learn")
        return SKIPPED
    print(f"{profile['kernel']} on {profile['device']['machine']}; scikit-learn {sklearn.__version__}; "
          f"features {FEATURES}")
    print(f"{'regret, mean / max in %':<24}{'all':>16}{'in sample':>16}{'held out':>16}")
    for kind in (Squares, Forest, Network):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that the MLP has not converged
            found = regrets_of(profile, kind, arguments.seed)
        everything = [regret for regret, _ in found]
        inside = [regret for regret, held_out in found if not held_out]
        outside = [regret for regret, held_out in found if held_out]
        print(f"{kind.name:<24}{percent(everything):>16}{percent(inside):>16}{percent(outside):>16}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
