"""bench/stragglers.py on the processor: its draws, its comparison with fp64, its rows."""

import json
import sys

import pytest

from conftest import ROOT, python, started

torch = pytest.importorskip("torch")

SCRIPT = ROOT / "bench" / "stragglers.py"
SIZES = ["--cpu", "--tokens", "9", "--hidden", "128", "--intermediate", "192", "--experts", "6"]


@pytest.fixture(name="stragglers")
def import_script(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    import stragglers

    return stragglers


def test_draws_are_those_of_the_seed(stragglers):
    draws = stragglers.draws_of(3, 200, 50, 4)
    assert draws == stragglers.draws_of(3, 200, 50, 4)
    assert draws != stragglers.draws_of(4, 200, 50, 4)
    assert [len(draw) for draw in draws] == [4] * 50
    assert all(0 <= late <= 200_000 for draw in draws for late in draw)
    assert max(map(max, draws)) > 150_000
    assert stragglers.draws_of(3, 0, 2, 2) == [[0, 0], [0, 0]]


def test_rows_tell_of_first_and_last_starts(stragglers):
    # 20 passes of two ranks: one begins at 0, the other 3 us later; both end after 10 us, in one pass after 50.
    spans = [[(1000, 11_000 + 40_000 * (i == 7)), (4000, 11_000)] for i in range(20)]
    row = stragglers.row_of("switchyard", 3, spans, 1e-3, 2e-3, {"ranks": 2})
    assert row["times_us"] == [7.0] * 7 + [47.0] + [7.0] * 12
    assert (row["mean_us"], row["median_us"], row["p95_us"]) == (9.0, 7.0, 7.0)
    assert row["p95_over_mean"] == pytest.approx(7 / 9, abs=1e-4)
    assert row["after_first_start"]["mean_us"] == 12.0
    # The slowest rank takes 10 us but once, the fastest 7.
    assert row["p95_slowest_over_mean_fastest"] == pytest.approx(10 / 7, abs=1e-4)
    assert row["starts_us"][0] == [0.0, 3.0] and row["ends_us"][7] == [50.0, 10.0]


def test_right_outputs_pass_and_wrong_ones_do_not(stragglers):
    spec = stragglers.torch_chain.Spec("thesis", 128, 192, 6, 2, gated=False, activation="gelu", bias=True,
                                       renormalize=True)
    shapes = {"up_proj.weight": (192, 128), "up_proj.bias": (192,), "down_proj.weight": (128, 192),
              "down_proj.bias": (128,)}
    tensors = {f"{stragglers.LAYER}experts.{e}.{name}": torch.randn(shape).bfloat16() / 12
               for e in range(6) for name, shape in shapes.items()}
    tensors[stragglers.LAYER + "gate.weight"] = torch.randn(6, 128).bfloat16() / 12
    x = torch.randn(50, 128).bfloat16()
    reference = stragglers.Reference(spec, tensors, x)
    assert reference.decided.all()
    right = reference.exact.bfloat16()
    stragglers.refuse_wrong("ours", [(reference.error(right), reference.bound)])
    one_token = right.clone()
    one_token[31] *= 1.1
    one_nan = right.clone()
    one_nan[2, 5] = float("nan")
    for wrong in [right.roll(1, 0), one_token, one_nan, torch.zeros_like(right)]:
        with pytest.raises(stragglers.Wrong, match="ours, rank 1: a token's error"):
            stragglers.refuse_wrong("ours", [(0.0, reference.bound), (reference.error(wrong), reference.bound)])
    # A token whose second and third logits are alike may go either way.
    tied = {**tensors, stragglers.LAYER + "gate.weight": torch.zeros(6, 128).bfloat16()}
    tied[stragglers.LAYER + "gate.weight"][0] = 1
    assert not stragglers.Reference(spec, tied, x.abs()).decided.any()


def test_bad_arguments_are_refused(stragglers, capsys):
    for words, message in [
        (["--cpu", "--ranks", "3"], "must divide"),
        (["--cpu", "--ranks", "1"], "2 ranks or more"),
        (["--cpu", "--top-k", "64"], "top-64 of 64"),
        (["--cpu", "--tokens", "0"], "--tokens is 0; use 1 or more"),
        (["--cpu", "--jitter", "5,-1"], "use 0 or more"),
        (["--cpu", "--jitter", "2000000", "--deadline", "1"], "use a longer deadline"),
    ]:
        with pytest.raises(SystemExit) as refused:
            stragglers.parse(words)
        assert refused.value.code == 2
        assert message in capsys.readouterr().err
    words = ["--cpu", "--tokens=9", "--json", "x.json", "--commit=abc", "--seeds", "4"]
    assert stragglers.parse(words).command == "bench/stragglers.py --cpu --tokens=9 --seeds 4"


def test_the_whole_script_on_the_processor(tmp_path):
    path = tmp_path / "rows.json"
    words = ["--ranks", "2", "--jitter", "0,500", "--seeds", "0,7", "--passes", "3", "--warm-ups", "1"]
    python(SCRIPT, *SIZES, *words, "--commit", "abc", "--json", path)
    rows = json.loads(path.read_text())
    assert [(row["way"], row["jitter_us"]) for row in rows] == [
        (way, jitter) for jitter in (0, 500) for way in ("switchyard", "Gloo chain")
    ]
    for row in rows:
        assert row["commit"] == "abc" and row["tokens_per_rank"] == 9 and row["seeds"] == [0, 7]
        assert row["passes"] == len(row["times_us"]) == len(row["starts_us"]) == len(row["ends_us"]) == 6
        assert 0 < row["error"] <= row["error_bound"] < 0.05
        assert row["mean_us"] <= row["after_first_start"]["mean_us"]
        assert all(len(of_pass) == 2 and min(of_pass) == 0 for of_pass in row["starts_us"])


def test_a_layer_that_cannot_be_made_is_told(tmp_path):
    done = started(sys.executable, SCRIPT, *SIZES, SWITCHYARD_COMMAND="/bin/false")
    assert done.returncode == 2
    assert "the layer's checkpoint could not be made" in done.stderr
