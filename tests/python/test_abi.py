"""python/switchyard/_abi.py is what scripts/abi.py makes of the header, which a C compiler reads in the same way."""

import ctypes
import importlib
import pathlib
import re
import shutil
import subprocess
import sys

import pytest

from switchyard import _abi

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
HEADER = ROOT / "include" / "switchyard" / "c.h"

pytestmark = pytest.mark.skipif(not HEADER.exists(), reason="no sources")


@pytest.fixture(scope="module")
def abi():
    sys.path.insert(0, str(ROOT / "scripts"))
    try:
        return importlib.import_module("abi")
    finally:
        sys.path.pop(0)


def test_the_committed_file_is_what_the_generator_makes(abi):
    text = pathlib.Path(abi.MODULE).read_text()
    assert text == abi.made(HEADER.read_text()), "run scripts/abi.py, and commit what it writes"


def test_what_each_form_becomes(abi):
    text = abi.made(
        """
// A comment; with { braces and #directives }, struct sy_none {.
#define SY_ROOM 3
typedef int32_t sy_kind;
enum {
  SY_FIRST = 0,  // the first
  SY_SECOND = 12
};
typedef struct sy_handle sy_handle;
typedef void (*sy_told)(void* user, double seconds);
typedef struct sy_two_words {
  uint32_t struct_size;
  sy_kind kind, other;
  const char* const* names; /* of
  two lines */
  int64_t shape[SY_ROOM];
  void* (*allocate)(uint64_t bytes,
                    void* user);
  sy_told told;
} sy_two_words;
#define SY_TWO_WORDS_INIT \\
  { .struct_size = sizeof(sy_two_words), .kind = SY_SECOND }
SY_API sy_kind sy_call(const sy_two_words* words, float scale, sy_handle* handle,
                       sy_handle** out);
SY_API const char* sy_name(void);
"""
    )
    words = """
TwoWordsAllocate = CFUNCTYPE(c_void_p, c_uint64, c_void_p)


class TwoWords(Sized):
    _fields_ = [
        ("struct_size", c_uint32), ("kind", c_int32), ("other", c_int32), ("names", POINTER(c_char_p)),
        ("shape", c_int64 * 3), ("allocate", TwoWordsAllocate), ("told", Told),
    ]
"""
    call = """
    "sy_call": (c_int32, {"words": POINTER(TwoWords), "scale": c_float, "handle": c_void_p, "out":
        POINTER(c_void_p)}),
    "sy_name": (c_char_p, {}),
}
"""
    assert "ROOM = 3\nFIRST = 0\nSECOND = 12\n" in text and text.endswith(call)
    assert words in text and "Told = CFUNCTYPE(None, c_void_p, c_double)\n" in text


UNKNOWN = [
    "#define SY_MASK (1 << 3)",
    "#define SY_MOST(a, b) ((a) > (b) ? (a) : (b))",
    "#if SY_NEW",
    "#include <stdbool.h>",
    "#pragma pack(1)",
    "typedef uint32_t sy_unsigned;",
    "typedef union sy_either { int32_t a; float b; } sy_either;",
    "typedef struct sy_nested { struct { int32_t a; } inner; } sy_nested;",
    "typedef struct sy_other { int32_t a; } sy_name;",
    "struct sy_plain { int32_t a; };",
    "enum sy_named { SY_A = 0 };",
    "enum { SY_A = 0, SY_NEXT };",
    "enum { SY_NEGATIVE = -1 };",
    "typedef struct sy_bits { uint32_t low : 4; } sy_bits;",
    "typedef struct sy_grid { float values[2]; } sy_grid;",
    "typedef struct sy_grid { float values[SY_MAX_DIMS][SY_MAX_DIMS]; } sy_grid;",
    "typedef struct sy_new { sy_nowhere kind; } sy_new;",
    "typedef struct sy_half { _Float16 value; } sy_half;",
    "typedef struct sy_if {\n#ifdef SY_NEW\n int32_t a; } sy_if;",
    "typedef struct sy_unended { int32_t a; } sy_unended",
    "SY_API void sy_nothing(void);",
    "SY_API sy_status sy_unnamed(int32_t);",
    "SY_API sy_status sy_many(int32_t count, ...);",
    "SY_API sy_status sy_array(const float values[4]);",
    "SY_API size_t sy_size(void);",
    "sy_status sy_hidden(int32_t a);",
    "static inline int32_t sy_inline(void) { return 1; }",
    "extern const int32_t sy_variable;",
]


@pytest.mark.parametrize("text", UNKNOWN)
def test_an_unknown_line_is_named(abi, text):
    """At the end of the header as it is, and in its midst."""
    header = HEADER.read_text()
    abi.made(header)
    marker = "\ntypedef struct sy_world sy_world;\n"
    for before, after in ((header, ""), header.split(marker)):
        before += marker.strip() + "\n"
        lines = before.count("\n") + 1
        with pytest.raises(abi.Unknown, match=r"^c\.h:\d+: no known form has: .") as caught:
            abi.made(before + text + "\n" + after)
        line = int(re.match(r"c\.h:(\d+)", str(caught.value))[1])
        assert lines <= line <= lines + text.count("\n"), caught.value


def test_a_line_within_a_struct_is_named(abi):
    with pytest.raises(abi.Unknown, match=r"^c\.h:4: no known form has: bool wrong$"):
        abi.made("typedef struct sy_a {\n  int32_t first;\n  // a comment;\n  bool wrong;\n  int32_t last;\n} sy_a;\n")
    with pytest.raises(abi.Unknown, match=r"^c\.h:3: no known form has: SY_B = A$"):
        abi.made("enum {\n  SY_A = 1,\n  SY_B = A\n};\n")


def test_the_script_fails_with_the_line(tmp_path):
    scripts, include = tmp_path / "scripts", tmp_path / "include" / "switchyard"
    shutil.copytree(ROOT / "scripts", scripts, ignore=shutil.ignore_patterns("__pycache__"))
    include.mkdir(parents=True)
    (tmp_path / "python" / "switchyard").mkdir(parents=True)
    (tmp_path / "src" / "c_api").mkdir(parents=True)

    def run(*arguments):
        script = [sys.executable, str(scripts / "abi.py"), *arguments]
        return subprocess.run(script, capture_output=True, text=True, timeout=60)

    shutil.copy(HEADER, include)
    stale = run("--check")
    assert stale.returncode == 1 and "_abi.py is not what scripts/abi.py makes" in stale.stdout
    assert run().returncode == 0 and run("--check").returncode == 0
    made = (tmp_path / "python" / "switchyard" / "_abi.py").read_text()
    assert made == (ROOT / "python" / "switchyard" / "_abi.py").read_text()
    with (include / "c.h").open("a") as file:
        file.write("int32_t sy_new;\n")
    failed = run()
    assert failed.returncode == 1 and re.match(r"c\.h:\d+: no known form has: int32_t sy_new\n", failed.stderr)
    # Nothing was written.
    assert made == (tmp_path / "python" / "switchyard" / "_abi.py").read_text()


def test_structs_and_numbers_are_those_of_the_header(tmp_path):
    """Sizes, offsets and values as a C compiler has them."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler")
    structs = {
        "sy_" + re.sub(r"\B(?=[A-Z])", "_", name).lower(): struct
        for name, struct in vars(_abi).items()
        if isinstance(struct, type) and issubclass(struct, ctypes.Structure) and hasattr(struct, "_fields_")
    }
    wanted = {f"SY_{name}": value for name, value in vars(_abi).items() if isinstance(value, int)}
    assert len(structs) > 30 and len(wanted) > 60
    for name, struct in structs.items():
        wanted[f"sizeof({name})"] = ctypes.sizeof(struct)
        for field, _ in struct._fields_:
            wanted[f"offsetof({name}, {field})"] = getattr(struct, field).offset
    lines = ["#include <stdio.h>", "#include <stddef.h>", "#include <switchyard/c.h>", "int main(void) {"]
    lines += [f'printf("%ld\\n", (long){expression});' for expression in wanted]
    source, program = tmp_path / "sizes.c", tmp_path / "sizes"
    source.write_text("\n".join([*lines, "return 0; }"]))
    subprocess.run([compiler, "-I", str(ROOT / "include"), str(source), "-o", str(program)], check=True)
    found = subprocess.run([str(program)], capture_output=True, text=True, check=True).stdout.split()
    assert dict(zip(wanted, map(int, found))) == wanted


# Changes of the header that break programs which were compiled before it, each with words of the message.
BREAKING = {
    "a signature": (r"(SY_API sy_status sy_world_barrier\(sy_world\* world)\)", r"\1, int32_t times)", "sy_world_barrier was"),
    "a handle's type": (r"sy_layer_check\(sy_layer\* layer\)", "sy_layer_check(sy_world* layer)", "sy_layer_check was"),
    "a function that goes": (r"SY_API sy_status sy_world_barrier\([^;]*;", "", "sy_world_barrier was .*, and is gone"),
    "an enumerator": (r"SY_TIMEOUT = 10,", "SY_TIMEOUT = 110,", "TIMEOUT was 10, and is 110"),
    "a field before others": (r"(typedef struct sy_layer_info \{\s+uint32_t struct_size;)", r"\1 int32_t new_one;", "sy_layer_info.backend was"),
    "a field's type": (r"(typedef struct sy_layer_info \{[^}]*)int32_t num_threads;", r"\1int64_t num_threads;", "sy_layer_info.num_threads was"),
    "a struct within others": (r"\} sy_tensor;", "int64_t new_one; } sy_tensor;", "sy_tensor has no struct_size"),
    "a callback": (r"(typedef int32_t \(\*sy_interrupt_check\)\()void", r"\1int32_t a", "sy_interrupt_check was"),
}  # fmt: skip
HARMLESS = {
    "a function": (r"\ntypedef struct sy_world sy_world;", r"\g<0>\nSY_API sy_status sy_new(sy_world* world);"),
    "a field at the end": (r"\} sy_layer_info;", "int32_t new_one; } sy_layer_info;"),
    "an enumerator": (r"SY_INTERRUPTED = 15", "SY_INTERRUPTED = 15, SY_NEW = 16"),
    "a name for a reserved field": (r"(typedef struct sy_python \{[^}]*)uint32_t reserved;", r"\1int32_t named;"),
}


def changed(pattern, replacement):
    text, count = re.subn(pattern, replacement, HEADER.read_text())
    assert count == 1
    return text


def tree_with(directory, header):
    """Scripts and what they make of the header, beside another header."""
    for path in ("scripts/abi.py", "scripts/generated.py", "python/switchyard/_abi.py", "src/c_api/abi.json"):
        (directory / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / path, directory / path)
    (directory / "include/switchyard").mkdir(parents=True)
    (directory / "include/switchyard/c.h").write_text(header)
    return directory


def run_abi(tree, *words):
    return subprocess.run([sys.executable, tree / "scripts/abi.py", *words], capture_output=True, text=True, check=False)


@pytest.mark.parametrize("change", BREAKING)
def test_a_break_needs_another_number(tmp_path, change):
    pattern, replacement, words = BREAKING[change]
    header = changed(pattern, replacement)
    tree = tree_with(tmp_path, header)
    description = (tree / "src/c_api/abi.json").read_bytes()
    for arguments in ((), ("--check",)):
        done = run_abi(tree, *arguments)
        assert done.returncode == 1 and "raise SY_ABI_VERSION" in done.stderr, done
        assert re.search(words, done.stdout), done.stdout
    assert (tree / "src/c_api/abi.json").read_bytes() == description
    number = re.search(r"#define SY_ABI_VERSION (\d+)u", header)
    raised = header.replace(number[0], f"#define SY_ABI_VERSION {int(number[1]) + 1}u")
    (tree / "include/switchyard/c.h").write_text(raised)
    assert run_abi(tree).returncode == 0 and run_abi(tree, "--check").returncode == 0
    (tree / "include/switchyard/c.h").write_text(header)
    done = run_abi(tree)
    assert done.returncode == 1 and f"SY_ABI_VERSION was {int(number[1]) + 1}" in done.stdout


@pytest.mark.parametrize("change", HARMLESS)
def test_what_breaks_nothing_needs_no_other_number(tmp_path, change):
    tree = tree_with(tmp_path, changed(*HARMLESS[change]))
    done = run_abi(tree, "--check")
    assert done.returncode == 1 and "is not what scripts/abi.py makes" in done.stdout
    assert run_abi(tree).returncode == 0 and run_abi(tree, "--check").returncode == 0
