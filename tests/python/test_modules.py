"""The package's modules: none waits for another that waits for it, and none has a function too long to read."""

import ast
import importlib.util
import pathlib

import pytest

from conftest import python
import switchyard

PACKAGE = pathlib.Path(switchyard.__file__).parent
MODULES = sorted(path.stem for path in PACKAGE.glob("*.py") if path.stem != "__init__")
# Packages that some modules are built on, without which they cannot be imported.
NEEDS = {
    **dict.fromkeys(("_vllm", "_vllm_four_bit", "_vllm_ranks"), "vllm"),
    **dict.fromkeys(("_sglang_ranks", "_sglang_runner"), "sglang"),
    **dict.fromkeys(("_hf", "_hf_block", "_hf_parallel", "_hf_patch", "_layer", "_probe", "_torch", "_watch"), "torch"),
}
ALONE = """
import importlib, sys, types
package = types.ModuleType("switchyard")
package.__path__ = [sys.argv[1]]
sys.modules["switchyard"] = package
importlib.import_module("switchyard." + sys.argv[2])
"""


@pytest.mark.parametrize("name", MODULES)
def test_a_module_can_be_imported_first(name):
    """In a fresh interpreter, without what the package itself imports before."""
    if name in NEEDS and importlib.util.find_spec(NEEDS[name]) is None:
        title = {"vllm": "vLLM", "sglang": "SGLang"}.get(NEEDS[name], NEEDS[name])
        pytest.skip(f"{title} is not installed: see docs/frameworks for how these tests were run")
    python("-c", ALONE, PACKAGE, name)


def imports(path):
    """The package's own modules that a file imports: at its head, in functions, or for checkers of types alone."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            module = (node.module or "").removeprefix("switchyard.")
            if node.level and module:
                found.add(module)
            elif node.level or node.module == "switchyard":
                found |= {alias.name if alias.name in MODULES else "__init__" for alias in node.names}
            elif (node.module or "").startswith("switchyard."):
                found.add(module)
        elif isinstance(node, ast.Import):
            names = [alias.name.split(".") for alias in node.names]
            found |= {parts[1] if parts[1:] else "__init__" for parts in names if parts[0] == "switchyard"}
    return found


def cycle_of(graph):
    """Modules that import one another in a ring; none: []."""
    done, path = set(), []

    def visit(name):
        if name in path:
            return path[path.index(name) :]
        if name in done:
            return []
        path.append(name)
        for other in sorted(graph.get(name, ())):
            if ring := visit(other):
                return ring
        done.add(path.pop())
        return []

    return next(filter(None, map(visit, sorted(graph))), [])


def test_a_cycle_is_found():
    assert cycle_of({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c"]
    assert cycle_of({"a": {"b", "c"}, "b": {"c"}}) == []


def test_no_imports_form_a_cycle():
    graph = {path.stem: imports(path) for path in PACKAGE.glob("*.py")}
    assert sum(map(len, graph.values())) > 100
    assert "_torch" in graph["_passes"] and "_hf_block" in graph["_layer"]  # in functions
    assert cycle_of(graph) == []


def test_no_function_is_too_long_to_read():
    most = 120
    long = [
        f"{path.name}:{node.lineno}: {node.name}() has {lines} lines"
        for path in sorted(PACKAGE.glob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        if (lines := node.end_lineno - node.lineno + 1) > most
    ]
    assert not long, f"more than {most} lines:\n" + "\n".join(long)
