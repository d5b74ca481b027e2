"""What a user meets before anything computes: import, the command, types."""

import os
import subprocess
import sys

import pytest

import switchyard


def run(*command, **more):
    return subprocess.run(command, capture_output=True, text=True, timeout=120, **more)


def test_the_package_needs_neither_torch_nor_numpy():
    script = (
        "import sys, switchyard; "
        "assert not {'torch', 'numpy', 'transformers'} & set(sys.modules); "
        "print(switchyard.__version__, switchyard.World.single())"
    )
    done = run(sys.executable, "-c", script)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(switchyard.__version__)


def test_everything_that_is_named_is_there():
    for name in switchyard.__all__:
        if name in ("MoeLayer", "patch", "register_with_transformers"):
            continue
        assert getattr(switchyard, name) is not None
        assert name in dir(switchyard)
    with pytest.raises(AttributeError):
        switchyard.nothing


@pytest.mark.parametrize("arguments,text", [(["doctor"], "cpu"), (["models"], "olmoe"), (["--help"], "check-hf")])
def test_the_command(arguments, text):
    done = run(sys.executable, "-m", "switchyard", *arguments)
    assert done.returncode == 0, done.stderr
    assert text in done.stdout.lower()


def test_the_commands_exit_code_is_kept():
    done = run(sys.executable, "-m", "switchyard", "run", "--model", "no-such-model")
    assert done.returncode == 2
    assert "no-such-model" in done.stderr


def test_a_library_that_is_not_there_is_said():
    done = run(
        sys.executable, "-c", "import switchyard", env=os.environ | {"SWITCHYARD_LIBRARY": "/nowhere/lib.so"}
    )
    assert "ImportError" in done.stderr and "/nowhere/lib.so" in done.stderr


def test_structs_are_those_of_the_header(tmp_path):
    """Sizes as a C compiler has them."""
    import ctypes
    import pathlib
    import shutil

    from switchyard import _abi

    compiler = shutil.which("cc")
    header = pathlib.Path(__file__).resolve().parent.parent.parent / "include"
    if compiler is None or not header.exists():
        pytest.skip("no C compiler, or no header")
    pairs = {
        "sy_tensor": _abi.Tensor,
        "sy_error": _abi.ErrorInfo,
        "sy_world_options": _abi.WorldOptions,
        "sy_world_info": _abi.WorldInfo,
        "sy_activation": _abi.Activation,
        "sy_routing": _abi.Routing,
        "sy_layer_spec": _abi.LayerSpec,
        "sy_matrices": _abi.Matrices,
        "sy_layer_weights": _abi.LayerWeights,
        "sy_layer_options": _abi.LayerOptions,
        "sy_forward": _abi.Forward,
        "sy_layer_info": _abi.LayerInfo,
        "sy_stats": _abi.Stats,
        "sy_workspace_options": _abi.WorkspaceOptions,
        "sy_row_layout": _abi.RowLayout,
        "sy_grouped_gemm_spec": _abi.GroupedGemmSpec,
        "sy_grouped_gemm_options": _abi.GroupedGemmOptions,
        "sy_grouped_gemm_info": _abi.GroupedGemmInfo,
        "sy_grouped_gemm_call": _abi.GroupedGemmCall,
        "sy_workspace_info": _abi.WorkspaceInfo,
        "sy_exchange_spec": _abi.ExchangeSpec,
        "sy_exchange_options": _abi.ExchangeOptions,
        "sy_exchange_info": _abi.ExchangeInfo,
        "sy_dispatch_input": _abi.DispatchInput,
        "sy_dispatch_output": _abi.DispatchOutput,
        "sy_combine_input": _abi.CombineInput,
        "sy_combine_output": _abi.CombineOutput,
        "sy_exchange_stats": _abi.ExchangeStats,
        "sy_heap_options": _abi.HeapOptions,
        "sy_heap_info": _abi.HeapInfo,
        "sy_peer_map": _abi.PeerMap,
        "sy_tune_model": _abi.TuneModel,
        "sy_tune_configuration": _abi.TuneConfiguration,
        "sy_tune_kernel": _abi.TuneKernel,
        "sy_tune_plan": _abi.TunePlan,
        "sy_tune_options": _abi.TuneOptions,
    }
    lines = ["#include <stdio.h>", "#include <stddef.h>", "#include <switchyard/c.h>", "int main(void) {"]
    for name, struct in pairs.items():
        lines.append(f'printf("{name} %zu\\n", sizeof({name}));')
        for field, _ in struct._fields_:
            lines.append(f'printf("{name}.{field} %zu\\n", offsetof({name}, {field}));')
    source, program = tmp_path / "sizes.c", tmp_path / "sizes"
    source.write_text("\n".join([*lines, "return 0; }"]))
    subprocess.run([compiler, "-I", str(header), str(source), "-o", str(program)], check=True)
    found = dict(line.rsplit(" ", 1) for line in run(str(program)).stdout.splitlines())
    for name, struct in pairs.items():
        assert ctypes.sizeof(struct) == int(found[name]), name
        for field, _ in struct._fields_:
            assert getattr(struct, field).offset == int(found[f"{name}.{field}"]), f"{name}.{field}"
