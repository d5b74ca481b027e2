"""bench/grouped_rivals.py on the processor: its operands, its comparison with fp64, and its rows."""

import json

import pytest

from conftest import ROOT, python

torch = pytest.importorskip("torch")

SCRIPT = ROOT / "bench" / "grouped_rivals.py"


@pytest.fixture(name="rivals")
def import_script(monkeypatch):
    if torch.cuda.is_available():
        pytest.skip("these tests are of the processor")
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    import grouped_rivals

    return grouped_rivals


def point(rivals, **changes):
    return rivals.Point(**{"experts": 4, "n": 256, "k": 384, "rows": 6, **changes})


@pytest.mark.parametrize("dtype", ["bf16", "fp8"])
@pytest.mark.parametrize("swiglu", [False, True])
def test_right_results_pass_and_wrong_ones_do_not(rivals, dtype, swiglu):
    problem = rivals.Problem(point(rivals, swiglu=swiglu), dtype, 0)
    candidate = rivals.ours(problem, 2)
    for call in candidate.calls:
        candidate.output().fill_(float("nan"))
        call()
        error, bound = rivals.check(problem, candidate)
        assert 0 < error <= bound
    good = candidate.output()
    for row, wrong in [(0, good[1]), (problem.rows - 1, good[0]), (0, float("nan"))]:
        bad = good.clone()
        bad[row] = wrong
        with pytest.raises(rivals.Wrong):
            rivals.check(problem, candidate._replace(output=lambda bad=bad: bad))
    with pytest.raises(rivals.Wrong, match="the result is"):
        rivals.check(problem, candidate._replace(output=lambda: good[:-1]))


@pytest.mark.parametrize("dtype", ["bf16", "fp8"])
@pytest.mark.parametrize("layout", ["index", "padded"])
@pytest.mark.parametrize("uneven", [False, True])
def test_other_layouts_give_the_packed_bits(rivals, dtype, layout, uneven):
    problem = rivals.Problem(point(rivals, uneven=uneven), dtype, 3)
    results = []
    for make in (rivals.ours, {"index": rivals.ours_indexed, "padded": rivals.ours_padded}[layout]):
        candidate = make(problem, 1)
        candidate.output().fill_(float("nan"))
        candidate.calls[0]()
        rivals.check(problem, candidate)
        results.append(candidate.output())
    assert torch.equal(*results)


def test_scales_are_side_by_side_and_aligned(rivals):
    scales = torch.randn((2, 6, 3))
    spread = rivals.mn_major(scales)
    assert torch.equal(spread, scales) and spread.stride() == (24, 1, 8)


def test_our_rows_name_the_fastest_rival(rivals):
    rows = [
        {"implementation": name, "median_us": us}
        for name, us in [("switchyard", 3.0), ("switchyard, index", 1.0), ("a", 5.0), ("b", 4.0)]
    ]
    rivals.note_rivals(rows)
    assert [(row.get("rival"), row.get("rival_us")) for row in rows] == [("b", 4.0)] * 2 + [(None, None)] * 2
    alone = [{"implementation": "switchyard", "median_us": 3.0}]
    rivals.note_rivals(alone)
    assert alone[0]["rival"] is None and alone[0]["rival_us"] is None


def test_quantised_operands_are_near_the_originals(rivals):
    problem = rivals.Problem(point(rivals), "fp8", 1)
    rows = torch.arange(problem.rows)
    # E4M3 has three bits of mantissa: at most 2^-4 of a value, and on average less than half of that.
    assert rivals.relative_error(problem.exact_x(rows), problem.x.double()) < 0.04
    for expert in range(4):
        assert rivals.relative_error(problem.exact_w(expert), problem.w[expert].double()) < 0.04


def test_rows_are_equal_or_dealt(rivals):
    assert rivals.counts_of(point(rivals), 3) == [6, 6, 6, 6]
    uneven = point(rivals, experts=32, rows=64, uneven=True)
    counts = rivals.counts_of(uneven, 3)
    assert counts == rivals.counts_of(uneven, 3) != rivals.counts_of(uneven, 4)
    assert sum(counts) == 32 * 64
    assert rivals.balancedness(counts) < 0.99


def test_the_suite_has_no_point_twice(rivals):
    class Arguments:
        shape, rows, uneven = None, None, False

    points = list(rivals.points_of(Arguments))
    assert len(points) == len(set(points)) > 30


def test_script_writes_rows(tmp_path):
    file = tmp_path / "grouped.json"
    words = ["--shape", "4x256x384", "--rows", "3", "--repeats", "3", "--dtype", "bf16", "--json", file]
    done = python(SCRIPT, *words, "--implementations", "switchyard;quack")
    rows = json.loads(file.read_text())
    found = [row for row in rows if row["implementation"] == "switchyard"]
    assert [row["activation"] for row in found] == ["none", "swiglu"]
    for row in found:
        assert row["suite"] == "grouped"
        assert row["flops"] == 2 * 4 * 3 * 256 * 384
        assert len(row["times_us"]) == row["repeats"] == 3
        assert row["p10_us"] <= row["median_us"] <= row["p90_us"]
        assert row["error"] <= row["error_bound"]
        assert "--json" not in row["command"]
    if len(found) == len(rows):
        assert "quack (bf16) is left out" in done.stderr
