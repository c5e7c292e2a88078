"""Run against `llamarack serve` (llama.cpp on the CPU, SmolLM2-135M-Instruct Q4_1), with openai 3.57.0.

Settings that matter: base_url ends in /v1; the key may be any text when the rack has no keys; the read limit
is the longest gap between two reads, which the rack's heartbeats (every 8 s) end; a stream is closed by `with`,
which stops the generation.

    LLAMARACK_URL=http://127.0.0.1:8080 python examples/python/chat.py "Say hello"
"""

import os
import sys

from openai import OpenAI, Timeout

client = OpenAI(
    base_url=os.environ.get("LLAMARACK_URL", "http://127.0.0.1:8080") + "/v1",
    api_key=os.environ.get("LLAMARACK_API_KEY", "none"),
    timeout=Timeout(300, connect=10),
)
model = client.models.list().data[0].id
prompt = sys.argv[1] if len(sys.argv) > 1 else "Say hello"

with client.chat.completions.create(
    model=model,
    messages=[{"role": "user", "content": prompt}],
    max_tokens=32,
    stream=True,
    stream_options={"include_usage": True},
) as stream:
    for chunk in stream:
        if chunk.choices and chunk.choices[0].delta.content:
            print(chunk.choices[0].delta.content, end="", flush=True)
        if chunk.usage:
            print(f"\n[{chunk.usage.prompt_tokens} prompt + {chunk.usage.completion_tokens} output tokens]")
