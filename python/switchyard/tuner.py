"""Chooses a kernel's configuration by the routing that it meets: profile, fit, select.

The tuner serves kernels of any origin. It knows of a kernel only its configurations, how each cuts
the work into tasks, and a function that times one::

    from switchyard import tuner

    kernel = tuner.Kernel(
        "triton_moe", version=1, configurations=[
            tuner.Configuration(f"m{m} n{n}", token_rows=m, weight_rows=n, values={"BLOCK_M": m, "BLOCK_N": n})
            for m in (16, 32, 64, 128) for n in (64, 128, 256)],
        machine="NVIDIA H200, 132 SMs, CUDA 13.0", num_sms=132)

    def time(model, configuration, counts):         # microseconds: the median of several repetitions
        return bench(model, configuration.values, counts)

    models = [tuner.Model("olmoe", num_experts=64, top_k=8, n=2048, k=2048)]
    tuner.profile(kernel, models, time, "triton.profile.json", budget=600, resume=True)
    tuner.fit("triton.profile.json", "triton.fit.json")

    selector = tuner.Selector(kernel, "triton.fit.json")
    best = selector.select("olmoe", counts)          # a Configuration

``docs/tuner.md`` has the cost model, the two generators of histograms, and the forms of files.
"""

from __future__ import annotations

import ctypes
import dataclasses
import json
import math
import os
from ctypes import byref
from typing import Any, Callable, Literal, Mapping, Sequence, Union

from . import _abi, _values
from ._handle import Owned, read_json
from ._library import check, library
from ._values import count_text
from .errors import InvalidArgument, Unsupported

__all__ = [
    "Configuration", "Kernel", "Model", "Outcome", "Progress", "Selector", "balancedness",
    "draw_counts", "evaluate", "fit", "profile", "write_recordings",
]

Generator = Literal["distinct", "repeated"]
Form = Literal["tasks", "waves", "rounded_waves", "full", "rounded_full", "experts"]
Path = Union[str, "os.PathLike[str]"]

_GENERATORS = ("distinct", "repeated")
_FORMS = ("tasks", "waves", "rounded_waves", "full", "rounded_full", "experts")


@dataclasses.dataclass(frozen=True)
class Model:
    """The shape of a layer.

    Parameters
    ----------
    name : str
    num_experts, top_k : int
    n, k : int
        Rows (gate and up together) and columns of an expert's first matrix.
    unseen : bool
        Nothing was developed on this model; results tell it apart.
    """

    name: str
    num_experts: int
    top_k: int
    n: int
    k: int
    unseen: bool = False


@dataclasses.dataclass(frozen=True)
class Configuration:
    """A way to run a kernel.

    A task is the product of up to ``token_rows`` tokens of an expert with ``weight_rows`` rows of its
    matrix, over 1 / ``splits`` of its columns. A call's tasks are
    ``sum(ceil(c / token_rows) for c in counts) * ceil(n / weight_rows) * splits * blocks``.

    Parameters
    ----------
    name : str
        No two configurations of a kernel have the same.
    token_rows, weight_rows, splits : int
    blocks : int
        Thread blocks that do a task together.
    group_m : int
        Tiles of an expert that share a block of weight rows in turn; 1: none do.
    is_rule : bool
        It stands for the kernel's own rule: a baseline, which is never chosen.
    values : mapping of str to int
        What the kernel makes of it. The tuner only keeps these.
    """

    name: str
    token_rows: int
    weight_rows: int
    splits: int = 1
    blocks: int = 1
    group_m: int = 1
    is_rule: bool = False
    values: Mapping[str, int] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A kernel, and where it runs.

    Parameters
    ----------
    name : str
    version : int
        To be increased with every change that changes times: older fits are then refused.
    configurations : sequence of Configuration
    machine : str
        In words, with all that times depend on. A fit of another machine is refused.
    num_sms : int
        Blocks that run at the same time.
    l2_bytes : int
        0: unknown.
    """

    name: str
    version: int
    configurations: Sequence[Configuration]
    machine: str
    num_sms: int
    l2_bytes: int = 0

    def __repr__(self) -> str:
        # A kernel whose configurations are no sequence is refused, in a message that may show it.
        its = self.configurations
        text = count_text(len(its), "configuration") if isinstance(its, Sequence) else repr(its)
        return f"<Kernel: {self.name} version {self.version}, {text}, on {self.machine}>"


@dataclasses.dataclass(frozen=True)
class Progress:
    """How far `profile` is: timings done, of so many, and seconds of this run."""

    done: int
    total: int
    seconds: float
    seconds_left: float
    model: str | None  # of the timing that comes next; None at the end


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What each way to choose costs at one point, in microseconds; see `evaluate`."""

    model: str
    tokens: int
    beta: float
    beta_reached: float
    held_out: bool
    unseen: bool
    exhaustive_us: float
    chosen_us: float
    predicted_us: float
    static_us: float | None
    rule_us: float | None
    best: str
    chosen: str

    @property
    def regret(self) -> float:
        """The time that the choice loses, as a share: 0.01 is 1 %."""
        return self.chosen_us / self.exhaustive_us - 1


def _array(name: str, kind: Any, values: Sequence[Any] | None) -> tuple[Any, int]:
    """An array and its length. None: null, which stands for the default."""
    if values is None:
        return None, 0
    if kind is ctypes.c_int32:
        return _values.integers(name, kind, values), len(values)
    if kind is ctypes.c_double:
        values = [_values.number(f"{name}[{i}]", value) for i, value in enumerate(values)]
    # An empty list is not the default, so it has an address: that of an element that nobody reads.
    return (kind * max(len(values), 1))(*values), len(values)


def _whole_counts(counts: Any) -> list[int]:
    return _values.whole_numbers("counts", counts, 0, 2**63 - 1)


def _counts(counts: Any) -> tuple[Any, int]:
    values = _whole_counts(counts)
    return (ctypes.c_int64 * max(len(values), 1))(*values), len(values)


def _kernel(kernel: Kernel) -> tuple[_abi.TuneKernel, list[Any]]:
    """The struct, and what has to stay as long as it is used."""
    keep: list[Any] = []
    described = (_abi.TuneConfiguration * max(len(kernel.configurations), 1))()
    for to, c in zip(described, kernel.configurations):
        names, count = _array("values", ctypes.c_char_p, [_values.text("values", n) for n in c.values])
        values = _values.integers("values", ctypes.c_int64, c.values.values())
        keep += [names, values]
        to.name = _values.text("name", c.name)
        to.token_rows, to.weight_rows, to.splits = c.token_rows, c.weight_rows, c.splits
        to.blocks, to.group_m, to.is_rule = c.blocks, c.group_m, _values.flag("is_rule", c.is_rule)
        to.num_values, to.value_names, to.values = count, names, values
    keep.append(described)
    struct = _abi.TuneKernel(
        num_configurations=len(kernel.configurations), name=_values.text("name", kernel.name),
        version=kernel.version, machine=_values.text("machine", kernel.machine),
        l2_bytes=kernel.l2_bytes, num_sms=kernel.num_sms, configurations=described,
    )
    return struct, keep


def draw_counts(
    generator: Generator, tokens: int, num_experts: int, top_k: int, beta: float, seed: int = 0
) -> list[int]:
    """A histogram of a routing: the tokens of each expert, [num_experts].

    Parameters
    ----------
    generator : {"distinct", "repeated"}
        Distinct: each token draws ``top_k`` distinct experts, as a router does; ``beta`` is then at
        least ln top_k / ln num_experts. Repeated: ``tokens * top_k`` draws, each independent, as
        RaMP's; any ``beta``.
    beta : float
        The balancedness to come near to: the entropy of the histogram over its maximum.
    seed : int
        The histogram depends on the arguments alone, on every platform.
    """
    counts = (ctypes.c_int64 * _values.integer("num_experts", num_experts, 1, 1 << 20))()
    check(
        library.sy_draw_counts(
            _values.choice("generator", generator, _GENERATORS), tokens, num_experts, top_k, beta, seed, counts
        )
    )
    return list(counts)[:num_experts]


def balancedness(counts: Any) -> float:
    """The entropy of a histogram over its maximum: 1 is uniform, and what nobody routed.

    Parameters
    ----------
    counts : sequence of int, array or tensor [num_experts]
        The rows of each expert, such as a recorded step's.

    Raises
    ------
    InvalidArgument
        For what is no histogram, naming the element that is no whole number of at least 0.
    """
    values = _whole_counts(counts)
    total = sum(values)
    if total == 0 or len(values) < 2:
        return 1.0
    shares = [value / total for value in values if value > 0]
    return -sum(share * math.log(share) for share in shares) / math.log(len(values))


def write_recordings(file: Path, recordings: Sequence[Mapping[str, Any]], machine: str = "") -> None:
    """Write what layers recorded, for ``profile(recordings=...)``, ``switchyard tune --histograms`` and
    ``switchyard report --routing``.

    Parameters
    ----------
    recordings : sequence of dict
        What ``Experts.recording`` and ``MoeLayer.recording`` returned, of one rank.
    machine : str
        In words.
    """
    layers = []
    for recording in recordings:
        head = json.dumps({key: value for key, value in recording.items() if key != "steps"})
        steps = ",".join("\n" + json.dumps(step) for step in recording["steps"])
        layers.append(f'\n{head[:-1]}, "steps": [{steps}]}}')
    text = (
        f'{{\n"file": "switchyard routing",\n"file_version": 1,\n"machine": {json.dumps(machine)},\n'
        f'"layers": [{",".join(layers)}\n]\n}}\n'
    )
    with open(file, "w", encoding="utf-8") as out:
        out.write(text)


class _Calls:
    """A profile's callbacks. No exception may enter C, so the first one is kept and ends the profile."""

    def __init__(self, kernel: Kernel, models: list[Model], time: Any, progress: Any) -> None:
        self._kernel, self._models, self._time, self._progress = kernel, models, time, progress
        self.failure: BaseException | None = None

    def time(
        self, user: Any, model: int, configuration: int, counts: Any, num_experts: int, median_us: Any, variation: Any
    ) -> int:
        if self.failure is not None:
            return _abi.INTERNAL
        try:
            found = self._time(self._models[model], self._kernel.configurations[configuration], counts[:num_experts])
            median, spread = found if isinstance(found, tuple) else (found, 0.0)
            median_us[0], variation[0] = float(median), float(spread)
        except Unsupported:
            return _abi.UNSUPPORTED
        except BaseException as error:
            self.failure = error
            return _abi.INTERNAL
        return _abi.OK

    def progress(self, user: Any, done: int, total: int, seconds: float, seconds_left: float, model: int) -> None:
        if self._progress is None or self.failure is not None:
            return
        name = self._models[model].name if model >= 0 else None
        try:
            self._progress(Progress(done, total, seconds, seconds_left, name))
        except BaseException as error:
            self.failure = error


def _plan(models: list[Model], keep: list[Any], **lists: Any) -> _abi.TunePlan:
    """Of models and lists of points; `keep` gets what the plan points to."""
    described = (_abi.TuneModel * max(len(models), 1))()
    for to, m in zip(described, models):
        to.name, to.num_experts, to.top_k = _values.text("name", m.name), m.num_experts, m.top_k
        to.n, to.k, to.unseen = m.n, m.k, _values.flag("unseen", m.unseen)
    plan = _abi.TunePlan(num_models=len(models), models=described)
    for name, values in lists.items():
        array, count = _array(name, ctypes.c_double if name.endswith("betas") else ctypes.c_int32, values)
        keep.append(array)
        setattr(plan, f"num_{name}", count)
        if array is not None:
            setattr(plan, name, array)
    return plan


def profile(
    kernel: Kernel,
    models: Sequence[Model],
    time: Callable[[Model, Configuration, list[int]], "float | tuple[float, float]"],
    file: Path,
    *,
    tokens: Sequence[int] | None = None,
    betas: Sequence[float] | None = None,
    test_tokens: Sequence[int] | None = None,
    test_betas: Sequence[float] | None = None,
    generator: Generator = "distinct",
    seed: int = 0,
    recordings: Path | None = None,
    most_recorded: int = 24,
    budget: float = math.inf,
    prune: float | None = None,
    resume: bool = False,
    progress: Callable[[Progress], None] | None = None,
) -> bool:
    """Time every configuration over a grid of routings, into a file that is whole after each point.

    Parameters
    ----------
    time : callable (model, configuration, counts) -> float or (float, float)
        The median of several repetitions in microseconds, with their standard deviation over their
        mean if it is known. ``counts`` are the tokens of each expert. It raises `Unsupported` if the
        configuration cannot run this model, which is then left out there. Every other exception ends
        the profile and is raised here; the times before are kept.
    tokens, betas : sequences, optional
        The grid to fit on. None: 8, 32, 128, 256, 512 and 0.35, 0.5, 0.65, 0.9, 1.
    test_tokens, test_betas : sequences, optional
        The grid to judge by. None: 16, 32, 64, 128, 256, 1024 and 0.2, 0.5, 0.8, 1. Points that are
        not in the first grid are held out.
    recordings : path, optional
        A file of `write_recordings`: its histograms are fitted on (three of four) and judged by (all),
        beside the grids. Every model must be that of a recorded layer, by its experts and top_k.
    most_recorded : int
        Histograms that are taken of a model's recordings, evenly over all different ones.
    budget : float
        Seconds after which no timing begins.
    prune : float, optional
        Leave out configurations that are slower than the best by more than this share (0.25 is 25 %)
        at all pilots of a model: its points to fit on with the fewest, the middle and the most tokens,
        at the lowest and highest beta. They are neither fitted nor chosen.
    resume : bool
        Go on with the file if it exists. Without, it must not exist.
    progress : callable, optional
        Told before each timing, and at the end.

    Returns
    -------
    bool
        True if everything is timed, False if the budget ended first.

    Raises
    ------
    InvalidArgument
        For arguments that make no sense, and for a file of another kernel, version or machine,
        naming both.
    """
    known = list(models)
    calls = _Calls(kernel, known, time, progress)
    struct, keep = _kernel(kernel)
    plan = _plan(known, keep, tokens=tokens, betas=betas, test_tokens=test_tokens, test_betas=test_betas)
    plan.generator, plan.seed = _values.choice("generator", generator, _GENERATORS), seed
    if recordings is not None:
        if most_recorded < 1:
            raise InvalidArgument(f"most_recorded is {most_recorded}; use 1 or more")
        plan.recordings_file, plan.most_recorded = _values.path("recordings", recordings), most_recorded
    options = _abi.TuneOptions(
        resume=_values.flag("resume", resume), file=_values.path("file", file),
        budget_seconds=budget, prune=prune or 0.0, time=_abi.TuneTime(calls.time),
        progress=_abi.TuneProgress(calls.progress),
    )
    complete = ctypes.c_int32()
    status = library.sy_tune_measure(byref(struct), byref(plan), byref(options), byref(complete))
    if calls.failure is not None:
        raise calls.failure
    check(status)
    return bool(complete.value)


def fit(profile: Path, file: Path, *, form: Form = "experts", relative: bool = True) -> None:
    """Fit the cost model to a profile's times, into a file.

    Models that are not timed completely are left out.

    Parameters
    ----------
    form : str
        T is a + c g ("tasks"), + b g / SMs ("waves"), + d log(g + 1) ("full"); with "rounded_" the
        waves are ceil(g / SMs).
    relative : bool
        Least squares of errors over times. False: of errors, as RaMP has it.
    """
    check(
        library.sy_tune_fit(
            _values.path("profile", profile), _values.choice("form", form, _FORMS),
            _values.flag("relative", relative), _values.path("file", file),
        )
    )


def evaluate(profile: Path, *, form: Form = "experts", relative: bool = True) -> list[Outcome]:
    """What each way to choose costs, at the points to judge by: measured times of the best
    configuration, of the cost model's choice, of the best at balanced routing, and of the rule."""
    arguments = (
        _values.path("profile", profile),
        _values.choice("form", form, _FORMS),
        _values.flag("relative", relative),
    )
    return [Outcome(**row) for row in read_json(library.sy_tune_evaluate, *arguments)]


class Selector(Owned):
    """Chooses configurations by a fit.

    Parameters
    ----------
    kernel : Kernel
        That which is to run, on the machine where it is to run.
    fit : path

    Raises
    ------
    InvalidArgument
        For a fit of another machine or kernel, or older than the kernel, naming both.
    """

    _noun = "selector"

    def _shown(self) -> str:
        return f"of {self.kernel!r}"

    def __init__(self, kernel: Kernel, fit: Path) -> None:
        struct, keep = _kernel(kernel)
        handle = ctypes.c_void_p()
        check(library.sy_tuner_open(byref(struct), _values.path("fit", fit), byref(handle)))
        del keep
        super().__init__(handle, library.sy_tuner_destroy)
        self.kernel = kernel

    def select(self, model: str, counts: Any) -> Configuration:
        """The configuration with the least predicted time for the tokens of each expert."""
        return self.predict(model, counts)[0]

    def predict(self, model: str, counts: Any) -> tuple[Configuration, float]:
        """As `select`, with the predicted time in microseconds.

        Parameters
        ----------
        counts : sequence of int, array or tensor [num_experts]
            In host memory.
        """
        values, count = _counts(counts)
        name = _values.text("model", model)
        index, time = ctypes.c_int32(), ctypes.c_double()
        with self._lock:
            check(
                library.sy_tuner_select(
                    self._open(), name, values, count, byref(index), byref(time)
                )
            )
        return self.kernel.configurations[index.value], time.value
