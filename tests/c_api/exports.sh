#!/bin/sh
# The library exports the functions of c.h, and nothing else.
#   exports.sh LIBRARY HEADER
set -eu
exported=$(nm -D --defined-only "$1" | awk '{print $3}' | sort)
missing=0
for name in $exported; do
  case $name in sy_*) ;; *) echo "exported, but no function of the interface: $name"; missing=1 ;; esac
done
for name in $(grep '^SY_API\|^ *sy_status sy_' "$2" | grep -o 'sy_[a-z_]*(' | tr -d '(' | sort -u); do
  echo "$exported" | grep -qx "$name" || { echo "declared, but not exported: $name"; missing=1; }
done
exit $missing
