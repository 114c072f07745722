"""Make the pictures of the docs: `.venv/bin/python -m docs.images.make`, from the repository's root.

The report is that of a synthetic run (tests/support/report_run.py) in which half of one environment's rewards go
missing for four versions and the process is killed once; the status is a made-up moment of a run. Both say what the
real commands print for such a run. Needs a Chromium; tests/support/browser.py says where it looks for one.
"""

from __future__ import annotations

import io
import re
import tempfile
from pathlib import Path

from PIL import Image
from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console

from roadstead.cli.pace import Pace
from roadstead.cli.status import at_a_glance
from roadstead.dashboards.report import write_report
from roadstead.storage.keys import RunKeys
from tests.support.audit_run import Row
from tests.support.browser import Page, chromium
from tests.support.live_status import running
from tests.support.memory_store import MemoryStore
from tests.support.report_run import ReportRun

HERE = Path(__file__).parent
_MOST_BYTES = 300_000


def sick(version: int, rows: list[Row]) -> None:
    if 40 <= version < 44:
        for row in rows[::2]:
            row["reward"] = None if row["environment"] == "words" else row["reward"]


def report_pictures() -> None:
    store, keys = MemoryStore(), RunKeys("runs", "synthetic")
    ReportRun(store, keys, rows=sick).write(60)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "report.html"
        write_report(store, keys, file)
        with chromium() as page:
            page.open(file.as_uri(), 1600)
            save(page.picture(2700), "report-wide.png")
            save(lower_half(page), "report-wide-2.png")
            page.open(file.as_uri(), 1600, dark=True)
            save(page.picture(1450), "report-dark.png")
            page.open(file.as_uri(), 380)
            save(page.picture(2900), "report-narrow.png")


def lower_half(page: Page) -> bytes:
    """From the waste on, the step table folded."""
    page.value("document.getElementById('all-steps').open = false")
    top = page.value("document.getElementById('waste').getBoundingClientRect().top + scrollY")
    whole = Image.open(io.BytesIO(page.picture()))
    out = io.BytesIO()
    whole.crop((0, int(top), whole.width, whole.height)).save(out, "PNG")
    return out.getvalue()


def save(picture: bytes, name: str) -> None:
    """As PNG with 256 colours: a page has few, and the file is a third of the size."""
    image = Image.open(io.BytesIO(picture)).convert("RGB")
    image = image.quantize(256, method=Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
    image.save(HERE / name, "PNG", optimize=True)
    size = (HERE / name).stat().st_size
    assert size < _MOST_BYTES, f"{name}: {size} bytes"
    print(f"{HERE / name}: {image.width} x {image.height}, {size / 1000:.0f} kB")


def status_picture() -> None:
    console = Console(record=True, width=84, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    pace = Pace()
    pace.note(0.0, 2, 0)
    pace.note(372.0, 12, 61_480)
    console.print(at_a_glance(running(), pace, 2))
    # Fonts from somewhere else are not asked for.
    own = re.sub(r"@font-face\s*{{.*?}}\s*", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)
    own = own.replace("Fira Code, monospace", "Menlo, Consolas, 'DejaVu Sans Mono', monospace")
    svg = console.export_svg(title="roadstead status arithmetic", code_format=own)
    (HERE / "status.svg").write_text(svg)
    print(f"{HERE / 'status.svg'}: {len(svg) / 1000:.0f} kB")


if __name__ == "__main__":
    status_picture()
    report_pictures()
