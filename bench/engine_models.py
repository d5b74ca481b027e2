"""Models for bench/engines.py: published geometries, and seeded weights on which a wrong layer shows.

An engine's own dummy weights are so small that a layer of zeros passes every test. Here a matrix [.., N, K]
has normal values of scale 1/sqrt(K), norms are 1, and the values depend on the parameter's name alone: two
engines, or one in bf16 and in fp32, have the same model.
"""

import json
import math
import pathlib
import random
import re
import zlib

BLOCK = 128
DECODE_PROMPT, DECODE_TOKENS = 128, 128  # of what TPOT is taken from
FP8_SPREAD = 64.0  # standard deviation of e4m3 values before their scale
# Names of the matrices that models of these families have in FP8, and in MXFP4.
_QUANTISED = {
    "fp8": re.compile(r"(qkv_proj\.weight|o_proj\.weight|w13_weight|w2_weight)$"),
    "mxfp4": re.compile(r"(w13_weight|w2_weight)$"),
}
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
E2M1_SPREAD = 2.93  # standard deviation of such numbers, if each is as likely
GROUP = 32  # columns that share a scale in MXFP4

_COMMON = {
    "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu",
    "initializer_range": 0.02, "router_aux_loss_coef": 0.001, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    "use_cache": True, "output_router_logits": False,
}
# config.json of allenai/OLMoE-1B-7B-0924, Qwen/Qwen3-30B-A3B and openai/gpt-oss-20b.
MODELS = {
    "olmoe": _COMMON | {
        "architectures": ["OlmoeForCausalLM"], "model_type": "olmoe", "hidden_size": 2048, "intermediate_size": 1024,
        "max_position_embeddings": 16384, "norm_topk_prob": False, "num_attention_heads": 16, "num_experts": 64,
        "num_experts_per_tok": 8, "num_hidden_layers": 16, "num_key_value_heads": 16, "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0, "vocab_size": 50304, "clip_qkv": None,
    },
    "qwen3-30b": _COMMON | {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "decoder_sparse_step": 1,
        "head_dim": 128, "hidden_size": 2048, "intermediate_size": 6144, "max_position_embeddings": 40960,
        "max_window_layers": 48, "mlp_only_layers": [], "moe_intermediate_size": 768, "norm_topk_prob": True,
        "num_attention_heads": 32, "num_experts": 128, "num_experts_per_tok": 8, "num_hidden_layers": 48,
        "num_key_value_heads": 4, "rms_norm_eps": 1e-6, "rope_theta": 1000000.0, "sliding_window": None,
        "use_sliding_window": False, "vocab_size": 151936,
    },
    "gpt-oss-20b": _COMMON | {
        "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "attention_bias": True, "head_dim": 64,
        "hidden_size": 2880, "intermediate_size": 2880, "initial_context_length": 4096,
        "max_position_embeddings": 131072, "num_attention_heads": 64, "num_experts_per_tok": 4,
        "num_hidden_layers": 24, "num_key_value_heads": 8, "num_local_experts": 32, "rms_norm_eps": 1e-5,
        "rope_theta": 150000, "sliding_window": 128, "swiglu_limit": 7.0, "vocab_size": 201088,
        "rope_scaling": {"beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "rope_type": "yarn", "truncate": False,
                         "original_max_position_embeddings": 4096},
    },
    # To try these programs: half a second to make.
    "tiny": _COMMON | {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "decoder_sparse_step": 1, "head_dim": 64,
        "hidden_size": 512, "intermediate_size": 512, "max_position_embeddings": 40960, "max_window_layers": 2,
        "mlp_only_layers": [], "moe_intermediate_size": 256, "norm_topk_prob": True, "num_attention_heads": 8,
        "num_experts": 16, "num_experts_per_tok": 4, "num_hidden_layers": 2, "num_key_value_heads": 4,
        "rms_norm_eps": 1e-6, "rope_theta": 1000000.0, "sliding_window": None, "use_sliding_window": False,
        "vocab_size": 4096,
    },
}


def prompts_of(vocabulary, count, length, seed):
    """Token ids; different seeds have no prefix in common."""
    draw = random.Random(seed)
    return [[draw.randrange(3, vocabulary) for _ in range(length)] for _ in range(count)]


def write(directory, model, dtype, layers=None):
    """Makes a model directory with a config.json alone; returns its path and the number of layers."""
    config = dict(MODELS[model])
    if layers is not None:
        config["num_hidden_layers"] = layers
    if config["model_type"] == "gpt_oss":
        kinds = ["sliding_attention", "full_attention"]
        config["layer_types"] = [kinds[i % 2] for i in range(config["num_hidden_layers"])]
    if dtype == "fp8":
        config["quantization_config"] = {
            "quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [BLOCK, BLOCK],
            # As published checkpoints have it.
            "modules_to_not_convert": ["lm_head"]
            + [f"model.layers.{i}.mlp.gate" for i in range(config["num_hidden_layers"])],
        }
    if dtype == "mxfp4":
        config["quantization_config"] = {
            "quant_method": "mxfp4",
            "modules_to_not_convert": [
                "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head",
            ],
        }
    if dtype == "fp32":
        config["torch_dtype"] = "float32"
    path = pathlib.Path(directory) / f"{model}-{dtype}-{config['num_hidden_layers']}"
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config, indent=1))
    return path, config["num_hidden_layers"]


def shares_of(model):
    """Of layers whose experts are spread over ranks, by the name before their parameters': the experts of all, and
    the first one here."""
    shares = {}
    for name, module in model.named_modules():
        there = getattr(module, "_expert_map", None)  # vLLM's
        if there is not None:
            shares[name + "."] = there.shape[0], int((there >= 0).nonzero()[0])
        elif getattr(module, "moe_ep_size", 1) > 1 and hasattr(module, "num_local_experts"):  # SGLang's
            shares[name + "."] = module.num_experts, module.moe_ep_rank * module.num_local_experts
    return shares


def values(parameters, seed=1, quantised=None, shares={}, sizes=None):
    """Yields (name, tensor) for each parameter of a module that was loaded from no checkpoint, and not processed.

    parameters: by name. quantised: they are fp32, and stand for a model of "fp8" or "mxfp4" weights: those values,
    exactly. shares: as of shares_of(). An expert has the same values whatever rank it is on. sizes: hidden and
    intermediate, where experts are in MXFP4, which engines pad with zeros.
    """
    import torch

    def drawn(name, shape, device, uniform=False):
        generator = torch.Generator(device).manual_seed(zlib.crc32(f"{seed} {name}".encode()))
        draw = torch.rand if uniform else torch.randn
        experts, first = next((share for prefix, share in shares.items() if name.startswith(prefix)), (None, 0))
        whole = shape if experts is None else (experts, *shape[1:])
        # Engines set the default type to the model's while they load.
        found = draw(whole, generator=generator, device=device, dtype=torch.float32)
        return found if experts is None else found[first : first + shape[0]].clone()

    def e4m3(name, shape, device):
        return drawn(name, shape, device).mul_(FP8_SPREAD).clamp_(-448, 448).to(torch.float8_e4m3fn)

    def scale_of(name, shape, device):
        """Of blocks of a matrix of this shape."""
        blocks = shape[:-2] + tuple(-(-n // BLOCK) for n in shape[-2:])
        return (drawn(name + " scale", blocks, device, uniform=True) + 0.5) / (FP8_SPREAD * shape[-1] ** 0.5)

    def mxfp4(name, shape, device):
        """Codes, two of them in a byte, the first one in its low half, and exponents of a matrix of this shape."""
        codes = (drawn(name, (*shape[:-1], shape[-1] // 2), device, uniform=True) * 256).to(torch.uint8)
        lowest = 127 + math.floor(-math.log2(E2M1_SPREAD * shape[-1] ** 0.5))
        groups = drawn(name + " scale", (*shape[:-1], shape[-1] // GROUP), device, uniform=True)
        return codes, (lowest + (groups < 0.5)).to(torch.uint8)

    def real(name, shape):
        """Of a matrix or bias of experts in MXFP4, its padding left out."""
        if sizes is None:
            return shape
        hidden, intermediate = sizes
        rows, columns = (2 * intermediate, hidden) if ".w13_" in name else (hidden, intermediate)
        return (shape[0], rows) if name.endswith("bias") else (shape[0], rows, columns)

    def padded(value, shape):
        """In the first corner of zeros of this shape."""
        if tuple(value.shape) == shape:
            return value
        wide = value.new_zeros(shape)
        wide[tuple(map(slice, value.shape))] = value
        return wide

    for name, parameter in parameters.items():
        shape, device = tuple(parameter.shape), parameter.device
        if re.search(r"weight_scale(_inv)?$", name) or (not shape and name.endswith("_scale")):
            continue  # with its matrix; or of a cache in FP8, which there is none of
        if parameter.dtype == torch.float8_e4m3fn:
            if not _QUANTISED["fp8"].search(name):
                raise SystemExit(f"parameter {name} is FP8, which is not known of an fp32 model")
            yield name + "_scale_inv", scale_of(name, shape, device)
            yield name, e4m3(name, shape, device)
        elif parameter.dtype == torch.uint8 and _QUANTISED["mxfp4"].search(name):
            codes, exponents = mxfp4(name, real(name, shape), device)
            yield name + "_scale", padded(exponents, (*shape[:-1], 2 * shape[-1] // GROUP))
            yield name, padded(codes, shape)
        elif quantised == "mxfp4" and _QUANTISED["mxfp4"].search(name):
            yield name, from_mxfp4(*mxfp4(name, shape, device))
        elif quantised == "fp8" and _QUANTISED["fp8"].search(name):
            wide = scale_of(name, shape, device).repeat_interleave(BLOCK, -2).repeat_interleave(BLOCK, -1)
            yield name, e4m3(name, shape, device).float() * wide[..., : shape[-2], : shape[-1]]
        elif "norm" in name and len(shape) == 1:
            yield name, torch.ones(shape, device=device)
        elif "embed" in name:
            yield name, drawn(name, shape, device).bfloat16()
        elif name.endswith(("w13_bias", "w2_bias")):
            yield name, padded((drawn(name, real(name, shape), device) / 4).bfloat16(), shape)
        elif "bias" in name or name.endswith("sinks"):
            yield name, (drawn(name, shape, device) / 4).bfloat16()
        elif len(shape) in (2, 3):
            yield name, (drawn(name, shape, device) / shape[-1] ** 0.5).bfloat16()
        else:
            raise SystemExit(f"parameter {name} of shape {shape} is none that values() knows")


def from_mxfp4(codes, exponents):
    """fp32 of what mxfp4() of values() makes."""
    import torch

    table = torch.tensor(E2M1, device=codes.device)
    numbers = torch.stack([table[(codes & 15).long()], table[(codes >> 4).long()]], dim=-1).flatten(-2)
    return numbers * torch.exp2(exponents.float() - 127).repeat_interleave(GROUP, -1)


def fill(model, seed=1, quantised=None):
    """Gives every parameter its value, in place."""
    import torch

    parameters, sizes = dict(model.named_parameters()), None
    if any(p.dtype == torch.uint8 for p in parameters.values()):
        sizes = model.config.hidden_size, model.config.intermediate_size
    with torch.no_grad():
        for name, value in values(parameters, seed, quantised, shares_of(model), sizes):
            parameters[name].data.copy_(value)


def checkpoint(parameters, heads, seed):
    """Yields (name, tensor) as a checkpoint of these values has them: experts and projections one by one.

    heads: widths of q, k and v.
    """
    for name, value in values(parameters, seed):
        found = re.search(r"(routed_experts\.)?(w13|w2)_weight(_scale_inv)?$", name)
        if found:
            suffix = ".weight" + (found[3] or "")
            for e, matrix in enumerate(value):
                start = f"{name[: found.start()]}{e}."
                if found[2] == "w2":
                    yield start + "down_proj" + suffix, matrix
                else:
                    gate, up = matrix.chunk(2)
                    yield start + "gate_proj" + suffix, gate
                    yield start + "up_proj" + suffix, up
        elif ".qkv_proj." in name:
            rows = heads if "scale" not in name else [n // BLOCK for n in heads]
            for part, matrix in zip("qkv", value.split(rows), strict=True):
                yield name.replace("qkv_proj", f"{part}_proj"), matrix
        else:
            yield name, value
