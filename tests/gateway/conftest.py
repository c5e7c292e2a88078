"""One gateway worker and one fake engine a module, shared by the tests that break neither."""

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.rigs import Engine, GatewayRig, fake_engine, gateway_worker


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Engine]:
    async with fake_engine(tmp_path_factory.mktemp("engine"), context_tokens=1_000_000) as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gateway(engine: Engine, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[GatewayRig]:
    async with gateway_worker(tmp_path_factory.mktemp("gateway"), [engine.row()]) as running:
        yield running
