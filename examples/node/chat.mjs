// Run against `llamarack serve` (llama.cpp on the CPU, SmolLM2-135M-Instruct Q4_1), with openai 6.49.0, Node 20.20.2.
// Settings that matter: baseURL ends in /v1; timeout (ms) is the wait for the response headers, which the rack
// sends when it admits the request; leaving the loop early (break) aborts the request and stops the generation.
//   cd examples/node && npm install && LLAMARACK_URL=http://127.0.0.1:8080 node chat.mjs "Say hello"
import OpenAI from "openai";

const client = new OpenAI({
  baseURL: (process.env.LLAMARACK_URL ?? "http://127.0.0.1:8080") + "/v1",
  apiKey: process.env.LLAMARACK_API_KEY ?? "none",
  timeout: 300_000,
});
const model = (await client.models.list()).data[0].id;

const stream = await client.chat.completions.create({
  model,
  messages: [{ role: "user", content: process.argv[2] ?? "Say hello" }],
  max_tokens: 32,
  stream: true,
  stream_options: { include_usage: true },
});
for await (const chunk of stream) {
  process.stdout.write(chunk.choices[0]?.delta?.content ?? "");
  if (chunk.usage) {
    console.log(`\n[${chunk.usage.prompt_tokens} prompt + ${chunk.usage.completion_tokens} output tokens]`);
  }
}
