#!/usr/bin/env python3
"""Makes two files from include/switchyard/c.h: python/switchyard/_abi.py, the C interface as ctypes sees it, and
src/c_api/abi.json, its functions, values, and structs with the place of every field.

scripts/abi.py          writes the files
scripts/abi.py --check  exits with 1 if a file is not what the header makes

Both refuse a header that breaks programs compiled with the one that abi.json describes, unless SY_ABI_VERSION is higher
(docs/versions.md has the rules).

Every line of the header must have a form that is known here. Another one is an error that names it, so nothing is
left out in silence. Comments are not read.
"""

import json
import re
import sys
import textwrap

from generated import ROOT, write_or_check

HEADER = ROOT / "include" / "switchyard" / "c.h"
MODULE = ROOT / "python" / "switchyard" / "_abi.py"
DESCRIPTION = ROOT / "src" / "c_api" / "abi.json"

COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.S)
# A directive, the bracket around all declarations, or a declaration, which has one pair of braces at most.
STATEMENT = re.compile(r'\s*(#(?:\\\n|[^\n])*|extern "C" \{|\}|[^;{}#]+(?:\{[^{}]*\}[^;{}#]*)?;)')
# Statements that declare nothing. Defaults of initialisers are for callers in C.
IGNORED = re.compile(
    r"#ifndef SWITCHYARD_C_H_|#define SWITCHYARD_C_H_|#include <(math|stddef|stdint)\.h>|#if defined\(__GNUC__\)"
    r'|#define SY_API( __attribute__\(\(visibility\("default"\)\)\))?|#ifdef __cplusplus|#else|#endif|extern "C" \{|\}'
    r"|#define SY_[A-Z0-9_]+_INIT \{ \.struct_size = .*\}"
)
NAME = r"[a-z][a-z0-9_]*"
TYPE = rf"(?:const )?{NAME}(?:\*| const\*)*"
VALUE = re.compile(rf"({TYPE}) ({NAME})")
FIELDS = re.compile(rf"({TYPE}) ({NAME}(?:\[\w+\])?(?:, {NAME})*)")
CALLBACK = re.compile(rf"(?:typedef )?({TYPE}) \(\*({NAME})\)\(([^()]*)\)")
FUNCTION = re.compile(rf"SY_API ({TYPE}) (sy_{NAME})\(([^()]*)\)")
NUMBER = re.compile(r"#define SY_([A-Z0-9_]+) (\d+)u?")
ENUMERATOR = re.compile(r"SY_([A-Z0-9_]+) = (\d+)")
ALIAS = re.compile(rf"typedef int32_t (sy_{NAME})")
OPAQUE = re.compile(rf"typedef struct (sy_{NAME}) \1")
BRACED = re.compile(rf"(enum|typedef struct (sy_{NAME})) \{{(.*)\}}(?(2) \2)", re.S)

SCALARS = {f"{kind}_t": f"c_{kind}" for kind in ("int32", "int64", "uint32", "uint64")}
SCALARS |= {"float": "c_float", "double": "c_double"}
START = '''"""The C interface as ctypes sees it. scripts/abi.py makes this file from include/switchyard/c.h."""

from __future__ import annotations

from ctypes import (
@names@,
)
from typing import Any


class Sized(Structure):
    """A struct that begins with its size."""

    def __init__(self, **fields: Any) -> None:
        super().__init__(struct_size=sizeof(type(self)), **fields)


'''


class Unknown(Exception):
    """A line of the header that has no known form."""

    def __init__(self, line, text):
        super().__init__(f"c.h:{line}: no known form has: {text if len(text) < 200 else text[:200] + ' ...'}")


def class_name(name):
    """sy_layer_spec is LayerSpec."""
    return "".join(word.capitalize() for word in name.removeprefix("sy_").split("_"))


def plain(text):
    """In single spaces."""
    return " ".join(text.replace("\\\n", " ").split())


def pieces(text, line, separator):
    """The parts of a text between separators, each with its line and in single spaces."""
    for piece in text.split(separator):
        start = line + piece[: len(piece) - len(piece.lstrip())].count("\n")
        yield start, plain(piece)
        line += piece.count("\n")


def signature(result, parameters):
    """A function's types in C, without the names of its parameters."""
    types = [plain(parameter).rpartition(" ")[0] or plain(parameter) for parameter in parameters.split(",")]
    return f"{result} ({', '.join(types)})"


def filled(items, indent):
    """Items in lines of up to 116 columns, each of them in one piece."""
    text = " ".join(item.replace(" ", "\xa0") for item in items)
    return textwrap.fill(text, 116, initial_indent=indent, subsequent_indent=indent).replace("\xa0", " ")


class Header:
    """What a header declares, as Python's text."""

    def __init__(self, text):
        self.constants, self.types, self.functions = [], [], []
        self.numbers, self.kinds, self.opaque = {}, dict(SCALARS), set()
        # As C says it, for the description: ctypes has one type for all handles.
        self.values, self.signatures, self.fields = {}, {}, {}
        # As many lines as before.
        text = COMMENT.sub(lambda comment: "\n" * comment[0].count("\n"), text)
        position = 0
        while text[position:].strip():
            found = STATEMENT.match(text, position)
            start = found.start(1) if found else position + len(text[position:]) - len(text[position:].lstrip())
            line = text.count("\n", 0, start) + 1
            if not found:
                raise Unknown(line, text[start:].partition("\n")[0])
            self.read(line, found[1].removesuffix(";"))
            position = found.end()

    def read(self, line, text):
        statement = plain(text)
        if IGNORED.fullmatch(statement):
            return
        if found := NUMBER.fullmatch(statement):
            self.numbers[f"SY_{found[1]}"] = found[2]
            self.values[found[1]] = int(found[2])
            self.constants.append(f"{found[1]} = {found[2]}\n")
        elif found := ALIAS.fullmatch(statement):
            self.kinds[found[1]] = "c_int32"
        elif found := OPAQUE.fullmatch(statement):
            self.opaque.add(found[1])
        elif found := BRACED.fullmatch(text):
            body, line = found[3], line + text[: found.start(3)].count("\n")
            if found[2]:
                self.read_struct(found[2], pieces(body, line, ";"))
            else:
                self.read_enum(pieces(body, line, ","))
        elif found := FUNCTION.fullmatch(statement):
            values = ", ".join(f'"{name}": {kind}' for name, kind in self.parameters(line, found[3]))
            self.signatures[found[2]] = signature(found[1], found[3])
            text = f'"{found[2]}": ({self.kind(line, found[1], statement)}, {{{values}}}),'
            self.functions.append(textwrap.fill(text, 116, initial_indent="    ", subsequent_indent=" " * 8) + "\n")
        elif statement.startswith("typedef ") and (found := CALLBACK.fullmatch(statement)):
            self.kinds[found[2]] = self.read_callback(line, class_name(found[2]), found)
            self.signatures[found[2]] = signature(found[1], found[3])
        else:
            raise Unknown(line, statement)

    def read_enum(self, enumerators):
        for line, text in enumerators:
            if not (found := ENUMERATOR.fullmatch(text)):
                raise Unknown(line, text)
            self.constants.append(f"{found[1]} = {found[2]}\n")
            self.values[found[1]] = int(found[2])

    def read_struct(self, name, declarations):
        fields, struct = [], class_name(name)
        told = self.fields[name] = {}
        for line, text in declarations:
            if found := CALLBACK.fullmatch(text):
                fields.append((found[2], self.read_callback(line, struct + class_name(found[2]), found)))
                told[found[2]] = signature(found[1], found[3])
            elif found := FIELDS.fullmatch(text):
                for field in found[2].split(", "):
                    field, _, length = field.removesuffix("]").partition("[")
                    if length and length not in self.numbers:
                        raise Unknown(line, text)
                    times = f" * {self.numbers[length]}" if length else ""
                    fields.append((field, self.kind(line, found[1], text) + times))
                    told[field] = found[1] + (f"[{self.numbers[length]}]" if length else "")
            elif text:
                raise Unknown(line, text)
        base = "Sized" if ("struct_size", "c_uint32") in fields[:1] else "Structure"
        listed = filled((f'("{field}", {kind}),' for field, kind in fields), " " * 8)
        self.types.append(f"\n\nclass {struct}({base}):\n    _fields_ = [\n{listed}\n    ]\n")
        self.kinds[name] = struct

    def read_callback(self, line, name, found):
        result = "None" if found[1] == "void" else self.kind(line, found[1], found[0])
        values = ", ".join([result, *(kind for _, kind in self.parameters(line, found[3]))])
        self.types.append(f"\n\n{name} = CFUNCTYPE({values})\n")
        return name

    def parameters(self, line, text):
        for line, value in pieces(text, line, ",") if text != "void" else ():
            if not (found := VALUE.fullmatch(value)):
                raise Unknown(line, value)
            yield found[2], self.kind(line, found[1], value)

    def kind(self, line, text, whole):
        """A type of C as one of ctypes; `whole` has it."""
        base, *stars = re.sub(r"\bconst\b", "", text).replace("*", " *").split()
        if stars and (base in ("void", "char") or base in self.opaque):
            kind, stars = "c_char_p" if base == "char" else "c_void_p", stars[1:]
        elif base in self.kinds:
            kind = self.kinds[base]
        else:
            raise Unknown(line, whole)
        return "POINTER(" * len(stars) + kind + ")" * len(stars)


def made(text):
    """The module's text, of the header's."""
    return module_of(Header(text))


def module_of(header):
    functions = [
        "\n\n# Each function has the type of its result, and its parameters by name.\n",
        "FUNCTIONS: dict[str, tuple[Any, dict[str, Any]]] = {\n",
        *header.functions,
        "}\n",
    ]
    body = "".join([*header.constants, *header.types, *functions])
    names = sorted({"Structure", "sizeof", *re.findall(r"\bc_\w+|\bPOINTER\b|\bCFUNCTYPE\b", body)})
    listed = filled((f"{name}," for name in names), " " * 4).removesuffix(",")
    return START.replace("@names@", listed) + body


def described(text):
    """What programs in C that were compiled with a header depend on. Places are those of x86-64."""
    header = Header(text)
    module = {}
    exec(module_of(header), module)  # ctypes places fields as C does
    structs = {}
    for name, fields in header.fields.items():
        struct = module[class_name(name)]
        places = [[field, kind, getattr(struct, field).offset, getattr(struct, field).size] for field, kind in fields.items()]
        structs[name] = {"size": module["sizeof"](struct), "fields": places}
    return {"values": header.values, "functions": header.signatures, "structs": structs}


def breaks(old, new):
    """The changes from one description to another that break a program compiled with the old one."""
    for kind in ("values", "functions"):
        for name, told in old[kind].items():
            now = new[kind].get(name)
            if now != told and name != "ABI_VERSION":
                yield f"{name} was {told}, and is {'gone' if now is None else now}"
    for name, told in old["structs"].items():
        now = new["structs"].get(name)
        if now is None:
            yield f"{name} is gone"
            continue
        for index, field in enumerate(told["fields"]):
            other = now["fields"][index] if index < len(now["fields"]) else None
            # A reserved field may get a name and a type of its size, whose 0 means what was before.
            names_reserved = other and field[0].startswith("reserved") and field[2:] == other[2:]
            if other != field and not names_reserved:
                yield f"{name}.{field[0]} was {told_place(field)}, and is {told_place(other) if other else 'gone'}"
        has_size = told["fields"][0][:2] == ["struct_size", "uint32_t"]
        if not has_size and now["size"] != told["size"]:
            yield f"{name} has no struct_size and had {told['size']} bytes, and has {now['size']}"


def told_place(field):
    name, kind, offset, size = field
    return f"{kind} {name} at {offset} of {size} bytes"


def description_of(text, before):
    """abi.json of a header, and what is wrong if it breaks what abi.json had before (None: nothing was there)."""
    new = described(text)
    written = json.dumps(new, indent=1)
    # A field in a line.
    written = re.sub(r"\[\n\s+(\"[^\[\]]*?)\n\s+\]", lambda found: "[" + plain(found[1]) + "]", written) + "\n"
    old = json.loads(before) if before else new
    numbers = [told["values"]["ABI_VERSION"] for told in (old, new)]
    wrong = list(breaks(old, new)) if numbers[1] == numbers[0] else []
    if numbers[1] < numbers[0]:
        wrong = [f"SY_ABI_VERSION was {numbers[0]}, and is {numbers[1]}"]
    return written, wrong


def main():
    text = HEADER.read_text()
    try:
        module = made(text)
        description, wrong = description_of(text, DESCRIPTION.read_text() if DESCRIPTION.exists() else "")
    except Unknown as error:
        sys.exit(str(error))
    if wrong:
        print("\n".join(wrong))
        sys.exit("This breaks programs that were compiled before: undo it, or raise SY_ABI_VERSION in c.h (docs/versions.md).")
    sys.exit(write_or_check({MODULE: module, DESCRIPTION: description}))


if __name__ == "__main__":
    main()
