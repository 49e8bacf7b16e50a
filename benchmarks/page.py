"""Size, load time and frame rates of report pages, in headless Chromium.

autostream report nasnetalarge --input 1x3x331x331:float16 --device h200 --out nasnetalarge.html
autostream report benchmarks.page:chains --device h200 --policy path_cover --out chains.html
autostream report benchmarks.page:tree --device h200 --policy path_cover --out tree.html
python -m benchmarks.page nasnetalarge.html chains.html tree.html --out benchmarks/results/latest

A frame follows one step, timed by animation frames; the CPU time of the page's thread is less noisy.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
from tabulate import tabulate
from torch import Tensor, nn

from benchmarks.planning import chained
from benchmarks.stamp import save, saving_parser, stamp

_STEPS = {
    "table": "rows => { rows.scrollTop = (step * 280) % (rows.scrollHeight - 1000); }",
    "timeline": """lanes => lanes.dispatchEvent(new WheelEvent("wheel", {
        deltaY: step % 60 < 30 ? -60 : 60, ctrlKey: true, clientX: 600, clientY: 300, bubbles: true, cancelable: true,
    }))""",
    "graph": """drawing => drawing.dispatchEvent(new WheelEvent("wheel", {
        deltaY: step % 60 < 30 ? 60 : -60, ctrlKey: step % 2, shiftKey: true, clientX: 600, clientY: 300, bubbles: true,
        cancelable: true,
    }))""",
}
"""The step of one frame: the table scrolls by ten rows, the timeline zooms in and out, the graph zooms out and in and
moves."""

_PLACES = {"table": "#rows", "timeline": "#lanes", "graph": "#drawing"}

_RUN = """async ([selector, frames]) => {
    const target = document.querySelector(selector), at = [];
    for (let step = 0; step < frames; step += 1) {
        await new Promise((done) => requestAnimationFrame((now) => { at.push(now); (STEP)(target); done(); }));
    }
    return (frames - 1) / (at.at(-1) - at[0]) * 1e3;
}"""


def chains() -> tuple[nn.Module, tuple[Tensor, ...]]:
    """A model of 10,000 ops in eight chains, and an input for it: a TARGET."""
    return chained(10_000)


class Tree(nn.Module):
    """A ternary tree of ops: wide layers, and long edges between them."""

    def forward(self, x: Tensor) -> Tensor:
        level, ops = [x.sin()], 1
        while ops < 9_000:
            level = [above * factor for above in level for factor in (2, 3, 5)]
            ops += len(level)
        return torch.stack(level).sum(0)


def tree() -> tuple[nn.Module, tuple[Tensor, ...]]:
    """A tree of some 10,000 ops, and an input for it: a TARGET."""
    return Tree(), (torch.ones(8),)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, save and print the results."""
    parser = saving_parser("page", __doc__)
    parser.add_argument("pages", nargs="+", type=Path, metavar="REPORT.html")
    parser.add_argument("--frames", type=int, default=60, help="of each movement, measured three times (default: 60)")
    options = parser.parse_args(argv)
    rows = measured(options.pages, options.frames)
    save("page", {"schema": 1, "stamp": stamp(), "rows": rows}, table(rows), options.out)
    return 0


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The results as a table.

    Example:
        >>> row = {"page": "net", "ops": 5, "bytes": 60_000, "interactive_ms": 80.0}
        >>> row |= {f"{name}_{what}": 9.0 for name in _STEPS for what in ("frames_s", "cpu_ms")}
        >>> print(table([row]))  # doctest: +ELLIPSIS
        | page   |   ops |   MB |   ms to use |   table, frames/s |   CPU ms |   timeline, frames/s |   CPU ms | ...
        |--------|-------|------|-------------|-------------------|----------|----------------------|----------|-...
        | net    |     5 | 0.06 |          80 |               9.0 |      9.0 |                  9.0 |      9.0 | ...
    """
    head = ["page", "ops", "MB", "ms to use"]
    head += [text for name in _STEPS for text in (f"{name}, frames/s", "CPU ms")]
    lines = [
        [row["page"], f"{row['ops']:,}", f"{row['bytes'] / 1e6:.2f}", f"{row['interactive_ms']:,.0f}"]
        + [f"{row[f'{name}_{what}']:.1f}" for name in _STEPS for what in ("frames_s", "cpu_ms")]
        for row in rows
    ]
    return tabulate(
        lines, head, tablefmt="github", disable_numparse=True, colalign=("left", *["right"] * (len(head) - 1))
    )


def measured(pages: Sequence[Path], frames: int) -> list[dict[str, Any]]:
    """A row for each page; needs Playwright and a Chromium."""
    from playwright.sync_api import sync_playwright

    program = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        rows = [_row(browser, page, frames) for page in pages]
        browser.close()
    return rows


def _row(browser: Any, path: Path, frames: int) -> dict[str, Any]:
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    page.goto(path.resolve().as_uri())
    page.locator("#rows tbody tr").nth(2).wait_for(state="attached")
    meter = page.context.new_cdp_session(page)
    meter.send("Performance.enable", {"timeDomain": "threadTicks"})
    row = {
        "page": path.stem,
        "ops": page.evaluate("ops.length"),
        "bytes": path.stat().st_size,
        # Its scripts run while it is read, so it can be used from then on.
        "interactive_ms": page.evaluate("performance.getEntriesByType('navigation')[0].domContentLoadedEventEnd"),
    }
    for name, step in _STEPS.items():
        page.locator(_PLACES[name]).scroll_into_view_if_needed()
        runs = [_moved(page, meter, _PLACES[name], step, frames) for _ in range(3)]
        row |= {f"{name}_frames_s": median(speed for speed, _ in runs), f"{name}_cpu_ms": min(cpu for _, cpu in runs)}
    page.close()
    return row


def _moved(page: Any, meter: Any, selector: str, step: str, frames: int) -> tuple[float, float]:
    """Frames a second, and ms of CPU a frame."""
    before = _busy_s(meter)
    speed = page.evaluate(_RUN.replace("STEP", step), [selector, frames])
    return float(speed), (_busy_s(meter) - before) / frames * 1e3


def _busy_s(meter: Any) -> float:
    metrics = meter.send("Performance.getMetrics")["metrics"]
    return next(float(metric["value"]) for metric in metrics if metric["name"] == "TaskDuration")


if __name__ == "__main__":
    raise SystemExit(main())
