"""The official OpenAI client for Node: `make test-node`, or LLAMARACK_NODE_MODULES=/path/to/node_modules."""

import asyncio
import json
import os
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from tests.rigs import Engine, GatewayRig, fake_engine, gateway_worker, until

MODULES = Path(os.environ.get("LLAMARACK_NODE_MODULES", Path(__file__).parents[2] / "build" / "node" / "node_modules"))
pytestmark = [
    pytest.mark.node,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(shutil.which("node") is None, reason="no `node`: apt-get install nodejs, then make test-node"),
    pytest.mark.skipif(
        not (MODULES / "openai").is_dir(), reason=f"no `openai` in {MODULES}: make test-node installs it"
    ),
]

HEAD = """
import { createRequire } from "module";
const OpenAI = createRequire(process.env.MODULES + "/x.js")("openai");
const maxRetries = Number(process.env.RETRIES);
const client = new OpenAI({ baseURL: process.env.URL + "/v1", apiKey: "none", maxRetries });
const messages = [{ role: "user", content: process.env.TEXT }];
const out = (value) => console.log(JSON.stringify(value));
"""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def rack(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[tuple[GatewayRig, Engine]]:
    folder = tmp_path_factory.mktemp("node")
    async with fake_engine(folder) as engine, gateway_worker(folder, [engine.row()]) as gateway:
        yield gateway, engine


async def node(gateway: GatewayRig, script: str, text: str = "Hello", retries: int = 0) -> Any:
    """What the script gives to `out`."""
    environment = {**os.environ, "MODULES": str(MODULES), "URL": gateway.url, "TEXT": text, "RETRIES": str(retries)}
    process = await asyncio.create_subprocess_exec(
        "node", "--input-type=module", "-e", HEAD + script, env=environment, stdout=-1, stderr=-1
    )
    try:
        async with asyncio.timeout(60):
            out, error = await process.communicate()
    except TimeoutError:
        process.kill()
        raise
    assert process.returncode == 0, error.decode()
    return json.loads(out)


async def test_whole_answer_list_and_model(rack: tuple[GatewayRig, Engine]) -> None:
    found = await node(
        rack[0],
        """
const answer = await client.chat.completions.create({ model: "fake", messages, max_tokens: 3 });
const models = [];
for await (const model of client.models.list()) models.push(model.id);
out({ answer, models, owner: (await client.models.retrieve("fake")).owned_by });
""",
    )
    assert found["answer"]["usage"]["completion_tokens"] == 3
    assert (found["models"], found["owner"]) == (["fake"], "llamarack")


async def test_stream_with_usage_and_tools(rack: tuple[GatewayRig, Engine]) -> None:
    found = await node(
        rack[0],
        """
const read = async (more) => {
  const chunks = [];
  const stream = await client.chat.completions.create({ model: "fake", messages, stream: true, ...more });
  for await (const chunk of stream) chunks.push(chunk);
  return chunks;
};
const tool = { type: "function", function: { name: "weather", parameters: { type: "object" } } };
out({ plain: await read({ stream_options: { include_usage: true } }), tools: await read({ tools: [tool] }) });
""",
    )
    text = "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in found["plain"] if chunk["choices"])
    assert len(text) > 20
    assert found["plain"][-1]["usage"]["completion_tokens"] == 8
    assert any(c["delta"].get("tool_calls") for chunk in found["tools"] for c in chunk["choices"])


async def test_errors_have_their_classes_and_ids(rack: tuple[GatewayRig, Engine]) -> None:
    found = await node(
        rack[0],
        """
const seen = [];
for (const more of [{ model: "nope" }, { max_tokens: -1 }]) {
  try { await client.chat.completions.create({ model: "fake", messages, ...more }); }
  catch (error) { seen.push([error.constructor.name, error.status, error.code, error.param, !!error.requestID]); }
}
out(seen);
""",
    )
    assert found == [
        ["NotFoundError", 404, "model_not_found", "model", True],
        ["BadRequestError", 400, "invalid_request", "max_tokens", True],
    ]


@pytest.mark.parametrize("fault", ["error_after=2", "close_after=2", "no_done"])
async def test_stream_that_breaks_raises(rack: tuple[GatewayRig, Engine], fault: str) -> None:
    found = await node(
        rack[0],
        """
let count = 0, raised = false;
try {
  for await (const _ of await client.chat.completions.create({ model: "fake", messages, stream: true })) count++;
} catch { raised = true; }
out({ count, raised });
""",
        f"[[fault {fault}]]",
    )
    assert found["raised"]
    assert found["count"] >= 3


async def test_aborted_stream_reaches_the_engine(rack: tuple[GatewayRig, Engine]) -> None:
    await node(
        rack[0],
        """
const stream = await client.chat.completions.create({ model: "fake", messages, stream: true });
for await (const _ of stream) break;
out(true);
""",
        "[[fault stall_after=2]]",
    )
    await until(rack[1].is_idle, "the engine is told")
    assert (await rack[1].requests())[-1]["outcome"] == "left"
