"""What the site has beside docs/: README.md and its neighbours, the sources that pages link to, the API's entry pages,
and charts and a page of theirs and ours made of results/."""

import pathlib
import re
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
PAGES = {"README.md": "index.md", "CHANGELOG.md": "CHANGELOG.md", "CONTRIBUTING.md": "CONTRIBUTING.md", "SECURITY.md": "SECURITY.md"}
LINK = re.compile(r"(\]\()([^)\s]+)(\))")
LANGUAGES = {".py": "python", ".cpp": "cpp", ".h": "cpp", ".cuh": "cpp", ".cu": "cpp", ".c": "c", ".sh": "sh", ".json": "json",
             ".txt": "text", ".yml": "yaml", ".toml": "toml", ".cmake": "cmake"}
MOST_BYTES = 200_000

CHARTS = ["over-the-floor", "rivals", "scaling", "decode", "memory", "failures"]

API = {
    "api/python.md": "# Python\n\nThe package `switchyard`. [Python](../python.md) shows how it is used.\n\n::: switchyard\n    options:\n"
                     "      show_root_heading: false\n\n## switchyard.tuner\n\n::: switchyard.tuner\n    options:\n"
                     "      show_root_heading: false\n",
    "api/cpp.md": "# C++\n\nThe headers of `include/switchyard/`, by Doxygen.\n\n- [Classes and structs](../cpp/annotated.md)\n"
                  "- [Files](../cpp/files.md)\n- [Functions](../cpp/functions.md)\n- [Namespaces](../cpp/namespaces.md)\n"
                  "- [Index of members](../cpp/class_members.md)\n",
    "api/c.md": "# C\n\nThe C ABI, `include/switchyard/c.h`, by Doxygen.\n\n- [Structs](../c/annotated.md)\n- [Functions](../c/functions.md)\n"
                "- [The file](../c/c_8h.md)\n",
}
CSS = """.md-typeset table:not([class]) { font-size: 0.62rem; }
.md-grid { max-width: 72rem; }
.md-typeset img[src$="#only-dark"] { display: none; }
[data-md-color-scheme="slate"] .md-typeset img[src$="#only-dark"] { display: initial; }
[data-md-color-scheme="slate"] .md-typeset img[src$="#only-light"] { display: none; }
svg.reproduced { display: block; margin-top: 0.6rem; }
.scroll { overflow-x: auto; }
.scroll img { min-width: 680px; max-width: none; width: 100%; }
.md-typeset .scroll table:not([class]) :is(th, td) { min-width: 0; padding: 0.35em 0.7em; }
"""


def pictures(text):
    """Pictures for light and dark pages, by the page's own switch instead of the system's."""
    found = re.compile(r'<picture>\s*<source[^>]*srcset="([^"]+)"[^>]*>\s*<img src="([^"]+)" alt="([^"]*)"[^>]*>\s*</picture>')
    return found.sub(lambda m: f"![{m[3]}]({m[2]}#only-light)\n![{m[3]}]({m[1]}#only-dark)", text)


def outside_code(text, change):
    """Changes a text outside of its code blocks."""
    parts = re.split(r"(^```.*?^```\n?)", text, flags=re.S | re.M)
    return "".join(part if i % 2 else change(part) for i, part in enumerate(parts))


def place_of(path):
    """Where the site has a file or a folder of the repository, as a path of docs/."""
    if DOCS in path.parents:
        return path.relative_to(DOCS).as_posix()
    name = path.relative_to(ROOT).as_posix()
    return PAGES.get(name, f"source/{name}.md")


def rewritten(text, path, place, wanted):
    """Links of the page `path`, which stands at `place`, lead to pages of the site. Adds files outside of docs/ to `wanted`."""

    def change(match):
        target, _, anchor = match[2].partition("#")
        if not target or re.match(r"[a-z]+:", target):
            return match[0]
        to = (path.parent / target).resolve()
        if not to.exists() or ROOT not in to.parents:
            return match[0]
        there = place_of(to)
        if DOCS not in to.parents and to.relative_to(ROOT).as_posix() not in PAGES:
            wanted.add(to)
        up = "../" * place.count("/")
        is_source = there.startswith("source/")
        return f"{match[1]}{up}{there}{'#' + anchor if anchor and not is_source else ''}{match[3]}"

    return outside_code(pictures(text), lambda part: LINK.sub(change, part))


def source_page(path):
    """A file as a page, or the list of a folder."""
    name = path.relative_to(ROOT)
    if path.is_dir():
        entries = "".join(f"- `{entry.name}`\n" for entry in sorted(path.iterdir()) if not entry.name.startswith((".", "__")))
        return f"---\nsearch: {{exclude: true}}\n---\n\n# {name}\n\n{entries}"
    text = path.read_bytes()[:MOST_BYTES].decode(errors="replace")
    language = LANGUAGES.get(path.suffix, "text")
    return f"---\nsearch: {{exclude: true}}\n---\n\n# {name}\n\n````{language}\n{text}\n````\n"


def made(script, *words):
    subprocess.run([sys.executable, ROOT / "scripts" / script, *map(str, words)], check=True, capture_output=True)


def on_files(files, config):
    from mkdocs.structure.files import File

    wanted = set()
    pages = {}
    for name, place in PAGES.items():
        pages[place] = rewritten((ROOT / name).read_text(), ROOT / name, place, wanted)
    for path in DOCS.rglob("*.md"):
        rewritten(path.read_text(), path, path.relative_to(DOCS).as_posix(), wanted)
    for path in wanted:
        pages[place_of(path)] = source_page(path)
    with tempfile.TemporaryDirectory() as directory:
        made("reproduce.py", "all", "--from", ROOT / "results", "--markdown", "--out", directory)
        pages["reproduced.md"] = (pathlib.Path(directory) / "reproduced.md").read_text()
    pages.update(API)
    drawn = {path.stem.removesuffix("-light") for path in (DOCS / "images").glob("*-light.svg")}
    charts = [*CHARTS, *sorted(drawn - set(CHARTS))]
    pages["charts.md"] = "# Charts\n\nDrawn from `results/` by `scripts/charts.py`; [benchmarks](benchmarks.md) has every number.\n\n" + "".join(
        f'<div class="scroll" markdown>\n![{name}](images/{name}-light.svg#only-light)\n![{name}](images/{name}-dark.svg#only-dark)\n</div>\n\n'
        for name in charts)
    for place, text in pages.items():
        files.append(File.generated(config, place, content=text))
    files.append(File.generated(config, "stylesheets/site.css", content=CSS))
    return files


def on_page_markdown(markdown, page, config, files):
    # "[token][k]" is an array with two indices, not a reference.
    markdown = outside_code(markdown, lambda part: re.sub(r"\[([\w ]+)\]\[(\w+)\]", r"\\[\1\\]\\[\2\\]", part))
    if page.file.src_uri.startswith(("cpp/", "c/")):
        # Doxygen has no anchors for enums without a name.
        return re.sub(r"\[([^\]]*)\]\(#enum-@\d+\)", r"\1", markdown)
    path = DOCS / page.file.src_path
    if not path.exists() or page.file.generated_by:
        return markdown
    return rewritten(markdown, path, page.file.src_uri, set())


def on_page_content(html, page, config, files):
    """What announces a block of code in a docstring is no text."""
    return html.replace("<p>::</p>", "") if page.file.src_uri.startswith("api/") else html
