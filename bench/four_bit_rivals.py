#!/usr/bin/env python3
"""Layers with four-bit expert weights on one GPU, as others compute them: the points of
`switchyard bench layers --suite four_bit`.

    bench/four_bit_rivals.py --from DIRECTORY [--rivals marlin,humming] [--models gpt-oss-20b] [--tokens 1,64]
                             [--json four_bit_rivals.json] [--budget SECONDS]
    bench/four_bit_rivals.py --json four_bit_rivals.json --join FILE
                             gives each row of FILE, as the command wrote it, the fastest rival at its point on its card
    bench/four_bit_rivals.py --check       the weights, the reference and its bounds alone, small, on any machine

DIRECTORY has what is not installed: parts of vLLM, triton_kernels, Humming, FlashInfer. The rivals:

- marlin: vLLM's fused_marlin_moe, MXFP4 and INT4, tokens in bf16.
- triton_kernels: vLLM's path for gpt-oss on Hopper, whose activation is the only one that it has.
- humming, humming_fp8: Humming's indexed kernels with the configuration that its heuristics choose, its own kernel
  for the activation, and vLLM's kernels for the order of the tokens and for their sums. The second quantises
  tokens and hidden values to e4m3, a scale for each row, in the time.
- flashinfer, flashinfer_fp8: FlashInfer's cutlass_fused_moe, MXFP4, with the kernels that its autotuner chooses for
  the point's number of tokens. Columns and rows are padded to a multiple of 128, as vLLM pads them. The second
  quantises as humming_fp8 does, in the time. Its kernels for SM90 compile for more than an hour of one processor,
  so they are not compiled here: DIRECTORY/flashinfer/data/aot/fused_moe_90/fused_moe_90.so has them.

Weights and tokens are random, as those of `switchyard bench` are. The routing is given, and ids are as a gate
without favourites deals them. What a rival does to the weights, or pads of the tokens, once, is not timed. Some
tokens of every output are compared with fp64 on the weights' values. The bound is twice the error of the same
arithmetic in PyTorch, and a point beyond it is not kept. Then a CUDA graph of several calls is replayed, over so
many copies of the weights that the L2 cache does not hold them, and every repetition is kept.

Exit codes: 0 done; 1 a result is wrong or a rival failed; 77 there is no PyTorch, no GPU or none of the rivals.
"""

import copy
import dataclasses
import importlib
import importlib.machinery
import importlib.metadata
import json
import math
import os
import pathlib
import statistics
import sys
import time
import types

from result_rows import card_of, merge, percentile, write
from rival_timing import LeftOut, Wrong, rotation_of, timed
from script_arguments import SKIPPED, command_of, numbers, parser_of
from torch_chain import CUDA, DEVICE, Clock, machine, relative_error  # which ends with 77 without PyTorch

import torch
import torch.nn.functional as F

KEY = ["suite", "rival", "model", "experts", "tokens", "weights", "tokens_in"]
GROUP = 32  # columns that share a scale
FP8 = torch.float8_e4m3fn
FP8_MAX = torch.finfo(FP8).max
CHECKED_TOKENS = 8
# The values of e2m1 without their sign, and the middles between them.
E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
E2M1_MIDDLES = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5]
# As kF4Deviation and kU4Deviation of lab/models/random_tensor.cpp.
CODE_DEVIATION = {"mxfp4": 2.0, "int4": 2.5}


@dataclasses.dataclass(frozen=True)
class Model:
    name: str
    hidden: int
    intermediate: int
    experts: int
    top_k: int
    weights: str = "mxfp4"
    gpt_oss: bool = False  # gate and up rows in turn, biases, the clamped activation with up + 1
    limit: float | None = None  # of SwiGLU

    def shrunk(self):
        """A model of the same kind that a processor computes at once."""
        return dataclasses.replace(self, hidden=self.hidden // 16 // GROUP * GROUP or GROUP,
                                   intermediate=self.intermediate // 16 // GROUP * GROUP or GROUP,
                                   experts=max(self.experts // 8, self.top_k))


# As in four_bit() of lab/bench/suite.cpp.
MODELS = [
    Model("gpt-oss-20b", 2880, 2880, 32, 4, gpt_oss=True, limit=7.0),
    Model("gpt-oss-120b", 2880, 2880, 128, 4, gpt_oss=True, limit=7.0),
    Model("v4-flash-routed", 4096, 2048, 256, 6, limit=10.0),
    Model("v4-pro-routed", 7168, 3072, 96, 6, limit=10.0),
    Model("kimi-k3", 3584, 3072, 56, 16),
    Model("kimi-k2-routed", 7168, 2048, 48, 8, weights="int4"),
]
TOKENS = [1, 8, 64, 256, 1024, 2048, 8192]


# ------------------------------------------------------------------------------------- weights and reference


def unpacked(codes):
    """Four-bit codes [.., K] of bytes [.., K / 2], whose low half comes first."""
    return torch.stack((codes & 15, codes >> 4), dim=-1).flatten(-2)


def packed(codes):
    return codes[..., ::2] | codes[..., 1::2] << 4


class FourBit:
    """Matrices [E, N, K]: two codes a byte, the even column in the low half, and a scale for 32 columns.

    MXFP4 has codes e2m1 and scales e8m0 as bytes. INT4 has codes minus 8 and scales in bf16.
    """

    def __init__(self, kind, codes, scales):
        self.kind, self.codes, self.scales = kind, codes, scales

    @classmethod
    def random(cls, kind, experts, n, k):
        deviation = k**-0.5
        codes = torch.empty((experts, n, k // 2), dtype=torch.uint8, device=DEVICE)
        middles = torch.tensor(E2M1_MIDDLES, device=DEVICE)
        for part in codes:  # a temporary of all experts in fp32 would be eight times their size
            values = torch.randn((n, k), device=DEVICE) * CODE_DEVIATION[kind]
            if kind == "mxfp4":
                sign = (values < 0).to(torch.uint8) << 3
                part.copy_(packed(torch.bucketize(values.abs(), middles).to(torch.uint8) | sign))
            else:
                part.copy_(packed((values + 8.5).clamp(0, 15).to(torch.uint8)))
        shape = (experts, n, k // GROUP)
        if kind == "mxfp4":
            middle = 127 + round(math.log2(deviation / CODE_DEVIATION[kind]))
            scales = torch.randint(middle - 1, middle + 2, shape, dtype=torch.uint8, device=DEVICE)
        else:
            factor = 0.75 + 0.5 * torch.rand(shape, device=DEVICE)
            scales = (deviation / CODE_DEVIATION[kind] * factor).bfloat16()
        return cls(kind, codes, scales)

    def values(self, expert, dtype):
        codes = unpacked(self.codes[expert]).long()
        if self.kind == "mxfp4":
            table = torch.tensor(E2M1 + [-value for value in E2M1], dtype=dtype, device=codes.device)
            values, scales = table[codes], torch.exp2(self.scales[expert].to(dtype) - 127)
        else:
            values, scales = (codes - 8).to(dtype), self.scales[expert].to(dtype)
        return values * scales.repeat_interleave(GROUP, -1)

    @property
    def expert_bytes(self):
        return self.codes[0].nbytes + self.scales[0].nbytes

    def padded(self, n, k):
        """Of more rows and columns, whose values are zero."""
        experts, old_n, half_k = self.codes.shape
        zero, one = (0, 127) if self.kind == "mxfp4" else (0x88, 1)
        codes = F.pad(self.codes, (0, k // 2 - half_k, 0, n - old_n), value=zero)
        scales = F.pad(self.scales, (0, k // GROUP - self.scales.shape[2], 0, n - old_n), value=one)
        return FourBit(self.kind, codes, scales)


class Layer:
    """A model's experts. The rows of gate come before those of up, or in turn with them in gpt-oss."""

    def __init__(self, model):
        self.model = model
        self.w13 = FourBit.random(model.weights, model.experts, 2 * model.intermediate, model.hidden)
        self.w2 = FourBit.random(model.weights, model.experts, model.hidden, model.intermediate)
        bias = lambda n: (torch.randn((model.experts, n), device=DEVICE) * 0.05).bfloat16()  # noqa: E731
        self.b13 = bias(2 * model.intermediate) if model.gpt_oss else None
        self.b2 = bias(model.hidden) if model.gpt_oss else None

    @property
    def expert_bytes(self):
        biases = sum(b[0].nbytes for b in (self.b13, self.b2) if b is not None)
        return self.w13.expert_bytes + self.w2.expert_bytes + biases

    def activate(self, products):
        model = self.model
        gate, up = (products[:, ::2], products[:, 1::2]) if model.gpt_oss else products.chunk(2, dim=1)
        if model.limit is not None:
            gate, up = gate.clamp(max=model.limit), up.clamp(-model.limit, model.limit)
        if model.gpt_oss:
            return gate * torch.sigmoid(1.702 * gate) * (up + 1)
        return F.silu(gate) * up

    def forward(self, x, ids, weights, dtype, rounded=None, quantised=None):
        """The layer expert by expert in `dtype`. `rounded` is applied to weights and to all that kernels write, and
        `quantised` to the rows that are multiplied."""
        rounded, quantised = rounded or (lambda v: v), quantised or (lambda v: v)
        rows = quantised(x.to(dtype))
        out = torch.zeros(x.shape, dtype=dtype, device=x.device)
        for expert in ids.unique().tolist():
            tokens, slots = torch.nonzero(ids == expert, as_tuple=True)
            products = rows[tokens] @ rounded(self.w13.values(expert, dtype)).T
            if self.b13 is not None:
                products = products + self.b13[expert].to(dtype)
            hidden = quantised(rounded(self.activate(rounded(products))))
            y = hidden @ rounded(self.w2.values(expert, dtype)).T
            if self.b2 is not None:
                y = y + self.b2[expert].to(dtype)
            out.index_add_(0, tokens, rounded(y * weights[tokens, slots].to(dtype).unsqueeze(1)))
        return rounded(out)


def to_bf16(v):
    return v.bfloat16().to(v.dtype)


def to_fp8(v):
    """Rows with a scale of their own."""
    scales = v.abs().amax(-1, keepdim=True).clamp(min=1e-12) / FP8_MAX
    return (v / scales).to(FP8).to(v.dtype) * scales


class Point:
    """Tokens of a layer, with their routing."""

    def __init__(self, layer, tokens):
        model = layer.model
        self.layer, self.tokens = layer, tokens
        self.x = torch.randn((tokens, model.hidden), device=DEVICE, dtype=torch.bfloat16)
        logits = torch.randn((tokens, model.experts), device=DEVICE)
        top, ids = logits.topk(model.top_k, dim=1)
        self.ids = ids.to(torch.int32).contiguous()
        self.weights = top.softmax(-1).contiguous()
        self.counts = torch.bincount(ids.flatten(), minlength=model.experts).tolist()
        self.rows = tokens * model.top_k

    @property
    def experts_hit(self):
        return sum(count > 0 for count in self.counts)

    @property
    def touched_bytes(self):
        return self.experts_hit * self.layer.expert_bytes

    @property
    def flops(self):
        return 6 * self.rows * self.layer.model.hidden * self.layer.model.intermediate

    def balancedness(self):
        shares = [count / self.rows for count in self.counts if count > 0]
        return -sum(share * math.log(share) for share in shares) / math.log(len(self.counts))

    def sample(self):
        at = torch.linspace(0, self.tokens - 1, min(CHECKED_TOKENS, self.tokens)).round().long().unique().to(DEVICE)
        return at, (self.x[at], self.ids[at], self.weights[at])

    def exact(self, tokens_in):
        """The outputs of the sampled tokens, and the bound of a rival's error."""
        at, inputs = self.sample()
        exact = self.layer.forward(*inputs, torch.float64)
        plain = self.layer.forward(*inputs, torch.float32, to_bf16, to_fp8 if tokens_in == "fp8" else None)
        return at, exact, 2 * relative_error(plain, exact)


# --------------------------------------------------------------------------- vLLM, without all that it depends on


class _AbsentType(type):
    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return cls

    def __or__(cls, other):
        return cls

    __ror__ = __or__


class Absent(metaclass=_AbsentType):
    """Any name of a module that is not there: a base class, a logger, a type in a signature."""

    def __init__(self, *arguments, **named):
        pass

    def __call__(self, *arguments, **named):
        return None

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __class_getitem__(cls, item):
        return cls


class HopperPlatform:
    """vllm.platforms.current_platform."""

    simple_compile_backend = "inductor"
    dispatch_key = "CUDA"

    def is_cuda(self):
        return True

    def is_device_capability(self, capability, device_id=0):
        return capability in (90, (9, 0))

    def has_device_capability(self, capability, device_id=0):
        return capability <= 90 if isinstance(capability, int) else capability <= (9, 0)

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *arguments, **named: False


def register_custom_op(op_name, op_func, mutates_args=None, **named):
    library = torch.library.Library("vllm", "FRAGMENT")
    library.define(op_name + torch.library.infer_schema(op_func, mutates_args=mutates_args or []))
    _libraries.append(library)


_libraries = []  # an operator lives as long as its library


def stand_ins():
    """What the few modules of vLLM use of others, by module."""
    import triton
    import triton.language

    units = lambda device=0: torch.cuda.get_device_properties(device or 0).multi_processor_count  # noqa: E731
    return {
        "vllm.platforms": {"current_platform": HopperPlatform()},
        "vllm.triton_utils": {"triton": triton, "tl": triton.language},
        "vllm.utils.import_utils": {"has_triton_kernels": lambda: True},
        "vllm.utils.platform_utils": {"num_compute_units": units},
        "vllm.utils.torch_utils": {"direct_register_custom_op": register_custom_op,
                                   "is_torch_equal_or_newer": lambda version: True},
        "vllm.logger": {"init_logger": lambda name: Absent()},
    }


class StandInFinder:
    """Answers for modules of vLLM that no folder has, so that those there are load without its dependencies."""

    def __init__(self):
        self.known = stand_ins()

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] != "vllm":
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec):
        module = types.ModuleType(spec.name)
        module.__path__ = []
        # Settings are all unset.
        module.__getattr__ = lambda name: None if spec.name == "vllm.envs" else dunderless(name)
        module.__dict__.update(self.known.get(spec.name, {}))
        return module

    def exec_module(self, module):
        pass


def dunderless(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return _AbsentType(name, (Absent,), {})  # a class of its own, so that several may be bases of one


class Vllm:
    """The modules and operators of vLLM that are used here, from `directory` or installed."""

    def __init__(self, directory):
        for name in ("_C", "_moe_C"):
            library = directory / "vllm" / f"{name}_stable_libtorch.abi3.so"
            if library.exists():
                torch.ops.load_library(str(library))
        if not hasattr(torch.ops._moe_C, "moe_wna16_marlin_gemm"):
            raise LeftOut(f"vLLM's operators are not in {directory}/vllm")
        if not any(isinstance(finder, StandInFinder) for finder in sys.meta_path):
            sys.meta_path.append(StandInFinder())
        layers = "vllm.model_executor.layers"
        module = importlib.import_module
        self.ops = module("vllm._custom_ops")
        self.types = module("vllm.scalar_type").scalar_types
        self.activations = module(f"{layers}.fused_moe.activation").MoEActivation
        self.marlin = module(f"{layers}.fused_moe.experts.marlin_moe")
        self.marlin_fp4 = module(f"{layers}.quantization.utils.marlin_utils_fp4")
        self.marlin_utils = module(f"{layers}.quantization.utils.marlin_utils")
        self.align = module(f"{layers}.fused_moe.moe_align_block_size").moe_align_block_size
        self.mul_sum = module(f"{layers}.fused_moe.moe_fused_mul_sum").moe_fused_mul_sum
        version = directory / "vllm" / "VERSION"
        self.version = version.read_text().strip() if version.exists() else importlib.metadata.version("vllm")


# ----------------------------------------------------------------------------------------------------- rivals


class Rival:
    """weights() lays a layer out for the kernels: something that deepcopy() copies. call() returns what computes a
    point with such a layout, and `out`, of which the first columns of hidden count."""

    tokens_in = "bf16"

    def check_model(self, model):
        pass

    def ready(self, layout, points):
        """Compiles beforehand what the points need."""


class Marlin(Rival):
    def __init__(self, directory):
        self.vllm = Vllm(directory)
        self.version = f"vLLM {self.vllm.version} Marlin"

    def sizes(self, model):
        """Of vLLM's mxfp4_round_up_hidden_size_and_intermediate_size(); those of other models need no padding."""
        hidden, intermediate = model.hidden, model.intermediate
        return -(-hidden // 256) * 256, -(-intermediate // 128) * 128

    def weights(self, layer):
        model, vllm = layer.model, self.vllm
        hidden, intermediate = self.sizes(model)
        w13, w2 = layer.w13.padded(2 * intermediate, hidden), layer.w2.padded(hidden, intermediate)
        b13 = b2 = None
        if layer.b13 is not None:
            b13 = F.pad(layer.b13, (0, 2 * (intermediate - model.intermediate)))
            b2 = F.pad(layer.b2, (0, hidden - model.hidden))
        if model.weights == "mxfp4":
            laid = vllm.marlin_fp4.prepare_moe_mxfp4_layer_for_marlin(
                types.SimpleNamespace(params_dtype=torch.bfloat16), w13.codes, w2.codes, w13.scales, w2.scales, b13, b2)
            names = ("w1", "w2", "w1_scale", "w2_scale", "bias1", "bias2")
            layout = dict(zip(names, laid, strict=True), quant_type_id=vllm.types.float4_e2m1f.id)
        else:
            none = torch.empty(0, dtype=torch.int32, device=DEVICE)
            layout = {"bias1": None, "bias2": None, "quant_type_id": vllm.types.uint4b8.id}
            for name, w in (("w1", w13), ("w2", w2)):
                n, k = w.codes.shape[1], 2 * w.codes.shape[2]
                layout[name] = vllm.marlin_fp4._repack_marlin_experts(w.codes, n, k, none, False)
                layout[f"{name}_scale"] = vllm.marlin_utils.marlin_moe_permute_scales(
                    w.scales.transpose(1, 2).contiguous(), k, n, GROUP)
        layout["workspace"] = vllm.marlin_utils.marlin_make_workspace_new(torch.device("cuda", 0), 4)
        return layout

    def call(self, layout, point):
        model, kinds = point.layer.model, self.vllm.activations
        hidden, intermediate = self.sizes(model)
        x = F.pad(point.x, (0, hidden - model.hidden))
        out = torch.full_like(x, float("nan"))
        cache13 = torch.empty(point.rows * max(2 * intermediate, hidden), dtype=x.dtype, device=DEVICE)
        cache2 = torch.empty((point.rows, intermediate), dtype=x.dtype, device=DEVICE)

        def call():
            self.vllm.marlin.fused_marlin_moe(
                hidden_states=x, topk_weights=point.weights, topk_ids=point.ids, global_num_experts=model.experts,
                activation=kinds.SWIGLUOAI if model.gpt_oss else kinds.SILU,
                clamp_limit=None if model.gpt_oss else model.limit, output=out, intermediate_cache13=cache13,
                intermediate_cache2=cache2, moe_sum=lambda y, to, ids, expert_map: self.vllm.ops.moe_sum(y, to),
                **layout)

        return call, out


class TritonKernels(Rival):
    def __init__(self, directory):
        self.vllm = Vllm(directory)
        layers = "vllm.model_executor.layers"
        self.module = importlib.import_module(f"{layers}.fused_moe.experts.gpt_oss_triton_kernels_moe")
        self.swizzle = importlib.import_module(f"{layers}.quantization.utils.mxfp4_utils")._swizzle_mxfp4
        self.matmul = importlib.import_module("triton_kernels.matmul_ogs")
        self.version = f"vLLM {self.vllm.version} triton_kernels"

    def check_model(self, model):
        if not model.gpt_oss:
            raise LeftOut("vLLM has it for the activation of gpt-oss only")

    def weights(self, layer):
        layout = {}
        for name, w in (("w1", layer.w13), ("w2", layer.w2)):
            values, flex, scales = self.swizzle(w.codes, w.scales)
            layout[name] = values
            layout[f"{name}_precision"] = self.matmul.PrecisionConfig(
                weight_scale=scales, flex_ctx=self.matmul.FlexCtx(rhs_data=flex))
        return layout | {"w1_bias": layer.b13.float(), "w2_bias": layer.b2.float()}

    def call(self, layout, point):
        model = point.layer.model
        out = torch.full_like(point.x, float("nan"))
        cache = torch.empty((point.rows, model.intermediate), dtype=out.dtype, device=DEVICE)
        quant = types.SimpleNamespace(**layout)

        def call():
            routing = self.module.make_routing_data(point.ids, point.weights, model.experts)
            self.module.triton_kernel_fused_experts(
                out, point.x, layout["w1"], layout["w2"], *routing, topk=model.top_k, quant_config=quant,
                global_num_experts=model.experts, intermediate_cache=cache)

        return call, out


class Humming(Rival):
    # As vLLM pads, to multiples of what blocks of the kernels may be.
    PAD_N, PAD_K = 256, 128

    def __init__(self, directory):
        self.vllm = Vllm(directory)  # first: some of its kernels do the rest
        try:
            import humming
            from humming import dtypes, forward, schema, transform, tune
            from humming.kernel.humming import HummingKernel
            from humming.utils.cuda import filter_cuda_paths
        except (ImportError, OSError) as missing:
            raise LeftOut(missing) from missing
        try:
            filter_cuda_paths(required_headers=["nvrtc.h"])
        except RuntimeError:
            os.environ["HUMMING_COMPILER"] = "nvcc"
        self.dtypes, self.forward, self.schema, self.transform, self.tune = dtypes, forward, schema, transform, tune
        self.kernel = HummingKernel
        self.version = f"Humming {humming.__version__}"
        self.how = {"gemm_type": "indexed", "use_batch_invariant": False, "use_f16_accum": False}

    def input_type(self):
        return self.dtypes.bfloat16

    def matrix(self, w, bias):
        experts, n, half_k = w.codes.shape
        tensors = {"weight": w.codes.view(torch.int32).clone()}
        if w.kind == "mxfp4":
            tensors["weight_scale"] = w.scales.clone().view(torch.float8_e8m0fnu)
            kind = self.schema.HummingWeightSchema(
                b_dtype=self.dtypes.float4e2m1, bs_dtype=self.dtypes.float8e8m0, weight_scale_group_size=GROUP)
        else:
            tensors["weight_scale"] = w.scales.clone()
            kind = self.schema.HummingWeightSchema(b_dtype=self.dtypes.uint4, weight_scale_group_size=GROUP)
            kind, tensors = kind.convert_symmetric_integer_weight(tensors)
        if bias is not None:
            tensors["bias"] = bias.clone()
        config = self.transform.prepare_layer_config(
            n, 2 * half_k, kind, self.schema.HummingInputSchema(a_dtype=self.input_type()), experts, self.PAD_N,
            self.PAD_K, bias is not None, torch.bfloat16, 0, tensors)
        config, tensors = self.transform.prepare_fp16_e8m0_scale(config, tensors)
        tensors = self.transform.transform_humming_tensors(config, tensors)
        return {"config": config, "locks": torch.zeros(2048, dtype=torch.int32, device=DEVICE), **tensors}

    def weights(self, layer):
        return {"w13": self.matrix(layer.w13, layer.b13), "w2": self.matrix(layer.w2, layer.b2)}

    def tuned(self, config, rows):
        """What the heuristics of Humming choose for so many rows of all experts."""
        choices = self.tune.get_heuristics_config(config, gemm_type="indexed", device=0)
        return next(choice for least, most, choice in choices if least < rows <= most)

    def ready(self, layout, points):
        for matrix in layout.values():
            choices = [[i, i + 1, self.tuned(matrix["config"], point.rows)] for i, point in enumerate(points)]
            self.kernel.prepare_kernels(matrix["config"].to_str(), json.dumps(self.how), json.dumps(choices), 0)

    def activation(self, model):
        """Its kind, and C++ of the gate a and of b."""
        if model.gpt_oss:
            gate, up = f"fminf(a, {model.limit}f)", f"fminf(fmaxf(b, -{model.limit}f), {model.limit}f)"
            return "binary_interleaved", f"({gate} / (1.0f + __expf(-1.702f * {gate}))) * ({up} + 1.0f)"
        gate, up = "a", "b"
        if model.limit is not None:
            gate, up = f"fminf(a, {model.limit}f)", f"fminf(fmaxf(b, -{model.limit}f), {model.limit}f)"
        return "binary_split", f"({gate} / (1.0f + __expf(-{gate}))) * {up}"

    def call(self, layout, point):
        model, x = point.layer.model, point.x
        products = torch.empty((point.rows, 2 * model.intermediate), dtype=x.dtype, device=DEVICE)
        cells = torch.empty((point.rows, model.hidden), dtype=x.dtype, device=DEVICE)
        out = torch.full_like(x, float("nan"))
        kind, formula = self.activation(model)
        tuned = {name: self.tuned(matrix["config"], point.rows) for name, matrix in layout.items()}
        texts = {name: json.dumps(choice) for name, choice in tuned.items()}
        heights = {name: choice["block_shape"][0] for name, choice in tuned.items()}
        how = json.dumps(self.how)

        def multiply(name, rows, scales, order, into, top_k):
            matrix = layout[name]
            sorted_ids, expert_ids, num_padded = order
            tensors = {key: value for key, value in matrix.items() if key != "config"}
            self.forward.humming_forward(
                matrix["config"], inputs=rows, outputs=into, input_scale=scales, sorted_ids=sorted_ids,
                expert_ids=expert_ids, num_tokens_padded=num_padded, top_k=top_k, valid_shape_m=point.rows,
                compute_config=how, tuning_config=texts[name], **tensors)

        def call():
            orders = {height: self.vllm.align(point.ids, height, model.experts, ignore_invalid_experts=True)
                      for height in set(heights.values())}
            rows, scales = self.forward.may_quant_input(layout["w13"]["config"], x)
            multiply("w13", rows, scales, orders[heights["w13"]], products, model.top_k)
            hidden, group_scales, token_scales = self.forward.may_process_input(
                layout["w2"]["config"], products, activation_type=kind, activation_impl=formula)
            scales = group_scales if group_scales is not None else token_scales
            multiply("w2", hidden, scales, orders[heights["w2"]], cells, 1)
            self.vllm.mul_sum(cells.view(point.tokens, model.top_k, -1), point.weights, out, point.ids)

        return call, out


class HummingFp8(Humming):
    tokens_in = "fp8"

    def input_type(self):
        return self.dtypes.float8e4m3

    def check_model(self, model):
        if model.weights != "mxfp4":
            raise LeftOut("the suite multiplies INT4 with tokens in bf16 only")


class FlashInfer(Rival):
    PAD = 128  # as in vLLM's mxfp4_round_up_hidden_size_and_intermediate_size()

    def __init__(self, directory):
        # A library that is not there is then an error, instead of an hour's compiling.
        os.environ.setdefault("FLASHINFER_DISABLE_JIT", "1")
        try:
            import flashinfer
            from flashinfer import autotuner, fused_moe
        except (ImportError, OSError) as missing:
            raise LeftOut(missing) from missing
        self.tuner, self.moe = autotuner, fused_moe
        self.version = f"FlashInfer {flashinfer.__version__} CUTLASS"
        self.how = {"use_w4_group_scaling": True}

    def check_model(self, model):
        if model.weights != "mxfp4":
            raise LeftOut("its INT4 has groups of 128 columns")

    def sizes(self, model):
        return tuple(-(-size // self.PAD) * self.PAD for size in (model.hidden, model.intermediate))

    def up_then_gate(self, model, rows, pad):
        """The rows [E, 2 I, ..] in the order that it takes, each half padded by itself."""
        gate, up = (rows[:, ::2], rows[:, 1::2]) if model.gpt_oss else rows.chunk(2, dim=1)
        return torch.cat([pad(up), pad(gate)], dim=1).contiguous()

    def matrix(self, w):
        """The weights, and their scales for the call."""
        weights = self.moe.interleave_moe_weights_for_sm90_mixed_gemm(w.codes, "fp4")
        return weights, [self.moe.interleave_moe_scales_for_sm90_mixed_gemm(w.scales).view(torch.int32)]

    def weights(self, layer):
        model = layer.model
        hidden, intermediate = self.sizes(model)
        more_rows = (0, 0, 0, intermediate - model.intermediate)
        w13 = layer.w13.padded(2 * model.intermediate, hidden)
        w13 = FourBit(w13.kind, *(self.up_then_gate(model, part, lambda rows: F.pad(rows, more_rows, value=value))
                                  for part, value in ((w13.codes, 0), (w13.scales, 127))))
        (fc1, scales1), (fc2, scales2) = self.matrix(w13), self.matrix(layer.w2.padded(hidden, intermediate))
        each = lambda value: torch.full((model.experts,), value, device=DEVICE)  # noqa: E731
        layout = {"fc1_expert_weights": fc1, "fc2_expert_weights": fc2, "quant_scales": self.scales(scales1, scales2)}
        if model.limit is not None:
            layout["swiglu_limit"] = each(model.limit)
        if model.gpt_oss:
            layout |= {"swiglu_alpha": each(1.702), "swiglu_beta": each(1.0)}
            layout["fc1_expert_biases"] = self.up_then_gate(
                model, layer.b13, lambda rows: F.pad(rows, (0, intermediate - model.intermediate)))
            layout["fc2_expert_biases"] = F.pad(layer.b2, (0, hidden - model.hidden))
        return layout

    def scales(self, scales1, scales2):
        return [*scales1, *scales2]

    def ready(self, layout, points):
        for point in points:
            call, _ = self.call(layout, point)
            before = self.chosen()
            with self.tuner.autotune(True, tuning_buckets=(point.tokens,)):
                call()
            # Without a choice it would take its first kernel, and say nothing.
            if self.chosen() != before + 2:
                raise RuntimeError(f"the autotuner did not choose both kernels for {point.tokens} tokens")

    def chosen(self):
        return sum(self.tuner.AutoTuner.get().stats.tuned_op_successful_configs.values())

    def call(self, layout, point):
        model = point.layer.model
        hidden, intermediate = self.sizes(model)
        x = F.pad(point.x, (0, hidden - model.hidden))
        out = torch.full_like(x, float("nan"))
        workspace = torch.empty(self.moe.cutlass_fused_moe_workspace_size(
            point.tokens, hidden, intermediate, model.experts, model.top_k, x_dtype=x.dtype, weight_dtype=torch.uint8,
            **self.how), dtype=torch.uint8, device=DEVICE)

        def call():
            # The bucket leads to what the autotuner chose.
            with self.tuner.autotune(False, tuning_buckets=(point.tokens,)):
                self.moe.cutlass_fused_moe(
                    x, point.ids, point.weights, output=out, output_dtype=x.dtype, workspace_buffer=workspace,
                    **self.how, **layout)

        return call, out


class FlashInferFp8(FlashInfer):
    tokens_in = "fp8"

    def __init__(self, directory):
        super().__init__(directory)
        self.how["use_wfp4afp8_humming"] = True

    def matrix(self, w):
        # Its temporaries are 40 times as large as the weights, so a few experts at a time.
        parts = [self.moe.preprocess_moe_weights_for_sm90_mixed_gemm_humming(codes, scales)
                 for codes, scales in zip(w.codes.split(8), w.scales.split(8), strict=True)]
        weights, scales, residual = (torch.cat(part) for part in zip(*parts, strict=True))
        # 64 is the factor that its kernels leave out, as its prepare_cutlass_humming_weights() has it.
        return weights, [scales.view(torch.int32), 64 * residual]

    def scales(self, scales1, scales2):
        return [*scales1, torch.ones((), device=DEVICE), *scales2]


RIVALS = {"marlin": Marlin, "triton_kernels": TritonKernels, "humming": Humming, "humming_fp8": HummingFp8,
          "flashinfer": FlashInfer, "flashinfer_fp8": FlashInferFp8}


# ------------------------------------------------------------------------------------------------------ times


def check(point, out, tokens_in):
    """The error of some tokens against fp64, and its bound."""
    at, exact, bound = point.exact(tokens_in)
    out = out[:, : point.layer.model.hidden]
    if not out.isfinite().all():
        raise Wrong("values are not finite, or were not written")
    error = relative_error(out[at], exact)
    if not error <= bound:
        raise Wrong(f"the error against fp64 is {error:.2e}, and the bound {bound:.2e}")
    return error, bound


def row_of(name, rival, point, times, accuracy, rotation, args):
    model = point.layer.model
    return {
        "suite": "four_bit_rivals", "machine": machine(), "commit": args.commit,
        "command": args.command, "date": time.strftime("%Y-%m-%d"), "model": model.name,
        "hidden": model.hidden, "intermediate": model.intermediate, "experts": model.experts,
        "top_k": model.top_k, "weights": model.weights, "tokens_in": rival.tokens_in,
        "routing": "given", "tokens": point.tokens, "beta_reached": round(point.balancedness(), 4),
        "experts_hit": point.experts_hit, "rival": name, "version": rival.version,
        "median_us": round(statistics.median(times), 2), "p10_us": round(percentile(times, 0.1), 2),
        "p90_us": round(percentile(times, 0.9), 2), "repeats": len(times),
        "touched_bytes": point.touched_bytes, "flops": point.flops, "rotation_copies": rotation[0],
        "rotation_passes": rotation[1], "error": accuracy[0], "error_bound": accuracy[1],
        "times_us": [round(us, 2) for us in times],
    }


HEADING = (f"{'rival':<15} {'model':<16} {'tokens':>6} {'time us':>10} {'p10 .. p90 us':>21} {'TFLOP/s':>8} "
           f"{'TB/s':>6} {'error':>8} {'bound':>8}")


def print_row(row):
    us = row["median_us"]
    print(f"{row['rival']:<15} {row['model']:<16} {row['tokens']:>6} {us:>10.1f} {row['p10_us']:>9.1f} .. "
          f"{row['p90_us']:>8.1f} {row['flops'] / us / 1e6:>8.1f} {row['touched_bytes'] / us / 1e6:>6.2f} "
          f"{row['error']:>8.1e} {row['error_bound']:>8.1e}", flush=True)


class OutOfTime(Exception):
    pass


class Unusable(Exception):
    """A kernel left the GPU's context in an error, so this process measures nothing more."""


def note(text):
    print(f"four_bit_rivals: {text}", file=sys.stderr, flush=True)


def check_device():
    try:
        torch.cuda.synchronize()
    except RuntimeError as problem:
        raise Unusable(problem) from problem


def measure_model(name, rival, model, args, clock):
    """Times a rival on a model's points; returns what failed."""
    rival.check_model(model)
    left = [tokens for tokens in args.tokens if (name, model.name, tokens) not in args.done]
    if not left:
        return []
    torch.manual_seed(args.seed)
    layer, points = Layer(model), []
    for tokens in left:
        # All rivals get the same tokens and routing, whichever points are measured.
        torch.manual_seed(args.seed + tokens)
        points.append(Point(layer, tokens))
    layouts = [rival.weights(layer)]
    rival.ready(layouts[0], points)
    failed = []
    for point in points:
        if args.deadline is not None and time.monotonic() > args.deadline:
            raise OutOfTime(f"--budget is spent before {name}, {model.name}, {point.tokens} tokens")
        rotation = rotation_of(point.touched_bytes)
        try:
            calls, outs = [], []
            while len(layouts) < rotation[0]:
                layouts.append(copy.deepcopy(layouts[0]))
            for layout in layouts[: rotation[0]]:
                call, out = rival.call(layout, point)
                call()
                calls.append(call)
                outs.append(out)
            accuracy = check(point, outs[0], rival.tokens_in)
            if any(not relative_error(out, outs[0].double()) <= accuracy[1] for out in outs):
                raise Wrong("copies of the weights give other results")
            times = timed(calls, rotation[1], args.repeats, clock)
            accuracy = max(accuracy, check(point, outs[0], rival.tokens_in))
        except (Wrong, RuntimeError, AssertionError, AttributeError, TypeError, ValueError, KeyError) as problem:
            # A point that breaks must not take the others along.
            note(f"{name}, {model.name}, {point.tokens} tokens: {type(problem).__name__}: {str(problem)[:800]}")
            failed.append((name, model.name, point.tokens))
            check_device()
            continue
        finally:
            calls = outs = call = out = None
            torch.cuda.empty_cache()
        row = row_of(name, rival, point, times, accuracy, rotation, args)
        print_row(row)
        if args.json:
            merge(args.json, [row], KEY)
    return failed


def measure(names, models, args):
    clock = Clock(4 * torch.cuda.get_device_properties(0).L2_cache_size)
    print(f"{machine()}, PyTorch {torch.__version__}\n\n{HEADING}", flush=True)
    failed, found = [], False
    for name in names:
        try:
            rival = RIVALS[name](args.directory)
        except (LeftOut, ImportError, OSError, AttributeError) as reason:
            note(f"{name} is left out: {type(reason).__name__}: {reason}")
            continue
        found = True
        for model in models:
            begin = time.monotonic()
            try:
                failed += measure_model(name, rival, model, args, clock)
            except LeftOut as reason:
                note(f"{name} is left out of {model.name}: {reason}")
            except (OutOfTime, Unusable) as reason:
                note(f"{reason}; what was measured is kept")
                return failed or isinstance(reason, Unusable), found
            except (RuntimeError, AssertionError, AttributeError, TypeError, ValueError, KeyError) as problem:
                note(f"{name}, {model.name}: {type(problem).__name__}: {str(problem)[:800]}")
                failed.append((name, model.name))
                check_device_or_end(failed)
            torch.cuda.empty_cache()
            note(f"{name}, {model.name}: {time.monotonic() - begin:.0f} s")
    return failed, found


def check_device_or_end(failed):
    try:
        check_device()
    except Unusable as problem:
        note(f"{problem}; what was measured is kept")
        sys.exit(1)


# ------------------------------------------------------------------------------------------------------ check


def check_parts():
    """Compares the parts that need no rival with slower, separate code."""
    faults = []

    def expect(what, right):
        print(f"{'ok   ' if right else 'WRONG'} {what}")
        if not right:
            faults.append(what)

    torch.manual_seed(1)
    codes = torch.randint(0, 16, (3, 4, 64), dtype=torch.uint8, device=DEVICE)
    expect("codes are unpacked as they were packed", torch.equal(unpacked(packed(codes)), codes))
    for kind in CODE_DEVIATION:
        w = FourBit.random(kind, 2, 32, 128)
        values = w.values(1, torch.float64)
        byte, scale = w.codes[1, 5, 20].item(), w.scales[1, 5, 1].item()
        for column, code in ((40, byte & 15), (41, byte >> 4)):
            value = (E2M1[code & 7] * (-1) ** (code >> 3) * 2.0 ** (scale - 127) if kind == "mxfp4" else
                     (code - 8) * scale)
            expect(f"{kind}: column {column} is {value:.4g}", values[5, column].item() == value)
        deviation = values.std().item() * 128**0.5
        expect(f"{kind}: values have {deviation:.2f} of the deviation that was asked for", 0.8 < deviation < 2.2)
        wide = w.padded(64, 256).values(1, torch.float64)
        same, sums = torch.equal(wide[:32, :128], values), [v.abs().sum() for v in (wide, values)]
        expect(f"{kind}: padding has zeros", same and sums[0] == sums[1])
    for model in MODELS:
        layer = Layer(model.shrunk())
        point = Point(layer, 5)
        at, exact, bound = point.exact("bf16")
        token, slow = at[-1].item(), torch.zeros(layer.model.hidden, dtype=torch.float64, device=DEVICE)
        for id, weight in zip(point.ids[token].tolist(), point.weights[token].tolist(), strict=True):
            v = layer.w13.values(id, torch.float64) @ point.x[token].double()
            v = v if layer.b13 is None else v + layer.b13[id].double()
            y = layer.w2.values(id, torch.float64) @ layer.activate(v.unsqueeze(0))[0]
            slow += weight * (y if layer.b2 is None else y + layer.b2[id].double())
        error = relative_error(exact[-1], slow)
        expect(f"{model.name}: the reference is {error:.1e} from a loop over a token's experts", error < 1e-12)
        wide = point.exact("fp8")[2]
        expect(f"{model.name}: bounds {bound:.1e} in bf16, {wide:.1e} in FP8", 2e-3 < bound < 3e-2 < wide < 0.2)
        layer.w2.codes[point.ids[token, 0]] ^= 8 if model.weights == "mxfp4" else 1
        moved = relative_error(point.exact("bf16")[1], exact)
        expect(f"{model.name}: other codes of one expert show ({moved:.1e})", moved > bound)
    return 1 if faults else 0


def check_imports(directory):
    """Loads every rival, which needs no GPU."""
    faults = 0
    sys.path.insert(0, str(directory))
    for name, kind in RIVALS.items():
        try:
            print(f"ok    {name}: {kind(directory).version}")
        except Exception as problem:  # whatever is missing
            print(f"WRONG {name}: {type(problem).__name__}: {problem}")
            faults += 1
    return faults


def done_before(path):
    """Rivals, models and tokens of rows of this card in a file."""
    if path is None or not path.exists() or not CUDA:
        return set()
    rows = json.loads(path.read_text())
    card = card_of(machine())
    return {(row["rival"], row["model"], row["tokens"]) for row in rows if card_of(row["machine"]) == card}


def join(path, rivals):
    """Rivals with tokens in bf16 or FP8 are those of our rows of either: the caller may choose."""
    rows = json.loads(path.read_text())
    for row in rows:
        point = {"model": row["model"], "experts": row["experts"], "tokens": row["tokens_per_rank"], "weights": row["weights"]}
        there = [rival for rival in rivals if card_of(rival["machine"]) == card_of(row["machine"])
                 and all(rival[name] == value for name, value in point.items())]
        fastest = min(there, key=lambda rival: rival["median_us"], default=None)
        if fastest is None:
            continue
        times = fastest["times_us"]
        row.update(rival=fastest["version"] + (", FP8" if fastest["tokens_in"] == "fp8" else ""), rival_us=fastest["median_us"],
                   rival_p10_us=percentile(times, 0.1), rival_p90_us=percentile(times, 0.9))
    write(path, rows)


def main():
    begin = time.monotonic()
    parser = parser_of(__doc__)
    parser.add_argument("--from", dest="directory", type=pathlib.Path, default=pathlib.Path("/tmp/rivals"))
    parser.add_argument("--rivals", default=",".join(RIVALS), help="with , between them, in this order")
    parser.add_argument("--models", default=",".join(model.name for model in MODELS), help="with , between them")
    parser.add_argument("--tokens", type=numbers, default=TOKENS)
    parser.add_argument("--repeats", type=int, default=0, help="default 12 to 200")
    parser.add_argument("--budget", type=float, help="seconds, after which no further point begins")
    parser.add_argument("--resume", action="store_true", help="leave out the points that the file of --json has")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--json", type=pathlib.Path)
    parser.add_argument("--join", type=pathlib.Path, help="a file of the command, whose rows get their fastest rival")
    parser.add_argument("--check", action="store_true", help="check the reference, and that the rivals load, instead")
    args = parser.parse_args()
    names, by_name = args.rivals.split(","), {model.name: model for model in MODELS}
    if unknown := set(names) - set(RIVALS):
        parser.error(f"--rivals has '{min(unknown)}'; use some of {', '.join(RIVALS)}")
    if unknown := set(args.models.split(",")) - set(by_name):
        parser.error(f"--models has '{min(unknown)}'; use some of {', '.join(by_name)}")
    if args.join:
        if args.json is None or not args.json.exists():
            parser.error("--join needs --json FILE, where the rivals' rows are")
        join(args.join, json.loads(args.json.read_text()))
        return 0
    args.command = command_of("bench/four_bit_rivals.py", sys.argv[1:])
    if args.check:
        faults = check_parts()
        return 1 if faults + (check_imports(args.directory) if args.directory.exists() else 0) else 0
    if not CUDA:
        note("there is no GPU")
        return SKIPPED
    # At the end: what the machine has goes first.
    sys.path += [str(args.directory), str(args.directory / "others")]
    args.deadline = begin + args.budget if args.budget else None
    args.done = done_before(args.json) if args.resume else set()
    with torch.no_grad():
        failed, found = measure(names, [by_name[name] for name in args.models.split(",")], args)
    if not found:
        return SKIPPED
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
