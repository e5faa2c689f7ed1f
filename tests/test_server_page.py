"""The page at `/` in headless Chromium: against a scripted API, and against the real server on a tiny bundle."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from starlette.testclient import TestClient

from domino_deploy.server.page import page_files
from tests.support.browser import chromium, console_errors, requested_hosts
from tests.support.loopback import served
from tests.support.page_double import TERMS_MS, Cycle, PageDouble, Script

if TYPE_CHECKING:
    from selenium.webdriver import Chrome
    from selenium.webdriver.remote.webelement import WebElement

WAIT_SECONDS = 30.0
# Prefill; four proposed and three accepted; four proposed and one accepted.
ANSWER = (
    Cycle(texts=("One",)),
    Cycle(texts=(",", " two", ",", " three"), accepted=3, proposed=4),
    Cycle(texts=(", four", "."), accepted=1, proposed=4),
)
TEXT = "One, two, three, four."
TAU = f"{1 + 4 / 2:.2f}"  # accepted over the two cycles that proposed something


class Page:
    """What a reader does and sees."""

    def __init__(self, browser: Chrome) -> None:
        self.browser = browser

    def all(self, selector: str) -> list[WebElement]:
        return self.browser.find_elements("css selector", selector)

    def texts(self, selector: str) -> list[str]:
        return [str(element.get_property("textContent")) for element in self.all(selector)]

    def open(self, address: str) -> None:
        self.browser.get(address)
        self.wait_for(lambda: self.all("#model option") or self.texts("#server") != [""])

    def wait_for(self, condition: Any) -> None:
        from selenium.webdriver.support.ui import WebDriverWait

        WebDriverWait(self.browser, WAIT_SECONDS, poll_frequency=0.05).until(lambda browser: condition())

    def click(self, selector: str) -> None:
        # By script: radio buttons are drawn by their labels.
        self.browser.execute_script("document.querySelector(arguments[0]).click()", selector)

    def fill(self, selector: str, value: str) -> None:
        (field,) = self.all(selector)
        field.clear()
        field.send_keys(value)

    def send(self, text: str) -> None:
        self.all("#message")[0].send_keys(text, "\n")

    def wait_until_done(self) -> None:
        self.wait_for(lambda: self.all("#send")[0].is_displayed())

    def ask(self, text: str) -> None:
        self.send(text)
        self.wait_until_done()


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chrome]:
    with chromium(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


@pytest.fixture
def page(browser: Chrome) -> Iterator[Page]:
    console_errors(browser), requested_hosts(browser)  # those of the test before
    yield Page(browser)
    browser.execute_script("sessionStorage.clear()")


@pytest.mark.parametrize(("is_ci", "outcome"), [(False, pytest.skip.Exception), (True, pytest.fail.Exception)], ids=["elsewhere", "CI"])
@pytest.mark.parametrize("missing", ["chromium", "chromedriver"])
def test_a_missing_browser_is_a_reason_to_skip_but_not_in_ci(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, missing: str, is_ci: bool, outcome: type[BaseException]
) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None if name == missing else f"/usr/bin/{name}")
    monkeypatch.setenv("CI", "true") if is_ci else monkeypatch.delenv("CI", raising=False)
    with pytest.raises(outcome, match="apt-get install chromium chromium-driver"), chromium(tmp_path):
        pass


def test_an_answer_streams_with_its_marks_and_figures(page: Page) -> None:
    gate = threading.Event()
    double = PageDouble(Script(cycles=ANSWER, gate=gate))
    with served(double.app) as address:
        page.open(address)
        assert page.texts("#model option") == ["toy (128 tokens)"]
        page.send("Count to four.")
        page.wait_for(lambda: page.texts(".answer .text") == ["One"])  # while the rest is still to come
        assert page.texts(".question") == ["Count to four."]
        assert page.all(".answer")[0].get_attribute("aria-busy") == "true"
        gate.set()
        page.wait_until_done()

        assert page.texts(".answer .text") == [TEXT]
        assert page.texts(".answer .token.drafted") == [",", " two", ",", ", four"]
        assert page.texts(".answer .token.own") == ["One", " three", "."]
        titles = [element.get_attribute("title") for element in page.all(".answer .token")]
        assert titles[0] == "Prompt pass: the target's own (token 100)"
        assert titles[1] == "Cycle 1: drafted and accepted (token 101)"
        assert titles[-1] == "Cycle 2: the target's own (token 106)"
        assert page.texts("[data-figure=tau]") == [TAU]
        assert page.texts("[data-figure=acceptance]") == ["50 %"]
        assert page.texts("[data-figure=tokens]") == ["7"]
        assert float(page.texts("[data-figure=speed]")[0]) > 0
        assert page.texts("[data-figure=first]")[0].endswith("s")
        for term, milliseconds in TERMS_MS.items():
            assert page.texts(f"[data-term={term}]") == [f"{milliseconds:.1f}"]
        widths = [element.size["width"] for element in page.all(".bar span")]
        assert widths[2] > widths[0] > widths[3] > widths[1] > 0  # verify, draft, other, head
        assert requested_hosts(page.browser) == {address.removeprefix("http://")}
        assert console_errors(page.browser) == []


def test_the_request_is_what_the_settings_say(page: Page) -> None:
    double = PageDouble(Script(cycles=ANSWER), Script(cycles=ANSWER))
    with served(double.app) as address:
        page.open(address)
        page.fill("#system", "Be brief.")
        page.fill("#temperature", "0.7")
        page.fill("#seed", "11")
        page.fill("#max-tokens", "32")
        page.fill("#key", "secret")
        page.ask("Count.")
        page.click("input[name=mode][value=off]")
        page.ask("Again.")
    first, second = double.asked
    assert first == {
        "model": "toy",
        "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Count."}],
        "temperature": 0.7,
        "seed": 11,
        "max_completion_tokens": 32,
        "stream": True,
        "stream_options": {"include_usage": True},
        "speculation_details": True,
        "speculative": True,
    }
    assert second["speculative"] is False
    assert second["messages"][1:] == [
        {"role": "user", "content": "Count."},
        {"role": "assistant", "content": TEXT},
        {"role": "user", "content": "Again."},
    ]
    assert double.keys == ["Bearer secret"] * 2
    assert page.browser.execute_script("return [localStorage.length, document.cookie]") == [0, ""]


def test_stop_ends_the_request_and_keeps_what_was_said(page: Page) -> None:
    double = PageDouble(Script(cycles=ANSWER, gate=threading.Event()), Script(cycles=ANSWER))
    with served(double.app) as address:
        page.open(address)
        page.send("Count.")
        page.wait_for(lambda: page.texts(".answer .text") == ["One"])
        page.all("#stop")[0].click()
        page.wait_until_done()
        page.wait_for(lambda: double.left == 1)  # the server sees it too
        assert page.texts(".badge") == ["stopped"]
        page.ask("Go on.")
    assert double.asked[1]["messages"][1] == {"role": "assistant", "content": "One"}
    assert page.texts(".answer .text") == ["One", TEXT]
    assert console_errors(page.browser) == []


def test_side_by_side_asks_twice_one_after_the_other_and_compares(page: Page) -> None:
    plain = tuple(Cycle(texts=(text,)) for cycle in ANSWER for text in cycle.texts)
    double = PageDouble(answer=lambda body: Script(cycles=ANSWER if body["speculative"] else plain))
    with served(double.app) as address:
        page.open(address)
        page.click("input[name=mode][value=both]")
        page.ask("Count.")
        assert [body["speculative"] for body in double.asked] == [True, False]
        assert double.asked[0]["messages"] == double.asked[1]["messages"]
        assert page.texts(".answer .text") == [TEXT, TEXT]
        assert page.texts("[data-figure=tau]") == [TAU, "1.00"]
        speeds = [float(text) for text in page.texts("[data-figure=speed]")]
        (ratio,) = page.texts("[data-figure=ratio]")
        assert float(ratio.removesuffix("×")) == pytest.approx(speeds[0] / speeds[1], abs=0.02)
        assert page.texts("[data-figure=same]") == ["the same tokens both ways"]
        left, right = (element.location["x"] for element in page.all(".answer"))
        assert left < right
    assert console_errors(page.browser) == []


def test_side_by_side_at_once_begins_both_before_either_ends(page: Page) -> None:
    gate = threading.Event()
    double = PageDouble(answer=lambda body: Script(cycles=ANSWER if body["speculative"] else ANSWER[:2], gate=gate))
    with served(double.app) as address:
        page.open(address)
        page.click("input[name=mode][value=both]")
        page.click("input[name=order][value=both]")
        assert "share the machine" in page.texts("#order-note")[0]
        page.send("Count.")
        page.wait_for(lambda: page.texts(".answer .text") == ["One", "One"])
        gate.set()
        page.wait_until_done()
        assert page.texts("[data-figure=same]")[0].startswith("different tokens")


@pytest.mark.parametrize(
    ("script", "words"),
    [
        (Script(status=401, message="no key"), "wants an API key"),
        (Script(status=429, message="full", headers={"Retry-After": "7"}), "takes no more requests now. Try again in 7 s."),
        (Script(status=503, message="Warming up.", headers={"Retry-After": "2"}), "not ready: Warming up. Try again in 2 s."),
        (Script(status=400, message="Expected a shorter prompt, found 999 tokens."), "Expected a shorter prompt, found 999 tokens."),
        (Script(cycles=ANSWER[:1], error_in_stream="The engine has failed."), "The engine has failed."),
    ],
    ids=["401", "429", "503", "400", "in the stream"],
)
def test_a_refusal_is_shown_in_words_and_can_be_tried_again(page: Page, script: Script, words: str) -> None:
    double = PageDouble(script, Script(cycles=ANSWER))
    with served(double.app) as address:
        page.open(address)
        page.ask("Count.")
        (said,) = page.texts(".error p")
        assert words in said
        if script.status == 401:
            assert page.browser.switch_to.active_element.get_attribute("id") == "key"
        page.click(".error button")
        page.wait_for(lambda: page.texts(".answer .text") == [TEXT])
        page.wait_until_done()
        assert page.texts(".error") == []
    assert [len(body["messages"]) for body in double.asked] == [1, 1]  # the failed turn left nothing behind


def test_trying_again_waits_for_the_answer_that_is_coming(page: Page) -> None:
    gate = threading.Event()
    refused = Script(status=400, message="No.")
    double = PageDouble(answer=lambda body: refused if body["speculative"] else Script(cycles=ANSWER, gate=gate))
    with served(double.app) as address:
        page.open(address)
        page.click("input[name=mode][value=both]")
        page.send("Count.")
        page.wait_for(lambda: page.texts(".answer .text") == ["", "One"])
        page.click(".error button")
        gate.set()
        page.wait_until_done()
        assert page.texts(".answer .text") == ["", TEXT]
    assert len(double.asked) == 2


def test_a_server_that_is_gone_is_said_so(page: Page) -> None:
    with served(PageDouble().app) as address:
        page.open(address)
    page.ask("Count.")
    assert page.texts(".error p") == ["The server does not answer. Is it running?"]


def test_what_a_model_writes_never_becomes_markup(page: Page) -> None:
    attack = '<img src=x onerror="window.hit=1"><script>window.hit=1</script>'
    double = PageDouble(Script(cycles=(Cycle(texts=(attack, "<b>bold</b>")),)), Script(status=400, message=attack))
    with served(double.app) as address:
        page.open(address)
        page.ask(attack)
        assert page.texts(".answer .text") == [attack + "<b>bold</b>"]
        assert page.texts(".question") == [attack]
        page.ask("And in an error?")
        assert attack in page.texts(".error p")[0]
        assert page.all("#conversation :is(img, script, b)") == []
        assert page.browser.execute_script("return window.hit") is None


def test_the_policy_of_the_page_refuses_what_is_not_ours(page: Page) -> None:
    with served(PageDouble().app) as address:
        page.open(address)
        page.browser.execute_script(
            "const script = document.createElement('script'); script.textContent = 'window.hit = 1'; document.body.append(script);"
        )
        assert page.browser.execute_script("return window.hit") is None
        assert any("Content Security Policy" in message for message in console_errors(page.browser))


def test_everything_is_reached_and_named_for_the_keyboard(page: Page) -> None:
    from selenium.webdriver.common.keys import Keys

    gate = threading.Event()
    double = PageDouble(Script(cycles=ANSWER, gate=gate))
    with served(double.app) as address:
        page.open(address)
        assert page.browser.switch_to.active_element.get_attribute("id") == "message"
        unnamed = [
            element.get_attribute("outerHTML")
            for element in page.all(":is(button, input, select, textarea):not([hidden])")
            if not element.accessible_name
        ]
        assert unnamed == []
        message = page.all("#message")[0]
        message.send_keys("Two", Keys.SHIFT + Keys.ENTER + Keys.NULL, "lines", Keys.ENTER)
        page.wait_for(lambda: page.texts(".answer .text") == ["One"])
        page.browser.switch_to.active_element.send_keys(Keys.ESCAPE)
        page.wait_until_done()
        assert page.texts(".badge") == ["stopped"]
    assert double.asked[0]["messages"][0]["content"] == "Two\nlines"


def test_the_page_fits_a_narrow_screen(tmp_path: Path) -> None:
    double = PageDouble(Script(cycles=ANSWER), Script(cycles=ANSWER))
    with chromium(tmp_path / "profile", width=500, height=800) as browser, served(double.app) as address:
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", {"width": 360, "height": 740, "deviceScaleFactor": 1, "mobile": True})
        page = Page(browser)
        page.open(address)
        page.click("input[name=mode][value=both]")
        page.ask("Count.")
        assert browser.execute_script("return document.documentElement.scrollWidth") <= 360
        upper, lower = (element.location for element in page.all(".answer"))
        assert (upper["x"], upper["y"] < lower["y"]) == (lower["x"], True)


def test_the_pages_files_are_served_by_name_and_nothing_else() -> None:
    client = TestClient(PageDouble().app, raise_server_exceptions=False)
    found = client.get("/")
    assert found.headers["content-type"] == "text/html; charset=utf-8"
    assert found.headers["x-content-type-options"] == "nosniff"
    policy = found.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert found.content == page_files()["index.html"]
    assert client.get("/static/page.js").headers["content-type"] == "text/javascript; charset=utf-8"
    for name in ("..%2Fpage.py", "%2e%2e%2fpage.py", "nothing.js", ""):
        assert client.get(f"/static/{name}").content not in (b"", *page_files().values()), name
        assert client.get(f"/static/{name}").status_code >= 400, name


def test_the_pages_files_name_no_other_host() -> None:
    for name, content in page_files().items():
        text = content.decode().replace("http://www.w3.org/2000/svg", "")  # SVG's name, which nothing fetches
        assert "://" not in text, name
        assert "innerHTML" not in text, name


def test_over_the_real_server_the_page_shows_what_the_api_reports(page: Page, tiny_bundle: Path) -> None:
    from domino_deploy.runtime.engine import Engine, EngineSettings
    from domino_deploy.server.app import create_app
    from domino_deploy.server.settings import ServerSettings, StatisticsLevel

    settings = ServerSettings(statistics_level=StatisticsLevel.SUMMARY, served_model_names=("tiny",))
    # Not adaptive: then every run of a request has the same cycles.
    with Engine.open(tiny_bundle, settings=EngineSettings(max_sequences=2, adaptive=False)) as engine:
        with served(create_app(engine, settings)) as address:
            body = {
                "model": "tiny",
                "messages": [{"role": "user", "content": "Count to ten."}],
                "temperature": 0,
                "max_completion_tokens": 40,
                "speculation_details": True,
            }
            reported = httpx.post(f"{address}/v1/chat/completions", json=body, timeout=WAIT_SECONDS, trust_env=False).json()
            page.open(address)
            page.fill("#max-tokens", "40")
            page.click("input[name=mode][value=both]")
            page.ask("Count to ten.")
        tokens = [token for token in reported["speculation"][0]["tokens"] if token["text"]]
        speculative, plain = page.all(".answer")
        for answer in (speculative, plain):
            (text,) = answer.find_elements("css selector", ".text")
            assert text.get_property("textContent") == reported["choices"][0]["message"]["content"]
        shown = speculative.find_elements("css selector", ".token")
        assert [token.get_property("textContent") for token in shown] == [token["text"] for token in tokens]
        assert ["drafted" in str(token.get_attribute("class")) for token in shown] == [token["drafted"] for token in tokens]
        summary = reported["metrics"]["speculative_decoding"]
        assert page.texts("[data-figure=tau]") == [f"{summary['mean_acceptance_length']:.2f}", "1.00"]
        assert page.texts("[data-figure=acceptance]") == [f"{round(100 * summary['draft_acceptance_rate'])} %", "–"]
        assert page.texts("[data-figure=tokens]") == [str(reported["usage"]["completion_tokens"])] * 2
        assert page.texts("[data-figure=same]") == ["the same tokens both ways"]
        assert float(page.texts("[data-term=verify]")[0]) > 0
        assert requested_hosts(page.browser) == {address.removeprefix("http://")}
        assert console_errors(page.browser) == []


def test_over_the_real_server_a_key_is_asked_for_and_taken(page: Page, tiny_bundle: Path) -> None:
    from domino_deploy.runtime.engine import Engine, EngineSettings
    from domino_deploy.server.app import create_app
    from domino_deploy.server.settings import ServerSettings

    settings = ServerSettings(api_keys=("secret",))
    with Engine.open(tiny_bundle, settings=EngineSettings(max_sequences=1)) as engine, served(create_app(engine, settings)) as address:
        page.browser.get(address)
        page.wait_for(lambda: "wants an API key" in page.texts("#server")[0])
        page.fill("#key", "secret\n")
        page.wait_for(lambda: page.texts("#server") == [""])
        page.fill("#max-tokens", "8")
        page.ask("Count to ten.")
        assert page.texts(".error") == []
        assert page.texts("[data-figure=tokens]") == ["8"]
