"""The page for a browser, opened in Debian's Chromium."""

import base64
import json
import re
import shutil
import time

import pytest

from mobius_ds.reporting.comparison.answer import answer
from mobius_ds.reporting.page import html_report
from tests.reporting.reports import small, whole

CHROMIUM, DRIVER = (shutil.which(name) for name in ("chromium", "chromedriver"))
OPTIONS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
           "--disable-background-networking", "--disable-component-update")
SECTIONS = ("failed", "loss", "bytes", "step-time", "timeline", "time", "bandwidth", "memory", "plan", "sweep", "numbers",
            "measures", "machine")
ALWAYS = ("loss", "bytes", "step-time", "memory", "numbers", "measures", "machine")
PATIENCE = 60  # seconds
OPENS_WITHIN = 60  # seconds, for thousands of tasks, on a machine that does other things too: one trace a task takes minutes

needs_browser = pytest.mark.skipif(not (CHROMIUM and DRIVER), reason="opens the page with chromium and chromedriver, which "
                                   "are not installed (Debian's packages chromium and chromium-driver)")


@pytest.fixture(scope="module")
def report():
    made = whole()
    made["answer"] = answer(made)
    return made


@pytest.fixture(scope="module")
def page(report, tmp_path_factory):
    return html_report.write_html(report, tmp_path_factory.mktemp("page"))


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for option in (*OPTIONS, f"--user-data-dir={tmp_path_factory.mktemp('profile')}"):
        options.add_argument(option)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    yield driver
    driver.quit()


@pytest.fixture
def opened(browser, page):
    """The page on a desktop's screen, in light colours."""
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride",
                            {"width": 1200, "height": 900, "deviceScaleFactor": 1, "mobile": False})
    scheme(browser, "light")
    if browser.current_url != page.as_uri():
        browser.get_log("performance")  # of what the browser showed before
        begin = time.monotonic()
        browser.get(page.as_uri())
        browser.seconds = time.monotonic() - begin
    return browser


def scheme(browser, name):
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": name}]})


def ask(browser, script, *arguments):
    """What a script returns once charts had the time to be drawn again."""
    return browser.execute_async_script(
        "const [done, ...given] = [arguments[arguments.length - 1], ...arguments];"
        f"requestAnimationFrame(() => requestAnimationFrame(() => done((() => {{ {script} }})())));", *arguments)


def once(browser, script):
    """What a script returns, as soon as that is something; charts answer to a pointer or another width with a delay."""
    from selenium.webdriver.support.wait import WebDriverWait

    return WebDriverWait(browser, PATIENCE, poll_frequency=0.05).until(lambda _: browser.execute_script(script))


def range_of(browser, number):
    return ask(browser, f"return [...timelines[{number}].layout.xaxis.range]")


def test_it_needs_nothing_else_and_hides_nothing_from_a_parser(page, report):
    text = page.read_text()
    assert not re.search(r"<(script|link|img|iframe)[^>]+(src|href)=(?!\"data:)", text)
    assert "rank 1 needs &lt;12&gt; GiB &amp; has 10." in text
    assert re.findall(r'<section id="([\w-]+)"', text) == list(SECTIONS)
    for chart in re.findall(r'<script type="application/json"[^>]*>(.*?)</script>', text):
        assert json.loads(chart)["data"]


def test_what_a_report_lacks_is_left_out():
    assert [section.id for section in html_report.sections(small())] == list(ALWAYS)


@pytest.mark.parametrize("dark", (False, True))
def test_text_stands_out_from_its_background(dark):
    style = (html_report.PAGE / "report.css").read_text()
    colours = dict(re.findall(r"--([\w-]+): (#\w{6})", style.split("prefers-color-scheme: dark")[dark].split("* {")[0]))
    for ink, ground in (("ink", "page"), ("muted", "page"), ("accent", "page"), ("ink", "panel"), ("warn-ink", "warn")):
        lighter, darker = sorted((luminance(colours[ink]), luminance(colours[ground])), reverse=True)
        assert (lighter + 0.05) / (darker + 0.05) >= 4.5, (ink, ground)


def luminance(colour):
    """Relative luminance as WCAG defines it."""
    channels = [int(colour[at:at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055)**2.4 for value in channels]
    return sum(weight * value for weight, value in zip((0.2126, 0.7152, 0.0722), linear))


def test_observed_arms_are_busy_rather_than_computing(report):
    (time, ) = (section for section in html_report.sections(report) if section.id == "time")
    of_step, (chart, ) = time.tables[0], time.charts
    assert [("busy" in row[2], row[0]) for row in of_step.rows] == [(True, "zero3"), (False, "mobius")]
    names = {bar.name for bar in chart.figure.data}
    assert {"computes", "is busy (DeepSpeed's host work included)"} <= names and "waits for late ranks" in chart.caption
    alone = {**report, "figures": {"mobius": report["figures"]["mobius"]}}
    (time, ) = (section for section in html_report.sections(alone) if section.id == "time")
    assert "busy" not in str(time.tables) + time.charts[0].caption


def test_the_memory_of_a_cpu_is_no_link(report):
    assert "bandwidth" in {section.id for section in html_report.sections(report)}
    on_cpu = {**report, "machine": {**report["machine"], "device": "cpu"}}
    assert "bandwidth" in {section.id for section in html_report.sections(on_cpu)}
    on_cpu["emulated"] = None
    assert "bandwidth" not in {section.id for section in html_report.sections(on_cpu)}


@needs_browser
def test_it_opens_fast_without_an_error_or_a_request(opened, report):
    drawn = opened.execute_script("return charts.map(chart => chart.querySelectorAll('.main-svg').length > 0)")
    assert len(drawn) == 10 and all(drawn)
    tasks = sum(len(recorded["tasks"]) for recorded in report["timelines"].values())
    bars = opened.execute_script("return timelines.map(chart => chart.querySelectorAll('.bars .point').length)")
    assert tasks > 4000 and sum(bars) == tasks
    assert opened.seconds < OPENS_WITHIN
    assert opened.get_log("browser") == []
    events = [json.loads(entry["message"])["message"] for entry in opened.get_log("performance")]
    requests = [event["params"]["request"]["url"] for event in events if event["method"] == "Network.requestWillBeSent"]
    assert requests and all(url.startswith(("file:", "data:", "chrome:")) for url in requests), requests


@needs_browser
def test_the_answer_comes_first_and_every_section_has_its_content(opened, report):
    text = opened.find_element("tag name", "main").text
    order = (report["answer"]["headline"], *report["answer"]["because"], "Arms without numbers")
    places = [text.index(part) for part in order]
    assert places == sorted(places)
    for said in ("emulated", "Step time (emulated)", "OOM", "rank 1 needs <12> GiB & has 10.", "Cut by a test.", "layer.0",
                 "12.50 ms", "hidden", "Test CPU", "mobius-ds compare --wires", "delivered / model size", "PSS",
                 "1.50 x model"):
        assert said in text, said
    assert opened.execute_script("return charts.every(chart => chart.getAttribute('aria-label').length > 20)")
    assert len(opened.find_elements("tag name", "h1")) == 1


@needs_browser
def test_timelines_zoom_together_and_tell_of_a_task_under_the_pointer(opened, report):
    from selenium.webdriver import ActionChains

    whole_step = range_of(opened, 0)
    button = {button.text: button for button in opened.find_elements("css selector", "#timeline button")}
    button["Zoom in"].click()
    half = range_of(opened, 0)
    assert half[1] - half[0] == pytest.approx((whole_step[1] - whole_step[0]) / 2)
    assert range_of(opened, 1) == half
    button["Later"].click()
    assert range_of(opened, 1)[0] == pytest.approx(half[0] + (half[1] - half[0]) / 2)
    for press in ("Later", "Later", "Later", "Zoom out", "Zoom out"):  # beyond either end there is nothing to see
        button[press].click()
    assert range_of(opened, 0) == pytest.approx(whole_step)
    button["Show this step"].click()
    assert range_of(opened, 0) == [0, report["timelines"]["mobius"]["seconds"]]
    button["All"].click()
    assert range_of(opened, 0) == whole_step

    plot = opened.find_elements("css selector", "#timeline .nsewdrag")[0]
    ActionChains(opened).move_to_element_with_offset(plot, -100, 0).click_and_hold().move_by_offset(150, 0).release() \
        .perform()
    zoomed = range_of(opened, 0)
    assert whole_step[0] < zoomed[0] < zoomed[1] < whole_step[1] and range_of(opened, 1) == zoomed
    button["All"].click()

    bar = opened.execute_script("""
        const width = (bar) => bar.getBoundingClientRect().width;
        const [widest] = [...timelines[1].querySelectorAll(".bars .point path")].sort((a, b) => width(b) - width(a));
        widest.scrollIntoView({ block: "center" });
        return widest;""")
    ActionChains(opened).move_to_element(bar).perform()
    hover = once(opened, "return timelines[1].querySelector('.hoverlayer').textContent")
    for said in ("weights 0W", "GPU 0 prefetch", "stage 0", "parameters_in", "GiB", "GB/s"):
        assert said in hover
    assert "stage 3, microbatch 5" in opened.execute_script("return timelines[1].data.flatMap(it => it.hovertext).join()")


@needs_browser
def test_dark_is_dark_and_charts_follow(opened):
    def colours():
        return ask(opened, "return [getComputedStyle(document.body).backgroundColor, getComputedStyle(document.body).color, "
                   "getComputedStyle(charts[0].querySelector('.xtick text')).fill]")

    light = colours()
    scheme(opened, "dark")
    dark = colours()
    assert light[1] == light[2] and dark[1] == dark[2]
    assert all(before != after for before, after in zip(light, dark))


@needs_browser
def test_a_phone_scrolls_tables_and_not_the_page(opened):
    opened.execute_cdp_cmd("Emulation.setDeviceMetricsOverride",
                           {"width": 360, "height": 740, "deviceScaleFactor": 1, "mobile": True})
    assert ask(opened, "return document.documentElement.scrollWidth") == 360
    assert once(opened, "return charts.every(chart => chart.querySelector('.main-svg').clientWidth <= 360)")
    assert ask(opened, "return document.querySelector('#numbers .scrolls').scrollWidth") > 328


@needs_browser
def test_it_prints_in_light_with_whole_charts_and_is_itself_again(opened):
    scheme(opened, "dark")
    opened.execute_script("""
        addEventListener("beforeprint", () => { window.printed = charts.map(chart => [
            chart.querySelector(".main-svg").clientWidth, chart.querySelector(".main-svg").clientHeight,
            getComputedStyle(chart.querySelector("[class*=tick] text")).fill]); });""")
    printed = opened.execute_cdp_cmd("Page.printToPDF", {"preferCSSPageSize": True, "printBackground": True})
    assert base64.b64decode(printed["data"]).startswith(b"%PDF")
    a4 = (210 - 2 * 12) / 25.4 * 96, (297 - 2 * 12) / 25.4 * 96  # CSS pixels between the margins
    for width, height, ink in opened.execute_script("return window.printed"):
        assert 600 < width <= a4[0] and height < a4[1] and ink == "rgb(27, 29, 33)"
    assert once(opened, "const [chart] = charts; return chart.querySelector('.main-svg').clientWidth === chart.clientWidth")
