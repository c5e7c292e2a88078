// Reads the rack's record once a second while the page is seen, and draws it. It changes nothing on the server.

import { offerModels, start as startAsking } from "./ask.js";
import { bar, bytes, count, duration, el, gauge, known, percent, put, rate, span, spark } from "./draw.js";

const PERIOD_MS = 1000;
const KEY = "llamarack-key";
const SLOTS_DRAWN = 48;
const STATES = { ready: "good", failed: "bad", backoff: "bad", stopped: "off" };
const LINKS = { nvlink: "NVLink", pcie_switch: "PCIe switch", pcie_host: "PCIe", cross_socket: "across sockets" };
const byId = (id) => document.getElementById(id);
let timer = null;
let reading = false; // one at a time: a tab that is shown again must not begin a second round

// -- reading -----------------------------------------------------------------------------------------------------

const headers = () => (sessionStorage.getItem(KEY) ? { Authorization: `Bearer ${sessionStorage.getItem(KEY)}` } : {});

async function read() {
  if (reading) return;
  reading = true;
  clearTimeout(timer);
  const goesOn = await readOnce();
  reading = false;
  if (goesOn && !document.hidden) timer = setTimeout(read, PERIOD_MS);
}

/** Whether to go on by itself. */
async function readOnce() {
  try {
    const response = await fetch("dashboard/status", { headers: headers(), cache: "no-store" });
    if (response.status === 401) {
      askForKey();
      return false;
    }
    if (!response.ok) throw new Error(`status ${response.status}`);
    draw(await response.json());
  } catch (error) {
    tell(`The gateway does not answer (${error.message}); trying again.`);
    stale(true);
  }
  return true;
}

function askForKey() {
  const refused = sessionStorage.getItem(KEY) !== null;
  sessionStorage.removeItem(KEY);
  byId("main").hidden = true;
  byId("key-form").hidden = false;
  byId("key-change").hidden = true;
  mood("locked", "wait");
  byId("facts").textContent = "";
  tell(refused ? "This key is not known here." : "");
  byId("key").focus();
}

function begin() {
  byId("key-form").addEventListener("submit", (event) => {
    event.preventDefault();
    sessionStorage.setItem(KEY, byId("key").value.trim());
    byId("key").value = "";
    read();
  });
  byId("key-change").addEventListener("click", () => {
    sessionStorage.removeItem(KEY);
    read();
  });
  document.addEventListener("visibilitychange", () => (document.hidden ? clearTimeout(timer) : read()));
  startAsking(headers);
  read();
}

// -- the whole page ----------------------------------------------------------------------------------------------

function draw({ version, supervisor_answers: here, age_s: age, status }) {
  byId("key-form").hidden = true;
  byId("key-change").hidden = sessionStorage.getItem(KEY) === null;
  byId("version").textContent = version;
  stale(!here);
  if (!status) {
    mood("starting", "wait");
    return tell("The supervisor has not answered yet.");
  }
  tell(here ? "" : `The supervisor is away; requests are served on. What you see is ${span(age)} old.`);
  byId("main").hidden = false;
  const now = status.time_unix_s;
  const replicas = status.models.flatMap((model) => model.replicas);
  const colours = new Map(replicas.map((replica, index) => [replica.id, `o${index % 8}`]));
  document.title = `${status.rack} · llamarack`;
  byId("rack").textContent = status.rack;
  byId("facts").textContent = `${address(status.gateway)} · up ${span(now - status.started_unix_s)}`;
  mood(...overall(status, replicas, here));
  offerModels(status.models.map((model) => model.name));
  put("tiles", tiles(status, replicas));
  put("models", status.models.map((model) => modelPanel(model, trafficOf(status, model.name), now, colours)));
  put("hardware", hardware(status, replicas, colours));
  put("events", events(status.events));
  return undefined;
}

function tell(text) {
  const notice = byId("notice");
  notice.hidden = !text;
  if (notice.textContent !== text) notice.textContent = text;
}

function mood(text, kind) {
  byId("state").textContent = text;
  byId("state").className = `pill ${kind}`;
}

const stale = (is) => byId("main").classList.toggle("stale", is);
const address = (gateway) => `${gateway.tls ? "https" : "http"}://${location.host || `${gateway.host}:${gateway.port}`}/v1`;
const trafficOf = (status, name) => (status.gateway.traffic ?? []).find((each) => each.model === name);

function overall(status, replicas, here) {
  const ready = replicas.filter((replica) => replica.state === "ready").length;
  if (!here) return ["supervisor away", "wait"];
  if (status.draining) return ["draining", "wait"];
  const dark = status.models.filter((model) => !model.replicas.some((replica) => replica.state === "ready"));
  if (ready === replicas.length) return [ready === 1 ? "ready" : `all ${ready} ready`, "good"];
  if (dark.length && replicas.some((replica) => STATES[replica.state] === "bad")) return [`${ready} of ${replicas.length} ready`, "bad"];
  return [ready === 0 ? "starting" : `${ready} of ${replicas.length} ready`, "wait"];
}

// -- tiles -------------------------------------------------------------------------------------------------------

function tiles(status, replicas) {
  const traffic = status.gateway.traffic ?? [];
  const sum = (pick) => traffic.reduce((total, each) => total + pick(each), 0);
  const history = (traffic[0]?.tokens_per_s_history ?? []).map((_, at) => sum((each) => each.tokens_per_s_history[at]));
  const busiest = [...traffic].sort((a, b) => b.requests - a.requests)[0];
  const serving = replicas.filter((replica) => replica.state === "ready");
  const slots = serving.reduce((total, replica) => total + replica.slots_total, 0);
  const busy = serving.reduce((total, replica) => total + (replica.slots_busy ?? replica.running), 0);
  const stuck = serving.reduce((total, replica) => total + (replica.slots_stuck ?? 0), 0);
  const failures = sum((each) => each.failures);
  const whose = traffic.length > 1 && busiest ? ` · ${busiest.model}` : "";
  return [
    tile("Tokens per second", [rate(sum((each) => each.tokens_per_s))], spark(history, "tokens per second, last five minutes")),
    tile(`First token${whose}`, latency(busiest?.first_token_s), quantiles(busiest?.first_token_s)),
    tile(`Per token${whose}`, latency(busiest?.per_token_s), quantiles(busiest?.per_token_s)),
    tile("Requests", [count(status.gateway.running), el("small", " running")],
      `${status.gateway.queued} waiting · ${rate(sum((each) => each.requests_per_s))}/s`,
      failures ? el("span.bad", ` · ${failures} failed`) : null),
    tile("Slots", [`${busy}`, el("small", ` of ${slots} busy`)],
      stuck ? el("span.bad", `${stuck} stuck`) : bar([{ fraction: slots ? busy / slots : 0, kind: "fill", title: "busy" }], "slots busy")),
  ];
}

function tile(name, value, ...more) {
  return el("div.tile.panel", el("span.name", name), el("span.value", value), el("div.more", more));
}

function latency(quantile) {
  const text = duration(quantile?.p50);
  const [number, unit] = text.split(" ");
  return unit ? [number, el("small", ` ${unit}`)] : [text];
}

function quantiles(quantile) {
  if (!quantile?.n) return "no stream in the last 5 min";
  const parts = ["p90", "p99"].filter((name) => known(quantile[name])).map((name) => `${name} ${duration(quantile[name])}`);
  return parts.length ? parts.join(" · ") : `median of ${quantile.n}`;
}

// -- models and replicas -----------------------------------------------------------------------------------------

function modelPanel(model, traffic, now, colours) {
  const planned = model.replicas[0]?.predicted?.speed ?? {};
  const engines = [...new Set(model.replicas.map((replica) => replica.engine))].join(", ");
  const against = (name, measured, plan) =>
    el("li", el("span.soft", name), el("b", measured), known(plan) ? el("span.soft", `planned ${plan}`) : null);
  return el("article.panel",
    el("div.head", el("h2", model.name), el("span.soft.small", engines),
      traffic?.queued ? el("span.push.small.wait", `${traffic.queued} waiting`) : null),
    el("ul.facts",
      against("tokens/s", rate(traffic?.tokens_per_s), known(planned.tokens_per_s) ? rate(planned.tokens_per_s) : null),
      against("first token", duration(traffic?.first_token_s?.p50), known(planned.first_token_s) ? duration(planned.first_token_s) : null),
      against("per token", duration(traffic?.per_token_s?.p50), known(planned.per_token_s) ? duration(planned.per_token_s) : null),
      against("context", `${count(model.replicas[0]?.context_tokens)} tokens`, null)),
    el("div.replicas", model.replicas.map((replica) => replicaRow(replica, now, colours))));
}

function replicaRow(replica, now, colours) {
  const kind = STATES[replica.state] ?? "wait";
  const since = replica.state === "ready" && replica.ready_since_unix_s ? ` for ${span(now - replica.ready_since_unix_s)}` : "";
  const progress = known(replica.load_fraction) && replica.state === "loading" ? ` ${percent(replica.load_fraction)}` : "";
  return el("div.replica", { "data-replica": replica.id, "data-state": replica.state },
    el("div.who", el(`i.dot.${kind}`), el("div", el("b", replica.id),
      el("div.small", el(`span.${kind === "off" ? "soft" : kind}`, replica.state), el("span.soft", progress || since)))),
    slots(replica),
    memory(replica, colours),
    el("div.small", el(`div${replica.restarts ? "" : ".soft"}`, `${replica.restarts} restart${replica.restarts === 1 ? "" : "s"}`),
      replica.pid ? el("div.soft", `process ${replica.pid}`) : null),
    known(replica.degraded_from) ? el("div.wide.small.wait", `runs a smaller plan: ${steps(replica.degraded_from)}`) : null,
    replica.last_death ? el("div.wide.small", el("span.bad", replica.last_death.message),
      el("span.soft", ` while ${replica.last_death.while}, ${span(now - replica.last_death.at_unix_s)} ago`),
      replica.last_death.hint ? el("div.hint", replica.last_death.hint) : null) : null,
    terms(replica));
}

const steps = ({ steps: taken = [] }) => taken.map((step) => `${step.setting} ${step.was} → ${step.becomes}`).join(", ");

function slots(replica) {
  const stuck = replica.slots_stuck ?? 0;
  const busy = replica.slots_busy ?? replica.running;
  const label = `${busy} of ${replica.slots_total} slots busy${stuck ? `, ${stuck} stuck` : ""}`;
  if (replica.slots_total > SLOTS_DRAWN) {
    return el("div", bar([{ fraction: busy / replica.slots_total, kind: "fill", title: label }], label), el("div.small.soft", label));
  }
  const kindOf = (at) => (at < stuck ? ".stuck" : at < stuck + busy ? ".busy" : "");
  return el("div", el("div.slots", { role: "img", "aria-label": label },
    Array.from({ length: replica.slots_total }, (_, at) => el(`i${kindOf(at)}`))), el("div.small.soft", label));
}

function actualBytes(replica) {
  if (!replica.pid) return null;
  const held = Object.values(replica.actual.card_held_bytes ?? {});
  return held.length ? held.reduce((a, b) => a + b, 0) : replica.actual.resident_bytes;
}

function memory(replica, colours) {
  const planned = replica.predicted.total_bytes;
  const actual = actualBytes(replica);
  const whole = Math.max(planned, actual ?? 0, 1) * 1.08;
  const label = `${bytes(actual)} held, ${bytes(planned)} planned`;
  const drawn = gauge((actual ?? 0) / whole, planned / whole, label);
  drawn.querySelector("span").className = colours.get(replica.id);
  return el("div", drawn, el("div.small.soft", known(actual) ? `${bytes(actual)} · planned ${bytes(planned)}` : `planned ${bytes(planned)}`));
}

function terms(replica) {
  const told = replica.actual.terms ?? [];
  if (!told.length) return null;
  const several = new Set(told.map((each) => each.device)).size > 1;
  const row = (each) => el("tr",
    el("td", `${several ? `${each.device} ` : ""}${each.term.replace("_bytes", "").replaceAll("_", " ")}`),
    el("td", bytes(each.predicted_bytes)), el("td", bytes(each.actual_bytes)),
    el("td", known(each.error_fraction) ? `${each.error_fraction > 0 ? "+" : ""}${(100 * each.error_fraction).toFixed(1)} %` : "–"));
  return el("details.wide", el("summary", "memory by purpose"),
    el("div.scroll", el("table",
      el("thead", el("tr", el("th", ""), el("th", "planned"), el("th", "engine says"), el("th", "plan is off by"))),
      el("tbody", told.map(row)))));
}

// -- hardware ----------------------------------------------------------------------------------------------------

function hardware(status, replicas, colours) {
  const cards = (status.cards ?? []).map((card) => cardPanel(card, colours, status.links));
  const host = hostPanel(status.host, cards.length ? [] : replicas, colours);
  return [...cards, host];
}

function owners(list, total, colours) {
  const named = list.map(({ replica, pid, name, bytes: held }) => ({
    held, name: name ?? replica ?? (pid ? `process ${pid}` : "others"), kind: (replica && colours.get(replica)) || "other",
  })).sort((a, b) => (a.kind === "other") - (b.kind === "other") || a.name.localeCompare(b.name));
  const label = named.map(({ name, held }) => `${name} ${bytes(held)}`).join(", ");
  return [
    bar(named.map(({ held, kind, name }) => ({ fraction: held / total, kind, title: `${name}: ${bytes(held)}` })), label),
    el("ul.legend", named.map(({ held, kind, name }) => el("li", el(`i.${kind}`), name, el("span.soft", bytes(held))))),
  ];
}

function cardPanel(card, colours, links) {
  const total = card.memory_total_bytes;
  const byOwner = card.memory_by_owner ?? [];
  const accounted = byOwner.reduce((sum, owner) => sum + (owner.bytes ?? 0), 0);
  const rest = (card.memory_used_bytes ?? 0) - accounted;
  const shown = rest > total * 0.005 ? [...byOwner, { pid: null, replica: null, bytes: rest }] : byOwner;
  const history = (card.history ?? []).map((point) => point.memory_used_bytes);
  const fact = (name, value) => (known(value) ? el("li", el("span.soft", name), el("b", value)) : null);
  const when = (value, text) => (known(value) ? text : null);
  return el("article.panel.card", { "data-card": card.index },
    el("div.head", el("h2", `GPU ${card.index} · ${card.name}`), el("span.push.small.soft", `${bytes(card.memory_used_bytes)} of ${bytes(total)}`)),
    owners(shown, total, colours),
    el("ul.facts",
      fact("busy", when(card.utilisation_fraction, percent(card.utilisation_fraction))),
      fact("memory bus", when(card.memory_utilisation_fraction, percent(card.memory_utilisation_fraction))),
      fact("power", when(card.power_w, `${count(card.power_w)} W`)),
      fact("temperature", when(card.temperature_c, `${count(card.temperature_c)} °C`)),
      fact("limited by", when(card.bound_by, String(card.bound_by).replaceAll("_", " "))),
      fact("clock", when(card.sm_clock_hz, `${((card.sm_clock_hz ?? 0) / 1e9).toFixed(2)} GHz`))),
    history.length > 1 ? [spark(history, "memory in use over time", total), overTime(card.history)] : null,
    chips(card, (links ?? []).filter((link) => link.index === card.index)));
}

function overTime(history) {
  return el("div.axis", el("span", `memory, ${span(history.at(-1).at - history[0].at)}`), el("span", "now"));
}

function chips(card, links) {
  const faults = [
    known(card.xid) ? el("li.bad", `XID ${card.xid}`) : null,
    card.ecc_uncorrected ? el("li.bad", `${card.ecc_uncorrected} uncorrected memory errors`) : null,
    ...(card.throttle_reasons ?? []).map((reason) => el("li.wait", `slowed: ${reason.replaceAll("_", " ")}`)),
  ];
  const joined = links.map((link) => el("li", `↔ GPU ${link.peer_index} · ${LINKS[link.kind] ?? link.kind}${link.lanes ? ` ×${link.lanes}` : ""}`
    + (link.bandwidth_bytes_per_s ? ` · ${count(link.bandwidth_bytes_per_s / 1e9)} GB/s` : "")));
  const all = [...faults, ...joined].filter(Boolean);
  return all.length ? el("ul.chips", all) : null;
}

function hostPanel(host, replicas, colours) {
  const total = host?.memory_total_bytes ?? replicas[0]?.predicted?.cards?.[0]?.memory_total_bytes;
  if (!total) return null;
  const held = replicas.filter((replica) => known(replica.actual.resident_bytes))
    .map((replica) => ({ replica: replica.id, bytes: replica.actual.resident_bytes }));
  const ours = held.reduce((sum, each) => sum + each.bytes, 0);
  const rest = (host?.memory_used_bytes ?? 0) - ours;
  if (rest > total * 0.005) held.push({ pid: null, replica: null, name: replicas.length ? "others" : "in use", bytes: rest });
  const history = (host?.history ?? []).map((point) => point.memory_used_bytes);
  const used = host?.memory_used_bytes ?? ours;
  return el("article.panel.card", { "data-card": "host" },
    el("div.head", el("h2", replicas.length ? "Host · processor and memory" : "Host"), el("span.push.small.soft", `${bytes(used)} of ${bytes(total)}`)),
    owners(held, total, colours),
    known(host?.cpu_fraction) ? el("ul.facts", el("li", el("span.soft", "processor busy"), el("b", percent(host.cpu_fraction)))) : null,
    history.length > 1 ? [spark(history, "memory in use over time", total), overTime(host.history)] : null);
}

// -- events ------------------------------------------------------------------------------------------------------

function events(entries) {
  const marks = { info: "·", warning: "!", error: "✗" };
  const clock = new Intl.DateTimeFormat(undefined, { hour: "2-digit", minute: "2-digit", second: "2-digit", hourCycle: "h23" });
  const row = (entry) => el("li", { "data-kind": entry.kind },
    el("time", { datetime: new Date(entry.time_unix_s * 1000).toISOString() }, clock.format(entry.time_unix_s * 1000)),
    el("div.text", el(`span.mark${entry.severity === "error" ? ".bad" : entry.severity === "warning" ? ".wait" : ""}`,
      entry.kind === "ready" ? "✓" : marks[entry.severity] ?? "·"),
      entry.replica ? [el("b", entry.replica), " "] : null, entry.message,
      entry.data?.hint ? el("div.hint", entry.data.hint) : null));
  return el("article.panel", el("h2", "Events"),
    entries.length ? el("ol.events", [...entries].reverse().map(row)) : el("p.soft", "Nothing has happened yet."));
}

begin();
