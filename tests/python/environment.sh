#!/usr/bin/env bash
# Makes a virtual environment with PyTorch, transformers and pytest, all pinned, and prints the path of
# its Python. It is made once and kept in ~/.cache/switchyard (or $XDG_CACHE_HOME/switchyard).
#
# PyPI has PyTorch for Linux with CUDA only: 0.5 GB, and 3 GB of NVIDIA's libraries that it names.
# Where there is no GPU they are left out, and stubs put in their place (cuda_stubs.py). If PyTorch
# cannot be imported then, they are installed after all.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
torch=2.15.0
python=${PYTHON:-python3}

stubs=yes
[ ! -e /dev/nvidiactl ] || stubs=no
version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
key=$(cat "$here"/{requirements.txt,environment.sh,cuda_stubs.py} | sha256sum | cut -c1-12)
directory=${XDG_CACHE_HOME:-$HOME/.cache}/switchyard/python-$version-$key-stubs-$stubs
if [ ! -x "$directory/bin/python" ]; then
  echo "Making a Python environment with PyTorch $torch in $directory ..." >&2
  mkdir -p "$(dirname "$directory")"
  # Others may be making the same one: it is renamed when it is complete. A virtual environment
  # cannot be moved, so the last step makes its scripts and configuration anew.
  work=$(mktemp -d "$directory.XXXXXX")
  trap 'rm -rf "$work"' EXIT
  "$python" -m venv "$work" >&2
  pip() { "$work/bin/python" -m pip --quiet --disable-pip-version-check "$@" >&2; }
  if [ $stubs = yes ]; then
    pip install --no-deps --only-binary :all: torch==$torch
    pip install --only-binary :all: -r "$here/requirements.txt"
    "$work/bin/python" "$here/cuda_stubs.py" "$("$work/bin/python" -c \
      'import importlib.util as u; print(u.find_spec("torch").submodule_search_locations[0])')" >&2
    if ! "$work/bin/python" -c 'import torch, transformers; torch.zeros(2) @ torch.zeros(2)' >&2; then
      echo "PyTorch does not run with stubs; installing the libraries that it names." >&2
      pip install --force-reinstall torch==$torch
    fi
  else
    pip install -r "$here/requirements.txt" torch==$torch
  fi
  if mv -T "$work" "$directory" 2>/dev/null; then "$python" -m venv --upgrade "$directory" >&2; fi
fi
echo "$directory/bin/python"
