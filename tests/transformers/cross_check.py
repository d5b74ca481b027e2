#!/usr/bin/env python3
"""Runs `switchyard run` against the MoE blocks of Hugging Face transformers.

For every model family: a small model with random weights is built by transformers and written by
its save_pretrained; the model's own MoE block and `switchyard run --checkpoint` are given the same
activations; outputs, expert ids and routing weights must agree. In fp32 both do the same arithmetic
in a different order. In bf16 the yardstick is what the block itself loses against its fp32 run.

Exit codes: 0 all agree; 1 some do not; 77 torch, transformers or the binary is not there.
"""

import argparse
import copy
import dataclasses
import math
import os
import pathlib
import subprocess
import sys
import tempfile

SKIPPED = 77
MAX_F32_ERROR = 1e-5
MAX_BF16_ERROR_RATIO = 2.0
NUM_TOKENS = 61  # divisible by none of the rank counts

try:
    import torch
    import transformers
    from safetensors.torch import load_file, save_file
    from transformers import AutoConfig, AutoModelForCausalLM
except ImportError as error:
    print(f"skipped: {error}; pip install torch transformers safetensors")
    sys.exit(SKIPPED)


@dataclasses.dataclass
class Case:
    name: str
    model_type: str
    config: dict
    architecture: str = ""  # class name; empty: what AutoModelForCausalLM chooses
    # A factor that the block applies outside its router, but `switchyard` inside topk_weights.
    scale_outside_router: float = 1.0
    # Also written with one tensor for all experts, which transformers calls its own format.
    has_packed_form: bool = True
    bf16: bool = False


def sizes(hidden=64, layers=2, heads=4, **more):
    return dict(hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=heads,
                num_key_value_heads=2, vocab_size=96, max_position_embeddings=64,
                pad_token_id=0, bos_token_id=1, eos_token_id=2, **more)


MLA = dict(q_lora_rank=24, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8)
INDEXER = dict(index_topk=16, index_head_dim=16, index_n_heads=2)
LINEAR_ATTENTION = dict(linear_num_key_heads=2, linear_num_value_heads=2, linear_key_head_dim=16,
                        linear_value_head_dim=16, head_dim=16)
QWEN35 = dict(**sizes(layers=2), **LINEAR_ATTENTION, num_experts=32, num_experts_per_tok=8,
              moe_intermediate_size=24, shared_expert_intermediate_size=56)
LLAMA4 = dict(**sizes(layers=4), num_local_experts=16, num_experts_per_tok=1,
              intermediate_size=40, intermediate_size_mlp=72, interleave_moe_layer_step=2,
              head_dim=16)
MINIMAX_M3 = dict(**sizes(layers=3), num_local_experts=32, num_experts_per_tok=4,
                  intermediate_size=40, dense_intermediate_size=80, shared_intermediate_size=48,
                  routed_scaling_factor=2.0, swiglu_alpha=1.5, swiglu_limit=1.25, head_dim=16,
                  rotary_dim=8)

# Routing as published; everything else small. The clamps of clamped activations are lower than
# published ones so that activations of unit variance reach them.
CASES = [
    Case("OLMoE", "olmoe", dict(**sizes(), intermediate_size=48, num_experts=64,
                                num_experts_per_tok=8, norm_topk_prob=False), bf16=True),
    Case("OLMoE, renormalised", "olmoe", dict(**sizes(), intermediate_size=48, num_experts=64,
                                              num_experts_per_tok=8, norm_topk_prob=True)),
    Case("Mixtral", "mixtral", dict(**sizes(hidden=128), intermediate_size=96, num_local_experts=8,
                                    num_experts_per_tok=2), bf16=True),
    Case("Qwen2-MoE", "qwen2_moe",
         dict(**sizes(layers=3), intermediate_size=80, moe_intermediate_size=40, num_experts=60,
              num_experts_per_tok=4, shared_expert_intermediate_size=96, norm_topk_prob=False,
              mlp_only_layers=[1]), bf16=True),
    Case("Qwen3-MoE", "qwen3_moe",
         dict(**sizes(layers=4), intermediate_size=80, moe_intermediate_size=24, num_experts=128,
              num_experts_per_tok=8, norm_topk_prob=True, decoder_sparse_step=2, head_dim=16)),
    Case("Qwen3-Next", "qwen3_next",
         dict(**sizes(), **LINEAR_ATTENTION, intermediate_size=80, moe_intermediate_size=24,
              shared_expert_intermediate_size=24, num_experts=64, num_experts_per_tok=10,
              norm_topk_prob=True)),
    Case("Qwen3.5-MoE, text", "qwen3_5_moe_text", QWEN35),
    Case("Qwen3.5-MoE", "qwen3_5_moe",
         dict(text_config=QWEN35,
              vision_config=dict(depth=1, hidden_size=32, num_heads=2, intermediate_size=32,
                                 out_hidden_size=64, num_position_embeddings=16)),
         architecture="Qwen3_5MoeForConditionalGeneration"),
    Case("DeepSeek-V2", "deepseek_v2",
         dict(**sizes(layers=2) | dict(num_key_value_heads=4), **MLA, intermediate_size=80,
              moe_intermediate_size=24, n_routed_experts=160, num_experts_per_tok=6,
              n_shared_experts=2, first_k_dense_replace=1, topk_method="group_limited_greedy",
              n_group=8, topk_group=3, routed_scaling_factor=16.0, norm_topk_prob=False)),
    Case("DeepSeek-V2-Lite", "deepseek_v2",
         dict(**sizes(layers=2) | dict(num_key_value_heads=4), **MLA, intermediate_size=80,
              moe_intermediate_size=24, n_routed_experts=64, num_experts_per_tok=6,
              n_shared_experts=2, first_k_dense_replace=1, topk_method="greedy",
              n_group=1, topk_group=1, routed_scaling_factor=1.0, norm_topk_prob=False)),
    Case("DeepSeek-V3", "deepseek_v3",
         dict(**sizes(layers=3) | dict(num_key_value_heads=4), **MLA, intermediate_size=80,
              moe_intermediate_size=24, n_routed_experts=256, num_experts_per_tok=8,
              n_shared_experts=1, first_k_dense_replace=2, n_group=8, topk_group=4,
              routed_scaling_factor=2.5, norm_topk_prob=True), bf16=True),
    Case("Kimi-K2 (as V3)", "deepseek_v3",
         dict(**sizes(layers=2) | dict(num_key_value_heads=4), **MLA, intermediate_size=80,
              moe_intermediate_size=24, n_routed_experts=384, num_experts_per_tok=8,
              n_shared_experts=1, first_k_dense_replace=1, n_group=1, topk_group=1,
              routed_scaling_factor=2.827, norm_topk_prob=True)),
    Case("DeepSeek-V3.2", "deepseek_v32",
         dict(**sizes(layers=2) | dict(num_key_value_heads=4), **MLA, **INDEXER,
              intermediate_size=80, moe_intermediate_size=24, n_routed_experts=64,
              num_experts_per_tok=8, n_shared_experts=1, first_k_dense_replace=1, n_group=8,
              topk_group=4, routed_scaling_factor=2.5, norm_topk_prob=True)),
    Case("DeepSeek-V4", "deepseek_v4",
         dict(**sizes(layers=3) | dict(num_key_value_heads=1), head_dim=16, q_lora_rank=24,
              o_lora_rank=16, o_groups=2, qk_rope_head_dim=8, **INDEXER,
              moe_intermediate_size=40, n_routed_experts=64, num_experts_per_tok=6,
              n_shared_experts=1, routed_scaling_factor=1.5, swiglu_limit=1.25,
              mlp_layer_types=["hash_moe", "moe", "moe"],
              layer_types=["sliding_attention"] * 3)),
    Case("GLM-4.5", "glm4_moe",
         dict(**sizes(), intermediate_size=80, moe_intermediate_size=24, n_routed_experts=128,
              num_experts_per_tok=8, n_shared_experts=1, first_k_dense_replace=1, n_group=1,
              topk_group=1, routed_scaling_factor=2.5, norm_topk_prob=True, head_dim=16)),
    Case("GLM-5", "glm_moe_dsa",
         dict(**sizes(layers=2) | dict(num_key_value_heads=4), **MLA, **INDEXER,
              intermediate_size=80, moe_intermediate_size=24, n_routed_experts=64,
              num_experts_per_tok=8, n_shared_experts=1, first_k_dense_replace=1, n_group=1,
              topk_group=1, routed_scaling_factor=2.5, norm_topk_prob=True)),
    Case("GPT-OSS", "gpt_oss",
         dict(**sizes(), intermediate_size=72, num_local_experts=32, num_experts_per_tok=4,
              swiglu_limit=1.5, head_dim=16), has_packed_form=False, bf16=True),
    Case("GPT-OSS, other alpha", "gpt_oss",
         dict(**sizes(), intermediate_size=72, num_local_experts=32, num_experts_per_tok=4,
              swiglu_limit=1.5, swiglu_alpha=1.25, head_dim=16), has_packed_form=False),
    Case("Llama-4, text", "llama4_text", LLAMA4, has_packed_form=False),
    Case("Llama-4", "llama4",
         dict(text_config=LLAMA4,
              vision_config=dict(hidden_size=32, num_hidden_layers=1, num_attention_heads=2,
                                 intermediate_size=32, vision_output_dim=32, image_size=28,
                                 patch_size=14, projector_input_dim=32, projector_output_dim=32)),
         architecture="Llama4ForConditionalGeneration", has_packed_form=False),
    Case("MiniMax-M2", "minimax_m2",
         dict(**sizes(), intermediate_size=24, num_local_experts=256, num_experts_per_tok=8,
              head_dim=16, rotary_dim=8)),
    Case("MiniMax-M3, text", "minimax_m3_vl_text",
         dict(**MINIMAX_M3, mlp_layer_types=["dense", "sparse", "sparse"]),
         architecture="MiniMaxM3VLForCausalLM", scale_outside_router=2.0),
    Case("MiniMax-M3", "minimax_m3_vl",
         dict(text_config=dict(**MINIMAX_M3, moe_layer_freq=[0, 1, 1]),
              vision_config=dict(hidden_size=32, num_hidden_layers=1, num_attention_heads=2,
                                 intermediate_size=32)),
         architecture="MiniMaxM3SparseForConditionalGeneration", scale_outside_router=2.0),
    Case("Phi-3.5-MoE", "phimoe",
         dict(**sizes(), intermediate_size=48, num_local_experts=16, num_experts_per_tok=2,
              router_jitter_noise=0.01)),
    # A threshold that keeps several experts in the mixer's softmax; the published one rarely does.
    Case("Phi-3.5-MoE, jitter 0.2", "phimoe",
         dict(**sizes(), intermediate_size=48, num_local_experts=16, num_experts_per_tok=2,
              router_jitter_noise=0.2), bf16=True),
    Case("Jamba", "jamba",
         dict(**sizes(layers=4), intermediate_size=48, num_experts=16, num_experts_per_tok=2,
              expert_layer_period=2, expert_layer_offset=1, attn_layer_period=4,
              attn_layer_offset=2, mamba_d_state=4, use_mamba_kernels=False)),
    Case("DBRX", "dbrx",
         dict(d_model=64, n_heads=4, n_layers=2, max_seq_len=64, vocab_size=96,
              attn_config=dict(kv_n_heads=2, rope_theta=10000.0),
              ffn_config=dict(ffn_hidden_size=48, moe_num_experts=16, moe_top_k=4)),
         has_packed_form=False, bf16=True),
    Case("DBRX, no norm", "dbrx",
         dict(d_model=64, n_heads=4, n_layers=2, max_seq_len=64, vocab_size=96,
              attn_config=dict(kv_n_heads=2, rope_theta=10000.0),
              ffn_config=dict(ffn_hidden_size=48, moe_num_experts=16, moe_top_k=4,
                              moe_normalize_expert_weights=None)),
         has_packed_form=False),
]


def build(case, dtype):
    """A model with random weights. Raises if this transformers does not know the family."""
    config = AutoConfig.for_model(case.model_type, **case.config)
    # The loop over experts that the modeling file spells out, instead of a fused kernel.
    for part in (config, config.get_text_config()):
        part._experts_implementation = "eager"
    if case.architecture:
        model = getattr(transformers, case.architecture)(config)
    else:
        model = AutoModelForCausalLM.from_config(config)
    if case.model_type == "gpt_oss":
        # Its class has the published numbers as constants, and does not look at the configuration.
        for module in model.modules():
            if hasattr(module, "limit") and hasattr(module, "alpha"):
                module.limit = case.config["swiglu_limit"]
                module.alpha = case.config.get("swiglu_alpha", module.alpha)
    assert model.dtype == torch.float32, f"transformers built the model in {model.dtype}"
    # Not for fp32: Llama-4's complex rotary buffer would be warned about.
    return model.eval() if dtype == torch.float32 else model.eval().to(dtype)


def moe_blocks(model):
    """(layer index, block) of every MoE layer, and the indices of the dense ones."""
    decoder = model.get_decoder()
    while not hasattr(decoder, "layers") and not hasattr(decoder, "blocks"):
        decoder = decoder.model
    layers = decoder.blocks if hasattr(decoder, "blocks") else decoder.layers
    moe, dense = [], []
    for index, layer in enumerate(layers):
        blocks = [block for block in layer.children() if hasattr(block, "experts")]
        assert len(blocks) <= 1, f"layer {index} has {len(blocks)} MoE blocks"
        moe += [(index, block) for block in blocks]
        dense += [] if blocks else [index]
    return moe, dense


@torch.no_grad()
def fill(block, hidden, generator):
    """Random weights that keep activations at unit variance and spread the router's logits."""
    for name, tensor in block.state_dict().items():
        leaf = name.split(".")[-1]
        if tensor.dtype == torch.int64:  # token id -> distinct expert ids
            num_experts = block.gate.weight.shape[0]
            rows = [torch.randperm(num_experts, generator=generator)[: tensor.shape[1]]
                    for _ in range(tensor.shape[0])]
            tensor.copy_(torch.stack(rows))
            continue
        values = torch.randn(tensor.shape, generator=generator)
        if leaf == "e_score_correction_bias":
            values *= 0.1  # a few times the distance between neighbouring scores
        elif tensor.ndim == 1 or leaf.endswith("bias"):
            values *= 0.5
        else:
            values *= (1.5 if name.startswith(("gate.weight", "router")) else 1.0)
            values /= math.sqrt(hidden)
        tensor.copy_(values.to(tensor.dtype))


def routing_of(case, block, x, token_ids):
    """The block's own (ids [T, K], weights [T, K]) for tokens x [T, H]."""
    if hasattr(block, "route_tokens_to_experts"):  # DBRX, Jamba
        if case.model_type == "dbrx":
            weights, ids = block.route_tokens_to_experts(block.router(x))
            return ids, weights
        return block.route_tokens_to_experts(x, block.router(x))
    router = block.gate if hasattr(block, "gate") else block.router
    if getattr(block, "is_hash", False):
        _, weights, ids = router(x, token_ids)
    elif case.model_type == "minimax_m2":
        _, weights, ids = router(x, block.e_score_correction_bias)
    elif case.model_type.startswith("llama4"):
        scores, _ = router(x)
        weights, ids = scores.topk(router.top_k, dim=-1)
    else:
        _, weights, ids = router(x)
    return ids, weights * case.scale_outside_router


@torch.no_grad()
def run_block(case, block, x, token_ids):
    more = {"input_ids": token_ids[None]} if getattr(block, "is_hash", False) else {}
    output = block(x[None].clone(), **more)
    output = output[0] if isinstance(output, tuple) else output
    return output.reshape(x.shape), *routing_of(case, block, x.clone(), token_ids)


def run_switchyard(binary, directory, layer, inputs, ranks, compute):
    save_file(inputs, directory / "input.safetensors")
    command = [binary, "run", "--checkpoint", directory / "model", "--layer", str(layer),
               "--input", directory / "input.safetensors", "--output", directory / "y.safetensors",
               "--ranks", str(ranks), "--threads", "1", "--compute", compute, "--repeat", "1",
               "--quiet"]
    # A launcher's variables would make the command join that launcher's world.
    environment = {key: value for key, value in os.environ.items()
                   if key not in ("RANK", "WORLD_SIZE")}
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=120,
                          env=environment)
    if done.returncode != 0:
        raise RuntimeError(f"exit code {done.returncode}: {done.stderr.strip()}")
    return load_file(directory / "y.safetensors")


def relative_error(actual, expected):
    expected = expected.double()
    return ((actual.double() - expected).norm() / expected.norm()).item()


def dense_weights(ids, weights, num_experts):
    """[T, E]: the same routing whatever the order of the chosen experts."""
    return torch.zeros(ids.shape[0], num_experts).scatter_(1, ids.long(), weights.float())


def same_experts(ids, others):
    return (ids.long().sort(dim=-1).values == others.long().sort(dim=-1).values).all(dim=-1)


class Check:
    def __init__(self, binary, filters):
        self.binary, self.filters = binary, filters
        self.failures = 0
        self.ran = 0

    def tell(self, case, what, ok, detail):
        self.ran += 1
        self.failures += not ok
        print(f"{case.name:24} transformers {transformers.__version__}  {what:30} {detail}  "
              f"{'PASS' if ok else 'FAIL'}", flush=True)

    def all(self):
        for case in CASES:
            if self.filters and not any(text in case.name.lower() for text in self.filters):
                continue
            if case.model_type not in transformers.CONFIG_MAPPING:
                print(f"{case.name:24} transformers {transformers.__version__}  does not have it")
                continue
            self.check(case, torch.float32, save_original_format=True, all_ranks=(1, 2, 3))
            if case.has_packed_form:
                self.check(case, torch.float32, save_original_format=False, all_ranks=(2,))
            if case.bf16:
                self.check(case, torch.bfloat16, save_original_format=True, all_ranks=(1, 2, 3))

    def check(self, case, dtype, save_original_format, all_ranks):
        form = "f32" if dtype == torch.float32 else "bf16"
        form += "" if save_original_format else " packed"
        try:
            self.check_form(case, dtype, form, save_original_format, all_ranks)
        except Exception as error:  # one family must not hide the others
            self.tell(case, form, False, f"{type(error).__name__}: {error}")

    def check_form(self, case, dtype, form, save_original_format, all_ranks):
        generator = torch.Generator().manual_seed(sum(case.name.encode()))
        model = build(case, dtype)
        hidden = model.config.get_text_config().hidden_size
        vocabulary = model.config.get_text_config().vocab_size
        moe, dense = moe_blocks(model)
        for _, block in moe:
            fill(block, hidden, generator)
        with tempfile.TemporaryDirectory(prefix="switchyard_transformers_") as temporary:
            directory = pathlib.Path(temporary)
            # Small enough that the experts of a layer are spread over shards.
            model.save_pretrained(directory / "model", max_shard_size="300KB",
                                  save_original_format=save_original_format)
            for layer, block in moe:
                x = torch.randn(NUM_TOKENS, hidden, generator=generator).to(dtype)
                token_ids = torch.randint(vocabulary, (NUM_TOKENS,), generator=generator)
                # Layers differ in their tensors; one of them shows that ranks make no difference.
                ranks = all_ranks if layer == moe[0][0] else all_ranks[-1:]
                self.compare(case, directory, layer, block, x, token_ids, form, ranks)
            for layer in dense[:1]:
                self.refuse(case, directory, layer, form, hidden)

    def compare(self, case, directory, layer, block, x, token_ids, form, all_ranks):
        inputs = {"activations": x}
        if getattr(block, "is_hash", False):
            inputs["token_ids"] = token_ids
        is_f32 = x.dtype == torch.float32
        # In bf16, too, routing is compared with fp32 logits, which is what `switchyard` computes.
        exact = copy.deepcopy(block).float()
        expected, ids, weights = run_block(case, exact, x.float(), token_ids)
        same = torch.ones(NUM_TOKENS, dtype=torch.bool)
        limit = MAX_F32_ERROR
        if not is_f32:
            # Tokens that the block's own bf16 logits send elsewhere would make its error no
            # yardstick.
            own, own_ids, _ = run_block(case, block, x, token_ids)
            same = same_experts(own_ids, ids)
            limit = MAX_BF16_ERROR_RATIO * relative_error(own[same], expected[same])
        for ranks in all_ranks:
            got = run_switchyard(self.binary, directory, layer, inputs, ranks,
                                 "f32" if is_f32 else "bf16")
            error = relative_error(got["output"][same], expected[same])
            num_experts = max(int(ids.max()), int(got["topk_ids"].max())) + 1
            weight_error = relative_error(
                dense_weights(got["topk_ids"], got["topk_weights"], num_experts),
                dense_weights(ids, weights, num_experts))
            misrouted = int((~same_experts(got["topk_ids"], ids)).sum())
            ok = error <= limit and weight_error <= MAX_F32_ERROR and misrouted == 0
            detail = (f"error {error:.1e} (at most {limit:.1e}), weights {weight_error:.1e}, "
                      f"misrouted {misrouted}")
            if not is_f32:
                detail += f" (transformers in bf16: {int((~same).sum())})"
            self.tell(case, f"{form}, layer {layer}, ranks {ranks}", ok, detail)

    def refuse(self, case, directory, layer, form, hidden):
        what = f"{form}, dense layer {layer}"
        try:
            run_switchyard(self.binary, directory, layer, {"activations": torch.zeros(1, hidden)},
                           1, "f32")
        except RuntimeError as error:
            self.tell(case, what, "exit code 2" in str(error) and "not an MoE layer" in str(error),
                      "refused")
            return
        self.tell(case, what, False, "ran as an MoE layer")


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--switchyard", required=True, help="the binary")
    parser.add_argument("--only", action="append", default=[], metavar="TEXT",
                        help="families whose name contains TEXT; may be repeated")
    arguments = parser.parse_args()
    if not os.access(arguments.switchyard, os.X_OK):
        print(f"skipped: {arguments.switchyard} is not an executable; build switchyard_cli")
        return SKIPPED
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.manual_seed(0)
    check = Check(arguments.switchyard, [text.lower() for text in arguments.only])
    check.all()
    print(f"{check.ran - check.failures} of {check.ran} comparisons passed")
    return 1 if check.failures or not check.ran else 0


if __name__ == "__main__":
    sys.exit(main())
