#!/usr/bin/env bash
# Makes a virtual environment in which vLLM or SGLang can be imported on a machine without a GPU, and
# prints the path of its Python. CI does not use it: half a gigabyte is downloaded for each.
#
#   $(tests/python/server_environment.sh vllm) -m pytest tests/python/test_vllm.py
#   $(tests/python/server_environment.sh sglang) -m pytest tests/python/test_sglang.py
#
# The wheels are installed without what they name, and PyTorch's CUDA libraries are stubs
# (cuda_stubs.py): nothing of the servers' own kernels can run. On a machine with a GPU install the
# server itself instead.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
torch=2.14.0
server=${1:?usage: server_environment.sh vllm|sglang}
requirements=$here/requirements-$server.txt
[ -e "$requirements" ] || { echo "no $requirements; use vllm or sglang" >&2; exit 2; }
key=$(cat "$requirements" "$here"/{server_environment.sh,cuda_stubs.py} | sha256sum | cut -c1-12)
directory=${XDG_CACHE_HOME:-$HOME/.cache}/switchyard/$server-$key
if [ ! -e "$directory/complete" ]; then
  echo "Making a Python environment with $server in $directory ..." >&2
  rm -rf "$directory"
  "${PYTHON:-python3}" -m venv "$directory" >&2
  "$directory/bin/python" -m pip --quiet --disable-pip-version-check install --no-deps torch==$torch \
    -r "$requirements" >&2
  "$directory/bin/python" "$here/cuda_stubs.py" "$("$directory/bin/python" -c \
    'import importlib.util as u; print(u.find_spec("torch").submodule_search_locations[0])')" >&2
  touch "$directory/complete"
fi
echo "$directory/bin/python"
