#!/usr/bin/env bash
# Prints a directory with a second transformers, newer than the one of environment.sh, to put on PYTHONPATH
# before it. It is made once and kept beside that environment, which has all else that it needs.
#
#   PYTHONPATH=$(tests/python/next_transformers.sh PYTHON) PYTHON -m pytest tests/python/test_transformers.py
#
# PYTHON is what environment.sh prints; without it, that is asked.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
transformers=5.24.0
python=${1:-$("$here/environment.sh")}
version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
directory=${XDG_CACHE_HOME:-$HOME/.cache}/switchyard/transformers-$transformers-python-$version
if [ ! -e "$directory" ]; then
  echo "Installing transformers $transformers into $directory ..." >&2
  mkdir -p "$(dirname "$directory")"
  # Others may be making the same one: it is renamed when it is complete.
  work=$(mktemp -d "$directory.XXXXXX")
  trap 'rm -rf "$work"' EXIT
  "$python" -m pip --quiet --disable-pip-version-check install --no-deps --no-compile --only-binary :all: \
    --target "$work" transformers==$transformers >&2
  # It says itself which versions of other packages it cannot run with.
  PYTHONPATH=$work "$python" -c 'import transformers' >&2
  mv -T "$work" "$directory" 2>/dev/null || [ -e "$directory" ]
fi
echo "$directory"
