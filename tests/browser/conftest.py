from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.browser.chromium import HOW_TO_INSTALL, Browser, chromium, executable


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def browser(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Browser]:
    if executable() is None:
        pytest.skip(HOW_TO_INSTALL)
    async with chromium(tmp_path_factory.mktemp("browser")) as running:
        yield running


@pytest.fixture(autouse=True)
def own_load_lock(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    monkeypatch.setenv("LLAMARACK_LOAD_LOCK", str(tmp_path_factory.mktemp("lock") / "load.lock"))
