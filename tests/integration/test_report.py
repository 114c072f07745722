"""The report in a real browser: no error, no request, no sideways scrolling, values under the pointer."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from roadstead.dashboards.report import write_report
from roadstead.storage.keys import RunKeys
from roadstead.storage.objects import ObjectStore
from tests.support.audit_run import Row
from tests.support.browser import NoBrowser, Page, chromium
from tests.support.page import Parsed
from tests.support.report_run import ReportRun
from tests.support.workplace import Workplace

STEPS = 6


@pytest.fixture(scope="module")
def browser() -> Iterator[Page]:
    try:
        with chromium() as page:
            yield page
    except NoBrowser as reason:
        pytest.skip(f"the page was not opened in a browser: {reason}")


@pytest.fixture(scope="module")
def written(store: ObjectStore, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report of a run on the real S3 server, made with names that are long and full of markup."""

    def plant(version: int, rows: list[Row]) -> None:
        for row in rows:
            row["environment"] = "<script>alert(1)</script>" + "long" * 30
        rows[0]["reward"] = None

    keys = RunKeys("reports", "a-run-with-a-name-that-is-as-long-as-the-name-of-a-run-may-be-63")
    ReportRun(store, keys, rows=plant).write(STEPS)
    file = tmp_path_factory.mktemp("report") / "report.html"
    write_report(store, keys, file)
    return file


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [380, 1600])
def test_opens_clean_and_fits(browser: Page, written: Path, width: int, dark: bool) -> None:
    seen = browser.open(written.as_uri(), width, dark=dark)
    # All of it: what is folded away may be too wide as well.
    browser.value("document.querySelectorAll('details').forEach((d) => { d.open = true })")
    assert browser.value("document.documentElement.scrollWidth") <= width
    wide = """[...document.querySelectorAll('body *')]
        .filter((e) => !e.closest('.scroll, nav, svg, .skip, thead') && e.getClientRects().length)
        .filter((e) => e.getBoundingClientRect().right > innerWidth + 1).map((e) => e.outerHTML.slice(0, 90))"""
    assert browser.value(wide) == []
    assert browser.value("getComputedStyle(document.body).backgroundColor") == (
        "rgb(13, 20, 26)" if dark else "rgb(244, 246, 248)"
    )
    assert seen.messages == [] and seen.requests == []


def test_text_of_a_plot_is_readable_at_any_width(browser: Page, written: Path) -> None:
    for width in (380, 1600):
        browser.open(written.as_uri(), width)
        sizes = browser.value("[...document.querySelectorAll('.x span')].map((e) => e.getBoundingClientRect().height)")
        assert min(sizes) >= 12, "labels are not scaled with the plot"


def test_the_pointer_reads_values_off_a_chart_and_a_click_goes_to_the_step(browser: Page, written: Path) -> None:
    browser.open(written.as_uri(), 1600)
    shown = Parsed(written.read_text("utf-8")).data["charts"]["reward"]["reward"]
    box = browser.value(
        """(() => { const a = document.querySelector('#chart-reward .area'); a.scrollIntoView({block: 'center'});
        const b = a.getBoundingClientRect(); return [b.left, b.top, b.width, b.height] })()"""
    )
    at = {"x": box[0] + box[2] * 4.5 / STEPS, "y": box[1] + box[3] / 2}
    browser.send("Input.dispatchMouseEvent", type="mouseMoved", **at)
    tip = browser.value("document.getElementById('tip').innerText")
    assert tip.startswith("step 4") and f"{shown[4]:.4g}" in tip
    for kind in ("mousePressed", "mouseReleased"):
        browser.send("Input.dispatchMouseEvent", type=kind, button="left", clickCount=1, **at)
    assert browser.value("location.hash") == "#s4"
    assert "batch show" in browser.value("document.querySelector('tr:target').innerText")
    assert browser.seen.messages == []


def test_keys_move_along_the_steps(browser: Page, written: Path) -> None:
    browser.open(written.as_uri(), 380)
    browser.value("document.querySelector('#chart-loss .plot').focus()")
    for key in ("Home", "ArrowRight", "ArrowRight"):
        browser.send("Input.dispatchKeyEvent", type="keyDown", key=key, code=key)
    assert browser.value("document.getElementById('tip').innerText").startswith("step 2")


def test_the_page_alone_could_not_run_a_script_of_somebody_else(browser: Page, written: Path, tmp_path: Path) -> None:
    """Were a text not escaped, the page's policy would still refuse to run it."""
    broken = tmp_path / "broken.html"
    broken.write_text(written.read_text("utf-8").replace("<main", "<script>document.title='owned'</script><main", 1))
    seen = browser.open(broken.as_uri(), 1600)
    assert browser.value("document.title") != "owned"
    assert any("Content Security Policy" in message for message in seen.messages)


@pytest.mark.slow
def test_the_command_writes_the_page(workplace: Workplace, tmp_path: Path) -> None:
    store, keys = workplace.store("reported")
    ReportRun(store, keys).write(3, killed_at=0)
    file = tmp_path / "report.html"
    answer = workplace.roadstead("report", "reported", "-o", str(file))
    assert str(file) in answer.stdout
    page = Parsed(file.read_text("utf-8"))
    assert [row[-1] for row in page.tables["steps"][1:]] == [f"roadstead batch show reported {s}" for s in range(3)]
    assert workplace.roadstead("batch", "show", "reported", "2").returncode == 0, "the command on the page works"
    refused: subprocess.CompletedProcess[str] = workplace.roadstead("report", "nobody", check=False)
    assert refused.returncode == 2 and "known runs" in refused.stderr
