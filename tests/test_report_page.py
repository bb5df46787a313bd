"""report.html: what it makes of metrics, and how it looks in a browser."""

import itertools
import json
import math
import re
import shutil
from types import SimpleNamespace

import numpy as np
import pytest

import needle as ndl
from needle import memory
from needle.models import PythiaConfig, plannable
from pythia_app import flops, page, report
from pythia_app.report import Reporter

pytest.importorskip("plotly")
CONFIG = PythiaConfig.named("14m", vocab_size=1000).with_sparse("mixed", block=16)
HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(1)> {{data}} \x00\x1b[31m\u202e\ud800 & " + "long" * 5000


def about(**changes):
    fields = {"title": "Pythia <14m>", "steps": 300, "max_grad_norm": 1.0, "mask": page.mask_picture(CONFIG.layout(256))}
    return page.About(**{**fields, "facts": {"folder": "runs/<b>x</b>"}, **changes})


def row(step, **changes):
    """What a run says of a step."""
    peaks = {
        "parameter": 1 << 20,
        "gradient": 1 << 20,
        "optimizer state": 2 << 20,
        "activation": 3 << 20,
        "workspace": 1 << 19,
        "data": 99,
    }
    found = {
        "step": step, "loss": 9 - math.log1p(step), "grad_norm": 1 + 1 / step, "lr": 1e-3 / step, "tokens_per_second": 1000.0 + step % 7,
        "mfu": 0.25, "live_bytes": 3 << 20, "peak_bytes": sum(peaks.values()), "peak_by_category": peaks, "tokens": 512 * step,
    }  # fmt: skip
    return {**found, **changes}


def written(folder, rows, **changes):
    """The page, and the charts in it by name."""
    text = "".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in rows)
    (folder / page.METRICS).write_text(text)
    page.write(folder, about(**changes), page.History(folder / page.METRICS))
    html = (folder / page.PAGE).read_bytes().decode()
    return html, {chart["id"]: chart for chart in json.loads(re.search(r'id="data">(.*?)</script>', html)[1])}


def a_run(steps):
    for step in range(1, steps + 1):
        yield row(step)
        if step % 100 == 0:
            yield {"step": step, "held_out_loss": 5.0, "unigram_entropy": 7.0}
            yield {"step": step, "prompt": "once upon", "sample": f" a time {step}"}


def test_every_figure_of_a_run(tmp_path):
    html, charts = written(tmp_path, a_run(300))
    assert list(charts) == ["loss", "lr", "norm", "speed", "memory"]
    names = {name: [line["name"] for line in chart["lines"]] for name, chart in charts.items()}
    assert names["loss"] == ["training batch", "held-out text", "token frequencies alone"] and names["speed"] == ["tokens/s", "MFU"]
    assert names["memory"] == ["parameter", "optimizer state", "data", "gradient", "activation", "workspace", "after the step"]
    assert charts["loss"]["lines"][0]["x"] == list(range(1, 301)) and charts["loss"]["lines"][1]["x"] == [100, 200, 300]
    assert charts["memory"]["lines"][0]["y"] == [1.0] * 300 and charts["speed"]["lines"][1]["y"][0] == 0.25
    assert "step 300 of 300" in html and "density" in html and html.count("<details") == 3 and "a time 200" in html
    assert "Pythia &lt;14m&gt;" in html and "runs/&lt;b&gt;x" in html and "<b>x" not in html


def test_what_a_glance_is_for(tmp_path):
    """The peak is of the whole run, speeds are of its last hundred steps, and the perplexity is that of text held out."""
    early = [row(1, peak_bytes=900 << 20), *(row(s, tokens_per_second=1.0, mfu=0.01) for s in range(2, 101))]
    late = [row(s, tokens_per_second=700.0, loss=2.0) for s in range(101, 201)]
    html, _ = written(tmp_path, [*early, {"step": 100, "held_out_loss": 4.0}, *late, {"step": 200, "held_out_loss": 3.0}])
    found = {name: value for value, name in re.findall("<div><b>([^<]*)</b><span>([^<]*)</span></div>", html)}
    assert found == {
        "loss": "2.000", "held-out loss": "3.000", "perplexity": "20.1", "tokens/s": "700", "MFU": "25.0%", "peak memory": "900 MiB",
    }  # fmt: skip


def test_nothing_is_fetched(tmp_path):
    html, _ = written(tmp_path, a_run(100))
    assert not re.search(r"<script[^>]*\ssrc=|<link [^>]*href=\"(?!data:)|@import|url\(", html.partition("<script>/**")[0])
    assert len(html) < 5_500_000


def test_text_stays_text(tmp_path):
    html, _ = written(tmp_path, [row(1), {"step": 1, "prompt": HOSTILE, "sample": HOSTILE}], title=HOSTILE)
    head = html.partition('<script type="application/json"')[0]
    assert "<script" not in head and "<img" not in head and "\x00" not in html and "\x1b" not in html and "{{data}}" in head
    assert "\u2400\u241b[31m" in head and len(head) < 60_000


@pytest.mark.parametrize("rows", [[], [row(1)], [row(1, loss=None, grad_norm=math.nan, mfu=None)], [{"step": 1, "loss": 2}]])
def test_short_runs(tmp_path, rows):
    _, charts = written(tmp_path, rows)
    for chart in charts.values():
        assert all(len(line["x"]) == len(line["y"]) for line in chart["lines"])
    assert bool(charts) == bool(rows) or rows[0].get("loss") is None


def test_what_is_no_number_is_a_gap(tmp_path):
    rows = [
        row(1),
        row(2, loss=math.nan, grad_norm=math.inf),
        row(3, loss="x", lr=True, grad_norm=10**400),
        row(4, peak_by_category=7),
    ]
    _, charts = written(tmp_path, rows)
    assert [value is None for value in charts["loss"]["lines"][0]["y"]] == [False, True, True, False]
    assert [value is None for value in charts["norm"]["lines"][0]["y"]] == [False, True, True, False]
    assert [value is None for value in charts["lr"]["lines"][0]["y"]] == [False, False, True, False]
    assert [value is None for value in charts["memory"]["lines"][0]["y"]] == [False, False, False, True]


@pytest.mark.filterwarnings("error")
def test_any_number_is_drawn(tmp_path):
    strange = [row(s, tokens_per_second=speed, loss=1e308, lr=-1, grad_norm=0) for s, speed in ((1, 0), (2, 1e308), (3, 1e308))]
    for rows in (strange, strange * 700, [{**line, "step": s} for s, line in enumerate(strange * 700)]):
        _, charts = written(tmp_path, rows)
        assert list(charts) == ["loss", "lr", "norm", "speed", "memory"]


def test_what_is_no_row_is_passed_over(tmp_path):
    wrong = [
        "",
        "x",
        "[1]",
        "7",
        '{"loss": 1}',
        '{"step": "1", "loss": 1}',
        '{"step": -1, "loss": 1}',
        '{"step": 1e400}',
        "[" * 10**5,
    ]
    wrong += [f'{{"step": {10**30}, "loss": 1}}', '{"step": 1, "loss"']
    _, charts = written(tmp_path, [row(1), *wrong, row(2)])
    assert charts["loss"]["lines"][0]["x"] == [1, 2]


def test_a_run_that_goes_on_says_how_many_rows_are_damaged(tmp_path, capsys):
    good = [json.dumps(row(step)) for step in (1, 2, 3, 4)]
    for wrong, torn, first, said in (
        (['{"step": 2, "lo\x00', "", "[1]", " "], "", 3, f"damaged lines of {tmp_path / page.METRICS}, left out: 2\n"),
        ([], '{"step": 5, "lo', 3, ""),  # as a kill leaves it
        (["x"], "", 0, ""),  # a new run
    ):
        (tmp_path / page.METRICS).write_text("\n".join([good[0], *wrong, *good[1:]]) + "\n" + torn)
        with Reporter(tmp_path, about(), first=first):
            assert capsys.readouterr().out == said
            assert (tmp_path / page.METRICS).read_text() == "".join(line + "\n" for line in good[:first])


def test_what_comes_later_wins(tmp_path):
    """A run was killed after step 300 and went on from step 150."""
    more = [row(step, loss=1.0) for step in range(151, 161)] + [{"step": 160, "held_out_loss": 4.0}, {"step": 160, "sample": "new"}]
    html, charts = written(tmp_path, [*a_run(300), *more[:10]])
    assert charts["loss"]["lines"][1]["x"] == [100] and "a time 100" in html and "a time 200" not in html
    html, charts = written(tmp_path, [*a_run(300), *more])
    loss, held = charts["loss"]["lines"]
    assert loss["x"] == list(range(1, 161)) and loss["y"][149] > 2 and loss["y"][150:] == [1.0] * 10
    assert held["x"] == [100, 160] and "a time 100" in html and "new" in html and "a time 200" not in html
    assert ">held-out loss 4.000</span>" in html
    html, charts = written(tmp_path, [*a_run(300), {"step": 300, "held_out_loss": 4.0}, {"step": 300, "sample": "in another time"}])
    assert charts["loss"]["lines"][1]["x"] == [100, 200, 300] and "in another time" in html and "a time 300" not in html


def test_a_page_is_written_anew_from_what_is_new(tmp_path):
    lines = [json.dumps(line) + "\n" for line in a_run(300)]
    whole, _ = written(tmp_path, a_run(300))
    history = page.History(tmp_path / page.METRICS)
    for start in range(0, len(lines), 50):
        part = "".join(lines[: start + 50])
        (tmp_path / page.METRICS).write_text(part + '{"step": 300, "loss": 7, "to')  # a line that is being written
        history.read()
        page.write(tmp_path, about(), history)
        (tmp_path / page.METRICS).write_text(part)
    now = (tmp_path / page.PAGE).read_text()
    assert re.sub("as of [^<]*", "", now) == re.sub("as of [^<]*", "", whole)


def test_a_run_goes_on_without_a_page(tmp_path, monkeypatch, capsys):
    def absent(package):
        raise ModuleNotFoundError(f"No module named {package!r}", name=package)

    monkeypatch.setattr(page.resources, "files", absent)
    (tmp_path / f"{page.PAGE}.1234-5.tmp").write_text("of a run that was killed")
    with Reporter(tmp_path, about()) as report:
        for step in (1, 2, 3):
            report.step(row(step, tokens_per_second=1.0), 0)
    assert capsys.readouterr().out.count("no report.html: No module named 'plotly' (pip install plotly)\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == [page.METRICS]


@pytest.mark.parametrize(
    "drawing, nows, expected", [(0, [100, 110, 119.9, 121, 122], [100, 121]), (1, [100, 150, 200, 202, 250], [100, 202])]
)
def test_a_page_is_drawn_now_and_then_and_at_the_end(tmp_path, monkeypatch, drawing, nows, expected):
    """Every twenty seconds, or in a hundredth of the time where that is more; with what came since at the end."""
    drawn, clock = [], SimpleNamespace(now=0.0)

    def write(*_):
        drawn.append(clock.now)
        clock.now += drawing

    monkeypatch.setattr(page, "write", write)
    monkeypatch.setattr(report, "time", SimpleNamespace(time=lambda: 1.7e9 + clock.now, perf_counter=lambda: clock.now))
    with Reporter(tmp_path, about(utilization=1e-4)) as reporter:
        for step, clock.now in enumerate(nows, start=1):
            reporter.step(row(step, tokens_per_second=500.0), 0)
        assert drawn == expected
    assert drawn == [*expected, nows[-1]]
    rows = [json.loads(line) for line in (tmp_path / page.METRICS).read_text().splitlines()]
    assert [line["time"] for line in rows] == [1.7e9 + now for now in nows] and {line["mfu"] for line in rows} == {500.0 * 1e-4}


def test_of_ten_steps_one_is_printed(tmp_path, capsys):
    with Reporter(tmp_path, about(steps=25)) as report:
        for step in range(1, 26):
            report.step(row(step), 0)
    assert re.findall(r"^step +(\d+)/25 ", capsys.readouterr().out, re.MULTILINE) == ["1", "10", "20", "25"]


def test_long_runs_are_thinned(tmp_path):
    steps, most = 20_003, 33.0
    html, charts = written(tmp_path, [row(s, loss=most if s == 7777 else 2.0 + s % 2) for s in range(1, steps + 1)])
    line = charts["loss"]["lines"][0]
    assert len(line["x"]) == len(line["y"]) == len(line["low"]) <= page.MOST_POINTS and line["x"][-1] == steps
    assert max(line["high"]) == most and min(line["low"]) == 2 and line["y"][0] == pytest.approx(2.5, abs=0.05)
    assert "mean of 21 steps" in html and len(html) < 5_500_000
    assert all({"low", "high"} <= charts[name]["lines"][0].keys() for name in ("loss", "norm", "speed"))


def test_many_samples_are_thinned(tmp_path):
    html, _ = written(tmp_path, [line for s in range(1, 500) for line in (row(s), {"step": s, "sample": "x"})])
    shown = [int(step) for step in re.findall(r"<summary>step (\d+)", html)]
    assert len(shown) == page.MOST_SAMPLES and shown[0] == 499 and shown[-1] == 1 and shown == sorted(shown, reverse=True)


def test_means_leave_out_gaps():
    mean, low, high = page.thinned(np.array([1, 3, np.nan, np.nan, 5, np.nan, 7]), 2)
    np.testing.assert_array_equal(mean, [2, np.nan, 5, 7])
    np.testing.assert_array_equal(low, [1, np.nan, 5, 7])
    np.testing.assert_array_equal(high, [3, np.nan, 5, 7])


def cells(svg):
    """(row, start, width, opacity) of each rectangle."""
    return [
        tuple(map(float, found)) for found in re.findall(r'x="(\d+)" y="(\d+)" width="(\d+)" height="1" opacity="([\d.]+)"', svg)
    ]


def test_the_mask_is_drawn():
    assert cells(page.mask_picture(PythiaConfig().layout(256))) == [(0, row, row + 1, 1) for row in range(4)]
    local = page.mask_picture(PythiaConfig().with_sparse("local").layout(256))
    assert cells(local) == [(0, 0, 1, 1), (0, 1, 2, 1), (1, 2, 2, 1), (2, 3, 2, 1)] and "7 blocks" in local and "0.70" in local
    large = page.mask_picture(PythiaConfig().with_sparse("mixed").layout(131_072))
    assert "16 x 16 blocks" in large and f'viewBox="0 0 {page.MOST_CELLS} {page.MOST_CELLS}"' in large and len(large) < 100_000
    assert {opacity for *_, opacity in cells(large)} == {0.25}


def test_flops_of_a_token():
    dense = PythiaConfig.named("70m")
    assert dense.flops_per_token(512) == 6 * (70_426_624 - 50304 * 512) + 12 * 6 * 512 * 512
    assert dense.with_sparse("local").flops_per_token(512) == 6 * (70_426_624 - 50304 * 512) + 12 * 6 * 512 * 512 * 15 / 36


def test_peaks_that_are_published():
    assert (
        flops.published("NVIDIA H100 80GB HBM3", "bf16")[0] == 989e12 and flops.published("NVIDIA H100 PCIe", "fp16")[0] == 756e12
    )
    assert flops.published("NVIDIA A100-SXM4-80GB", "fp32")[0] == 19.5e12 and flops.published("Tesla T4", "fp16")[0] == 65e12
    for name in ("NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA H100 80GB HBM3 MIG 1g.10gb", "NVIDIA A10G", "Tesla K80"):
        assert flops.published(name, "bf16") == (0.0, "")


def test_a_peak_that_is_measured(host):
    before = host.memory_stats()["live"]
    for precision, itemsize in (("fp32", 4), ("bf16", 2), ("fp16", 2)):
        host.require().reset_peak()
        peak, known = flops.peak_flops(host, precision)
        stats = host.memory_stats()
        assert peak > 0 and f"{precision} products of 1024 x 1024" in known
        assert (stats["live"], stats["peak"]) == (before, before + 2 * 1024**2 * itemsize)
    assert flops.peak_flops(ndl.meta(), "fp32") == (0.0, "")


def test_a_product_is_as_many_multiplications_as_additions(monkeypatch):
    """Of the products the first is slow: it starts the threads."""
    ends = iter(np.cumsum([0.0, 8.0, 0.0, 2.0, 0.0, 1.0, 0.0, 2.0, 0.0, 4.0, 0.0, 2.0]))
    monkeypatch.setattr(flops.time, "perf_counter", lambda: next(ends))
    assert flops.peak_flops(ndl.cpu_numpy(), "fp32")[0] == 2 * 1024**3


@pytest.fixture(scope="module")
def browser():
    """Chromium, as it is installed or as playwright has fetched it."""
    playwright = pytest.importorskip("playwright.sync_api")
    found = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
    with playwright.sync_playwright() as driver:
        try:
            started = driver.chromium.launch(executable_path=found, args=["--no-sandbox"])
        except playwright.Error as error:
            pytest.skip(f"no browser: {str(error).splitlines()[0]} (playwright install chromium)")
        yield started
        started.close()


@pytest.mark.parametrize("scheme, width", [("light", 1280), ("dark", 360)])
def test_in_a_browser(browser, tmp_path, scheme, width):
    rows = [*a_run(2500), row(2501, loss=math.nan), {"step": 2501, "prompt": HOSTILE, "sample": HOSTILE}]
    written(tmp_path, rows, title="Pythia-" + "long" * 40)
    complaints, fetched = [], []
    with browser.new_context(viewport={"width": width, "height": 800}, color_scheme=scheme, has_touch=width < 500) as context:
        tab = context.new_page()
        tab.on("console", lambda message: complaints.append(message.text))
        tab.on("pageerror", lambda error: complaints.append(str(error)))
        tab.on("dialog", lambda dialog: complaints.append(dialog.message))
        tab.on("request", lambda request: fetched.append(request.url))
        tab.goto((tmp_path / page.PAGE).as_uri())
        assert tab.evaluate("document.documentElement.scrollWidth") == width
        for name in ("loss", "lr", "norm", "speed", "memory"):
            path = tab.locator(f"#{name} .scatterlayer path.js-line").first
            assert len(path.get_attribute("d")) > 15
            inside, svg = tab.locator(f"#{name}").bounding_box(), tab.locator(f"#{name} .main-svg").first.bounding_box()
            assert (
                inside["x"] >= 0
                and inside["x"] + inside["width"] <= width
                and svg["width"] == pytest.approx(inside["width"], abs=1)
            )
        dark = tab.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(21, 24, 27)"
        assert dark == (scheme == "dark")
        label = tab.locator("#loss .xtick text").first
        before = label.evaluate("element => getComputedStyle(element).fill")
        tab.emulate_media(color_scheme="light" if dark else "dark")  # as when the sun goes down
        tab.wait_for_function(
            "old => getComputedStyle(document.querySelector('#loss .xtick text')).fill != old", arg=before, timeout=10_000
        )
        chart = tab.locator("#loss .nsewdrag")
        chart.scroll_into_view_if_needed()
        chart.hover()
        tab.locator("#loss .hoverlayer text", has_text="training batch").first.wait_for(timeout=10_000)
    assert complaints == [] and fetched == [(tmp_path / page.PAGE).as_uri()]


def test_labels_of_gradient_norms_are_apart(browser, tmp_path):
    tab = browser.new_page()
    for low, high in ((0.08, 3), (0.6, 12), (0.3, 1.2), (1, 1000)):
        written(tmp_path, [row(step, grad_norm=high * (low / high) ** (step / 40)) for step in range(1, 41)])
        tab.goto((tmp_path / page.PAGE).as_uri())
        labels = tab.locator("#norm .ytick text")
        boxes = sorted((labels.nth(i).bounding_box() for i in range(labels.count())), key=lambda box: box["y"])
        assert len(boxes) >= 2 and all(a["y"] + a["height"] <= b["y"] + 2 for a, b in itertools.pairwise(boxes)), (low, high)
    tab.close()


def labels_of(tab, axis):
    """The numbers at the ticks of an axis, such as "#lr .y"."""
    return [float(text.replace(",", "").replace("\u2212", "-")) for text in tab.locator(f"{axis}tick text").all_text_contents()]


@pytest.mark.parametrize("steps", [1, 2, 3, 2000])
def test_each_tick_is_another_step(browser, tmp_path, steps):
    written(tmp_path, a_run(steps))
    tab = browser.new_page()
    tab.goto((tmp_path / page.PAGE).as_uri())
    found = labels_of(tab, "#lr .x")
    tab.close()
    assert len(found) >= 2 and found == pytest.approx(np.linspace(found[0], found[-1], len(found)))


@pytest.mark.parametrize("steps", [1, 50])
def test_a_learning_rate_that_stays_is_seen(browser, tmp_path, steps):
    written(tmp_path, [row(step, lr=1e-4) for step in range(1, steps + 1)])
    tab = browser.new_page()
    tab.goto((tmp_path / page.PAGE).as_uri())
    found = labels_of(tab, "#lr .y")
    tab.close()
    assert found[0] == 0 and 0.5e-4 <= found[-1] <= 2e-4


def test_the_memory_picture_on_a_phone(browser, tmp_path):
    """What its marks say and what its peak says stand beside one another."""
    config = PythiaConfig(vocab_size=50_304, layers=2, width=64, heads=2, feed_forward=256)
    memory.picture(memory.plan(plannable(config, 1, 64)).trace, tmp_path / "memory.html")
    with browser.new_context(viewport={"width": 390, "height": 844}) as context:
        tab = context.new_page()
        tab.goto((tmp_path / "memory.html").as_uri())
        texts = tab.locator(".annotation-text")
        boxes = {texts.nth(i).text_content(): texts.nth(i).bounding_box() for i in range(texts.count())}
    (peak,) = (boxes.pop(text) for text in list(boxes) if text.startswith("peak"))
    assert list(boxes) == ["step 1", "step 2", "after"]
    assert all(box["y"] + box["height"] <= peak["y"] or peak["y"] + peak["height"] <= box["y"] for box in boxes.values())
