"""Checkpoints that `switchyard make-checkpoint` writes with four-bit experts, read by others.

gpt-oss's blocks are read by transformers, whose block computes in fp32. The other layouts are decoded
here, from what their publishers say of them, and saved as f32. Both must compute what
`switchyard run` does with the same weights, which it generates and never reads from a file."""

import json
import os

import pytest
import torch
from safetensors.torch import load_file, save_file

from conftest import started
from reference import error

transformers = pytest.importorskip("transformers", minversion="5.0")

H, I, E, T, SEED = 160, 96, 16, 20, 5
SIZES = ["--experts", E, "--hidden", H, "--intermediate", I]
FP4 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
BOUND = 1e-5


def switchyard(*arguments):
    done = started(os.environ["SWITCHYARD_COMMAND"], *arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout


def written(directory, model, dtype, layers=1):
    path = directory / "written"
    switchyard(
        "make-checkpoint", "--model", model, "--dtype", dtype, "--layers", layers, "--seed", SEED, "--out", path, *SIZES
    )
    return load_file(path / "model.safetensors"), json.loads((path / "config.json").read_text())


def generated(directory, model, dtype, layer, x):
    save_file({"activations": x}, directory / "x")
    switchyard(
        "run", "--model", model, "--dtype", dtype, "--layer", layer, "--seed", SEED, "--compute", "f32",
        "--input", directory / "x", "--output", directory / "y", "--repeat", 1, *SIZES
    )  # fmt: skip
    return load_file(directory / "y")["output"]


def nibbles(packed):
    """Codes of four bits, the low half of each byte first."""
    return torch.stack([packed & 15, packed >> 4], -1).flatten(-2)


def mxfp4(codes, exponents):
    values = FP4[nibbles(codes.view(torch.uint8)).long()]
    return values * torch.exp2(exponents.view(torch.uint8).float() - 127).repeat_interleave(32, -1)


def int4(words, scales, shape):
    columns = [(words >> 4 * i) & 15 for i in range(8)]
    codes = torch.stack(columns, -1).flatten(-2)
    assert list(codes.shape) == shape.tolist()
    return (codes.float() - 8) * scales.float().repeat_interleave(32, -1)


def blocks_of_128(codes, scales):
    wide = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)
    return codes.float() * wide[: codes.shape[0], : codes.shape[1]]


def decoded(tensors):
    """The same tensors, unquantised: every module has a `weight`."""
    plain = {}
    for name, tensor in tensors.items():
        module, _, part = name.rpartition(".")
        if part == "weight_packed" and tensor.dtype == torch.int32:
            scales, shape = tensors[module + ".weight_scale"], tensors[module + ".weight_shape"]
            plain[module + ".weight"] = int4(tensor, scales, shape)
        elif part == "weight_packed":
            plain[module + ".weight"] = mxfp4(tensor, tensors[module + ".weight_scale"])
        elif part == "weight" and tensor.dtype == torch.int8:
            plain[name] = mxfp4(tensor, tensors[module + ".scale"])
        elif part == "weight" and tensor.dtype == torch.float8_e4m3fn:
            plain[name] = blocks_of_128(tensor, tensors[module + ".scale"])
        elif part not in ("scale", "weight_scale", "weight_shape"):
            plain[name] = tensor
    return plain


def test_transformers_reads_the_blocks_of_gpt_oss(tmp_path):
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssMLP

    tensors, keys = written(tmp_path, "gpt-oss-20b", "mxfp4")
    block = GptOssMLP(transformers.GptOssConfig(**keys)).float().eval()
    state = {name.removeprefix("model.layers.0.mlp."): tensor for name, tensor in tensors.items()}
    for name in ("experts.gate_up_proj", "experts.down_proj"):
        blocks, scales = state.pop(name + "_blocks"), state.pop(name + "_scales")
        state[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    block.load_state_dict({name: tensor.float() for name, tensor in state.items()})
    x = torch.randn(T, H, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = block(x[None])[0][0]
    assert error(generated(tmp_path, "gpt-oss-20b", "mxfp4", 0, x), expected) < BOUND


@pytest.mark.parametrize(
    "model,dtype,layer,layers",
    [
        ("deepseek-v4-flash", "mxfp4", 3, 4),  # the first layer that does not route by token id
        ("kimi-k2-thinking", "int4", 1, 1),
        ("kimi-k3", "mxfp4", 1, 1),
        ("qwen3.5-35b", "int4", 0, 1),
    ],
)
def test_other_layouts_hold_the_generated_weights(tmp_path, model, dtype, layer, layers):
    tensors, keys = written(tmp_path, model, dtype, layers)
    assert keys.pop("quantization_config")["quant_method"] in ("fp8", "compressed-tensors")
    keys.pop("expert_dtype", None)
    plain = tmp_path / "plain"
    plain.mkdir()
    save_file({name: tensor.contiguous() for name, tensor in decoded(tensors).items()}, plain / "model.safetensors")
    (plain / "config.json").write_text(json.dumps(keys))
    x = torch.randn(T, H, generator=torch.Generator().manual_seed(2))
    actual = generated(tmp_path, model, dtype, layer, x)
    switchyard(
        "run", "--checkpoint", plain, "--layer", layer, "--compute", "f32",
        "--input", tmp_path / "x", "--output", tmp_path / "z", "--repeat", 1
    )  # fmt: skip
    assert error(actual, load_file(tmp_path / "z")["output"]) < BOUND
