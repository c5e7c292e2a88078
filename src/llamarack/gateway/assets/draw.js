// Nodes, numbers and small charts. Text enters the page through text nodes only.

const SVG = "http://www.w3.org/2000/svg";

/** An element: el("p.soft", {title: "…"}, "text", child, null). A number or string becomes a text node. */
export function el(kind, ...rest) {
  const [name, ...classes] = kind.split(".");
  const node = document.createElement(name || "div");
  if (classes.length) node.className = classes.join(" ");
  return fill(node, rest);
}

function fill(node, rest) {
  for (const each of rest.flat()) {
    if (each === null || each === undefined || each === false) continue;
    if (each instanceof Node) node.append(each);
    else if (typeof each === "object") for (const [key, value] of Object.entries(each)) node.setAttribute(key, value);
    else node.append(document.createTextNode(String(each)));
  }
  return node;
}

function svg(name, attributes) {
  return fill(document.createElementNS(SVG, name), [attributes]);
}

/** Makes `old` look like `fresh` with the fewest changes, so that a selection or an open fold survives a second. */
export function morph(old, fresh) {
  if (old.nodeName !== fresh.nodeName || old.namespaceURI !== fresh.namespaceURI) return old.replaceWith(fresh);
  if (old.nodeType === Node.TEXT_NODE) {
    if (old.data !== fresh.data) old.data = fresh.data;
    return undefined;
  }
  for (const { name } of [...old.attributes]) {
    if (!fresh.hasAttribute(name) && name !== "style" && name !== "open") old.removeAttribute(name);
  }
  for (const { name, value } of fresh.attributes) {
    if (name !== "style" && old.getAttribute(name) !== value) old.setAttribute(name, value);
  }
  if (old.style && old.style.cssText !== fresh.style.cssText) old.style.cssText = fresh.style.cssText;
  const wanted = [...fresh.childNodes];
  while (old.childNodes.length > wanted.length) old.lastChild.remove();
  wanted.forEach((child, index) => (index < old.childNodes.length ? morph(old.childNodes[index], child) : old.append(child)));
  return undefined;
}

/** Replaces the content of a standing element. */
export function put(id, ...children) {
  const place = document.getElementById(id);
  const fresh = fill(place.cloneNode(false), children);
  morph(place, fresh);
}

/** A line over time; unknown values leave a gap. `top`: the value of the upper edge, else the largest. */
export function spark(values, label, top = null) {
  const highest = top ?? Math.max(...values.filter((value) => value !== null), 1e-9);
  const chart = svg("svg", { class: "spark", viewBox: "0 0 100 30", preserveAspectRatio: "none", role: "img", "aria-label": label });
  const x = (index) => ((index * 100) / Math.max(1, values.length - 1)).toFixed(2);
  const y = (value) => (29 - 28 * Math.min(1, value / highest)).toFixed(2);
  const points = values.map((value, index) => (value === null ? null : `${x(index)},${y(value)}`)).filter(Boolean);
  if (points.length > 1) {
    chart.append(svg("polygon", { class: "area", points: `${points[0].split(",")[0]},30 ${points.join(" ")} ${points.at(-1).split(",")[0]},30` }));
    chart.append(svg("polyline", { class: "line", points: points.join(" ") }));
  }
  return chart;
}

/** Shares of a whole, side by side: [{fraction, kind, title}]. */
export function bar(parts, label) {
  const whole = el("div.bar", { role: "img", "aria-label": label });
  for (const { fraction, kind, title } of parts) {
    const part = el(`span.${kind}`, { title });
    part.style.width = `${(100 * Math.max(0, Math.min(1, fraction))).toFixed(2)}%`;
    whole.append(part);
  }
  return whole;
}

/** A bar with a tick where the plan expected its end. */
export function gauge(fraction, planned, label) {
  const box = el("div.gauge", bar([{ fraction, kind: "fill", title: label }], label));
  if (planned !== null) {
    const tick = el("u", { title: "planned" });
    tick.style.left = `${(100 * Math.min(1, planned)).toFixed(2)}%`;
    box.append(tick);
  }
  return box;
}

const known = (value) => value !== null && value !== undefined;

export function bytes(count) {
  if (!known(count)) return "–";
  for (const [unit, size] of [["TiB", 2 ** 40], ["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10]]) {
    if (Math.abs(count) >= size) return `${(count / size).toFixed(1)} ${unit}`;
  }
  return `${count} B`;
}

export function duration(seconds) {
  if (!known(seconds)) return "–";
  if (seconds < 0.1) return `${(seconds * 1000).toFixed(1)} ms`;
  if (seconds < 0.9995) return `${(seconds * 1000).toFixed(0)} ms`;
  if (seconds < 60) return `${seconds.toFixed(seconds < 10 ? 2 : 1)} s`;
  return span(seconds);
}

/** Longer times, without fractions: how long something is up, or ago. */
export function span(seconds) {
  if (!known(seconds)) return "–";
  const s = Math.max(0, Math.floor(seconds));
  if (s < 60) return `${s} s`;
  if (s < 3600) return `${Math.floor(s / 60)} min`;
  const of = (large, unit, small, smallUnit) => `${Math.floor(s / large)} ${unit}${s % large >= small ? ` ${Math.floor((s % large) / small)} ${smallUnit}` : ""}`;
  return s < 86400 ? of(3600, "h", 60, "min") : of(86400, "d", 3600, "h");
}

export function count(value) {
  return known(value) ? value.toLocaleString("en", { maximumFractionDigits: 0 }) : "–";
}

export function rate(value) {
  if (!known(value)) return "–";
  return value >= 100 || value === 0 ? count(value) : value.toFixed(1);
}

export function percent(fraction) {
  return known(fraction) ? `${Math.round(100 * fraction)} %` : "–";
}

export { known };
