"""Examples in documents do what they say: every block of Python runs here, in its document's order.

A block that cannot run on a machine without a GPU and a network says so behind its fence, with the reason:
```` ```python not run: needs a GPU ````. Names that a block leaves to the reader have small arrays of the right shape.
"""

import ast
import builtins
import pathlib
import re
import shlex

import pytest

from conftest import ROOT, python
import switchyard

torch = pytest.importorskip("torch")

FENCE = re.compile(r"^```(?P<info>[^\n]*)\n(?P<code>.*?)^```$", re.DOTALL | re.MULTILINE)
NOT_RUN = re.compile(r"not run: \w.*")

E, I, H, K, T = 64, 32, 64, 8, 5


def gaussian(*shape, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype) / 8


def ids():
    return torch.stack([torch.randperm(E, generator=torch.Generator().manual_seed(t))[:K] for t in range(T)]).int()


def small_model():
    transformers = pytest.importorskip("transformers")
    config = transformers.OlmoeConfig(
        hidden_size=H, intermediate_size=I, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=4, num_experts=E, num_experts_per_tok=K, vocab_size=100, eos_token_id=0,
    )
    torch.manual_seed(0)
    return transformers.OlmoeForCausalLM(config)


def pairs_of_weights():
    return [(gaussian(E, 2 * I, H, dtype=torch.bfloat16), gaussian(E, H, I, dtype=torch.bfloat16)) for _ in range(2)]


# Names that blocks take as given.
GIVEN = {
    "switchyard": lambda: switchyard,
    "torch": lambda: torch,
    "E": lambda: E,
    "H": lambda: H,
    "K": lambda: K,
    "bench": lambda: lambda model, values, counts: 10.0 + sum(counts) / (1 + len(values)),
    "counts": lambda: [K * T // E + (e < K * T % E) for e in range(E)],
    "hidden_states": lambda: gaussian(2, 3, H),
    "ids": ids,
    "logits": lambda: gaussian(T, E),
    "model": small_model,
    "shared_expert": lambda: lambda x: x,
    "topk_ids": ids,
    "topk_weights": lambda: torch.full((T, K), 1 / K),
    "w13": lambda: gaussian(E, 2 * I, H),
    "w2": lambda: gaussian(E, H, I),
    "weights": lambda: torch.full((T, K), 1 / K),
    "world": switchyard.World.single,
    "x": lambda: gaussian(T, H),
}
# Where a document means something else by a name.
GIVEN_IN = {
    "docs/python.md": {"weights": pairs_of_weights},
    "docs/exchange.md": {"x": lambda: gaussian(T, H, dtype=torch.bfloat16)},
}
# Functions that blocks define for the reader to call.
CALLS = {"exchange_rows": lambda function: function(switchyard.World.single(), torch.ones(3))}


def documents(language):
    """Of the documents that have such blocks: name, and blocks as (line, what is behind the language, code)."""
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        blocks = []
        text = path.read_text() if path.exists() else ""
        for match in FENCE.finditer(text):
            kind, _, info = match["info"].partition(" ")
            if kind == language:
                blocks.append((text.count("\n", 0, match.start()) + 1, info, match["code"]))
        if blocks:
            yield str(path.relative_to(ROOT)), blocks


PYTHON = dict(documents("python"))


def test_documents_have_examples():
    if not (ROOT / "docs").is_dir():
        pytest.skip("no documents")
    assert {"README.md", "docs/python.md", "docs/frameworks/transformers.md"} <= set(PYTHON)


def from_pretrained(*_, **options):
    """In place of a download of 60 GB."""
    model = small_model()
    if "experts_implementation" in options:
        model.set_experts_implementation(options["experts_implementation"])
    return model


@pytest.mark.parametrize("document", PYTHON)
def test_every_block_of_python_runs(document, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if any("from_pretrained" in code for _, _, code in PYTHON[document]):
        transformers = pytest.importorskip("transformers")
        monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", from_pretrained)
    given = GIVEN | GIVEN_IN.get(document, {})
    names = {}
    for line, info, code in PYTHON[document]:
        if info:
            assert NOT_RUN.fullmatch(info), f"{document}:{line}: '{info}' says neither that it is not run, nor why"
            continue
        # An ellipsis stands for the arguments of a pass.
        code = re.sub(r"^\.\.\.$", "experts(x, topk_ids, topk_weights)", code, flags=re.MULTILINE)
        # Lines of errors are those of the document.
        tree = ast.parse("\n" * line + code, str(ROOT / document))
        for node in ast.walk(tree):
            if isinstance(node, ast.Name) and node.id not in names and not hasattr(builtins, node.id):
                if node.id in given:
                    names[node.id] = given[node.id]()
        before = dict(names)
        exec(compile(tree, str(ROOT / document), "exec"), names)
        for name, value in names.items():
            if value is before.get(name):
                continue
            if name in CALLS:
                CALLS[name](value)
            # A reader looks at results, by numpy() for one, which a gradient to come forbids.
            if isinstance(value, torch.Tensor):
                assert not value.requires_grad, f"{document}:{line}: {name} requires a gradient"


@pytest.mark.parametrize("hashed", [False, True])
def test_image_tokens_of_deepseek_v4_choose_by_their_own_bias(hashed):
    (code,) = (code for _, _, code in PYTHON["docs/checkpoints.md"] if "def route_v4" in code)
    names = {"switchyard": switchyard, "torch": torch}
    exec(code, names)
    tokens, vocabulary, first = 40, 100, 60
    token_ids = torch.arange(tokens) + 40  # 60 to 64 are images
    logits, bias, bias_vl = gaussian(tokens, E) * 20, gaussian(E), -gaussian(E)
    table = torch.stack([torch.randperm(E, generator=torch.Generator().manual_seed(t))[:K] for t in range(vocabulary)])
    ids, weights = names["route_v4"](
        logits, token_ids, K, None if hashed else bias, bias_vl, table if hashed else None, first_image=first,
    )
    scores = torch.log1p(logits.double().exp()).sqrt()
    for t in range(tokens):
        if first <= t + 40 < first + 5:
            expected = (scores[t] + bias_vl).topk(K).indices
            assert not torch.equal(expected, (scores[t] + bias).topk(K).indices)
        else:
            expected = table[t + 40] if hashed else (scores[t] + bias).topk(K).indices
        assert ids[t].tolist() == expected.tolist()
        torch.testing.assert_close(weights[t].double(), 1.5 * scores[t][expected] / scores[t][expected].sum())


# Lines of shell that no test may run, and why.
NO_TESTS = {
    r".*bench/(engines|tile_files)\.py .*": "serves whole models on a GPU; test_engines.py has what needs none",
    r"pip install \.": "changes the environment",
    r"scripts/wheel\.sh": "builds for minutes",
    r"vllm serve .*": "needs vLLM, a GPU and a model of 60 GB",
    r"(SWITCHYARD_SGLANG_OPTIONS='.*' )?python -m sglang\.launch_server .*": "needs SGLang, a GPU and a model",
    r"SWITCHYARD_NCCL_SECONDS=\d+ python3 -m pytest tests/python/test_nccl\.py": "needs two GPUs for minutes",
    r"(SWITCHYARD_PYTHON=|SWITCHYARD_VLLM_STEPS=\d+ )?\$\(tests/python/(server_)?environment\.sh.*\).*": "makes an environment, and runs these tests",
}
OURS = re.compile(r"(python -m )?switchyard ")


def shell_lines():
    for document, blocks in documents("sh"):
        if document == "docs/python.md" or document.startswith("docs/frameworks/"):
            for _, _, code in blocks:
                for line in code.strip().split("\n"):
                    yield document, re.sub(r"\s+#.*", "", line).strip()


@pytest.mark.parametrize("document,line", list(shell_lines()))
def test_lines_of_shell_run_or_are_known_not_to(document, line):
    if any(re.fullmatch(pattern, line) for pattern in NO_TESTS):
        return
    assert OURS.match(line), f"{document}: run '{line}' here, or say in NO_TESTS why not"
    words = shlex.split(OURS.sub("", line, count=1))
    python("-m", "switchyard", *words)
