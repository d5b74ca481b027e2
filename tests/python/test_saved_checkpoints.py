"""The command on checkpoints that transformers saves, of every family whose checkpoints it reads.

Right is what transformers itself computes from the same files: its own MoE block, eager, in fp32.
Keys of config.json are taken out and changed too, so that both sides read every default, and leave
out the same keys."""

import inspect
import json
import os
import pathlib
import re

import pytest
import torch

transformers = pytest.importorskip("transformers", minversion="5.0")
transformers.utils.logging.disable_progress_bar()

from safetensors.torch import load_file, save_file

from conftest import python, started
import switchyard
from reference import error

H, I, E, K, T = 64, 40, 16, 3, 20
COMMON = dict(hidden_size=H, num_hidden_layers=3, vocab_size=64, num_experts_per_tok=K)
COMMON.update(max_position_embeddings=64, pad_token_id=0)
HEADS = dict(num_attention_heads=2, num_key_value_heads=1)
ATTENTION = dict(HEADS, head_dim=32)
LATENT = dict(num_attention_heads=2, num_key_value_heads=2, q_lora_rank=16, kv_lora_rank=16)
LATENT.update(qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=16)
INDEXER = dict(index_n_heads=2, index_head_dim=16, index_topk=4)
QWEN = dict(intermediate_size=96, moe_intermediate_size=I, num_experts=E)
ROUTED = dict(intermediate_size=96, moe_intermediate_size=I, n_routed_experts=E)
LOCAL = dict(intermediate_size=I, num_local_experts=E)
SHARED = dict(shared_expert_intermediate_size=24)
FULL = dict(layer_types=["full_attention"] * 3)
GROUPS = dict(n_group=4, topk_group=2, first_k_dense_replace=0)
VISION = dict(depth=1, hidden_size=32, intermediate_size=32, num_heads=2, out_hidden_size=H)
ROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 6, 6]}

# model_type: the class of its configuration, and sizes that make it tiny.
FAMILIES = {
    "olmoe": ("OlmoeConfig", dict(HEADS, intermediate_size=I, num_experts=E)),
    "qwen2_moe": ("Qwen2MoeConfig", dict(QWEN, **HEADS, **SHARED)),
    "qwen3_moe": ("Qwen3MoeConfig", dict(QWEN, **ATTENTION)),
    "qwen3_vl_moe_text": (
        "Qwen3VLMoeTextConfig",
        dict(QWEN, **ATTENTION, rope_parameters=ROPE),
    ),
    "qwen3_vl_moe": (
        "Qwen3VLMoeConfig",
        dict(
            text_config=dict(COMMON, **QWEN, **ATTENTION, rope_parameters=ROPE),
            vision_config=dict(VISION, deepstack_visual_indexes=[0]),
        ),
    ),
    "qwen3_next": ("Qwen3NextConfig", dict(QWEN, **ATTENTION, **SHARED, **FULL)),
    "qwen3_5_moe_text": (
        "Qwen3_5MoeTextConfig",
        dict(ATTENTION, moe_intermediate_size=I, num_experts=E, **SHARED, **FULL),
    ),
    "qwen3_5_moe": (
        "Qwen3_5MoeConfig",
        dict(
            text_config=dict(
                COMMON, **ATTENTION, moe_intermediate_size=I, num_experts=E, **SHARED, **FULL
            ),
            vision_config=VISION,
        ),
    ),
    "mixtral": ("MixtralConfig", dict(LOCAL, **ATTENTION)),
    "deepseek_v2": ("DeepseekV2Config", dict(ROUTED, **LATENT)),
    "deepseek_v3": ("DeepseekV3Config", dict(ROUTED, **LATENT, **GROUPS)),
    "deepseek_v32": ("DeepseekV32Config", dict(ROUTED, **LATENT, **INDEXER, **GROUPS)),
    "glm4_moe": ("Glm4MoeConfig", dict(ROUTED, **ATTENTION, first_k_dense_replace=0)),
    "glm4v_moe_text": (
        "Glm4vMoeTextConfig",
        dict(ROUTED, **HEADS, first_k_dense_replace=0, rope_parameters=ROPE),
    ),
    "glm_moe_dsa": (
        "GlmMoeDsaConfig",
        dict(ROUTED, **LATENT, **INDEXER, first_k_dense_replace=0),
    ),
    "deepseek_v4": (
        "DeepseekV4Config",
        dict(
            INDEXER, moe_intermediate_size=I, n_routed_experts=E, num_attention_heads=2,
            head_dim=32, q_lora_rank=16, o_groups=1, o_lora_rank=16, mlp_layer_types=["moe"] * 3,
            swiglu_limit=1.5,
        ),
    ),
    "llama4_text": ("Llama4TextConfig", dict(LOCAL, **ATTENTION, intermediate_size_mlp=96)),
    "gpt_oss": ("GptOssConfig", dict(LOCAL, **ATTENTION)),
    "minimax_m2": ("MiniMaxM2Config", dict(LOCAL, **ATTENTION)),
    "minimax_m3_vl_text": (
        "MiniMaxM3VLTextConfig",
        dict(LOCAL, **ATTENTION, dense_intermediate_size=96, shared_intermediate_size=24, rotary_dim=16),
    ),
    "dbrx": (
        "DbrxConfig",
        dict(d_model=H, n_heads=2, n_layers=3, vocab_size=64, attn_config={"kv_n_heads": 1, "clip_qkv": 8}),
    ),
    "phimoe": ("PhimoeConfig", dict(LOCAL, **HEADS, num_experts_per_tok=2)),
    "jamba": (
        "JambaConfig",
        dict(
            HEADS, intermediate_size=I, num_experts=E, attn_layer_period=1, attn_layer_offset=0,
            expert_layer_period=1, expert_layer_offset=0, use_mamba_kernels=False,
        ),
    ),
}

ABSENT = object()
# Keys that change what a layer computes, and values that config.json may give them. Every family is
# tried with all of them: one that its code does not read must change nothing.
EDITS = [
    ("norm_topk_prob", ABSENT),
    ("norm_topk_prob", True),
    ("norm_topk_prob", False),
    ("routed_scaling_factor", ABSENT),
    ("routed_scaling_factor", 1.75),
    ("hidden_act", ABSENT),
    ("hidden_act", "gelu"),
    ("swiglu_limit", ABSENT),
    ("swiglu_limit", 0.5),
    ("swiglu_alpha", ABSENT),
    ("swiglu_alpha", 1.25),
    ("use_routing_bias", False),
    ("n_group", ABSENT),
    ("topk_group", ABSENT),
    ("n_shared_experts", ABSENT),
    ("mlp_bias", False),
    ("router_jitter_noise", 0.25),
    ("router_jitter_noise", ABSENT),
    ("scoring_func", ABSENT),
    ("scoring_func", "sigmoid"),
    ("moe_layer_freq", 1),
    ("decoder_sparse_step", ABSENT),
    ("mlp_only_layers", ABSENT),
]
EDITS += [(key, None) for key in dict(EDITS)]
# The reader refuses these on purpose: the value asks for what transformers does not do.
REFUSED = {("deepseek_v2", "scoring_func", "sigmoid")}


def configured(family):
    name, sizes = FAMILIES[family]
    made = getattr(transformers, name, None)
    if made is None:
        pytest.skip(f"transformers {transformers.__version__} has no {name}")
    if family == "dbrx":
        config = made(**sizes, ffn_config=dict(ffn_hidden_size=I, moe_num_experts=E, moe_top_k=K))
        config.attn_config.rope_theta = 1e4
        return config
    config = made(**(sizes if "text_config" in sizes else {**COMMON, **sizes}))
    config._experts_implementation = "eager"
    return config


def model_of(config):
    try:
        return transformers.AutoModelForCausalLM.from_config(config)
    except (ValueError, TypeError):
        return transformers.AutoModel.from_config(config)


def block_of(model, layer=0):
    """The module of a layer that holds its experts, or None in a dense layer."""
    for name, module in model.named_modules():
        if re.search(rf"(layers|blocks)\.{layer}\.", name + ".") and hasattr(module, "experts"):
            return module
    return None


@torch.no_grad()
def output_of(block, x):
    for module in block.modules():
        if getattr(module, "config", None) is not None:
            module.config._experts_implementation = "eager"
    out = block(x[None])
    return (out[0] if isinstance(out, tuple) else out).reshape(x.shape)


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Threads only get in each other's way with layers as small as these."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A function that saves a family's model once: (directory, the model)."""
    made = {}

    def save(family):
        if family not in made:
            torch.manual_seed(0)
            model = model_of(configured(family)).float().eval()
            with torch.no_grad():
                for tensor in model.state_dict().values():
                    if tensor.is_floating_point():
                        tensor.copy_(torch.randn(tensor.shape) * 0.15)
            directory = tmp_path_factory.mktemp(family)
            model.save_pretrained(directory)
            made[family] = directory, model
        return made[family]

    return save


def edited(directory, target, changes):
    """A copy of a checkpoint, its weights linked, with keys of config.json changed."""
    target.mkdir(exist_ok=True)
    for file in pathlib.Path(directory).iterdir():
        if file.name != "config.json" and not (target / file.name).exists():
            os.symlink(file, target / file.name)
    config = json.loads((pathlib.Path(directory) / "config.json").read_text())
    of_layers = config.get("text_config", config)
    for key, value in changes.items():
        if value is ABSENT:
            of_layers.pop(key, None)
        else:
            of_layers[key] = value
    (target / "config.json").write_text(json.dumps(config))
    return config


def run(checkpoint, scratch, x, layer=0):
    """(exit code, stderr, output) of the command."""
    save_file({"activations": x}, scratch / "x.safetensors")
    command = os.environ["SWITCHYARD_COMMAND"]
    arguments = ["run", "--checkpoint", checkpoint, "--layer", str(layer), "--compute", "f32"]
    arguments += ["--input", scratch / "x.safetensors", "--output", scratch / "y.safetensors"]
    arguments += ["--repeat", "1", "--threads", "1", "--quiet"]
    done = started(command, *arguments)
    output = load_file(scratch / "y.safetensors")["output"] if done.returncode == 0 else None
    return done.returncode, done.stderr, output


@pytest.mark.parametrize("family", FAMILIES)
def test_a_saved_checkpoint_computes_what_its_block_computes(saved, tmp_path, family):
    directory, model = saved(family)
    x = torch.randn(T, H)
    code, stderr, ours = run(directory, tmp_path, x)
    assert code == 0, stderr
    assert error(ours, output_of(block_of(model), x)) < 1e-5


def computed_by(block, config, x):
    """What a block of the same class and weights, but of another config, makes of `x`. None if
    transformers refuses that config, needs other weights for it, or cannot compute with it."""
    try:
        config = transformers.AutoConfig.from_pretrained(config).get_text_config()
        config._experts_implementation = "eager"
        parameters = inspect.signature(type(block).__init__).parameters
        made = type(block)(config, layer_idx=0) if "layer_idx" in parameters else type(block)(config)
        made.load_state_dict(block.state_dict())
        return output_of(made.eval(), x)
    except Exception:
        return None


def is_read(family, config, key):
    """Whether this version of transformers reads the key as the newest one does."""
    return family != "gpt_oss" or not key.startswith("swiglu") or hasattr(config, key)


@pytest.mark.parametrize("family", FAMILIES)
def test_keys_mean_what_transformers_makes_of_them(saved, tmp_path, family):
    directory, model = saved(family)
    block = block_of(model)
    x = torch.randn(T, H)
    unchanged = json.loads((directory / "config.json").read_text())
    wrong, compared = [], 0
    for key, value in EDITS:
        if not is_read(family, model.config, key):
            continue
        if edited(directory, tmp_path, {key: value}) == unchanged:
            continue
        right = computed_by(block, tmp_path, x)
        if right is None:
            continue
        shown = f"{key} {'absent' if value is ABSENT else value}: "
        refused = (family, key, value) in REFUSED
        try:
            layer = switchyard.MoeLayer.from_checkpoint(tmp_path, 0, max_tokens=T, compute="f32", num_threads=1)
            ours = layer(x)
            if refused:
                wrong.append(shown + "was not refused")
            elif not error(ours, right) < 1e-5:
                wrong.append(shown + f"error {error(ours, right):.1e}")
        except switchyard.Error as problem:
            if not refused or f"'{key}'" not in str(problem):
                wrong.append(shown + str(problem))
        compared += 1
    assert not wrong, "\n".join(wrong)
    assert compared >= 10


# Keys that say which layers have experts, and values for a model of 3 layers.
LAYERS = {
    "first_k_dense_replace": [ABSENT, 1],
    "mlp_layer_types": [ABSENT, ["dense", "sparse", "dense"], ["sparse", "dense", "sparse"]],
    "moe_layer_freq": [ABSENT, [0, 1, 0], [1, 0, 1]],
    "decoder_sparse_step": [ABSENT, 2],
    "mlp_only_layers": [ABSENT, None, [1]],
    "interleave_moe_layer_step": [ABSENT, 2],
    "moe_layers": [ABSENT, None, [1]],
    "expert_layer_period": [ABSENT, 2, 3],
    "expert_layer_offset": [ABSENT, 1],
}


@pytest.mark.parametrize("family", FAMILIES)
def test_the_same_layers_have_experts(saved, tmp_path, family):
    directory, model = saved(family)
    unchanged = json.loads((directory / "config.json").read_text())
    wrong = []
    for key, values in LAYERS.items():
        for value in values:
            config = edited(directory, tmp_path, {key: value})
            if config == unchanged:
                continue
            try:
                with torch.device("meta"):
                    other = model_of(transformers.AutoConfig.from_pretrained(tmp_path))
            except Exception:
                continue  # transformers refuses this value
            right = [layer for layer in range(3) if block_of(other, layer) is not None]
            if not right:
                continue
            stated = "" if value is ABSENT else value
            ours = []
            for layer in range(3):
                try:
                    switchyard.MoeLayer.from_checkpoint(tmp_path, layer, max_tokens=1, num_threads=1)
                    ours.append(layer)
                except switchyard.MissingTensor:
                    ours.append(layer)  # it has experts, by a table that was not saved
                except switchyard.InvalidArgument as problem:
                    assert "is not an MoE layer" in str(problem)
            if ours != right:
                wrong.append(f"{key} {stated}: {ours}, but transformers has {right}; {config}")
    assert not wrong, "\n".join(wrong)


CUT = """
import faulthandler, os, sys, torch, switchyard
faulthandler.enable()
directory, shard, left = sys.argv[1], sys.argv[2], int(sys.argv[3])
layer = switchyard.MoeLayer.from_checkpoint(directory, 0, max_tokens=8, num_threads=2)
x = torch.randn(8, 64)
layer(x)
os.truncate(shard, left)
for expected in (switchyard.InvalidFile, switchyard.Error):
    try:
        layer(x)
        sys.exit("a layer whose weights are gone gave a result")
    except expected as problem:
        told = str(problem)
    if expected is switchyard.InvalidFile:
        assert shard in told and "became shorter while it was in use" in told, told
"""


@pytest.mark.parametrize("part", [0, 0.5, 0.001])
def test_a_checkpoint_that_becomes_shorter_is_an_error_and_not_the_end(saved, tmp_path, part):
    directory, _ = saved("olmoe")
    for file in directory.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    shard = tmp_path / "model.safetensors"
    left = int(shard.stat().st_size * part)
    python("-c", CUT, tmp_path, shard, left)
