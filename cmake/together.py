#!/usr/bin/env python3
"""Which C++ sources can be compiled as one file.

    cmake/together.py MOST SOURCE...     prints the number of each source's group, of at most MOST files

Two sources do not go together if one has a local name that the other one, or a header of it, uses. Names are found as
text, so a group can fail to compile all the same.
"""

import functools
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
FOLDERS = ["include", "src", "lab", "examples", "tests"]  # where headers are found


@functools.cache
def types_of_header(name):
    """Types that a header of this project declares, and those of the headers that it includes."""
    found = set()
    for folder in FOLDERS:
        if (header := ROOT / folder / name).is_file():
            text = header.read_text()
            found |= set(re.findall(r"^(?:class|struct|union|enum class|enum|using) (\w+)", text, flags=re.M))
            found |= types_of_headers(text)
    return found


def types_of_headers(text):
    return set().union(*map(types_of_header, re.findall(r'^#include ["<](.+\.h)[">]', text, flags=re.M)))


def names_of(text):
    """(names that a source defines for itself, at the begin of a line; all names in it, and types of its headers)."""
    own = set()
    for block in re.findall(r"^namespace \{$(.*?)^\}  // namespace$", text, flags=re.M | re.S):
        for line in block.splitlines():
            for pattern in (r"(?:class|struct|union|enum class|enum|using) (?:\w+::)*(\w+)",
                            r"(?:\[\[\w+\]\] )?[A-Za-z][^(={;]*?(?<!:)\b(\w+)(?:\[\w*\])?(?: ?[(={;]|$)"):
                if found := re.match(pattern, line):
                    own.add(found[1])
    used = set(re.findall(r"(?<![\w.:>])[A-Za-z]\w+", re.sub(r'//.*|#include.*|"(?:\\.|[^"\\\n])*"', "", text)))
    return own, own | used | types_of_headers(text)


def groups(files, most):
    """[[file]], of at most `most` files each. The files that go with the fewest others choose first."""
    names = {file: names_of(pathlib.Path(file).read_text()) for file in files}

    def apart(file, other):
        return names[file][0] & names[other][1] or names[other][0] & names[file][1]

    found = []
    for file in sorted(files, key=lambda file: -sum(bool(apart(file, other)) for other in files)):
        for members in found:
            if len(members) < most and not any(apart(file, member) for member in members):
                members.append(file)
                break
        else:
            found.append([file])
    return found


def main():
    """Only files of one folder go together: between namespaces, a header can mean another type by a name."""
    most, *sources = sys.argv[1:]
    folders = {}
    for file in sources:
        folders.setdefault(pathlib.Path(file).parent, []).append(file)
    of_folders = [members for files in folders.values() for members in groups(files, int(most))]
    group_of = {file: i for i, members in enumerate(of_folders) for file in members}
    print(";".join(str(group_of[file]) for file in sources))


if __name__ == "__main__":
    main()
