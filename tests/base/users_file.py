#!/usr/bin/env python3
"""Compiles what a user writes against the public headers, with a user's warnings as errors.

    users_file.py COMPILER...

Two kinds of file: the C++ examples, and a generated one that includes every public header and initialises the
first member of every public aggregate by name. A member without a default would warn there, in a user's file.
"""

import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[2]
INCLUDE = ROOT / "include"
WARNINGS = ["-Wall", "-Wextra", "-Wpedantic", "-Wmissing-field-initializers", "-Werror"]
EXAMPLES = [ROOT / "examples" / name / "main.cpp" for name in ("forward", "symmetric_heap")]
# Structs that the library lays out in ranks' shared memory, and users only read.
READ_ONLY = {"peer_map.h"}


def headers() -> list[pathlib.Path]:
    return sorted((INCLUDE / "switchyard").glob("*.h"))


def structs(text: str) -> list[tuple[str, str]]:
    """The qualified name of each struct of a header, and its first data member."""
    text = re.sub(r"//[^\n]*|/\*.*?\*/", "", text, flags=re.S)
    found: list[tuple[str, str]] = []
    scopes: list[tuple[str, str]] = []  # (kind, name)
    without_member: set[str] = set()
    piece = ""
    for c in text:
        if c not in "{};":
            piece += c
            continue
        kind, name = scopes[-1] if scopes else ("", "")
        if kind == "struct" and name in without_member and c in "{;" and "(" not in re.sub(r"<.*>", "", piece):
            # `Type name = value;`, `Type name{...};` or `Type name;`, but no nested type, alias or friend.
            member = re.search(r"[\w>&*\]]\s+[*&]?(\w+)\s*(=.*)?$", piece, re.S)
            if member and not re.search(r"\b(struct|class|enum|union|using|static|friend|template)\b", piece):
                found.append((name, member.group(1)))
                without_member.discard(name)
        if c == "{":
            opened = re.search(r"\b(namespace|struct)\s+([\w:]+)(?:\s*:\s*[^{]*|\s+final)?\s*$", piece)
            if opened and "enum" not in piece:
                outer = next((n for k, n in reversed(scopes) if k in ("namespace", "struct")), "")
                inner = f"{outer}::{opened.group(2)}" if outer else opened.group(2)
                scopes.append((opened.group(1), inner))
                if opened.group(1) == "struct":
                    without_member.add(inner)
            else:
                scopes.append(("other", ""))
        elif c == "}":
            scopes.pop()
        piece = ""
    return found


def generated() -> str:
    lines = ["#include <type_traits>"]
    lines += [f"#include <switchyard/{header.name}>" for header in headers() if header.name != "c.h"]
    number = 0
    for header in headers():
        if header.name in READ_ONLY | {"c.h"}:
            continue
        for name, member in structs(header.read_text()):
            # Structs with constructors are no aggregates; a template leaves their branch uncompiled.
            lines += [
                f"template <class T> void use_{number}() {{",
                "  if constexpr (std::is_aggregate_v<T>) {",
                f"    [[maybe_unused]] T value{{.{member} = {{}}}};",
                "  }",
                "}",
                f"template void use_{number}<{name}>();",
            ]
            number += 1
    if number < 50:
        sys.exit(f"only {number} structs were found in {INCLUDE}: this test no longer reads its headers")
    print(f"{number} structs")
    return "\n".join(lines) + "\n"


def main() -> int:
    failed = False
    with tempfile.TemporaryDirectory() as directory:
        file = pathlib.Path(directory) / "user.cpp"
        file.write_text(generated())
        for compiler in sys.argv[1:]:
            if shutil.which(compiler) is None:
                sys.exit(f"{compiler} is not there")
            for source in [file, *EXAMPLES]:
                done = subprocess.run(
                    [compiler, "-std=c++20", *WARNINGS, "-fsyntax-only", f"-I{INCLUDE}", str(source)],
                    capture_output=True, text=True,
                )
                print(f"{compiler} {source.name}: {'ok' if done.returncode == 0 else 'failed'}")
                if done.returncode:
                    failed = True
                    print(done.stderr[-6000:])
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
