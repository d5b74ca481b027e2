"""bench/mega_moe.py on the processor: the ways to call the rival, and which of them counts."""

import types

import pytest

from conftest import ROOT

torch = pytest.importorskip("torch")


@pytest.fixture(name="mega_moe")
def import_script(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    import mega_moe

    return mega_moe


@pytest.mark.parametrize("tokens, bounded, expected", [
    (8, True, ["128", "128, bound 8", "512", "512, bound 8", "8192", "8192, bound 8"]),
    (8, False, ["128", "512", "8192"]),
    (512, True, ["512", "8192", "8192, bound 512"]),
    (1000, True, ["1024", "1024, bound 1000", "8192", "8192, bound 1000"]),
    (8192, True, ["8192"]),
])
def test_ways_hold_the_tokens_and_differ(mega_moe, tokens, bounded, expected):
    assert [str(way) for way in mega_moe.ways_of(tokens, [8192, 512], bounded)] == expected


def test_the_fastest_right_way_counts(mega_moe, monkeypatch):
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    staged = []

    def call(us, error):
        fake = types.SimpleNamespace(y=torch.zeros(2), stage=lambda: staged.append(us), kernel=us - 1)
        fake.anew = lambda copy: fake.y.fill_(error)
        fake.us = us
        return fake

    a, b, c = (mega_moe.Way(capacity, None) for capacity in (128, 512, 8192))
    calls = {a: call(30, 0.05), b: call(10, 0.5), c: call(20, 0.04)}
    monkeypatch.setattr(mega_moe, "timed", lambda what: [getattr(what, "us", what)] * 3)
    for each in calls.values():
        each.anew.us = each.us
    batch = types.SimpleNamespace(error=lambda y: y[0].item())
    right, in_place, wrong = mega_moe.measure(calls, batch)
    assert set(right) == {a, c} and mega_moe.fastest(right) == c
    assert right[c] == ([20, 20, 20], pytest.approx(0.04)) and in_place == [19, 19, 19] and staged == [20]
    assert wrong == {b: 0.5}
    assert mega_moe.measure({b: calls[b]}, batch) == ({}, [], {b: 0.5})
