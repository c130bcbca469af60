// What every part of the page uses: elements, numbers and times as people say them, and small controls.
import { h, render, Component, Fragment } from "./vendor/preact.js";
import { useState, useEffect, useLayoutEffect, useRef, useMemo, useCallback } from "./vendor/preact-hooks.js";
import htm from "./vendor/htm.js";

export const html = htm.bind(h);
export { render, Fragment, useState, useEffect, useLayoutEffect, useRef, useMemo, useCallback };

// A part that is drawn again only if one of its properties is another.
export function still(draw) {
  return class extends Component {
    shouldComponentUpdate(next) {
      return Object.keys(next).some((name) => next[name] !== this.props[name]);
    }

    render(props) {
      return h(draw, props);
    }
  };
}

// -- numbers and times ---------------------------------------------------------------------------

const UNITS = [[1e12, "T"], [1e9, "B"], [1e6, "M"], [1e3, "k"]];

export function count(number) {
  if (number === null || number === undefined) return "–";
  for (const [size, unit] of UNITS) {
    if (Math.abs(number) >= size * 10 || (size < 1e4 ? Math.abs(number) >= 1e4 : Math.abs(number) >= size)) {
      return trimmed(number / size, 3) + unit;
    }
  }
  return trimmed(number, 4);
}

function trimmed(number, digits) {
  return String(Number(number.toPrecision(digits)));
}

export function value(number) {
  if (number === null || number === undefined) return "–";
  if (typeof number === "string") return { nan: "NaN", inf: "∞", "-inf": "−∞" }[number] ?? number;
  if (number === 0) return "0";
  const size = Math.abs(number);
  if (size >= 1e5 || size < 1e-3) return number.toExponential(2).replace("e+", "e");
  return trimmed(number, 4);
}

export function bytes(size) {
  if (size === null || size === undefined) return "–";
  let unit = 0;
  while (size >= 1000 && unit < 4) { size /= 1000; unit += 1; }
  return `${trimmed(size, 3)} ${["B", "kB", "MB", "GB", "TB"][unit]}`;
}

const SPANS = [[86400 * 365, "year"], [86400 * 30, "month"], [86400, "day"], [3600, "hour"], [60, "minute"]];
const relative = new Intl.RelativeTimeFormat("en", { numeric: "auto" });
const brief = new Intl.RelativeTimeFormat("en", { numeric: "auto", style: "short" });
const exactly = new Intl.DateTimeFormat(undefined, { dateStyle: "medium", timeStyle: "medium" });

export function ago(seconds, words = relative, now = Date.now() / 1000) {
  const passed = seconds - now;
  for (const [size, unit] of SPANS) {
    // What is to come is rounded: seven days from now are not six a second later.
    if (Math.abs(passed) >= size * (passed > 0 ? 0.99 : 1)) return words.format(passed > 0 ? Math.round(passed / size) : Math.trunc(passed / size), unit);
  }
  return Math.abs(passed) < 10 ? "just now" : words.format(Math.trunc(passed), "second");
}

export function exact(seconds) {
  return exactly.format(new Date(seconds * 1000));
}

export function duration(seconds) {
  const parts = [[86400, "d"], [3600, "h"], [60, "min"], [1, "s"]];
  let left = Math.max(0, Math.floor(seconds));
  const shown = [];
  for (const [size, unit] of parts) {
    const number = Math.floor(left / size);
    left -= number * size;
    if (number || shown.length) shown.push(`${number} ${unit}`);
  }
  return shown.slice(0, 2).join(" ") || "0 s";
}

// -- controls ------------------------------------------------------------------------------------

let ticking = new Set();
setInterval(() => { if (!document.hidden) for (const tick of ticking) tick(); }, 20000);

// A time as people say it; it is kept up to date, and the exact one shows on hover. `short` is for narrow places.
export const Time = still(({ at, short = false }) => {
  const words = short ? brief : relative;
  const [, say] = useState("");
  useEffect(() => {
    const tick = () => say(ago(at, words));  // the same words are not drawn again
    ticking.add(tick);
    return () => ticking.delete(tick);
  }, [at]);
  if (!at) return html`<span>–</span>`;
  return html`<time dateTime=${new Date(at * 1000).toISOString()} title=${exact(at)}>${ago(at, words)}</time>`;
});

export function State({ state }) {
  return html`<span class="state ${state.kind}" title=${state.about || state.kind}>${state.kind}</span>`;
}

export function Spark({ values, label }) {
  const width = 112, height = 28;
  const finite = values.filter((number) => number !== null);
  if (finite.length < 2) return html`<svg class="spark" width=${width} height=${height} aria-hidden="true"></svg>`;
  const low = Math.min(...finite), high = Math.max(...finite), half = high / 2 - low / 2 || 1;  // halves, because the whole may be infinite
  let path = "";
  values.forEach((number, place) => {
    if (number === null) return;
    const x = (place / (values.length - 1)) * (width - 4) + 2;
    const y = height - 3 - ((number / 2 - low / 2) / half) * (height - 6);
    path += `${path ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}`;
  });
  return html`<svg class="spark" width=${width} height=${height} role="img" aria-label=${label}>
    <path d=${path} fill="none" stroke="currentColor" stroke-width="1.6" stroke-linejoin="round" /></svg>`;
}

export function Copy({ text, label = "Copy" }) {
  const [done, setDone] = useState(false);
  const copy = async () => {
    try {
      await navigator.clipboard.writeText(text);
    } catch {
      const area = document.createElement("textarea");  // pages without HTTPS have no clipboard
      area.value = text;
      document.body.append(area);
      area.select();
      document.execCommand("copy");
      area.remove();
    }
    setDone(true);
    setTimeout(() => setDone(false), 1500);
  };
  return html`<button type="button" class="small" onClick=${copy}>${done ? "Copied" : label}</button>`;
}

export function Code({ text, label }) {
  return html`<div class="code"><pre tabindex="0" aria-label=${label}><code>${text}</code></pre><${Copy} text=${text} /></div>`;
}

export function Notice({ kind = "soft", children }) {
  return html`<p class="notice ${kind}" role=${kind === "bad" ? "alert" : "status"}>${children}</p>`;
}

// A dialog that holds the keyboard until it is answered; Escape closes it.
export function Dialog({ title, onClose, children }) {
  const dialog = useRef();
  useEffect(() => {
    const before = document.activeElement;
    dialog.current.showModal();
    return () => before?.focus?.();
  }, []);
  return html`<dialog ref=${dialog} aria-label=${title} onCancel=${(event) => { event.preventDefault(); onClose(); }}
    onClick=${(event) => { if (event.target === dialog.current) onClose(); }}>
    <div class="inside"><h2>${title}</h2>${children}</div></dialog>`;
}

export const COLORS = ["#5b5fe0", "#e0742f", "#1f9d63", "#cf3f7b", "#2a8fd0", "#a06bd4", "#b98a16", "#c4453c", "#3aa6a0", "#7d8794"];

// -- tokens ----------------------------------------------------------------------------------------

// How surprising a token was, from 0 (certain) to 5 (very unlikely).
export function surprise(logprob) {
  if (logprob === null || logprob === undefined) return null;
  const number = typeof logprob === "string" ? -99 : logprob;
  return Math.min(5, Math.floor(-number / 0.7));
}

// Tokens coloured by how likely they were; the alternatives of one show when it is pointed at or focused.
export function Tokens({ texts, logprobs, alternatives }) {
  const [shown, setShown] = useState(null);
  const leave = () => setShown(null);
  return html`<div class="tokens" onMouseLeave=${leave}>
    ${texts.map((text, place) => {
      const level = surprise(logprobs?.[place]);
      return html`<span class=${level === null ? "token" : `token s${level}`} tabindex=${alternatives?.[place]?.length ? 0 : null}
        onMouseEnter=${() => setShown(place)} onFocus=${() => setShown(place)} onBlur=${leave}>${text}</span>`;
    })}
    <div class="alternatives" aria-live="polite">${shown !== null && html`<${Alternatives} text=${texts[shown]}
      logprob=${logprobs?.[shown]} rows=${alternatives?.[shown]} />`}</div>
  </div>`;
}

function Alternatives({ text, logprob, rows }) {
  const percent = (number) => (typeof number === "number" ? `${(Math.exp(number) * 100).toPrecision(3)} %` : value(number));
  return html`<span><b class="piece">${visible(text)}</b> ${logprob === null || logprob === undefined ? "" : `${percent(logprob)} (logprob ${value(logprob)})`}
    ${rows?.length ? html`<span class="soft"> instead of </span>${rows.filter(([other]) => other !== text).map(([other, number]) =>
      html`<span class="choice"><b class="piece">${visible(other)}</b> ${percent(number)}</span>`)}` : null}</span>`;
}

export function visible(text) {
  return text.replaceAll("\n", "⏎").replaceAll("\t", "⇥").replace(/^ | $/g, "␣") || "∅";
}
