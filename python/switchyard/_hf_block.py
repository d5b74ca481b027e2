"""Reads a whole MoE block of transformers: its router, experts and shared expert.

As with activations (_probe.py), no table of models says how a block routes. Its own forward() is run on
tokens at which the rules that there are differ, what it hands to its experts is looked at, and the routing
that Switchyard has is searched for one that gives the same for all of them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import threading
from collections.abc import Iterator
from typing import Any

import torch

from . import _hf, _probe, _routing
from ._activation import Activation
from ._routing import Routing
from ._watch import Watch, registered
from .errors import Error, Unsupported

# Tokens whose logits are of a few units.
_TOKENS = 64
# Of weights, in fp32.
_ROUTING_ERROR = 1e-4
# Of outputs. In 16 bits logits round, and experts whose logits are alike change places.
_OUTPUT_ERROR = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 5e-2}
_MOST_CHANGED = 0.1
_EXACT: dict[str, Any] = {"dtype": torch.float64, "device": "cpu"}
# Held while a block is read: its experts are taken out meanwhile, and ranks that are threads may read the
# same one.
_reading = threading.Lock()


@dataclasses.dataclass
class Block:
    """What a block consists of."""

    found: _hf._Found
    router: torch.Tensor  # [E, H]
    router_bias: torch.Tensor | None
    correction_bias: torch.Tensor | None
    top_k: int
    routing: Routing
    shared: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None  # gate, up, down
    shared_sigmoid: torch.Tensor | None  # [H]
    watch: Watch
    x: torch.Tensor  # tokens that it was run on,
    out: torch.Tensor  # what it made of them,
    sure: torch.Tensor  # [T], and whether rounding cannot change their experts


def read(block: torch.nn.Module) -> Block:
    """The parts of a block.

    Raises
    ------
    Unsupported
        Naming the class and the attribute, or how it routes otherwise.
    """
    with _reading, _exact_products():
        return _read(block)


@contextlib.contextmanager
def _exact_products() -> Iterator[None]:
    """fp32 as it is, without TF32, bf16 or autocast."""
    backends = [getattr(getattr(torch.backends, name), "matmul", None) for name in ("cuda", "mkldnn")]
    # Since 2.9; before, only TF32 was there to allow.
    kept = [(b, "fp32_precision", "ieee") for b in backends if hasattr(b, "fp32_precision")]
    kept = kept or [(torch.backends.cuda.matmul, "allow_tf32", False)]
    were = [getattr(backend, name) for backend, name, _ in kept]
    try:
        for backend, name, exact in kept:
            setattr(backend, name, exact)
        with torch.autocast("cuda", enabled=False), torch.autocast("cpu", enabled=False):
            yield
    finally:
        for (backend, name, _), was in zip(kept, were):
            setattr(backend, name, was)


def _read(block: torch.nn.Module) -> Block:
    kind = type(block).__name__
    experts = block._modules.get("experts") if isinstance(block, torch.nn.Module) else None
    if experts is None or not _hf._is_decorated(experts):
        raise Unsupported(
            f"{kind}.experts is {type(getattr(block, 'experts', None)).__name__}; from_hf() takes blocks whose "
            "experts go through the interface of transformers 5: see python -m switchyard check-hf"
        )
    _hf._warn_of_newer()
    found, _ = _hf._read(experts, _hf._of_decorated)
    tensors = {f"experts.{name}": tensor for name, tensor in found.tensors.items()}

    gate = next((getattr(block, n) for n in ("gate", "router") if hasattr(block, n)), None)
    shape = (found.w13.shape[0], found.w2.shape[2 if found.options.get("transposed") else 1])
    router, router_bias = _router(gate, shape)
    if router is None:
        raise Unsupported(f"{kind} has no gate or router with a weight of {list(shape)}")
    correction = _named(block, ("e_score_correction_bias", "expert_bias"))
    shared, sigmoid = _shared(block, kind, found.options["activation"], (gate, experts))
    more = {"router": router, "router's bias": router_bias, "correction bias": correction, "shared gate": sigmoid}
    more |= zip(("gate_proj", "up_proj", "down_proj"), shared or ())
    watch = Watch(block, tensors | {name: tensor for name, tensor in more.items() if tensor is not None})
    for name, tensor in registered(block):
        if name not in watch.names:
            raise Unsupported(
                f"{kind}.{name} ({list(tensor.shape)}) is no part of a layer that Switchyard has: router, "
                "correction bias, experts, and one shared expert without biases"
            )

    x, ids, weights = _run(block, kind, router)
    lowest, highest = ids.min().item(), ids.max().item()
    if lowest < 0 or highest >= len(router):
        raise Unsupported(
            f"{kind} hands ids from {lowest} to {highest} to its experts, but its router has {len(router)}; "
            "experts beside those of the router are none that a layer has"
        )
    answers = _answers(x, ids, weights, router, router_bias, correction)
    routing = _routing_of(block, gate, kind, answers)
    sure = ~answers.ambiguous(dataclasses.asdict(routing)) & answers.weights.isfinite().all(1)
    dtype = found.w13.dtype if found.w13.dtype in _OUTPUT_ERROR else torch.bfloat16
    if dtype != torch.float32:
        # Large logits of 16 bits are too coarse to compare.
        some = [*range(_TOKENS), *range(len(x) - 8, len(x) - 4), len(x) - 1]
        x, sure = x[some].to(dtype), sure[some]
    return Block(
        found=found, router=router, router_bias=router_bias,
        correction_bias=None if correction is None else correction.view(-1), top_k=ids.shape[1],
        routing=routing, shared=shared,
        shared_sigmoid=None if sigmoid is None else sigmoid.view(-1), watch=watch, x=x,
        out=_output(block, x), sure=sure,
    )


def _answers(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    router: torch.Tensor,
    router_bias: torch.Tensor | None,
    correction: torch.Tensor | None,
) -> _Answers:
    x, router = x.detach().double().cpu(), router.detach().double().cpu()
    logits = x @ router.T
    slack = 2e-7 * (x.abs() @ router.abs().T).amax(1)
    if router_bias is not None:
        logits += router_bias.detach().double().cpu()
    return _Answers(
        logits.float().contiguous(), slack.float(),
        None if correction is None else correction.detach().float().cpu().reshape(-1).contiguous(),
        _dense(ids, weights, len(router)), ids.shape[1],
    )


def _router(gate: Any, shape: tuple[int, ...]) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """The weight of a gate, or of a module in it, and the bias beside it."""
    for module in gate.modules() if isinstance(gate, torch.nn.Module) else ():
        weight = getattr(module, "weight", None)
        if isinstance(weight, torch.Tensor) and tuple(weight.shape) == shape:
            return weight, getattr(module, "bias", None)
    return None, None


def _named(block: torch.nn.Module, names: tuple[str, ...]) -> torch.Tensor | None:
    """The tensor of one of these names, in the block or in a module of its router."""
    for name, tensor in itertools.chain(block.named_parameters(), block.named_buffers()):
        if name.rpartition(".")[2] in names and not name.startswith("experts."):
            return tensor
    return None


def _shared(
    block: torch.nn.Module, kind: str, activation: Activation, others: tuple[Any, ...]
) -> tuple[tuple[torch.Tensor, ...] | None, torch.Tensor | None]:
    """(gate, up, down) of a shared expert, and the weight of its sigmoid gate."""
    shared, sigmoid = None, None
    for name, child in block.named_children():
        if child in others:
            continue
        projections = [getattr(child, n, None) for n in ("gate_proj", "up_proj", "down_proj")]
        if all(isinstance(p, torch.nn.Linear) for p in projections) and shared is None:
            if not _computes(child, projections, activation):
                raise Unsupported(
                    f"{kind}.{name} ({type(child).__name__}) does not compute down(act(gate, up)) with the "
                    f"experts' {activation}; Switchyard has one activation for both"
                )
            shared = tuple(p.weight for p in projections)
        elif isinstance(child, torch.nn.Linear) and child.out_features == 1 and child.bias is None:
            sigmoid = child.weight
    if shared is None and sigmoid is not None:
        raise Unsupported(f"{kind} has a gate for a shared expert, but no gate_proj, up_proj and down_proj")
    return shared, sigmoid


def _computes(mlp: torch.nn.Module, projections: list[Any], activation: Activation) -> bool:
    """Whether a shared expert has this activation, asked where its limits would show."""
    gate, up, down = (p.weight.float() for p in projections)
    dtype = projections[0].weight.dtype
    spread = max(gate.norm(dim=1).mean().item(), 1e-20)
    generator = torch.Generator("cpu").manual_seed(1)
    x = torch.randn(_TOKENS, gate.shape[1], generator=generator, **_EXACT) * (8 / spread)
    x = x.to(gate.device, dtype)
    hidden = _probe.apply(activation, x.float() @ gate.T, x.float() @ up.T)
    if any(projection.bias is not None for projection in projections):
        return True  # The biases are refused, by name, as no part of a layer.
    expected, actual = hidden @ down.T, mlp(x[None])[0].float()
    return ((actual - expected).norm() <= _OUTPUT_ERROR.get(dtype, 0.1) * expected.norm()).item()


class _Recorder(torch.nn.Module):
    """Stands where a block has its experts, and keeps what it is called with."""

    def __init__(self, experts: torch.nn.Module) -> None:
        super().__init__()
        settings = vars(experts).items()
        self.__dict__.update({n: v for n, v in settings if not n.startswith("_") and n != "forward"})
        self.seen: list[Any] = []

    def forward(self, *arguments: Any, **named: Any) -> torch.Tensor:
        self.seen.extend((*arguments, *named.values()))
        tensors = [t for t in self.seen if isinstance(t, torch.Tensor) and t.is_floating_point()]
        return torch.zeros_like(tensors[0])


@contextlib.contextmanager
def _with_recorder(block: torch.nn.Module) -> Iterator[_Recorder]:
    """The block without its experts, in fp32 and not training: so rules show, and no rounding."""
    modules = [m for m in block.modules() if m is not block.experts and m not in set(block.experts.modules())]
    recorder = _Recorder(block.experts)
    kept = [(m, dict(m._parameters), dict(m._buffers), m.training) for m in modules]
    experts = block._modules["experts"]
    try:
        block._modules["experts"] = recorder
        for module, parameters, buffers, _ in kept:
            module.training = False
            for name, tensor in parameters.items():
                if tensor is not None and tensor.dtype in (torch.float16, torch.bfloat16):
                    module._parameters[name] = torch.nn.Parameter(tensor.detach().float(), False)
            for name, tensor in buffers.items():
                if tensor is not None and tensor.dtype in (torch.float16, torch.bfloat16):
                    module._buffers[name] = tensor.float()
        yield recorder
    finally:
        block._modules["experts"] = experts
        for module, parameters, buffers, training in kept:
            module._parameters.update(parameters)
            module._buffers.update(buffers)
            module.training = training


def _probes(router: torch.Tensor) -> torch.Tensor:
    """Tokens [T, H], fp32: the first _TOKENS of logits of a few units, far enough apart for all scores
    to differ, and none vanishes; then those at which a rule's constants show.

    - Logits that are all about the same number, from -75 to 75: sums of weights then pass every
      epsilon and minimum that they may be compared with, and scores saturate.
    - Logits that are equal, nearly equal, or far apart.
    """
    weight = router.detach().double().cpu()
    hidden = weight.shape[1]
    unit = 1 / weight.norm(dim=1).mean()
    generator = torch.Generator("cpu").manual_seed(0)

    def draw(count: int) -> torch.Tensor:
        return torch.randn(count, hidden, generator=generator, **_EXACT) * unit

    plain = 2 * draw(_TOKENS)
    # The shortest token whose logits are all 1; if there is none, the nearest to it.
    ones = torch.ones(weight.shape[0], 1, **_EXACT)
    level = (weight.T @ (torch.linalg.pinv(weight @ weight.T, rtol=1e-12, hermitian=True) @ ones)).T
    ladder = torch.arange(-75, 76, 3, **_EXACT)[:, None] * level
    spread = torch.tensor([1e-4, 1e-2, 0.2, 4.0, 8.0, 16.0, 32.0], **_EXACT)[:, None]
    zero = torch.zeros(1, hidden, **_EXACT)
    return torch.cat((plain, ladder + draw(len(ladder)), draw(len(spread)) * spread, zero)).float()


def _handed(kind: str, seen: list[Any], x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The ids and weights among what a block handed to its experts for tokens x."""
    tensors = [t for t in seen if isinstance(t, torch.Tensor) and t.dim() == 2 and t.shape[0] == x.shape[0]]
    ids = [t for t in tensors if not t.is_floating_point()]
    rest = [t for t in tensors if t.is_floating_point()]
    tokens = [t for t in rest if t.shape == x.shape and torch.equal(t, x)]
    weights = [t for t in rest if ids and t.shape == ids[0].shape and t is not (tokens or [None])[0]]
    if not (ids and tokens and weights):
        shapes = ", ".join(str(list(t.shape)) for t in tensors) or "nothing of these tokens"
        raise Unsupported(
            f"{kind} does not hand its tokens as they are, with ids and weights [T, K], to its experts, but "
            f"{shapes}"
        )
    return ids[0], weights[0]


def _run(
    block: torch.nn.Module, kind: str, router: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens that show how a block routes, and what it handed to its experts for them."""
    spread = router.detach().float().norm(dim=1).mean().item()
    if not spread > 0 or not math.isfinite(spread):
        raise Unsupported(f"{kind}: the router's weights are all 0, or not finite; load the weights first")
    x = _probes(router).to(router.device)
    with _with_recorder(block) as recorder:
        block(x[None].clone())
    return x, *_handed(kind, recorder.seen, x)


def _output(block: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    training = [(module, module.training) for module in block.modules()]
    try:
        block.eval()
        out = block(x[None].clone())
    finally:
        for module, was in training:
            module.training = was
    out = out[0] if isinstance(out, tuple) else out
    return out.reshape(x.shape)


def _dense(ids: torch.Tensor, weights: torch.Tensor, experts: int) -> torch.Tensor:
    """[T, E] of ids and weights [T, K]."""
    none = torch.zeros(ids.shape[0], experts, dtype=torch.float32, device="cpu")
    return none.scatter_(1, ids.cpu().long(), weights.float().cpu())


def _candidates(block: Any, gate: Any, has_correction: bool) -> Iterator[dict[str, Any]]:
    """Fields of `Routing`, likely ones first: where several give the same, the first is taken."""

    def attribute(*names: str) -> Any:
        for holder in (gate, block):
            for name in names:
                value = getattr(holder, name, None)
                if value is not None:
                    return value
        return None

    groups = int(attribute("num_group", "n_group", "num_expert_group") or 1)
    top_groups = int(attribute("topk_group", "top_k_group") or 1)
    grouped = [(groups, top_groups)] if groups > 1 else []
    for (number, top), renormalize, before, score, group_score in itertools.product(
        [*grouped, (1, 1)],
        (True, False),
        (False, True),
        ("sigmoid", "softmax", "sqrt_softplus") if has_correction else ("softmax", "sigmoid", "sqrt_softplus"),
        ("sum_top_two", "max"),
    ):
        if number > 1 or group_score == "sum_top_two":
            yield {
                "score": score, "top_k_before_score": before, "renormalize": renormalize,
                "groups": number, "top_groups": top, "group_score": group_score,
            }
    jitter = attribute("router_jitter_noise")
    if jitter is not None and not has_correction:
        yield {"method": "sparse_mixer", "jitter_eps": float(jitter)}


@dataclasses.dataclass
class _Answers:
    """What a block answered to tokens, on the CPU."""

    logits: torch.Tensor  # [T, E]
    # How far they may be off, because a block adds up in another order.
    slack: torch.Tensor  # [T]
    correction: torch.Tensor | None  # [E]
    weights: torch.Tensor  # [T, E], 0 where an expert was not chosen
    top_k: int

    def choose(self, fields: dict[str, Any]) -> torch.Tensor:
        """Weights [T, E] that a routing gives."""
        ids, weights = _routing.topk(self.logits, self.top_k, correction_bias=self.correction, **fields)
        return _dense(ids.clamp(min=0), weights * (ids >= 0), self.logits.shape[1])

    def ambiguous(self, fields: dict[str, Any]) -> torch.Tensor:
        """[T]: whether rounding decides which experts a routing chooses. A block then may choose others
        than Switchyard, and both are right."""
        if fields.get("top_k_before_score") or fields.get("method") == "sparse_mixer":
            scores, relative = self.logits, False
        else:
            scores, relative = _scores(fields["score"], self.logits), True
        values = scores if self.correction is None else scores + self.correction
        error = 2 * self.slack[:, None] * (scores.abs() if relative else 1) + 4e-6 * values.abs() + 1e-37
        unsure = torch.zeros(len(values), dtype=torch.bool, device="cpu")
        groups, top_groups = fields.get("groups", 1), fields.get("top_groups", 1)
        if groups > 1:
            parts = values.view(len(values), groups, -1)
            best = parts.topk(2 if fields["group_score"] == "sum_top_two" else 1, dim=2).values.sum(2)
            errors = error.view(parts.shape).amax(2) * 2
            unsure |= _close(best, errors, top_groups)
            outside = torch.ones_like(best, dtype=torch.bool).scatter_(1, best.topk(top_groups).indices, False)
            values = parts.masked_fill(outside[:, :, None], -math.inf).flatten(1)
        return unsure | _close(values, error, self.top_k)


def _close(values: torch.Tensor, errors: torch.Tensor, count: int) -> torch.Tensor:
    """[T]: whether the last of the `count` largest and the next one are nearer than their errors."""
    if count >= values.shape[1]:
        return torch.zeros(len(values), dtype=torch.bool, device="cpu")
    best, at = values.topk(count + 1, dim=1)
    reach = errors.gather(1, at[:, -2:]).sum(1)
    return ~(best[:, -2] - best[:, -1] > reach)


def _scores(score: str, logits: torch.Tensor) -> torch.Tensor:
    if score == "softmax":
        return logits.softmax(1)
    return logits.sigmoid() if score == "sigmoid" else torch.nn.functional.softplus(logits).sqrt()


def _near(value: float) -> float:
    return 1.0 if abs(value - 1) < _ROUTING_ERROR else _probe._rounded(value)


def _written(value: float) -> float:
    """The number of few digits that somebody wrote, from one that was measured."""
    for digits in range(1, 5):
        short = float(f"{value:.{digits}g}")
        if abs(short - value) <= 3e-4 * abs(value):
            return short
    return value


def _constants(answers: _Answers, fields: dict[str, Any]) -> Iterator[dict[str, float]]:
    """Scales of a routing, and epsilons of its renormalisation, that fit the answers: first without an
    epsilon, which often nothing shows.

    A token whose chosen scores have the sum S gets weights of the sum scale * S / (S + epsilon).
    """
    found = answers.weights.double().sum(1)
    plain = answers.choose({**fields, "renormalize": False}).double().sum(1)
    usable = (found > 0) & found.isfinite() & (plain > 0)
    # The median: tokens whose experts are others must not count.
    few = usable[:_TOKENS]
    ratio = found[:_TOKENS] / (1 if fields.get("renormalize") else plain[:_TOKENS])
    yield {"scale": _near(ratio[few].median().item())}
    if not fields.get("renormalize"):
        return
    found, plain = found[usable], plain[usable]
    # found / scale + found / plain * (epsilon / scale) = 1, over columns of one size.
    columns = torch.stack((found, found / plain), dim=1)
    sizes = columns.amax(0)
    inverse, share = torch.linalg.lstsq(columns / sizes, torch.ones_like(found)[:, None]).solution[:, 0] / sizes
    scale, epsilon = 1 / inverse, share / inverse
    large = plain >= plain.quantile(0.75)
    for _ in range(2):
        each = plain * (scale / found - 1)
        # Where epsilon and the sum are of one size, both are seen well.
        telling = (each > 0.02 * plain) & (each < 50 * plain)
        epsilon = each[telling].median() if telling.any() else epsilon
        scale = (found * (plain + epsilon) / plain)[large].median()
    # Beside a much larger epsilon the sum would not count: that is no renormalisation.
    if 0 < epsilon < 4 * plain.max():
        yield {"scale": _near(scale.item()), "renormalize_epsilon": _written(epsilon.item())}


def _wrong(answers: _Answers, fields: dict[str, Any]) -> torch.Tensor:
    """[T]: whether a routing gives a token other weights than the block."""
    actual, expected = answers.choose(fields), answers.weights
    bound = (_ROUTING_ERROR + 4 * answers.slack) * expected.norm(dim=1) + 1e-37
    unsure = answers.ambiguous(fields)
    wrong = ~((expected - actual).norm(dim=1) <= bound)
    # Among equals anyone may be chosen, but with the same weights.
    apart = ~((expected.sort(dim=1).values - actual.sort(dim=1).values).norm(dim=1) <= bound)
    if answers.correction is None and fields.get("groups", 1) == 1:
        return torch.where(unsure, apart, wrong)
    return wrong & ~unsure


def _routing_of(block: Any, gate: Any, kind: str, answers: _Answers) -> Routing:
    nearest, least = None, math.inf
    # Where a block's own weights are no numbers, as 0 / 0 is none, there is nothing to reproduce.
    sensible = answers.weights.isfinite().all(1)
    if not sensible[:_TOKENS].all():
        raise Unsupported(f"{kind} gives weights that are not finite; load its weights first")
    for candidate in _candidates(block, gate, answers.correction is not None):
        try:
            for constants in _constants(answers, candidate):
                fields = candidate | constants
                wrong = _wrong(answers, fields) & sensible
                if not wrong.any():
                    return Routing(**fields)
                share = wrong.float().mean().item()
                if share < least:
                    nearest, least = Routing(**fields), share
        except Error:  # groups or constants that do not fit are none of this block's
            continue
    raise Unsupported(
        f"{kind} routes as Switchyard cannot: the nearest is {nearest}, which differs for {least:.0%} of "
        f"{len(sensible)} tokens"
    )


def compare(kind: str, block: Block, out: torch.Tensor, compute: str) -> None:
    """Raise `Unsupported` unless a layer makes of the tokens what the block did; compute: the type that
    the layer computes in."""
    sure = block.sure.to(out.device)
    expected, actual = block.out.detach().float()[sure], out.detach().float()[sure]
    errors = (actual - expected).norm(dim=1) / expected.norm(dim=1).clamp(min=1e-20)
    # A token whose output vanishes has to have one that does.
    errors = errors.where(expected.norm(dim=1) > 1e-20, actual.norm(dim=1))
    bound = _OUTPUT_ERROR[block.x.dtype]
    if compute == "bf16":
        bound = max(bound, _OUTPUT_ERROR[torch.bfloat16])
    elif compute == "f8_e4m3":
        bound = 0.1  # both products' activations are rounded to e4m3
    wrong = (~(errors < bound)).float().mean().item()
    exact = block.x.dtype == torch.float32 and compute == "f32"
    if wrong > (0 if exact else _MOST_CHANGED):
        raise Unsupported(
            f"{kind} does more than router, experts and shared expert: of {len(errors)} tokens {wrong:.0%} come "
            f"out otherwise, by {errors.median().item():.1e} of their norm. check=False takes it all the same"
        )
