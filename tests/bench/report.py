"""How long `report.html` of a 36-layer model takes to write, and to open in headless Chromium; it should open in under two seconds.

    PYTHONPATH=. python tests/bench/report.py [SITES] [--throttle N] [--repeat N] [--out DIR]

SITES is a sites file. Without one, Qwen3-8B's shape is captured for an H100 that isn't here (no weights, no GPU), or
read from DIR if `tests/bench/run.py` left it there. Chromium's own throttle makes its one main thread N times slower.
Opening ends with the second frame after the load event, when everything is laid out and painted.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path

from graphalign.ir.files import read_json
from graphalign.sites.report import Report
from tests.render.browser import Browser, find

MODEL, TARGET = "example:qwen3-8b-base", "h100"
BAR = 2.0
DRAWN = "new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done(performance.now() / 1000))))"
PAINTED = "(performance.getEntriesByName('first-contentful-paint')[0] || {startTime: NaN}).startTime / 1000"


def make_report(out: Path) -> Report:
    """Find the sites of the 36-layer model."""
    from graphalign.capture.inference import capture_inference
    from graphalign.capture.training import capture_training
    from graphalign.engines.examples import resolve_model
    from graphalign.ir.inference import InferenceGraph
    from graphalign.pipeline.diff import diff

    model = resolve_model(MODEL)
    captured = out / f"{MODEL.replace(':', '-')}.{TARGET}.json.gz"  # as run.py names it
    if captured.exists():
        inference = read_json(captured, InferenceGraph, kind="inference capture")
    else:
        inference = capture_inference(model, captured, target=TARGET)
    return diff(inference, capture_training(model))


def open_page(browser: Browser, page: Path, throttle: int) -> tuple[float, float]:
    """Seconds until the first paint, and until everything is painted."""
    browser.open(Path("/dev/null"))  # nothing of the page is left over
    browser.call("Network.setCacheDisabled", cacheDisabled=True)
    browser.call("Emulation.setCPUThrottlingRate", rate=throttle)
    browser.open(page)
    drawn = browser.call("Runtime.evaluate", expression=DRAWN, awaitPromise=True, returnByValue=True)["result"]["value"]
    return browser.js(PAINTED), drawn


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sites", nargs="?", type=Path)
    parser.add_argument("--throttle", type=int, default=4)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path("out/bench"))
    options = parser.parse_args()
    executable = find()
    if executable is None:
        sys.exit("no chromium or chrome in PATH: apt-get install chromium")
    options.out.mkdir(parents=True, exist_ok=True)
    report = read_json(options.sites, Report, kind="sites file") if options.sites else make_report(options.out)
    from graphalign.render.page import render_page

    started = time.perf_counter()
    page = options.out / "report.html"
    page.write_text(render_page(report))
    written = time.perf_counter() - started
    layers = report.model.get("layers")
    print(f"{report.model.get('architecture')}, {layers} layers: {page} written in {written:.2f} s, {page.stat().st_size / 1024:.0f} KiB")
    worst = 0.0
    with Browser(executable) as browser:
        browser.look()
        for throttle in (1, options.throttle):
            runs = [open_page(browser, page, throttle) for _ in range(options.repeat)]
            paint, drawn = (statistics.median(r[n] for r in runs) for n in (0, 1))
            worst = max(drawn, worst)
            slowest = max(r[1] for r in runs)
            print(f"  opened, {throttle} x slower: first paint {paint:.2f} s, all painted {drawn:.2f} s (slowest {slowest:.2f} s)")
        counts = browser.js("[document.querySelectorAll('figure').length, document.querySelectorAll('*').length]")
        most = browser.js("Math.max(...[...document.querySelectorAll('figure svg')].map(s => s.querySelectorAll('.vertex').length))")
    print(f"  {counts[0]} diagrams, {counts[1]} elements; at most {most} boxes in a diagram")
    print(f"  {'within' if worst < BAR else 'NOT within'} {BAR:.0f} s")


if __name__ == "__main__":
    main()
