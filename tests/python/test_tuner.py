"""The tuner over a kernel of known cost, timed by a Python function."""

import dataclasses
import importlib.util
import json
import math
import pathlib
import statistics
import subprocess
import sys

import numpy
import pytest
import torch

import switchyard
from switchyard import tuner

MODELS = [tuner.Model("small", 32, 4, 1024, 1024), tuner.Model("large", 8, 2, 8192, 4096, unseen=True)]
KERNEL = tuner.Kernel(
    "known",
    version=3,
    configurations=[tuner.Configuration("rule", 16, 128, is_rule=True)]
    + [
        tuner.Configuration(f"{m} x {n}", m, n, values={"BLOCK_M": m, "BLOCK_N": n})
        for m in (4, 16, 64)
        for n in (128, 256)
    ],
    machine="Imagined 100, 100 SMs",
    num_sms=100,
    l2_bytes=60 << 20,
)


def tasks(model, c, counts):
    tiles = sum(-(-count // c.token_rows) for count in counts)
    return tiles * -(-model.n // c.weight_rows) * c.splits * c.blocks


def cost(model, c, counts):
    task = (1 + 0.05 * c.token_rows) * model.k / 1024 * c.weight_rows / 128
    grid = tasks(model, c, counts)
    return 8 + task * math.ceil(grid / 100) + 0.01 * task * grid


@pytest.fixture
def files(tmp_path):
    profile, fitted = tmp_path / "known.profile.json", tmp_path / "known.fit.json"
    assert tuner.profile(KERNEL, MODELS, cost, profile)
    tuner.fit(profile, fitted, form="rounded_waves")
    return profile, fitted


def test_points_of_a_recording(tmp_path):
    steps = [
        {"step": i, "epoch": i + 1, "tokens": 8 + i, "counts": tuner.draw_counts("distinct", 8 + i, 32, 4, 0.8, i)}
        for i in range(9)
    ]
    layer = {
        "layer": "layers.0", "rank": 0, "ranks": 1, "experts": 32, "top_k": 4, "n": 1024, "k": 1024,
        "overwritten": 3, "steps": steps,
    }
    recordings, profile = tmp_path / "routing.json", tmp_path / "p.json"
    tuner.write_recordings(recordings, [layer], "a machine")
    assert json.loads(recordings.read_text())["layers"] == [layer]
    grids = {"tokens": [8, 32, 128], "betas": [0.6, 1], "test_tokens": [], "test_betas": []}
    assert tuner.profile(
        KERNEL, MODELS[:1], cost, profile, recordings=recordings, most_recorded=8, **grids
    )
    points = json.loads(profile.read_text())["points"]
    recorded = [point for point in points if point["test"]]
    assert [p["counts"] for p in recorded if p["fit"]] == [steps[i]["counts"] for i in (0, 1, 2, 4, 5, 6)]
    assert [p["counts"] for p in recorded if not p["fit"]] == [steps[i]["counts"] for i in (3, 7)]
    assert recorded[0]["beta"] == pytest.approx(tuner.balancedness(steps[0]["counts"]))
    assert len(tuner.evaluate(profile)) == 8
    with pytest.raises(switchyard.InvalidArgument, match="8 experts with top-2"):
        tuner.profile(KERNEL, MODELS[1:], cost, tmp_path / "q.json", recordings=recordings)
    with pytest.raises(switchyard.InvalidArgument, match="most_recorded is 0"):
        tuner.profile(
            KERNEL, MODELS[:1], cost, tmp_path / "q.json", recordings=recordings, most_recorded=0
        )


def test_histograms_of_both_kinds():
    distinct = tuner.draw_counts("distinct", 256, 64, 8, 0.2)
    repeated = tuner.draw_counts("repeated", 256, 64, 8, 0.2)
    assert sum(distinct) == sum(repeated) == 256 * 8
    assert max(distinct) == 256 < max(repeated)
    assert tuner.draw_counts("repeated", 256, 64, 8, 0.2, seed=1) != repeated
    with pytest.raises(switchyard.InvalidArgument, match="'zipf'; use one of distinct, repeated"):
        tuner.draw_counts("zipf", 256, 64, 8, 0.2)
    with pytest.raises(switchyard.InvalidArgument, match="9 of 8 experts"):
        tuner.draw_counts("distinct", 1, 8, 9, 1)


@pytest.mark.parametrize(
    "counts, message",
    [
        ([-1, 2], r"counts\[0\] is -1; use 0 or more"),
        ([3, 1.5], r"counts\[1\] is 1.5; use a whole number"),
        ([True, 1], r"counts\[0\] is True; use a whole number"),
        (None, "counts is None; use a sequence"),
        (7, "counts is 7; use a sequence"),
        (numpy.int64(7), r"counts is .*7.*; use a sequence"),
        ("x", r"counts\[0\] is 'x'; use a whole number"),
        (numpy.array([[1, 2]]), r"counts\[0\] is \[1, 2\]; use a whole number"),
        (torch.tensor([0.5, 1.0]), r"counts\[0\] is 0.5; use a whole number"),
        ([2**63, 1], r"counts\[0\] is 9223372036854775808; use 9223372036854775807 or less"),
    ],
    ids=str,
)
def test_histograms_are_counts(files, counts, message):
    selector = tuner.Selector(KERNEL, files[1])
    for function in (tuner.balancedness, lambda counts: selector.select("a", counts)):
        with pytest.raises(switchyard.InvalidArgument, match=message):
            function(counts)


def test_balancedness_of_each_kind_of_sequence():
    for counts in ([1, 2, 1], (1, 2, 1), numpy.array([1, 2, 1]), torch.tensor([1, 2, 1]), iter([1, 2, 1])):
        assert tuner.balancedness(counts) == pytest.approx(1.5 * math.log(2) / math.log(3))
    assert tuner.balancedness([0, 0]) == tuner.balancedness([]) == 1


def test_profile_fit_select(files):
    profile, fitted = files
    selector = tuner.Selector(KERNEL, fitted)
    for model in MODELS:
        for beta in (0.3, 0.7, 1):
            counts = tuner.draw_counts("repeated", 200, model.num_experts, model.top_k, beta, seed=5)
            chosen, predicted = selector.predict(model.name, counts)
            assert not chosen.is_rule and chosen in KERNEL.configurations
            best = min(cost(model, c, counts) for c in KERNEL.configurations if not c.is_rule)
            assert cost(model, chosen, counts) == pytest.approx(best, rel=1e-3)
            assert predicted == pytest.approx(best, rel=1e-3)
    numpy = pytest.importorskip("numpy")
    assert selector.select("small", numpy.full(32, 2)).values["BLOCK_M"] == 4
    assert selector.select("small", numpy.full(32, 512)).values["BLOCK_M"] == 64
    with pytest.raises(switchyard.InvalidArgument, match="31 experts"):
        selector.select("small", [1] * 31)
    with pytest.raises(switchyard.InvalidArgument, match="no model 'medium'; it has small, large"):
        selector.select("medium", [1] * 32)
    selector.close()
    selector.close()
    with pytest.raises(switchyard.InvalidArgument, match="closed"):
        selector.select("small", [1] * 32)


def test_outcomes(files):
    outcomes = tuner.evaluate(files[0], form="rounded_waves")
    assert len(outcomes) == 2 * 24
    assert {o.held_out for o in outcomes} == {True, False}
    assert all(o.unseen == (o.model == "large") for o in outcomes)
    assert max(o.regret for o in outcomes) < 1e-3
    assert all(o.static_us >= o.exhaustive_us and o.rule_us >= o.exhaustive_us for o in outcomes)
    # A form without rounded waves misses the steps, and says other times.
    wrong = {
        form: max(abs(o.predicted_us / o.chosen_us - 1) for o in tuner.evaluate(files[0], form=form))
        for form in ("tasks", "waves", "rounded_waves")
    }
    assert wrong["tasks"] == wrong["waves"] > 0.05 > 1e-3 > wrong["rounded_waves"]


def test_a_budget_ends_and_is_resumed(tmp_path):
    file = tmp_path / "p.json"
    told = []
    assert not tuner.profile(KERNEL, MODELS, cost, file, budget=0, progress=told.append)
    assert told[-1].done == 0 and told[-1].total == 2 * 43 * 7 and told[-1].model is None
    with pytest.raises(switchyard.InvalidArgument, match="exists; set resume"):
        tuner.profile(KERNEL, MODELS, cost, file)
    with pytest.raises(switchyard.InvalidArgument, match="no model all of whose points"):
        tuner.fit(file, tmp_path / "f.json")
    calls = []

    def counted(model, c, counts):
        calls.append((model.name, c.name, tuple(counts)))
        return cost(model, c, counts), 0.01

    assert tuner.profile(KERNEL, MODELS, counted, file, resume=True, progress=told.append)
    assert len(calls) == told[-1].done == told[-1].total
    assert tuner.profile(KERNEL, MODELS, counted, file, resume=True)
    assert len(calls) == told[-1].total, "nothing is timed twice"
    assert json.loads(file.read_text())["points"][0]["variations"][1] == 0.01


def test_exceptions_come_back_and_times_are_kept(tmp_path):
    file = tmp_path / "p.json"
    calls = []

    def breaks(model, c, counts):
        calls.append(c)
        if len(calls) == 20:
            raise KeyError("the device is gone")
        return cost(model, c, counts)

    with pytest.raises(KeyError, match="the device is gone"):
        tuner.profile(KERNEL, MODELS, breaks, file)
    assert tuner.profile(KERNEL, MODELS, breaks, file, resume=True)
    assert len(calls) == 2 * 43 * 7 + 1

    def no_progress(_):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        tuner.profile(KERNEL, MODELS, cost, tmp_path / "q.json", progress=no_progress)
    with pytest.raises(switchyard.InvalidArgument, match="above 0"):
        tuner.profile(KERNEL, MODELS, lambda *_: -1, tmp_path / "r.json")


def test_what_cannot_run_is_left_out(tmp_path):
    def picky(model, c, counts):
        if model.name == "large" and c.name == "64 x 256":
            raise switchyard.Unsupported("too large")
        return cost(model, c, counts) * (0.5 if c.name == "64 x 256" else 1)

    profile, fitted = tmp_path / "p.json", tmp_path / "f.json"
    tuner.profile(KERNEL, MODELS, picky, profile, test_tokens=[], test_betas=[])
    tuner.fit(profile, fitted)
    selector = tuner.Selector(KERNEL, fitted)
    assert selector.select("small", [2048] * 32).name == "64 x 256"
    assert selector.select("large", [2048] * 8).name == "64 x 128"
    assert tuner.evaluate(profile) == []


@pytest.mark.parametrize(
    "change,named",
    [
        ({"machine": "Imagined 200, 100 SMs"}, "Imagined 100.*Imagined 200"),
        ({"version": 4}, "version 3 .* older than version 4"),
        ({"name": "other"}, "'known', and 'other'"),
        ({"num_sms": 90}, "'100', and '90'"),
        ({"configurations": KERNEL.configurations[:-1]}, "'7', and '6'"),
    ],
)
def test_files_of_another_kernel_or_machine(files, change, named):
    other = dataclasses.replace(KERNEL, **change)
    with pytest.raises(switchyard.InvalidArgument, match=named):
        tuner.Selector(other, files[1])
    with pytest.raises(switchyard.InvalidArgument, match=named):
        tuner.profile(other, MODELS, cost, files[0], resume=True)


def test_files_that_are_none(tmp_path):
    with pytest.raises(switchyard.InvalidFile):
        tuner.Selector(KERNEL, tmp_path / "absent.json")
    (tmp_path / "list.json").write_text("[]")
    with pytest.raises(switchyard.InvalidFile, match="list.json"):
        tuner.fit(tmp_path / "list.json", tmp_path / "f.json")
    with pytest.raises(switchyard.InvalidArgument, match="'cubic'"):
        tuner.fit(tmp_path / "list.json", tmp_path / "f.json", form="cubic")


def test_learned_baselines_stand_beside_the_same_least_squares(files):
    """bench/tuner_baselines.py fits as the library does; without scikit-learn it says so."""
    script = pathlib.Path(__file__).resolve().parent.parent.parent / "bench" / "tuner_baselines.py"
    done = subprocess.run(
        [sys.executable, script, files[0]], capture_output=True, text=True, timeout=600
    )
    if importlib.util.find_spec("sklearn") is None:
        assert done.returncode == 77 and "no scikit-learn" in done.stdout
        return
    assert done.returncode == 0, done.stderr
    outcomes = tuner.evaluate(files[0])
    mean, most = (100 * f([o.regret for o in outcomes]) for f in (statistics.mean, max))
    line = next(line for line in done.stdout.splitlines() if line.startswith("least squares"))
    assert f"{mean:.2f} / {most:.2f}" in line
    assert "random forest" in done.stdout and "MLP" in done.stdout
    wrong = subprocess.run([sys.executable, script, files[1]], capture_output=True, text=True)
    assert wrong.returncode == 1 and "no profile" in wrong.stderr


BENCH = pathlib.Path(__file__).resolve().parent.parent.parent / "bench"


@pytest.fixture
def triton_bench(monkeypatch):
    pytest.importorskip("torch")
    monkeypatch.syspath_prepend(str(BENCH))
    import tune_triton

    return tune_triton


def test_triton_blocks_have_every_row_once(triton_bench):
    for counts in ([3, 0, 17, 16, 1], [0, 0], [64]):
        for height in (16, 64):
            places, experts = triton_bench.align(counts, height)
            assert len(places) == height * len(experts)
            assert sorted(p for p in places if p >= 0) == list(range(sum(counts)))
            for i, place in enumerate(places):
                if place >= 0:
                    expert = experts[i // height]
                    assert sum(counts[:expert]) <= place < sum(counts[: expert + 1])
    configurations = triton_bench.triton_configurations()
    assert len({name for name, _ in configurations}) == len(configurations) > 20
    for _, v in configurations:
        used = v["num_stages"] * (v["BLOCK_M"] + v["BLOCK_N"]) * v["BLOCK_K"] * 2
        assert v["num_stages"] >= 2 and used <= triton_bench.SHARED_BYTES


def test_triton_bench_checks_what_it_times(triton_bench):
    import torch

    shape = triton_bench.tuner.Model("small", 5, 2, 192, 96)
    problem = triton_bench.Problem(shape, 1, torch.device("cpu"))
    for counts in ([3, 0, 17, 40, 2], [0, 0, 0, 0, 8]):
        problem.set_counts(counts)
        problem.y.fill_(float("nan"))
        triton_bench.TorchCall(triton_bench.TORCH_WAYS["loop"], problem)(problem.weights[0])
        problem.check("loop")
        problem.y[-1] += 0.1
        with pytest.raises(triton_bench.Wrong, match="'loop' on small"):
            problem.check("loop")


def test_triton_bench_without_a_gpu():
    def run(*arguments):
        command = [sys.executable, str(BENCH / "tune_triton.py"), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    listed = run("--list")
    assert listed.returncode == 0 and len(listed.stdout.splitlines()) > 20, listed.stderr
    assert "BLOCK_M" in listed.stdout
    assert run("--models", "gpt").returncode == 2
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    timed = run("--kernel", "torch")
    assert timed.returncode == 77 and "no GPU" in timed.stderr


def test_prune_leaves_out_what_is_far_from_the_best(tmp_path):
    calls = []

    def time(model, c, counts):
        calls.append(c.name)
        return cost(model, c, counts) * (10 if c.name == "4 x 128" else 1)

    assert tuner.profile(KERNEL, MODELS[:1], time, tmp_path / "p.json", prune=0.3)
    assert calls.count("4 x 128") == 6 and calls.count("rule") == 43
