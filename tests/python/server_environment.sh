#!/usr/bin/env bash
# Makes a virtual environment in which vLLM or SGLang can be imported on a machine without a GPU, and
# prints the path of its Python. CI does not use it: half a gigabyte is downloaded for each.
#
#   $(tests/python/server_environment.sh vllm) -m pytest tests/python/test_vllm.py
#   $(tests/python/server_environment.sh sglang) -m pytest tests/python/test_sglang.py
#   $(PYTHON=python3.12 tests/python/server_environment.sh sglang-0.5.16) -m pytest tests/python/test_sglang.py
#
# The argument names a file of requirements beside this one: a server, and its release where it is not the
# newest that the plugin knows. The file says which PyTorch. PYTHON: the interpreter, if not python3.
#
# The wheels are installed without what they name, and PyTorch's CUDA libraries are stubs
# (cuda_stubs.py): nothing of the servers' own kernels can run. On a machine with a GPU install the
# server itself instead.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
servers=$(cd "$here" && ls requirements-*.txt | sed 's/requirements-\(.*\)\.txt/\1/' | xargs)
server=${1:?usage: server_environment.sh one of: $servers}
requirements=$here/requirements-$server.txt
[ -e "$requirements" ] || { echo "no $requirements; use one of: $servers" >&2; exit 2; }
key=$(cat "$requirements" "$here"/{server_environment.sh,cuda_stubs.py} | sha256sum | cut -c1-12)
directory=${XDG_CACHE_HOME:-$HOME/.cache}/switchyard/$server-$key
if [ ! -e "$directory/complete" ]; then
  echo "Making a Python environment with $server in $directory ..." >&2
  rm -rf "$directory"
  "${PYTHON:-python3}" -m venv "$directory" >&2
  "$directory/bin/python" -m pip --quiet --disable-pip-version-check install --no-deps -r "$requirements" >&2
  "$directory/bin/python" "$here/cuda_stubs.py" "$("$directory/bin/python" -c \
    'import importlib.util as u; print(u.find_spec("torch").submodule_search_locations[0])')" >&2
  touch "$directory/complete"
fi
echo "$directory/bin/python"
