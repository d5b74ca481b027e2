#!/usr/bin/env bash
# Builds the site into build/site, a folder that any web server can serve as it is: README.md, docs/, charts and a page
# of theirs and ours made from results/, and the API of C++, C and Python. Fails at a warning.
#   scripts/site.sh            build
#   scripts/site.sh --serve    build, then serve on 127.0.0.1:8000
# Needs doxygen (scripts/bootstrap.sh site) and Python with venv; what site/requirements.txt names comes from PyPI, once.
set -euo pipefail
cd "$(dirname "$0")/.."

[ $# -eq 0 ] || [ "$*" = --serve ] || { echo "site.sh: unknown arguments '$*'; use none, or --serve" >&2; exit 2; }
command -v doxygen >/dev/null || { echo "site.sh: doxygen is missing; run scripts/bootstrap.sh site" >&2; exit 2; }
environment=.cache/site-$(sha256sum site/requirements.txt | cut -c1-12)
if [ ! -x "$environment/bin/mkdocs" ]; then
  echo "Making a Python environment with MkDocs in $environment ..." >&2
  rm -rf "$environment"
  "${PYTHON:-python3}" -m venv "$environment"
  "$environment/bin/python" -m pip --quiet --disable-pip-version-check install --only-binary :all: -r site/requirements.txt
fi
export NO_MKDOCS_2_WARNING=1  # a notice about the next major version
mkdir -p build
if ! "$environment/bin/mkdocs" build --strict -f site/mkdocs.yml >build/site.log 2>&1; then
  grep -v '^INFO' build/site.log >&2
  exit 1
fi
echo "build/site: $(find build/site -name '*.html' | wc -l) pages"
[ "$*" != --serve ] || exec "$environment/bin/python" -m http.server 8000 --bind 127.0.0.1 --directory build/site
