"""What a checker of types makes of a program that uses the package."""

import ast
import inspect
import pathlib
import sys

import pytest

from conftest import started
import switchyard
from switchyard import tuner

HERE = pathlib.Path(__file__).resolve().parent
USER = HERE / "typed_user.py"


def public():
    """Names, and methods and properties of classes, that are the package's own."""
    for module in (switchyard, tuner):
        for name in module.__all__:
            yield name
            value = getattr(module, name)
            if inspect.isclass(value) and not issubclass(value, BaseException):
                ours = [kind for kind in value.__mro__ if kind.__module__.startswith("switchyard")]
                yield from {attribute for kind in ours for attribute in vars(kind) if not attribute.startswith("_")}


def test_a_users_file_has_every_public_name():
    pytest.importorskip("torch")
    tree = ast.parse(USER.read_text())
    used = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    # Protocols are implemented, and a call's module is passed on by torch.
    defined = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    used |= {node.arg for node in ast.walk(tree) if isinstance(node, ast.keyword)}
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert set(public()) <= used | defined | imported


def mypy(*arguments, **environment):
    pytest.importorskip("mypy")
    words = ["-m", "mypy", "--strict", "--no-error-summary"]
    return started(sys.executable, *words, *arguments, timeout=600, cwd=HERE.parent, **environment)


@pytest.fixture(scope="module")
def checked(tmp_path_factory):
    """mypy over a file, as a user has it: the package is installed, so its own files are not reported."""
    cache = tmp_path_factory.mktemp("mypy")
    package = pathlib.Path(switchyard.__file__).parent.parent

    def check(file):
        return mypy("--follow-imports=silent", "--cache-dir", cache, file, MYPYPATH=str(package))

    return check


def test_mypy_strict_passes(checked):
    pytest.importorskip("torch")
    pytest.importorskip("numpy")
    done = checked(USER)
    assert done.returncode == 0, done.stdout + done.stderr


def test_mypy_knows_the_package(checked, tmp_path):
    """It would accept anything of a package that it takes for untyped."""
    assert (pathlib.Path(switchyard.__file__).parent / "py.typed").exists()
    for line, code in {
        "switchyard.World.single(deadline='soon')": "arg-type",
        "switchyard.Experts(1, 2)": "call-arg",
        "switchyard.nothing": "attr-defined",
        "switchyard.Activation(kind=3)": "arg-type",
        "switchyard.permute(1, 2, 'paced')": "arg-type",
    }.items():
        wrong = tmp_path / "wrong.py"
        wrong.write_text(f"import switchyard\n{line}\n")
        done = checked(wrong)
        assert done.returncode == 1 and f"[{code}]" in done.stdout, (line, done.stdout, done.stderr)
