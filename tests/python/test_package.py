"""What a user meets before anything computes: import, the command, types."""

import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import time

import conftest
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


@pytest.fixture
def script(tmp_path):
    """The command `switchyard`, as pip installs it."""
    ours = pathlib.Path(sys.executable).parent / "switchyard"
    if os.environ.get("SWITCHYARD_TEST_INSTALLED"):
        return str(ours)
    module, function = conftest.scripts()["switchyard"].split(":")
    path = tmp_path / "bin" / "switchyard"
    path.parent.mkdir()
    path.write_text(
        f"#!{sys.executable}\nimport sys\nfrom {module} import {function}\n"
        f"if __name__ == '__main__':\n    sys.exit({function}())\n"
    )
    path.chmod(0o755)
    return str(path)


@pytest.fixture(params=["script", "module", "program"])
def command(request, script):
    """The three ways to the command."""
    if request.param == "program":
        from switchyard.__main__ import _command

        return [_command()]
    return [script] if request.param == "script" else [sys.executable, "-m", "switchyard"]


def test_the_commands_exit_code_is_kept(command):
    done = run(*command, "run", "--model", "no-such-model")
    assert done.returncode == 2
    assert "no-such-model" in done.stderr


def test_signals_reach_the_command(command, tmp_path):
    """It is that process itself: whoever started it can stop it, and sees what it was stopped by."""
    started = tmp_path / "started"
    process = subprocess.Popen(
        [*command, "launch", "-n", "1", "--", "sh", "-c", f"echo $PPID > {started}.new; mv {started}.new {started}; exec sleep 100"],
        stderr=subprocess.DEVNULL,
    )
    while not started.exists():
        assert process.poll() is None
        time.sleep(0.01)
    assert int(started.read_text()) == process.pid
    process.send_signal(signal.SIGTERM)
    assert process.wait(20) == 128 + signal.SIGTERM


def test_a_reader_that_goes_away_ends_the_command_in_silence(command):
    """Python ignores SIGPIPE, and programs that it becomes would, too."""
    reader, writer = os.pipe()
    os.close(reader)  # before the command begins: what it writes can go nowhere
    try:
        done = subprocess.run([*command, "run", "--help"], stdout=writer, stderr=subprocess.PIPE, text=True, timeout=60)
    finally:
        os.close(writer)
    assert (done.returncode, done.stderr) == (-signal.SIGPIPE, "")


def test_the_script_tells_what_only_python_does(script):
    done = run(script, "--help")
    assert done.stdout.startswith("switchyard check-hf")
    done = run(sys.executable, "-m", "switchyard", "--help")
    assert done.stdout.startswith("python -m switchyard check-hf")


def test_the_script_never_runs_itself(script, tmp_path):
    """Without a program in the package it looks on the PATH, where it stands itself, perhaps first."""
    from switchyard import _library

    package = tmp_path / "package" / "switchyard"
    shutil.copytree(
        pathlib.Path(switchyard.__file__).parent, package, ignore=shutil.ignore_patterns("bin", "lib", "__pycache__")
    )
    environment = os.environ | {"PYTHONPATH": str(package.parent), "PATH": str(pathlib.Path(script).parent)}
    environment.pop("SWITCHYARD_COMMAND", None)
    environment["SWITCHYARD_LIBRARY"] = os.path.abspath(_library._path())
    done = run(sys.executable, script, "models", env=environment)
    assert done.returncode == 127 and "neither in this package nor on the PATH" in done.stderr
    # One in C++ behind it is found.
    from switchyard.__main__ import _command

    other = tmp_path / "other"
    other.mkdir()
    (other / "switchyard").symlink_to(os.path.abspath(_command()))
    environment["PATH"] += os.pathsep + str(other)
    done = run(sys.executable, script, "models", env=environment)
    assert done.returncode == 0 and "olmoe" in done.stdout


@pytest.mark.parametrize("kind", ["missing", "text", "not executable"])
def test_a_command_that_cannot_run_is_said(script, kind, tmp_path):
    path = tmp_path / "program"
    if kind != "missing":
        path.write_text("no program")
        path.chmod(0o755 if kind == "text" else 0o644)
    done = run(script, "models", env=os.environ | {"SWITCHYARD_COMMAND": str(path)})
    assert done.returncode == 127
    assert str(path) in done.stderr and "SWITCHYARD_COMMAND" in done.stderr and "Traceback" not in done.stderr


def test_launched_ranks_are_of_the_launchers_own_build(script, tmp_path):
    """Whatever else is named switchyard and comes first on the PATH: a C++ installation beside pip's."""
    stranger = tmp_path / "stranger"
    stranger.mkdir()
    (stranger / "switchyard").write_text("#!/bin/sh\necho stranger\n")
    (stranger / "switchyard").chmod(0o755)
    environment = os.environ | {"PATH": os.pathsep.join([str(stranger), os.environ["PATH"]])}
    done = run(script, "launch", "-n", "2", "--", "switchyard", "--version", env=environment)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.split("\n")
    assert lines[0] == lines[1] == f"switchyard {switchyard.__version__}"


def readme_commands():
    """README's lines of shell that are this command."""
    if not (conftest.ROOT / "README.md").exists():
        return []
    blocks = re.findall(r"```sh\n(.*?)```", (conftest.ROOT / "README.md").read_text(), re.DOTALL)
    lines = [line.split("#")[0].strip() for block in blocks for line in block.split("\n")]
    return [line for line in lines if line.startswith("switchyard ")]


def test_readme_has_commands():
    assert len(readme_commands()) > 3


@pytest.mark.parametrize("line", readme_commands())
def test_readmes_commands_are_those_of_the_installed_command(script, line):
    words = line.split()[1:]
    done = run(script, words[0], "--help")
    assert done.returncode == 0, done.stderr
    known = set(re.findall(r"(?<![\w-])--?[a-z][\w-]*", done.stdout))
    own = words[: words.index("--")] if "--" in words else words
    assert not {word for word in own if re.match(r"--?[a-z]", word)} - known


def test_the_build_warns_of_nothing(tmp_path):
    """`pip install .` shows what the build backend says of pyproject.toml."""
    pytest.importorskip("scikit_build_core")
    if not (conftest.ROOT / "pyproject.toml").exists():
        pytest.skip("no sources")
    script = f"import scikit_build_core.build as b; b.prepare_metadata_for_build_wheel({str(tmp_path)!r})"
    done = run(sys.executable, "-c", script, cwd=conftest.ROOT)
    assert done.returncode == 0, done.stderr
    assert not re.search("warn|deprecat", done.stdout + done.stderr, re.IGNORECASE), done.stdout + done.stderr
    info = next(tmp_path.iterdir())
    assert f"\nVersion: {switchyard.__version__}\n" in (info / "METADATA").read_text()
    assert "switchyard = switchyard.__main__:main" in (info / "entry_points.txt").read_text()


def test_a_library_that_is_not_there_is_said():
    done = run(
        sys.executable, "-c", "import switchyard", env=os.environ | {"SWITCHYARD_LIBRARY": "/nowhere/lib.so"}
    )
    assert "ImportError" in done.stderr and "/nowhere/lib.so" in done.stderr


def imported(library):
    return run(sys.executable, "-c", "import switchyard", env=os.environ | {"SWITCHYARD_LIBRARY": str(library)})


@pytest.mark.parametrize(
    "library,package",
    [
        ("libdnnl.so.2", "libdnnl2"),
        ("libdnnl.so.3", "libdnnl3"),
        ("libfmt.so.9", "libfmt9"),
        ("libfmt.so.10", "libfmt10"),
        ("libfabric.so.1", "libfabric1"),
        ("libcrypto.so.3", "libssl3"),
        ("libgomp.so.1", "libgomp1"),
        ("libOpenCL.so.1", "ocl-icd-libopencl1"),
        ("libcuda.so.1", None),
        ("libunheardof.so.4", None),
    ],
)
def test_a_library_that_is_missing_is_named_with_its_package(tmp_path, library, package):
    needed = conftest.compiled(tmp_path, library, "int nothing(void) { return 0; }", f"-Wl,-soname,{library}")
    ours = conftest.compiled(tmp_path, "ours.so", "int nothing(void); int sum(void) { return nothing(); }", str(needed))
    needed.unlink()
    if (pathlib.Path("/usr/lib/x86_64-linux-gnu") / library).exists() or run("sh", "-c", f"ldconfig -p | grep -qF {library}").returncode == 0:
        # It is installed here, so hide it: its name with a number that no version has.
        from switchyard import _missing

        text = _missing.explain(str(ours), f"{library}: cannot open shared object file: No such file or directory")
    else:
        text = imported(ours).stderr
        assert "ImportError" in text
    assert library in text
    if package:
        assert f"sudo apt-get install {package} " in text
    else:
        assert ("NVIDIA's driver" if "cuda" in library else f"apt-file search {library}") in text


def test_every_library_that_ours_needs_has_a_known_package():
    """But for what each Linux has."""
    from switchyard import _library, _missing

    if shutil.which("readelf") is None:
        pytest.skip("no readelf")
    needed = re.findall(r"\(NEEDED\).*\[(.+)\]", run("readelf", "-d", str(_library._path())).stdout)
    assert needed
    for library in needed:
        system = library.startswith(("libc.", "libm.", "libdl.", "libpthread.", "librt.", "ld-linux"))
        bundled = os.environ.get("SWITCHYARD_TEST_INSTALLED") and "-" in library
        sanitizer = library.startswith(("libasan", "libtsan", "libubsan"))
        assert system or bundled or sanitizer or _missing.package_of(library), library


def test_what_is_no_library_of_ours_is_said(tmp_path):
    (tmp_path / "text.so").write_text("no library")
    assert "invalid ELF header" in (text := imported(tmp_path / "text.so").stderr) or "file too short" in text
    assert "ImportError" in text and "SWITCHYARD_LIBRARY" in text
    text = imported(conftest.compiled(tmp_path, "other.so")).stderr
    assert "ImportError" in text and "no library of Switchyard's" in text
    older = conftest.compiled(tmp_path, "older.so", "int sy_abi_version(void) { return 1; }")
    text = imported(older).stderr
    assert "ImportError" in text and "has version 1 of the C interface" in text
    from switchyard import _abi

    same = conftest.compiled(tmp_path, "same.so", f"int sy_abi_version(void) {{ return {_abi.ABI_VERSION}; }}")
    text = imported(same).stderr
    assert "ImportError" in text and "lacks sy_" in text
    undefined = conftest.compiled(tmp_path, "undefined.so", "int gone(void); int (*use)(void) = gone;")
    text = imported(undefined).stderr
    assert "undefined symbol: gone" in text and "of another version" in text
