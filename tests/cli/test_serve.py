"""When `serve --detach` says that a rack is ready."""

from typing import Any

import pytest

from llamarack.cli.serving import is_served
from tests.browser.records import replica, status


def _record(*states: str, **gateway: Any) -> dict[str, Any]:
    record = status(models=[{"name": "m", "replicas": [replica(i, state=state) for i, state in enumerate(states)]}])
    record["gateway"] |= gateway
    return record


@pytest.mark.parametrize("states", [["ready"], ["ready", "ready"], ["ready", "failed"]])
def test_ready_once_nothing_is_on_its_way(states: list[str]) -> None:
    assert is_served(_record(*states))


@pytest.mark.parametrize("states", [[], ["loading"], ["ready", "loading"], ["failed"], ["ready", "backoff"]])
def test_not_ready_while_replicas_start_and_never_with_none(states: list[str]) -> None:
    assert not is_served(_record(*states))


def test_not_ready_until_the_gateway_has_heard_of_the_replicas() -> None:
    assert not is_served(_record("ready", is_current=False))
