#!/usr/bin/env bash
# Runs the CPU benchmarks and writes results/*.json and results/run.txt; then refreshes the tables.
set -euo pipefail
cd "$(dirname "$0")/.."

scripts/bootstrap.sh build test
cmake -S . -B build -G Ninja -DSWITCHYARD_BUILD_BENCH=ON >/dev/null
cmake --build build --target bench/all

machine="$(sed -n 's/^model name[^:]*: //p' /proc/cpuinfo | head -1), $(nproc) hardware threads"
commit="$(git rev-parse --short HEAD)$(git diff --quiet HEAD || echo +)"
measure() {  # name, arguments...
  local name=$1
  shift
  local command="$name --benchmark_format=json $*"
  "build/bench/$name" --benchmark_format=json "$@" >"build/$name.json"
  python3 - "build/$name.json" "results/$name.json" "$machine" "$commit" "$command" <<'PY'
import json, sys
source, target, machine, commit, command = sys.argv[1:]
result = json.load(open(source))
for key in ("host_name", "executable"):
    result["context"].pop(key, None)
result["switchyard"] = {"machine": machine, "commit": commit, "command": command}
parts = {name: json.dumps(part) for name, part in result.items()}
parts["benchmarks"] = "[\n" + ",\n".join(map(json.dumps, result["benchmarks"])) + "\n]"
with open(target, "w") as file:
    file.write("{\n" + ",\n".join(f'"{name}": {text}' for name, text in parts.items()) + "\n}\n")
PY
}
mkdir -p results
# Interleaved, so that a slow minute of a shared machine falls on all alike.
measure cpu_bench --benchmark_repetitions=9 --benchmark_enable_random_interleaving=true
./run >/dev/null  # builds, and makes the checkpoint
./run >results/run.txt
scripts/tables.py
