"""The dashboard in a real Chromium: what it shows, how it follows, what it withstands."""

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from aiohttp import web

from llamarack.engine.dialect import Endpoint
from llamarack.gateway.keys import Key, KeyFile, Keys, new_key, write_keys
from llamarack.supervise.state import State
from llamarack.supervise.table import ReplicaRow
from tests.browser.chromium import Browser
from tests.browser.records import NOW, card, event, gateway_of, replica, status
from tests.supervise.conftest import running_rack

pytestmark = [pytest.mark.browser, pytest.mark.asyncio(loop_scope="module")]
HOSTILE = "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>&lt;b&gt; \u202e</pre>"
DRAWN = "!document.getElementById('main').hidden"


def _state_of(id: str) -> str:
    return f"document.querySelector('[data-replica=\"{id}\"]').dataset.state"


async def test_page_shows_the_whole_record_without_a_complaint(browser: Browser, tmp_path: Path) -> None:
    async with gateway_of(tmp_path, status()) as (url, _), browser.page(url) as page:
        await page.until(DRAWN)
        tiles = await page.text("#tiles")
        for wanted in (
            "1,934",
            "81.0 ms",
            "12.7 ms",
            "p90 144 ms · p99 412 ms",
            "25 running",
            "3 waiting",
            "25 of 64 busy",
        ):
            assert wanted in tiles
        model = await page.text("#models")
        for wanted in ("llama2-13b-chat", "planned 2,300", "planned 12.1 ms", "ready for 2 d", "11 of 32 slots busy",
                       "68.8 GiB · planned 68.5 GiB", "0 restarts"):  # fmt: skip
            assert wanted in model
        first, second = await page.text("[data-card='0']"), await page.text("[data-card='1']")
        for wanted in (
            "GPU 0 · NVIDIA H200",
            "68.9 GiB of 141.0 GiB",
            "87 %",
            "498 W",
            "58 °C",
            "1.98 GHz",
            "NVLink ×18",
        ):
            assert wanted in first
        assert "process 990 1.9 GiB" in second.replace("\n", " ")
        assert "23 %" in await page.text("[data-card='host']")
        events = await page.text("#events")
        assert events.index("1 min 14 s") > events.index("1 min 16 s")  # the newest is on top
        assert "the plan counts it as taken" in events
        assert await page.evaluate("document.querySelectorAll('#hardware .spark polyline').length") == 2
        assert await page.text("#state") == "all 2 ready"
        assert page.complaints == []
        assert await page.violations() == []


@pytest.mark.parametrize(
    ("states", "pill"),
    [
        (("ready", "ready"), "all 2 ready"),
        (("ready", "loading"), "1 of 2 ready"),
        (("starting", "loading"), "starting"),
        (("failed", "backoff"), "0 of 2 ready"),
        (("draining", "ready"), "1 of 2 ready"),
    ],
)
async def test_each_state_is_told_in_words(
    browser: Browser, tmp_path: Path, states: tuple[str, str], pill: str
) -> None:
    rows = [replica(number, state=state, running=0) for number, state in enumerate(states)]
    record = status(models=[{"name": "llama2-13b-chat", "replicas": rows}])
    async with gateway_of(tmp_path, record) as (url, _), browser.page(url) as page:
        await page.until(DRAWN)
        for number, state in enumerate(states):
            assert state in await page.text(f"[data-replica='llama2-13b-chat-{number}']")
        assert await page.text("#state") == pill


async def test_faults_of_replicas_and_cards_stand_out(browser: Browser, tmp_path: Path) -> None:
    death = {"at_unix_s": NOW - 42, "while": "ready", "cause": "out_of_memory", "message": "ran out of GPU memory",
             "hint": "lower limits.sequences"}  # fmt: skip
    ill = replica(0, state="backoff", restarts=3, last_death=death, slots_stuck=2, slots_busy=4, pid=None,
                  degraded_from={"path": "/srv/secret.gguf", "steps": [
                      {"setting": "sequences", "was": 64, "becomes": 32},
                      {"setting": "path", "was": "/srv/a.Q8_0.gguf", "becomes": "/srv/a.Q4_K_M.gguf"}]})  # fmt: skip
    cards = [card(0, xid=79, throttle_reasons=["hw_thermal_slowdown"], ecc_uncorrected=2), card(1, memory_by_owner=[])]
    record = status(models=[{"name": "llama2-13b-chat", "replicas": [ill, replica(1, slots_stuck=1)]}], cards=cards)
    async with gateway_of(tmp_path, record) as (url, _), browser.page(url) as page:
        await page.until(DRAWN)
        row = await page.text("[data-replica='llama2-13b-chat-0']")
        for wanted in (
            "3 restarts",
            "ran out of GPU memory",
            "42 s ago",
            "lower limits.sequences",
            "sequences 64 → 32, path a.Q8_0.gguf → a.Q4_K_M.gguf",
            "2 stuck",
        ):
            assert wanted in row
        assert await page.evaluate("document.querySelectorAll('.slots .stuck').length") == 3
        chips = await page.text("[data-card='0'] .chips")
        for wanted in ("XID 79", "2 uncorrected memory errors", "slowed: hw thermal slowdown"):
            assert wanted in chips
        assert "others 70.8 GiB" in (await page.text("[data-card='1']")).replace("\n", " ")  # what nobody owned up to
        assert page.complaints == []


async def test_rack_without_cards_shows_the_hosts_memory_by_replica(browser: Browser, tmp_path: Path) -> None:
    record = status(cards=[])
    async with gateway_of(tmp_path, record) as (url, _), browser.page(url) as page:
        await page.until(DRAWN)
        host = (await page.text("[data-card='host']")).replace("\n", " ")
        assert "llama2-13b-chat-0 5.0 GiB" in host
        assert "others 51.0 GiB" in host
        del record["host"], record["cards"]  # written by an older supervisor
        await page.until("document.querySelector('[data-card=host]').innerText.includes('of 141.0 GiB')")
        assert page.complaints == []


async def test_selection_and_open_folds_survive_the_next_second(browser: Browser, tmp_path: Path) -> None:
    record = status()
    async with gateway_of(tmp_path, record) as (url, _), browser.page(url) as page:
        await page.until(DRAWN)
        await page.evaluate("window.kept = document.querySelector('details'); window.kept.open = true; 1")
        record["gateway"]["running"] = 99
        await page.until("document.getElementById('tiles').innerText.includes('99')")
        assert await page.evaluate(
            "window.kept.isConnected && document.querySelector('details') === window.kept && kept.open"
        )
        assert "engine says" in await page.text("details")


async def test_killed_replica_is_seen_to_die_and_to_come_back(browser: Browser, tmp_path: Path) -> None:
    # Long enough to load that a page which looks every second must see it.
    async with running_rack(tmp_path, [{"load_s": 4.0}, {}]) as rack:
        await rack.until_ready()
        async with browser.page(rack.url + "/") as page:
            await page.until(f"{DRAWN} && {_state_of('fake-0')} === 'ready' && {_state_of('fake-1')} === 'ready'")
            await page.evaluate(
                """window.states = [];
                new MutationObserver(() => states.push(document.querySelector('[data-replica="fake-0"]').dataset.state))
                  .observe(document.getElementById('models'), {subtree: true, attributes: true}); 1"""
            )
            child = rack.supervisor.replicas[0].child
            assert child is not None
            assert child.pid is not None
            os.kill(child.pid, signal.SIGKILL)
            row = "document.querySelector('[data-replica=\"fake-0\"]').innerText"
            await page.until(f"{row}.includes('1 restart') && {_state_of('fake-0')} === 'ready'")
            assert "killed" in await page.text("[data-replica='fake-0'] .bad")
            assert any(state != "ready" for state in await page.evaluate("states"))
            assert "killed" in await page.text("#events")
            assert page.complaints == []


async def test_five_hundred_engine_events_a_second_cost_one_write_a_frame(browser: Browser, tmp_path: Path) -> None:
    tokens = 2500
    async with running_rack(tmp_path, [{"token_interval_s": 0.001, "answer_tokens": tokens}]) as rack:
        await rack.until_ready()
        async with browser.page(rack.url + "/") as page:
            await page.until(DRAWN)
            await page.evaluate(
                f"""window.writes = 0; window.frames = 0;
                new MutationObserver(list => writes += list.length)
                  .observe(document.getElementById('ask-answer'), {{characterData: true, subtree: true}});
                (function frame() {{ frames++; requestAnimationFrame(frame); }})();
                document.getElementById('ask-tokens').value = {tokens};
                document.getElementById('ask').requestSubmit(); 1"""
            )
            await page.until("!document.getElementById('ask-send').disabled")
            await page.until(f"document.getElementById('ask-facts').innerText.includes('{tokens} tokens')")
            writes, frames = await page.evaluate("[writes, frames]")
            assert 1 < writes <= frames + 1
            assert writes < tokens / 4  # gathered, not one by one
            words = await page.evaluate("document.getElementById('ask-answer').textContent")
            assert words.count("harbour") >= tokens // 32 - 1  # the fake goes round 32 words: none was lost
            assert await page.evaluate("document.getElementById('ask-answer').childNodes.length") == 1
            await page.until("Number(document.querySelector('.tile .value').innerText.replace(',', '')) > 50")
            assert page.complaints == []


async def test_flood_of_journal_events_keeps_the_page_small(browser: Browser, tmp_path: Path) -> None:
    async with running_rack(tmp_path, [{}]) as rack:
        await rack.until_ready()

        async def flood() -> None:
            for number in range(1500):
                rack.supervisor.journal.warn("flood", f"event number {number}", replica="fake-0")
                if number % 5 == 4:
                    await asyncio.sleep(0.01)

        async with browser.page(rack.url + "/") as page:
            await page.until(DRAWN)
            await flood()
            await page.until("document.getElementById('events').innerText.includes('event number 1499')")
            assert await page.evaluate("document.querySelectorAll('#events li').length") <= 50
            assert page.complaints == []


@contextlib.asynccontextmanager
async def _hostile_engine(path: Path) -> AsyncIterator[ReplicaRow]:
    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for part in (HOSTILE[:7], HOSTILE[7:40], HOSTILE[40:]):
            chunk = {"id": "x", "object": "chat.completion.chunk", "created": 1, "model": "hostile",
                     "choices": [{"index": 0, "delta": {"content": part}, "finish_reason": None}]}  # fmt: skip
            await response.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        return response

    app = web.Application()
    app.router.add_post("/v1/chat/completions", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.UnixSite(runner, str(path)).start()
    endpoint = Endpoint(socket=path, port=None, key="k", served_name="hostile")
    yield ReplicaRow(id="hostile-0", model="hostile", engine="llamacpp", state=State.READY, endpoint=endpoint, slots=1,
                     context_tokens=100)  # fmt: skip
    await runner.cleanup()


async def test_hostile_model_output_and_names_stay_text(browser: Browser, tmp_path: Path) -> None:
    rows = [replica(0, id=HOSTILE, last_death={"at_unix_s": NOW, "while": "ready", "cause": "x", "message": HOSTILE,
                                               "hint": HOSTILE})]  # fmt: skip
    record = status(
        rack=HOSTILE,
        models=[{"name": "hostile", "replicas": rows}],
        events=[event(HOSTILE, replica=HOSTILE, data={"hint": HOSTILE})],
        cards=[card(0, name=HOSTILE, throttle_reasons=[HOSTILE])],
    )
    async with (
        _hostile_engine(tmp_path / "engine.sock") as engine,
        gateway_of(tmp_path, record, replicas=[engine]) as (url, _),
        browser.page(url) as page,
    ):
        await page.until(DRAWN)
        before = await page.evaluate("document.querySelectorAll('script, img').length")
        await page.evaluate("document.getElementById('ask').requestSubmit()")
        await page.until(
            "!document.getElementById('ask-send').disabled && document.getElementById('ask-answer').innerText"
        )
        assert await page.evaluate("document.getElementById('ask-answer').textContent") == HOSTILE
        assert await page.evaluate("document.querySelectorAll('script, img').length") == before == 2
        assert await page.evaluate("document.title") == f"{HOSTILE} · llamarack"
        assert page.complaints == []
        assert await page.violations() == []


async def test_refused_question_is_told_once_in_the_gateways_words(browser: Browser, tmp_path: Path) -> None:
    async with gateway_of(tmp_path, status()) as (url, _), browser.page(url) as page:
        await page.until(DRAWN)
        await page.evaluate("document.getElementById('ask').requestSubmit()")
        await page.until("document.querySelector('.answer.failed') !== null")
        assert "is not served here" in await page.text("#ask-answer")
        assert await page.text("#ask-facts") == ""


async def test_policy_stops_what_would_be_written_as_markup(browser: Browser, tmp_path: Path) -> None:
    async with gateway_of(tmp_path, status()) as (url, _), browser.page(url) as page:
        await page.until(DRAWN)
        for attempt in (
            "document.body.insertAdjacentHTML('beforeend', '<b>x</b>')",
            "document.createElement('p').setAttribute('onclick', 'x()')",
            "document.createElement('script').src = 'data:text/javascript,1'",
        ):
            assert await page.evaluate(f"(() => {{ try {{ {attempt}; return false }} catch {{ return true }} }})()")
        await page.evaluate("document.body.append(Object.assign(new Image(), {src: 'http://192.0.2.1/x.png'}))")
        await page.evaluate("fetch('http://192.0.2.1/').catch(() => 1)")
        await page.until("['img-src', 'connect-src'].every(name => (window.violations ?? []).includes(name))")


async def test_rack_with_keys_asks_for_one_and_keeps_it_in_this_tab(browser: Browser, tmp_path: Path) -> None:
    key, digest = new_key()
    file = tmp_path / "keys.yaml"
    write_keys(file, KeyFile(keys=[Key(name="me", sha256=digest, created_unix_s=1)]))

    def enter(text: str) -> str:
        field = f"document.getElementById('key').value = {json.dumps(text)}"
        return f"{field}; document.getElementById('key-form').requestSubmit()"

    async with gateway_of(tmp_path, status(), keys=Keys(file)) as (url, _), browser.page(url) as page:
        await page.until("!document.getElementById('key-form').hidden")
        assert "llama2" not in await page.evaluate("document.documentElement.outerHTML")
        await page.evaluate(enter("lr-wrong"))
        await page.until("document.getElementById('notice').innerText.includes('not known')")
        await page.evaluate(enter(key))
        await page.until(DRAWN)
        assert "llama2-13b-chat-0" in await page.text("#models")
        assert await page.evaluate("localStorage.length + document.cookie.length") == 0
        assert key not in await page.evaluate("document.documentElement.outerHTML + location.href")
        await page.evaluate("document.getElementById('key-change').click()")
        await page.until("!document.getElementById('key-form').hidden && document.getElementById('main').hidden")
        assert [each for each in page.complaints if "401" not in each] == []


async def test_absent_supervisor_and_absent_gateway_are_told(browser: Browser, tmp_path: Path) -> None:
    async with browser.page("about:blank") as page:
        async with gateway_of(tmp_path, status()) as (url, _):
            await page.call("Page.navigate", url=url)
            await page.until(f"document.getElementById('main') && {DRAWN}")
            (tmp_path / "rack.sock").unlink()
            await page.until("document.getElementById('notice').innerText.includes('supervisor is away')")
            assert await page.evaluate("document.getElementById('main').classList.contains('stale')")
            assert "1,934" in await page.text("#tiles")
        await page.until("document.getElementById('notice').innerText.includes('does not answer')")


@pytest.mark.parametrize("width", [320, 390, 768, 1280])
async def test_nothing_overflows_and_both_schemes_differ(browser: Browser, tmp_path: Path, width: int) -> None:
    async with gateway_of(tmp_path, status()) as (url, _), browser.page(url, width=width, phone=width < 500) as page:
        await page.until(DRAWN)
        assert await page.evaluate("document.documentElement.scrollWidth") <= width
        light = await page.evaluate("getComputedStyle(document.body).backgroundColor")
        await page.look(width=width, phone=width < 500, dark=True)
        await page.until(f"getComputedStyle(document.body).backgroundColor !== {json.dumps(light)}")
