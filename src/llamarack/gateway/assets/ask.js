// The try-it box: one streamed answer. Events are gathered and written once a frame, however fast they come.

import { duration, rate } from "./draw.js";

const SHOWN_CHARACTERS = 200_000;
const byId = (id) => document.getElementById(id);
let running = null;

export function offerModels(names) {
  const select = byId("ask-model");
  if (names.join("\n") === [...select.options].map((option) => option.value).join("\n")) return;
  const chosen = select.value;
  select.replaceChildren(...names.map((name) => new Option(name, name, false, name === chosen)));
}

/** `headers()`: with the key, when there is one. */
export function start(headers) {
  byId("ask").addEventListener("submit", (event) => {
    event.preventDefault();
    if (!running) ask(headers());
  });
  byId("ask-prompt").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) byId("ask").requestSubmit();
  });
  byId("ask-stop").addEventListener("click", () => running?.abort());
  byId("ask-curl").addEventListener("click", copyCurl);
}

function body() {
  const messages = [
    { role: "system", content: "You are a helpful assistant." },
    { role: "user", content: byId("ask-prompt").value },
  ];
  return { model: byId("ask-model").value, messages, max_tokens: Number(byId("ask-tokens").value) || 128, temperature: 0, stream: true };
}

async function ask(headers) {
  running = new AbortController();
  const page = new Answer();
  byId("ask-send").disabled = true;
  byId("ask-stop").hidden = false;
  try {
    const response = await fetch("v1/chat/completions", {
      method: "POST",
      headers: { "Content-Type": "application/json", ...headers },
      body: JSON.stringify({ ...body(), stream_options: { include_usage: true } }),
      signal: running.signal,
    });
    if (!response.ok) throw new Error((await response.json()).error?.message ?? `status ${response.status}`);
    await read(response.body, page);
    page.finish();
  } catch (error) {
    page.fail(error.name === "AbortError" ? "stopped" : error.message, error.name !== "AbortError");
  } finally {
    running = null;
    byId("ask-send").disabled = false;
    byId("ask-stop").hidden = true;
  }
}

async function read(stream, page) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  for (let rest = ""; ; ) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) if (line.startsWith("data: ") && line !== "data: [DONE]") page.take(JSON.parse(line.slice(6)));
  }
}

class Answer {
  constructor() {
    this.started = performance.now();
    this.firstToken = null;
    this.waiting = "";
    this.tokens = null;
    this.place = byId("ask-answer");
    this.place.replaceChildren();
    this.place.classList.remove("failed");
    this.place.hidden = false;
    this.facts = byId("ask-facts");
    this.facts.hidden = false;
    this.facts.textContent = "waiting for the first token";
    this.text = this.place.appendChild(document.createTextNode(""));
  }

  take(event) {
    if (event.error) throw new Error(event.error.message);
    if (event.usage) this.tokens = event.usage.completion_tokens;
    const words = event.choices?.[0]?.delta?.content;
    if (!words) return;
    this.firstToken ??= performance.now();
    if (!this.waiting) requestAnimationFrame(() => this.write());
    this.waiting += words;
  }

  write() {
    const follows = this.place.scrollHeight - this.place.scrollTop - this.place.clientHeight < 40;
    this.text.appendData(this.waiting);
    this.waiting = "";
    if (this.text.length > SHOWN_CHARACTERS) this.text.deleteData(0, this.text.length - SHOWN_CHARACTERS);
    if (follows) this.place.scrollTop = this.place.scrollHeight;
  }

  finish() {
    this.write();
    this.tell();
  }

  fail(why, isFault) {
    this.write();
    this.tell();
    if (isFault && this.text.length === 0) {
      this.place.classList.add("failed");
      this.text.data = why;
    } else {
      this.facts.append(`${this.facts.textContent ? " · " : ""}${why}`);
    }
    this.facts.hidden = this.facts.textContent === "";
  }

  tell() {
    const parts = [];
    if (this.firstToken !== null) parts.push(`first token ${duration((this.firstToken - this.started) / 1000)}`);
    const seconds = (performance.now() - (this.firstToken ?? 0)) / 1000;
    if (this.tokens > 1) parts.push(`${rate((this.tokens - 1) / seconds)} tokens/s`);
    if (this.tokens !== null) parts.push(`${this.tokens} tokens`);
    this.facts.textContent = parts.join(" · ");
  }
}

async function copyCurl() {
  const quoted = JSON.stringify({ ...body(), stream: false }).replaceAll("'", "'\\''");
  const url = new URL("v1/chat/completions", location.href);
  const key = byId("key-change").hidden ? "" : ` -H "Authorization: Bearer $LLAMARACK_KEY"`;
  const button = byId("ask-curl");
  try {
    await navigator.clipboard.writeText(`curl ${url} -H 'Content-Type: application/json'${key} -d '${quoted}'`);
    button.textContent = "Copied";
  } catch {
    button.textContent = "Copying is not allowed here";
  }
  setTimeout(() => (button.textContent = "Copy as curl"), 1500);
}
