"""``python -m switchyard check-hf``: every expert class of the installed transformers, at a tiny size,
beside its own eager forward()."""

from __future__ import annotations

import argparse
import ast
import copy
import dataclasses
import importlib
import inspect
import json
import math
import pathlib
import sys
from collections.abc import Iterator
from typing import Any

_HIDDEN, _INTERMEDIATE, _EXPERTS, _TOP_K, _TOKENS = 64, 48, 8, 2, 33
# In fp32 both do the same arithmetic in another order. In bf16 the yardstick is what eager itself
# loses against fp32.
_MAX_F32_ERROR = 1e-5
_MAX_BF16_RATIO = 2.0
# A published clamp, 7 or 10, is beyond what random activations reach.
_SIZES = {
    "hidden_size": _HIDDEN, "d_model": _HIDDEN, "intermediate_size": _INTERMEDIATE,
    "moe_intermediate_size": _INTERMEDIATE, "expert_ffn_hidden_size": _INTERMEDIATE,
    "ffn_hidden_size": _INTERMEDIATE, "expert_hidden_size": _INTERMEDIATE, "moe_latent_size": None,
    "num_experts": _EXPERTS, "num_local_experts": _EXPERTS, "n_routed_experts": _EXPERTS,
    "moe_num_experts": _EXPERTS, "num_experts_per_tok": _TOP_K, "moe_topk": _TOP_K,
    "moe_top_k": _TOP_K, "top_k_experts": _TOP_K, "shared_expert_intermediate_size": _INTERMEDIATE,
}


@dataclasses.dataclass
class Row:
    """What was found of one class."""

    family: str
    name: str
    reached_by: str  # "experts_implementation" or "patch"
    status: str  # "agrees", "differs", "refused", "fails" or "not made"
    activation: str = ""
    layout: str = ""
    f32_error: float | None = None
    bf16_error: float | None = None
    bf16_error_of_eager: float | None = None
    reason: str = ""


def _classes() -> Iterator[tuple[str, str, bool]]:
    """(family, class, decorated) of all expert classes, read from the sources: importing every model
    would take minutes."""
    import transformers

    from ._hf_patch import _PATCHES, _REFUSED

    models = pathlib.Path(transformers.__file__).parent / "models"
    for path in sorted(models.glob("*/modeling_*.py")):
        text = path.read_text()
        if "use_experts_implementation" not in text and not any(
            f"class {name}(" in text for name in (*_PATCHES, *_REFUSED)
        ):
            continue
        for node in ast.parse(text).body:
            if not isinstance(node, ast.ClassDef):
                continue
            decorators = [d.func if isinstance(d, ast.Call) else d for d in node.decorator_list]
            decorated = any(
                isinstance(d, ast.Name) and d.id == "use_experts_implementation" for d in decorators
            )
            if decorated or node.name in _PATCHES or node.name in _REFUSED:
                yield path.parent.name, node.name, decorated
    yield "mxfp4", "Mxfp4GptOssExperts", False


def _configs(module: Any, cls: Any) -> Iterator[Any]:
    """Configurations that may be the class's: as annotated, then the module's own."""
    annotation = inspect.signature(cls.__init__).parameters.get("config")
    names = [str(annotation.annotation).rsplit(".", 1)[-1].strip("'>")] if annotation else []
    own = [name for name in vars(module) if name.endswith("Config")]
    own.sort(key=lambda name: ("Text" not in name, len(name)))
    names += [name for name in own if name not in ("PreTrainedConfig", "PretrainedConfig")]
    for name in dict.fromkeys(names):
        config_class = getattr(module, name, None)
        if config_class is None:
            continue
        try:
            config = config_class()
        except Exception:
            continue
        nested = getattr(config, "ffn_config", None)
        yield from (c for c in (nested, config) if c is not None)


def _more_arguments(cls: Any) -> dict[str, int]:
    """What a constructor asks for beside the configuration: its layer, a size."""
    parameters = inspect.signature(cls.__init__).parameters.values()
    return {
        p.name: _INTERMEDIATE if "size" in p.name or "dim" in p.name else 0
        for p in parameters
        if p.name not in ("self", "config")
        and (p.default is p.empty or "intermediate_size" in p.name)
        and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
    }


def _make(module: Any, cls: Any) -> Any:
    """A tiny instance with random weights, fp32."""
    import torch

    first_error: Exception | None = None
    for config in _configs(module, cls):
        for name, size in _SIZES.items():
            value: Any = size
            try:
                old = getattr(config, name)
                if isinstance(old, (list, tuple)):
                    value = type(old)([value] * len(old))
                if value is not None or old is not None:
                    setattr(config, name, value)
            except Exception:
                continue
        config._experts_implementation = "eager"
        try:
            made = cls(config, **_more_arguments(cls)).float().eval()
        except Exception as error:
            first_error = first_error or error
            continue
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for parameter in made.parameters():
                width = parameter.shape[-1] if parameter.ndim < 3 else min(parameter.shape[1:])
                values = torch.randn(parameter.shape, generator=generator)
                parameter.copy_(values / math.sqrt(max(width, 1)))
        return made
    raise RuntimeError(f"no configuration makes one: {first_error}")


def _inputs(made: Any, dtype: Any) -> list[Any]:
    """Arguments of the module's forward(), by its first parameters."""
    import torch

    hidden, experts = _HIDDEN, _EXPERTS
    for name in ("hidden_size", "hidden_dim", "input_size"):
        hidden = getattr(made, name, hidden)
    for name in ("num_routed_experts", "num_experts"):
        experts = getattr(made, name, experts)
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(_TOKENS, hidden, generator=generator)
    names = [p for p in inspect.signature(type(made).forward).parameters if p != "self"]
    # A decorated forward() takes anything; what it wraps says what.
    wrapped = getattr(type(made).forward, "__wrapped__", None)
    if wrapped is not None:
        names = [p for p in inspect.signature(wrapped).parameters if p != "self"]
    if len(names) >= 3:
        scores = torch.rand(_TOKENS, getattr(made, "total_experts", experts), generator=generator)
        weights, ids = scores.softmax(-1).topk(_TOP_K, dim=-1)
        return [x.to(dtype), ids, weights.to(dtype)]
    if names[1:] == ["router_logits"]:
        return [x.to(dtype), torch.randn(_TOKENS, experts, generator=generator).to(dtype)]
    return [x[None].to(dtype)]


def _output(made: Any, inputs: list[Any]) -> Any:
    import torch

    with torch.no_grad():
        out = made(*(i.clone() for i in inputs))
    out = out[0] if isinstance(out, tuple) else out
    return out.double().flatten()


def _error(actual: Any, expected: Any) -> float:
    return ((actual - expected).norm() / expected.norm()).item()


def check_class(family: str, name: str, decorated: bool) -> Row:
    """Build one class, run it both ways and compare."""
    import torch

    from . import _hf, _hf_patch
    from .errors import DTypeMismatch, Unsupported

    reached_by = "experts_implementation" if decorated else "patch"
    row = Row(family, name, reached_by, "refused")
    if name in _hf_patch._REFUSED:
        row.reason = _hf_patch._REFUSED[name]
        return row
    module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    try:
        eager = _make(module, getattr(module, name))
    except Exception as error:
        row.status, row.reason = "not made", f"{type(error).__name__}: {error}"
        return row
    try:
        expected = _output(eager, _inputs(eager, torch.float32))
        ours = copy.deepcopy(eager)
        _hf_patch.patch(ours)
        # As a layer that is made says.
        row.f32_error = _error(_output(ours, _inputs(ours, torch.float32)), expected)
        made = next(made for m, made in list(_hf._made.items()) if m in set(ours.modules()))
        row.activation = _text(made.layer.activation)
        row.layout = made.layer.order + (", transposed" if made.layer.transposed else "")
        half = copy.deepcopy(eager).bfloat16()
        # The model in fp32 has the numbers that bf16 rounded to.
        rounded = copy.deepcopy(half).float()
        inputs = _inputs(half, torch.bfloat16)
        exact = _output(rounded, [i.float() if i.is_floating_point() else i for i in inputs])
        row.bf16_error_of_eager = _error(_output(half, inputs), exact)
        _hf_patch.patch(half)
        row.bf16_error = _error(_output(half, inputs), exact)
    except (Unsupported, DTypeMismatch) as error:
        row.reason = str(error)
        return row
    except Exception as error:  # one class must not hide the others
        row.status, row.reason = "fails", f"{type(error).__name__}: {error}"
        return row
    agrees = (
        row.f32_error <= _MAX_F32_ERROR
        and row.bf16_error <= _MAX_BF16_RATIO * row.bf16_error_of_eager
    )
    row.status = "agrees" if agrees else "differs"
    return row


def _text(activation: Any) -> str:
    text = activation.kind + (", gated" if activation.gated else "")
    for name, default in (("alpha", 1.0), ("limit", math.inf), ("up_bias", 0.0)):
        value = getattr(activation, name)
        if value != default:
            text += f", {name} {value:.4g}"
    return text


def check_all(only: list[str]) -> list[Row]:
    """Rows of all classes whose name or family contains one of `only`, or of all."""
    rows = []
    for family, name, decorated in _classes():
        if only and not any(text.lower() in (family + name).lower() for text in only):
            continue
        rows.append(check_class(family, name, decorated))
        print(_line(rows[-1]), flush=True)
    return rows


def _line(row: Row) -> str:
    def number(value: float | None) -> str:
        return "     -" if value is None else f"{value:6.0e}"

    text = f"{row.name:34} {row.status:9} {number(row.f32_error)} {number(row.bf16_error)} "
    text += f"{number(row.bf16_error_of_eager)}  {row.activation}"
    return text + (f"  {row.reason}" if row.reason else "")


def _as_expected(rows: list[Row], path: str) -> bool:
    """Whether classes, what they compute and how they are reached are those of a file."""

    def told(row: dict[str, Any]) -> tuple[str, ...]:
        return tuple(row[name] for name in ("status", "reached_by", "activation", "layout"))

    with open(path) as file:
        expected = {row["name"]: told(row) for row in json.load(file)["classes"]}
    found = {row.name: told(dataclasses.asdict(row)) for row in rows}
    names = [name for name in {**expected, **found} if found.get(name) != expected.get(name)]
    for name in names:
        print(f"{name}: found {found.get(name)}, but {path} has {expected.get(name)}")
    return not names


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m switchyard check-hf",
        description="Runs every expert class of the installed transformers beside its eager forward().",
        epilog="Exit code: 0 if all that run agree, 1 if some differ, 2 if there is nothing to run.",
    )
    parser.add_argument(
        "--only", action="append", default=[], metavar="TEXT", help="classes whose name has TEXT"
    )
    parser.add_argument("--json", metavar="FILE", help="write the rows to FILE")
    parser.add_argument(
        "--expect", metavar="FILE", help="exit code 1 if a class is not found as in FILE, of --json"
    )
    parsed = parser.parse_args(arguments)
    try:
        import torch
        import transformers
        import transformers.integrations.moe  # noqa: F401  # of 5
    except ImportError as error:
        print(f"check-hf needs torch and transformers 5: {error}", file=sys.stderr)
        return 2
    transformers.logging.set_verbosity_error()
    print(f"transformers {transformers.__version__}, torch {torch.__version__}")
    print(f"{'class':34} {'':9} {'f32':>6} {'bf16':>6} {'eager':>6}  activation")
    rows = check_all(parsed.only)
    if not rows:
        print(f"no class or family has {' or '.join(parsed.only)} in its name", file=sys.stderr)
        return 2
    counts = {status: sum(row.status == status for row in rows) for status in
              ("agrees", "differs", "refused", "fails", "not made")}
    decorated = [row for row in rows if row.reached_by == "experts_implementation"]
    print(", ".join(f"{count} {status}" for status, count in counts.items() if count))
    print(
        f"{sum(row.status == 'agrees' for row in decorated)} of {len(decorated)} classes that go "
        "through experts_implementation agree with eager"
    )
    if parsed.json:
        document = {
            "transformers": transformers.__version__,
            "torch": torch.__version__,
            "command": f"python -m switchyard check-hf --json {parsed.json}",
        }
        head = "".join(f'"{name}": {json.dumps(text)},\n' for name, text in document.items())
        lines = [json.dumps(dataclasses.asdict(row), allow_nan=False) for row in rows]
        with open(parsed.json, "w") as file:
            file.write(f'{{\n{head}"classes": [\n' + ",\n".join(lines) + "\n]\n}\n")
    if parsed.expect and not _as_expected(rows, parsed.expect):
        return 1
    return 1 if counts["differs"] or counts["fails"] or counts["not made"] else 0
