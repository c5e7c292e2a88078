"""Streams through a gateway, as a client with no retries of its own sees them."""

import asyncio
from dataclasses import dataclass

import aiohttp


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """`events`: content chunks that came; `has_begun`: whether any event of the engine did; `fault`: None where [DONE]
    ended it; `told`: the error in it."""

    events: int
    fault: str | None
    told: str = ""
    has_begun: bool = False


async def stream_once(
    url: str, *, tokens: int = 40, directive: str = "", timeout_s: float = 40.0, model: str = "fake"
) -> Outcome:
    body = {
        "model": model,
        "messages": [{"role": "user", "content": f"tell me more {directive}"}],
        "max_tokens": tokens,
        "stream": True,
    }
    events, fault, told, has_begun = 0, "no [DONE]", "", False
    try:
        limit = aiohttp.ClientTimeout(total=timeout_s)
        async with (
            aiohttp.ClientSession(timeout=limit) as session,
            session.post(f"{url}/v1/chat/completions", json=body) as response,
        ):
            if response.status != 200:
                return Outcome(events=0, fault=f"HTTP {response.status}: {await response.text()}")
            async for line in response.content:
                if line.startswith(b"event: error"):
                    fault = "error event"
                elif fault == "error event" and line.startswith(b"data: "):
                    told = line.decode()[6:].strip()
                elif line.startswith(b"data: [DONE]"):
                    return Outcome(events=events, fault=None, has_begun=has_begun)
                elif line.startswith(b"data: {"):
                    has_begun = True
                    events += b'"content":"' in line.replace(b'": "', b'":"')
    except (aiohttp.ClientError, TimeoutError) as error:
        fault = repr(error)
    return Outcome(events=events, fault=fault, told=told, has_begun=has_begun)


async def many(url: str, count: int, **options: int) -> list[Outcome]:
    return list(await asyncio.gather(*(stream_once(url, **options) for _ in range(count))))  # type: ignore[arg-type]
