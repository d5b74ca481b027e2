#!/usr/bin/env python3
"""Runs clang-tidy on the sources of the library, the command and the example, several in one go.

    .ci/lint.py DIRECTORY     with compile_commands.json, and where the batches are written

A file alone spends most of its time in headers. So sources are written one behind the other into one file, which has
the flags of all, and the lines in its findings are mapped back: half of the time of one by one.
Sources that do not compile together (two have a local function of one name, say) go to different batches.
Where that was not foreseen, a batch is linted again in two parts, in the end file by file.

Files that no command compiles (the GPU engine's, where there is no CUDA) are left out.
"""

import concurrent.futures
import json
import os
import pathlib
import re
import shlex
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT / "cmake"))
from together import groups

FOLDERS = ["src/*.cpp", "lab/*.cpp", "examples/all_to_all/*.cpp"]
TIDY = "clang-tidy-14"
MOST_FILES = 16  # of a batch: enough to read headers rarely, few enough for all cores to have some


def flags_of(command):
    """Flags that change what Clang sees, in pairs: of a word with its argument, and of a word and nothing. Optimisation
    and GCC's precompiled headers do not."""
    words = shlex.split(command)
    flags = []
    for i, word in enumerate(words):
        if word in ("-isystem", "-I", "-D"):
            flags.append((word, words[i + 1]))
        elif re.match(r"-(D|I|std=)", word):
            flags.append((word, ""))
    return tuple(flags)


def united(all_flags):
    """[flags]: as few as there can be. Folders and macros that a file does not need are no harm to it, but no two
    values of a macro go together."""
    found = []
    for flags in sorted(all_flags):
        for united_flags in found:
            both = dict.fromkeys(united_flags) | dict.fromkeys(flags)
            macros = [flag.split("=")[0] for flag, _ in both if flag.startswith("-D")]
            if len(macros) == len(set(macros)):
                united_flags[:] = both
                break
        else:
            found.append(list(flags))
    return found


def batches(build):
    """[(flags, [file])]: files that compile with the same flags, and whose names do not meet."""
    listed = subprocess.run(["git", "ls-files", *FOLDERS], cwd=ROOT, check=True, capture_output=True, text=True)
    wanted = {str(ROOT / name) for name in listed.stdout.split() if "kernels_impl" not in name}
    flags_of_file = {}  # once, though a test may compile it again
    for entry in json.loads((build / "compile_commands.json").read_text()):
        if entry["file"] in wanted:
            flags_of_file.setdefault(entry["file"], flags_of(entry["command"]))
    result = []
    for flags in united(set(flags_of_file.values())):
        files = [file for file, its_flags in sorted(flags_of_file.items()) if set(its_flags) <= set(flags)]
        for file in files:
            del flags_of_file[file]
        result += [([word for flag in flags for word in flag if word], members) for members in groups(files, MOST_FILES)]
    return result


def unused_names(file):
    """Names that are declared here (using a::name, namespace name = ...) and not used, as text: in a batch, clang-tidy
    takes the use of another file for theirs."""
    text = re.sub(r"//.*|#include.*", "", pathlib.Path(file).read_text())
    found = ""
    for match in re.finditer(r"^ *(?:using [\w:]+::(\w+)|namespace (\w+) = [\w:]+);", text, flags=re.M):
        name = match[1] or match[2]
        if len(re.findall(rf"(?<!\w)(?<!::){name}\b", text)) <= bool(match[2]):
            line = text.count("\n", 0, match.start(1 if match[1] else 2)) + 1
            found += f"{os.path.relpath(file, ROOT)}:{line}: error: '{name}' is declared and not used\n"
    return found


def lint(name, flags, files, work):
    """The findings in `files`, as text."""
    text, starts = "", []
    batch = work / f"{name}.cpp"
    for file in files:
        starts.append(text.count("\n"))
        text += pathlib.Path(file).read_text().rstrip("\n") + "\n"
    batch.write_text(text)
    done = subprocess.run([TIDY, "--quiet", str(batch), "--", *flags], cwd=ROOT, capture_output=True, text=True)

    named = []  # files of which the findings speak

    def mapped(match):
        line = int(match[1])
        i = max(i for i in range(len(files)) if starts[i] < line)
        named.append(files[i])
        return f"{os.path.relpath(files[i], ROOT)}:{line - starts[i]}:{match[2]}:{match[3]}"

    report = re.sub(rf"^{re.escape(str(batch))}:(\d+):(\d+):(.*)$", mapped, done.stdout, flags=re.M)
    if done.returncode == 0:
        return report
    if len(files) == 1 or "clang-diagnostic-error" not in report:
        return report or done.stderr or f"{TIDY} failed with {done.returncode}: {batch}\n"
    # They do not compile together. The first one named is tried alone, the others without it.
    apart = named[:1] or files[: len(files) // 2]
    together = [file for file in files if file not in apart]
    return lint(name + "a", flags, together, work) + lint(name + "b", flags, apart, work)


def main():
    build = pathlib.Path(sys.argv[1]).resolve()
    all_batches = batches(build)
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        reports = list(pool.map(lambda i: lint(f"batch{i}_", *all_batches[i], build), range(len(all_batches))))
    findings = "".join(reports) + "".join(unused_names(file) for _, files in all_batches for file in files)
    count = sum(len(files) for _, files in all_batches)
    print(findings, end="")
    print(f"clang-tidy: {count} files in {len(all_batches)} batches{', findings above' if findings else ''}")
    return bool(findings)


sys.exit(main())
