"""bench/exchange_rivals.py on the processor: its plan, its comparisons, its rows."""

import json

import pytest

from conftest import ROOT, python

torch = pytest.importorskip("torch")

SCRIPT = ROOT / "bench" / "exchange_rivals.py"


@pytest.fixture(name="rivals")
def import_script(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    import exchange_rivals

    return exchange_rivals


def point(rivals, **changes):
    return rivals.Point(**{"hidden": 136, "experts": 12, "top_k": 3, "tokens": 7, "dtype": "bf16", **changes})


def test_plan_is_that_of_plain_loops(rivals):
    p, ranks = point(rivals), 4
    each = p.experts // ranks
    ids = [rivals.routing_of(p, r, 5)[0] for r in range(ranks)]
    plans = [rivals.plan_of(p, ids, r) for r in range(ranks)]
    for rank, plan in enumerate(plans):
        sent = [[t for t in range(p.tokens) if any(e // each == to for e in ids[rank][t].tolist())] for to in range(ranks)]
        assert plan.send_tokens.tolist() == sum(sent, [])
        assert plan.send_splits == [len(tokens) for tokens in sent]
        received = [
            (r, t) for r in range(ranks) for t in range(p.tokens) if any(e // each == rank for e in ids[r][t].tolist())
        ]
        assert plan.receive_splits == [sum(r == other for r, _ in received) for other in range(ranks)]
        rows = [
            (r, t)
            for e in range(rank * each, (rank + 1) * each)
            for r in range(ranks)
            for t in range(p.tokens)
            if e in ids[r][t].tolist()
        ]
        assert [received[i] for i in plan.expand.tolist()] == rows
        assert [rows[i][0] for i in plan.return_rows.tolist()] == sorted(r for r, _ in rows)
        for other in range(ranks):
            assert plan.send_splits[other] == plans[other].receive_splits[rank]
            assert plan.return_splits[other] == plans[other].result_splits[rank]
    # Results that come back are those of the slots that they are put to.
    for rank, plan in enumerate(plans):
        came = []
        for other in range(ranks):
            rows = [
                (r, t, e)
                for e in range(other * each, (other + 1) * each)
                for r in range(ranks)
                for t in range(p.tokens)
                if e in ids[r][t].tolist()
            ]
            came += [rows[i] for i in plans[other].return_rows.tolist() if rows[i][0] == rank]
        slots = [came[i] for i in plan.places.tolist()]
        assert slots == [(rank, t, e) for t in range(p.tokens) for e in ids[rank][t].tolist()]


@pytest.mark.parametrize("dtype", ["bf16", "fp8"])
def test_right_results_pass_and_wrong_ones_do_not(rivals, dtype):
    problem = rivals.Problem(point(rivals, dtype=dtype), 1, 2, torch.device("cpu"), 3)
    rows = problem.expected_rows
    if dtype == "fp8":
        problem.check_rows("them", *rivals.quantise(rows))
    else:
        problem.check_rows("them", rows)
    for wrong in [rows.roll(1, 0), rows[:-1], rows.clone().index_fill_(0, torch.tensor([2]), float("nan"))]:
        with pytest.raises(rivals.Wrong, match="them, dispatch"):
            problem.check_rows("them", *(rivals.quantise(wrong) if dtype == "fp8" else (wrong,)))
    right = problem.expected_sum.bfloat16()
    problem.check_sum("them", right)
    for wrong in [right * 1.05, right.roll(1, 0), torch.full_like(right, float("nan")), torch.zeros_like(right)]:
        with pytest.raises(rivals.Wrong, match="them, combine"):
            problem.check_sum("them", wrong)


def test_rows_have_the_floor_and_the_fastest_rival(rivals):
    about = {"machine": "m", "commit": "c", "command": "x"}
    times = {"NCCL, counted": [40.0, 50.0, 60.0], "NCCL, known splits": [30.0, 31.0, 32.0]}
    row = rivals.row_of("dispatch", point(rivals), 2, [12.0, 10.0, 11.0], times, 33e4, 2, about)
    assert row["median_us"] == 11.0 and row["p10_us"] == 10.0 and row["p90_us"] == 12.0
    assert row["rival"] == "NCCL, known splits" and row["rival_us"] == 31.0
    assert row["floor_us"] == pytest.approx(2 * 1.37 + 1)
    assert rivals.row_of("combine", point(rivals), 4, [1.0], {}, 1.0, 2, about)["floor_us"] is None
    assert rivals.row_of("combine", point(rivals), 4, [1.0], {}, 1.0, 2, about)["rival_us"] is None


def test_bad_arguments_are_refused(rivals, capsys):
    for words, message in [
        (["--cpu", "--dtype", "f32"], "use bf16, fp8"),
        (["--cpu", "--ranks", "3"], "must divide"),
        (["--cpu", "--top-k", "300"], "top-300 of 256"),
    ]:
        with pytest.raises(SystemExit):
            rivals.parse(words)
        assert message in capsys.readouterr().err


def test_the_whole_script_on_the_processor(tmp_path):
    path = tmp_path / "rows.json"
    words = ["--cpu", "--ranks", "2", "--hidden", "136", "--experts", "12", "--top-k", "3"]
    words += ["--tokens", "1,5", "--calls", "2", "--repeats", "2", "--commit", "abc", "--json", path]
    python(SCRIPT, *words)
    rows = json.loads(path.read_text())
    assert [(r["stage"], r["dtype"], r["tokens_per_rank"]) for r in rows] == [
        (stage, dtype, tokens) for dtype in ("bf16", "fp8") for tokens in (1, 5) for stage in ("dispatch", "combine")
    ]
    for row in rows:
        assert set(row["rivals"]) >= {"Gloo, known splits", "Gloo, counted"}
        assert row["rival_us"] == min(row["rivals"].values())
        assert row["ranks"] == 2 and row["commit"] == "abc" and len(row["times_us"]) == 2
        assert row["floor_us"] is None and row["pre_sum"] is False
