"""Times of grouped GEMMs and layers in turn with copies of their weights, as `switchyard bench` takes them."""

import statistics

from torch_chain import CUDA, replay_of  # which ends with 77 without PyTorch

import torch

# As choose_rotation() of lab/bench/rotation.cpp.
TIMES_CACHE, MOST_COPIES, LEAST_PASSES = 8, 16, 8


class Wrong(Exception):
    """A result that is not what it must be."""


class LeftOut(Exception):
    """Why a rival is not timed."""


def rotation_of(touched_bytes, cold=False):
    """Copies of the weights, and calls in a graph."""
    if cold or not CUDA:
        return 1, 1
    cache = torch.cuda.get_device_properties(0).L2_cache_size
    copies = min(max(-(-TIMES_CACHE * cache // touched_bytes), 2), MOST_COPIES)
    return copies, -(-LEAST_PASSES // copies) * copies


def timed(calls, passes, repeats, clock):
    """Microseconds of a call, in every repetition of a graph of `passes` calls in turn. Without a GPU it calls them."""

    def run():
        for i in range(passes):
            calls[i % len(calls)]()

    replay = replay_of(run, lambda: [call() for call in calls]) if CUDA else run
    for _ in range(3):
        replay()
    pilot = statistics.median(clock.time(replay, 5, every_time=passes == 1))
    if repeats == 0:
        budget, least, most = (100e3, 12, 200) if CUDA else (1e6, 5, 50)
        repeats = int(min(max(budget / max(pilot, 1), least), most))
    return [us / passes for us in clock.time(replay, repeats, every_time=passes == 1)]
