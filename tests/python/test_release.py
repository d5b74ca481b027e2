"""scripts/release.sh and scripts/sbom.py, with a wheel that has no code in it."""

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile

import pytest

from conftest import ROOT

VERSION = re.search(r"project\(switchyard VERSION ([0-9.]+)", (ROOT / "CMakeLists.txt").read_text())[1]
CARRIED = [{"type": "library", "bom-ref": "pkg:pypi/onednn-cpu-gomp@1", "name": "onednn-cpu-gomp", "version": "1"}]


def wheel_of(directory, version=VERSION, library=b"ELF"):
    directory.mkdir(exist_ok=True)
    path = directory / f"switchyard_moe-{version}-py3-none-manylinux_2_28_x86_64.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("switchyard/licenses/components.json", json.dumps(CARRIED))
        archive.writestr("switchyard/lib/libswitchyard_c.so", library)
    return path


def clone(directory):
    """Scripts of this tree, in a repository whose files are all committed."""
    if not shutil.which("git"):
        pytest.skip("git is not installed: a release is made of a commit")
    tree = directory / "tree"
    (tree / "scripts").mkdir(parents=True)
    for name in ("scripts/release.sh", "scripts/sbom.py", "scripts/generated.py", "scripts/bootstrap.sh", "CMakeLists.txt"):
        shutil.copy(ROOT / name, tree / name)
    for words in (["init", "-q"], ["add", "-A"], ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "all"]):
        subprocess.run(["git", *words], cwd=tree, check=True)
    return tree


def release(tree, *words):
    return subprocess.run(["bash", tree / "scripts/release.sh", *map(str, words)], capture_output=True, text=True, check=False)


def test_a_release_has_wheel_sources_bill_and_checksums(tmp_path):
    tree, out = clone(tmp_path), tmp_path / "out"
    wheel = wheel_of(tmp_path / "wheels")
    done = release(tree, "--wheels", tmp_path / "wheels", out)
    assert done.returncode == 0, done.stderr
    names = {path.name for path in out.iterdir()}
    assert names == {wheel.name, wheel.name.replace(".whl", ".cdx.json"), f"switchyard-{VERSION}.tar.gz", "SHA256SUMS"}
    sums = dict(reversed(line.split("  ")) for line in (out / "SHA256SUMS").read_text().splitlines())
    assert set(sums) == names - {"SHA256SUMS"}
    assert all(hashlib.sha256((out / name).read_bytes()).hexdigest() == told for name, told in sums.items())
    with tarfile.open(out / f"switchyard-{VERSION}.tar.gz") as archive:
        assert f"switchyard-{VERSION}/scripts/release.sh" in archive.getnames()
    (tree / "CMakeLists.txt").write_text("changed")
    assert "files are changed" in release(tree, "--wheels", tmp_path / "wheels", out).stderr


@pytest.mark.parametrize("library, has_cutlass", [(b"ELF", False), (b"ELF .nv_fatbin", True)])
def test_the_bill_has_the_headers_that_are_compiled_in(tmp_path, library, has_cutlass):
    output = tmp_path / "bill.json"
    compiler = tmp_path / "nvcc"
    compiler.write_text("#!/bin/sh\necho Cuda compilation tools, release 13.0, V13.0.88\n")
    compiler.chmod(0o755)
    script = [sys.executable, ROOT / "scripts/sbom.py", wheel_of(tmp_path, library=library), output]
    subprocess.run(script, check=True, env=os.environ | {"CUDACXX": str(compiler)})
    bill = json.loads(output.read_text())
    names = {component["name"] for component in bill["components"]}
    assert {"onednn-cpu-gomp", "libssl-dev", "libfmt-dev", "nlohmann-json3-dev", "libcli11-dev", "libeigen3-dev"} <= names
    assert ("nvidia-cutlass" in names) == ("cuda-cudart" in names) == has_cutlass
    assert len(bill["dependencies"][0]["dependsOn"]) == len(names)


def test_what_cannot_be_released_is_named(tmp_path):
    tree = clone(tmp_path)
    (tmp_path / "none").mkdir()
    done = release(tree, "--wheels", tmp_path / "none")
    assert done.returncode == 2 and "which has no wheel" in done.stderr
    wheel_of(tmp_path / "old", version="0.0.1")
    done = release(tree, "--wheels", tmp_path / "old", tmp_path / "out")
    assert done.returncode == 1 and f"not of version {VERSION}" in done.stderr
    done = subprocess.run([sys.executable, ROOT / "scripts/sbom.py", ROOT / "README.md", tmp_path / "b"], capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "no wheel of scripts/wheel.sh" in done.stderr
