#!/usr/bin/env python3
"""Opens pages of `switchyard report` in headless Chromium, of all committed results: everything is drawn, no label
lies on another or leaves its chart, labels are legible at 400 px, keys work, dark and paper differ from light, and A4
holds every chart.
Exits with 77 where there is no Chromium, after it has made the pages.

    browser_check.py --switchyard build/src/cli/switchyard --results results [--keep DIRECTORY]
"""

import argparse
import html
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

sys.path.append(str(pathlib.Path(__file__).parents[2] / "bench"))
from result_rows import card_of

SKIPPED = 77
# Suites whose rows the repository's results have, and `switchyard report` draws.
DRAWN = {"one_gpu_bf16", "one_gpu_fp8", "one_gpu_thesis", "ep_bf16", "ep_fp8", "ep_thesis"}
BROWSERS = ["chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome"]

# Runs in a copy of the page, behind its own script, and leaves what it saw in an attribute.
PROBE = """
<script>
(() => {
  const seen = { overlaps: [], outside: [], incomplete: [] };
  const name = (figure) => figure.querySelector('figcaption').firstChild.textContent;
  for (const figure of document.querySelectorAll('figure')) {
    const rows = figure.querySelectorAll('details tbody tr').length;
    const chart = figure.querySelector('svg.chart, canvas');
    if (!chart || !name(figure) || rows === 0 || chart.tabIndex !== 0 || !chart.getAttribute('aria-label')) {
      seen.incomplete.push(name(figure));
    }
    if (!figure.querySelector('svg.chart')) continue;
    const border = figure.getBoundingClientRect();
    const boxes = [...chart.querySelectorAll('text')].filter((text) => text.textContent)
      .map((text) => ({ text: text.textContent, box: text.getBoundingClientRect() }));
    const slack = 1.5;
    boxes.forEach(({ text, box }, i) => {
      if (box.left < border.left || box.right > border.right || box.top < border.top || box.bottom > border.bottom) {
        seen.outside.push(`${name(figure)}: ${text}`);
      }
      for (const other of boxes.slice(i + 1)) {
        const wide = Math.min(box.right, other.box.right) - Math.max(box.left, other.box.left);
        const high = Math.min(box.bottom, other.box.bottom) - Math.max(box.top, other.box.top);
        if (wide > slack && high > slack + 2) seen.overlaps.push(`${name(figure)}: ${text} / ${other.text}`);
      }
    });
  }
  const press = (element, key) =>
    element.dispatchEvent(new KeyboardEvent('keydown', { key, bubbles: true }));
  press(document.querySelector('svg.chart'), 'ArrowRight');
  seen.tip = document.getElementById('tip').hidden ? '' : document.getElementById('tip').textContent;
  press(document.querySelector('svg.chart'), 'Escape');
  const canvas = document.querySelector('canvas');
  if (canvas) {
    const range = document.querySelector('.tools output');
    const whole = range.textContent;
    press(canvas, '+');
    seen.zoomed = range.textContent !== whole;
    press(canvas, '0');
    seen.restored = range.textContent === whole;
    const pixels = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data;
    seen.colours = new Set(new Uint32Array(pixels.buffer)).size;
  }
  seen.published = document.querySelectorAll('.panels .published').length;
  seen.background = getComputedStyle(document.body).backgroundColor;
  seen.sideways = document.documentElement.scrollWidth - document.documentElement.clientWidth;
  seen.figures = document.querySelectorAll('figure').length;
  seen.charts = Number(document.documentElement.dataset.charts);
  seen.problem = document.documentElement.dataset.problem || '';
  seen.smallest = Math.min(...[...document.querySelectorAll('svg.chart text')].filter((text) => text.textContent)
    .map((text) => text.getScreenCTM()).map(({ a, b }) => 11 * Math.hypot(a, b)));
  document.documentElement.dataset.seen = JSON.stringify(seen);
  if (parent !== window) parent.postMessage(JSON.stringify(seen), '*');
})();
</script>
"""


def require(condition, problem):
    if not condition:
        sys.exit(f"browser_check: {problem}")


# Windows are no narrower than 500 px; frames are.
FRAME = """<!doctype html><body style="margin: 0"><script>
addEventListener('message', ({ data }) => { document.documentElement.dataset.seen = data; });
</script><iframe src="PAGE" style="border: 0" width="WIDTH" height="1000"></iframe></body>"""
NARROW = 400
SMALLEST_LABEL = 9  # px


class Browser:
    def __init__(self, program, directory):
        self.command = [program, "--headless=new", "--disable-gpu", "--hide-scrollbars", "--no-first-run",
                        "--disable-dev-shm-usage", f"--user-data-dir={directory / 'profile'}",
                        "--virtual-time-budget=10000"]
        if os.geteuid() == 0:
            self.command.append("--no-sandbox")  # which Chromium refuses to make for root

    def open(self, page, *arguments):
        done = subprocess.run([*self.command, *arguments, page.as_uri()], capture_output=True, text=True,
                              timeout=120, check=False)
        require(done.returncode == 0, f"Chromium ended with {done.returncode}:\n{done.stderr[-2000:]}")
        return done.stdout

    def probe(self, page, width, dark=False):
        copy = page.with_suffix(".probe.html")
        text = page.read_text()
        end = text.rindex("</body>")
        copy.write_text(text[:end] + PROBE + text[end:])
        if width < 500:
            framed = page.with_suffix(".frame.html")
            framed.write_text(FRAME.replace("PAGE", copy.name).replace("WIDTH", str(width)))
            copy, width = framed, 500
        scheme = ["--blink-settings=preferredColorScheme=0"] if dark else []
        dom = self.open(copy, f"--window-size={width},1000", "--dump-dom", *scheme)
        found = re.search(r'data-seen="([^"]*)"', dom)
        require(found, f"the probe of {page.name} did not run:\n{dom[:500]}")
        return json.loads(html.unescape(found[1]))


def write_trace(path):
    """Two ranks with two tracks each, as `switchyard trace` names them."""
    events = []
    for rank in range(2):
        events.append({"ph": "M", "name": "process_name", "pid": rank + 1, "args": {"name": f"rank {rank}"}})
        for track, (role, kinds) in enumerate({"math": ["gemm1", "gemm2", "combine"], "send": ["send"]}.items()):
            place = {"pid": rank + 1, "tid": 1000 + track}
            events.append({"ph": "M", "name": "thread_name", **place, "args": {"name": f"SM 0 {role}"}})
            for i in range(60):
                at = {**place, "ph": "X", "ts": 10 * i + track}
                events.append({**at, "name": "wait: dispatch (rank 1)", "dur": 2})
                events.append({**at, "name": kinds[i * len(kinds) // 60], "ts": at["ts"] + 2, "dur": 5,
                               "args": {"tile": i, "expert": 3, "rows": 64}})
    path.write_text(json.dumps({"traceEvents": events}))


def with_loads(path, copy):
    """Rows that tell the load of their experts, as those of bench do since it has been kept."""
    rows = json.loads(path.read_text())
    for row in rows[: len(rows) // 2]:
        count = min(row["experts"], 64)
        row["expert_load"] = [2 * (i + 0.5) / count for i in range(count)]
        row["suite"] += "_loads"
    copy.write_text(json.dumps(rows[: len(rows) // 2]))


def files_of_layers(switchyard, results, directory):
    """The results of layers and of the all-to-all problem, and all others. None is refused but for points of a file
    before it."""
    files, others = [], []
    for path in sorted(results.glob("*.json")):
        if path.name == "published.json":
            continue  # --published
        done = subprocess.run([switchyard, "report", *files, path, "-o", directory / "one.html"], capture_output=True,
                              text=True, check=False)
        if done.returncode == 0:
            (others if f"of {path.name}" in done.stdout else files).append(path)
        else:
            require(f"error (invalid_file): {path}" in done.stderr and "same point" in done.stderr, f"{path} is refused: {done.stderr}")
    suites = {row["suite"] for path in files for row in json.loads(path.read_text())}
    require(suites >= DRAWN, f"`switchyard report` refuses the results of {', '.join(sorted(DRAWN - suites))}")
    return files, others


def panels_of(rows):
    keys = ["model", "hidden", "intermediate", "experts", "top_k", "dtype", "compute", "ranks", "beta", "routing"]
    return len({(row["suite"], card_of(row["machine"]), *(row.get(key) for key in keys)) for row in rows})


def ladder_figures(rows):
    """Of each number of ranks and GPUs: the means, and a chart of each case."""
    worlds = [(row["ranks"], row["gpus"], row["stand_in"]) for row in rows]
    return len(set(worlds)) + len({(world, row["case"]) for world, row in zip(worlds, rows)})


def check(seen, page, figures):
    require(not seen["problem"], f"{page}: {seen['problem']}")
    require(seen["figures"] == seen["charts"] == figures, f"{page}: {seen['charts']} charts, not {figures}")
    for what in ("incomplete", "outside", "overlaps"):
        require(not seen[what], f"{page}: {what}: {seen[what][:8]}")
    require("time" in seen["tip"] or "µs" in seen["tip"] or "ms" in seen["tip"], f"{page}: arrow keys tell nothing: {seen['tip']!r}")
    require(seen["sideways"] <= 0, f"{page}: wider than the window by {seen['sideways']} px")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--switchyard", required=True, type=pathlib.Path)
    parser.add_argument("--results", required=True, type=pathlib.Path)
    parser.add_argument("--keep", type=pathlib.Path, help="Leave pages, screenshots and the PDF here")
    arguments = parser.parse_args()

    with tempfile.TemporaryDirectory() as temporary:
        directory = arguments.keep or pathlib.Path(temporary)
        directory.mkdir(parents=True, exist_ok=True)
        directory = directory.resolve()
        published = arguments.results / "published.json"
        files, others = files_of_layers(arguments.switchyard, arguments.results, directory)
        with_loads(arguments.results / "one_gpu_bf16.json", directory / "loads.json")
        files.append(directory / "loads.json")
        write_trace(directory / "trace.json")
        page = directory / "report.html"
        subprocess.run([arguments.switchyard, "report", *files, "-o", page, "--published", published,
                        "--trace", directory / "trace.json"], check=True)

        rest = directory / "others.html"
        subprocess.run([arguments.switchyard, "report", *others, "-o", rest], check=True)

        program = next(filter(None, map(shutil.which, BROWSERS)), None)
        if program is None:
            print(f"skipped: no Chromium (looked for {', '.join(BROWSERS)}); apt-get install chromium")
            return SKIPPED

        rows = [row for path in files for row in json.loads(path.read_text())]
        layers = [row for row in rows if "rung" not in row]
        suites = {row["suite"] for row in layers}
        loads = [row for row in rows if "expert_load" in row]
        ranks = 2
        figures = panels_of(layers) + 2 * len(suites) + panels_of(loads) + ranks
        figures += ladder_figures([row for row in rows if "rung" in row])

        browser = Browser(program, directory)
        light = browser.probe(page, 1280)
        check(light, "at 1280 px", figures)
        require(light["zoomed"] and light["restored"], "the timeline does not zoom by keys")
        require(light["colours"] > 5, "the timeline is blank")
        require(light["published"] > 0, "nothing of what others publish is drawn")
        for of_page, name, count in ((page, "", figures), (rest, "other rows, ", None)):
            for width in (1280, 500, NARROW):
                seen = browser.probe(of_page, width)
                check(seen, f"{name}at {width} px", seen["figures"] if count is None else count)
            require(seen["smallest"] >= SMALLEST_LABEL, f"{name}at {NARROW} px a label has {seen['smallest']:.1f} px")
        require(seen["figures"] >= 100, f"of other rows only {seen['figures']} charts are drawn")
        dark = browser.probe(page, 1280, dark=True)
        check(dark, "dark", figures)
        require(light["background"] != dark["background"], "dark is as light as light")

        pdf = directory / "report.pdf"
        browser.open(page, "--no-pdf-header-footer", f"--print-to-pdf={pdf}")
        printed = pdf.read_bytes()
        boxes = set(re.findall(rb"/MediaBox\s*\[([^\]]*)\]", printed))
        sizes = {tuple(round(float(number)) for number in box.split()[2:]) for box in boxes}
        require(sizes == {(595, 842)} or sizes == {(596, 842)} or sizes == {(594, 841)},
                f"the paper is not A4: {sizes}")
        for name, scheme in (("light", []), ("dark", ["--blink-settings=preferredColorScheme=0"])):
            picture = directory / f"{name}.png"
            browser.open(page, "--window-size=1280,3000", f"--screenshot={picture}", *scheme)
            require(picture.stat().st_size > 50_000, f"{picture.name} is blank")
        print(f"{figures} charts of {len(rows)} rows: light, dark, narrow and printed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
