#!/usr/bin/env bash
# Installs a wheel in an empty environment of each Python, and tries it there: the command, a layer without and with NumPy.
#   scripts/try_wheel.sh WHEEL [PYTHON...]      default: python3
# Needs no sources, so a copy of this file and the wheel are enough on another machine.
set -euo pipefail

[ $# -ge 1 ] || { echo "try_wheel.sh: give a wheel, and Pythons to try it with" >&2; exit 2; }
wheel=$(realpath "$1")
shift
[ $# -gt 0 ] || set -- python3
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"  # where no sources are

try() {
  rm -rf empty
  "$1" -m venv empty
  pip() { empty/bin/python -m pip --quiet --disable-pip-version-check "$@"; }
  pip install --no-index "$wheel"
  empty/bin/switchyard doctor
  empty/bin/python -m switchyard models >/dev/null
  # The command as a program: a layer over two processes.
  empty/bin/switchyard run --model olmoe --hidden 256 --intermediate 128 --tokens 64 --ranks 2 --verify >run.log ||
    { cat run.log; return 1; }
  grep '^error' run.log
  empty/bin/python - <<'PYTHON'
import switchyard

switchyard.World.single().barrier()
try:
    switchyard.Experts([], [], top_k=1)
except switchyard.InvalidArgument as error:
    print("refused:", error)
PYTHON
  # And with the smallest library of arrays there is.
  pip install 'numpy==2.4.6; python_version >= "3.11"' 'numpy==2.2.6; python_version < "3.11"'
  empty/bin/python - <<'PYTHON'
import platform

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
print(f"switchyard {switchyard.__version__} in an empty environment of Python {platform.python_version()}, "
      f"{'-'.join(platform.libc_ver())}: error {error:.1e}")
PYTHON
}
for python in "$@"; do try "$python"; done
