"""What one key may use: models, requests at once and a minute, tokens a day."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from llamarack.errors import Forbidden, RateLimited
from llamarack.gateway.admission import Admission
from llamarack.gateway.keys import Key, KeyFile, new_key, write_keys
from llamarack.gateway.ledger import Ledger
from llamarack.gateway.quota import Quotas, Use, read_usage
from tests.gateway.raw import ask, chat, connect, get, post_bytes
from tests.gateway.test_metrics import families
from tests.rigs import fake_engine, gateway_worker, until

NOON_S = 1_796_040_000.0  # 2026-11-30 12:00 UTC
CHAT = "/v1/chat/completions"


class Clock:
    def __init__(self, now: float = NOON_S) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def key(**limits: Any) -> Key:
    return Key(name="app", sha256="0" * 64, created_unix_s=1, **limits)


def desk() -> Admission:
    return Admission(max_queue_requests=1, max_queue_s=1)


def test_requests_at_once_are_bounded_and_freed() -> None:
    quotas = Quotas(desk(), Clock())
    mine = key(max_parallel=2)
    quotas.enter(mine)
    quotas.enter(mine)
    with pytest.raises(RateLimited, match="2 requests running"):
        quotas.enter(mine)
    quotas.leave(mine, 1, 1)
    quotas.enter(mine)


def test_requests_of_a_minute_are_bounded_until_it_ends() -> None:
    clock = Clock(NOON_S + 45)
    quotas = Quotas(desk(), clock)
    mine = key(requests_per_minute=1)
    quotas.enter(mine)
    with pytest.raises(RateLimited) as caught:
        quotas.enter(mine)
    assert caught.value.retry_after_s == 15
    clock.now += 15
    quotas.enter(mine)


def test_tokens_of_a_day_are_bounded_until_it_ends_and_kept_over_a_restart(tmp_path: Path) -> None:
    clock = Clock()
    quotas = Quotas(desk(), clock, folder=tmp_path)
    mine = key(tokens_per_day=100)
    quotas.enter(mine)
    quotas.leave(mine, 90, 20)
    quotas.save()
    again = Quotas(desk(), clock, folder=tmp_path)
    with pytest.raises(RateLimited, match="110 tokens today") as caught:
        again.enter(mine)
    assert caught.value.should_retry is False
    clock.now += 12 * 3600
    again.enter(mine)
    again.leave(mine, 1, 2)
    again.save()
    assert read_usage(tmp_path) == {
        "2026-11-30": {"app": Use(requests=1, prompt_tokens=90, generated_tokens=20)},
        "2026-12-01": {"app": Use(requests=1, prompt_tokens=1, generated_tokens=2)},
    }


def test_use_of_a_worker_that_is_no_more_counts_on(tmp_path: Path) -> None:
    mine = key(tokens_per_day=10)
    second = Quotas(desk(), Clock(), folder=tmp_path, worker=1, workers=2)
    second.enter(mine)
    second.leave(mine, 20, 0)
    second.save()
    alone = Quotas(desk(), Clock(), folder=tmp_path, worker=0, workers=1)
    with pytest.raises(RateLimited):
        alone.enter(mine)
    assert read_usage(tmp_path)["2026-11-30"]["app"].prompt_tokens == 20  # once


def test_limits_hold_over_workers(tmp_path: Path) -> None:
    ledgers = [Ledger(tmp_path, number, 2) for number in range(2)]
    both = [Quotas(desk(), Clock(), ledger=ledger, worker=i, workers=2) for i, ledger in enumerate(ledgers)]
    parallel, minute, day = key(max_parallel=1), key(requests_per_minute=1), key(tokens_per_day=5)
    both[0].enter(parallel)
    for limited in (parallel, minute):
        with pytest.raises(RateLimited):
            both[1].enter(limited)
    both[0].leave(parallel, 5, 0)
    with pytest.raises(RateLimited, match="5 tokens today"):
        both[1].enter(day)
    for ledger in ledgers:
        ledger.close()


def test_model_outside_the_keys_list_is_forbidden_by_name() -> None:
    quotas = Quotas(desk(), Clock())
    quotas.require_model(key(models=["m"]), "m")
    with pytest.raises(Forbidden, match="may not use `n`; it may use: `m`"):
        quotas.require_model(key(models=["m"]), "n")


@pytest.mark.process
async def test_key_sees_and_uses_its_models_only_and_its_tokens_are_counted(tmp_path: Path) -> None:
    (one, first), (two, second) = new_key(), new_key()
    entries = [
        Key(name="one", sha256=first, created_unix_s=1, models=["other"], max_parallel=1),
        Key(name="two", sha256=second, created_unix_s=1, tokens_per_day=1),
    ]
    write_keys(tmp_path / "keys.yaml", KeyFile(keys=entries))
    async with (
        fake_engine(tmp_path, "a") as a,
        fake_engine(tmp_path, "b", model="other") as b,
        gateway_worker(tmp_path, [a.row(), b.row()], api_keys_file=tmp_path / "keys.yaml") as gateway,
    ):
        listed = (await get(gateway, "/v1/models", api_key=one)).json["data"]
        assert [row["id"] for row in listed] == ["other"]
        refused = await ask(gateway, CHAT, chat(), api_key=one)
        assert (refused.status, refused.error["code"]) == (403, "permission_denied")
        assert (await ask(gateway, CHAT, chat(model="other"), api_key=one)).status == 200
        assert (await ask(gateway, CHAT, chat(model="nope"), api_key=one)).status == 404
        assert (await ask(gateway, CHAT, chat(max_tokens=3), api_key=two)).status == 200
        used_up = await ask(gateway, CHAT, chat(), api_key=two)
        assert (used_up.status, used_up.error["code"]) == (429, "rate_limit_exceeded")
        assert used_up.headers["x-should-retry"] == "false"
        assert 1 <= int(used_up.headers["retry-after"]) <= 120
        async with connect(gateway) as client:
            await client.send(post_bytes(CHAT, chat("[[fault stall_prefill]]", model="other"), api_key=one))
            await until(lambda: gateway.counts_of("in_flight") == 1, "it runs")
            again = await ask(gateway, CHAT, chat(model="other"), api_key=one)
            assert (again.status, again.error["type"]) == (429, "rate_limit_error")
            client.leave()
        await until(lambda: gateway.counts_of("in_flight") == 0, "its slot is free")
        async with asyncio.timeout(30):
            while (await ask(gateway, CHAT, chat(model="other"), api_key=one)).status != 200:
                await asyncio.sleep(0.01)
        page = families((await get(gateway, "/metrics", api_key=two)).body.decode())
        tokens = {(labels["key"], labels["model"]): value for labels, value in page["llamarack_key_tokens_total"]}
        assert tokens[("two", "fake")] > 3
        rejected = {labels["reason"] for labels, _ in page["llamarack_requests_rejected_total"]}
        assert rejected == {"rate_limit_exceeded"}
    assert {"one", "two"} <= set(next(iter(read_usage(tmp_path).values())))
