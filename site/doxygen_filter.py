#!/usr/bin/env python3
"""Doxygen's input filter: makes documentation of our headers' plain comments.

    doxygen_filter.py HEADER

A comment above a declaration documents it, one behind a declaration that declaration, and the first one the file. A
comment that a blank line follows belongs to nothing, and stays a comment.
"""

import pathlib
import re
import sys


def escaped(text):
    """Words that Doxygen would take for commands or HTML."""
    return re.sub(r"([\\@<>&#$%])", r"\\\1", text)


def main():
    lines = pathlib.Path(sys.argv[1]).read_text().splitlines()
    behind = False  # the lines before ended with a comment behind a declaration
    first = True
    for i, line in enumerate(lines):
        alone = re.match(r"^(\s*)//( |$)(.*)$", line)
        trailing = None if alone else re.match(r"^(.*[^\s/:\"].*?)\s+// (.*)$", line)
        if alone:
            # A trailing comment goes on in the column where it began.
            if behind and len(alone[1]) > 8:
                print(f"{alone[1]}///< {escaped(alone[3])}")
                continue
            behind = False
            end = next((k for k in range(i, len(lines)) if not lines[k].lstrip().startswith("//")), len(lines))
            free = end >= len(lines) or (not lines[end].strip() and not first)
            print(line if free else f"{alone[1]}///{' @file' + chr(10) + '///' if first and i == 0 else ''} {escaped(alone[3])}")
        elif trailing and not line.lstrip().startswith("#"):
            behind = True
            print(f"{trailing[1]} ///< {escaped(trailing[2])}")
        else:
            behind, first = False, False
            print(line)


if __name__ == "__main__":
    main()
