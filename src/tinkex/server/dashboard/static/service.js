// The service: engines, memory, queue, rates of the last hour, disk, and what failed.
import { html, useState, useEffect, useMemo, bytes, count, value, duration, Time, Notice, COLORS } from "./base.js";
import { get, whileSeen } from "./api.js";
import { Plot } from "./plot.js";

const DRAWN = [
  ["trained", "Training", "tokens/s"], ["sampled", "Sampling", "tokens/s"], ["prefilled", "Prompts read", "tokens/s"],
  ["steps", "Optimizer steps", "per second"], ["samples", "Samples", "per second"], ["cached", "Prompt tokens from the cache", "tokens/s"],
  ["waiting", "Training requests in the queue", ""], ["sampling", "Samples in flight", ""], ["failed", "Failed requests", "per second"],
  ["busy", "Engine at work on training", "of the time"], ["engine_bytes", "Memory of the engine", "", bytes], ["service_bytes", "Memory of the service", "", bytes],
];

export function Service({ theme }) {
  const [found, setFound] = useState(null);
  const [error, setError] = useState(null);
  const [zoom, setZoom] = useState(null);
  useEffect(() => {
    let known = null, busy = false;
    const load = async () => {
      if (busy) return;
      busy = true;
      try {
        const answer = await get("/local/service", { since: known?.history.time.at(-1) });
        known = { ...answer, history: joined(known?.started === answer.started ? known.history : null, answer.history) };
        setFound(known);
        setError(null);
      } catch (failure) { setError(failure); known = null; }
      busy = false;
    };
    return whileSeen(load, 2000);
  }, []);
  const history = found?.history;
  const plots = useMemo(() => DRAWN.filter(([name]) => history?.[name]?.length > 1).map(([name, title, unit, format = value]) => [title, unit, format, [curve(history, name, zoom)]]), [history, zoom]);
  if (!found) return error ? html`<${Notice} kind="bad">${error.message} Trying again…<//>` : html`<p class="soft wait">Loading…</p>`;
  const { engine, disk, counts } = found;
  return html`
    <div class="title"><h1>Service</h1><span class="soft">tinkex ${found.version}, up for ${duration(found.time - found.started)}</span></div>
    ${error && html`<${Notice} kind="bad">${error.message} Trying again…<//>`}
    ${engine.trouble && html`<${Notice} kind="bad">${engine.trouble}<//>`}
    <dl class="facts">
      <div><dt>Engine</dt><dd class="text">${engine.kind} <span class="soft">${engine.state}</span></dd></div>
      <div><dt>Device</dt><dd class="text">${engine.device} <span class="soft">${engine.cores} cores</span></dd></div>
      <div><dt>Queue, this key</dt><dd>${count(found.queue["this key"] ?? 0)}</dd></div><div><dt>Queue, others</dt><dd>${count(found.queue["other keys"] ?? 0)}</dd></div>
      <div><dt>Samples in flight</dt><dd>${count(found.sampling)}</dd></div><div><dt>Loaded models</dt><dd>${count(counts.live_models)}</dd></div>
      <div><dt>Runs</dt><dd>${count(counts.runs)}</dd></div><div><dt>Checkpoints</dt><dd>${count(counts.checkpoints)}</dd></div>
    </dl>
    <div class="tools"><span class="soft">The last hour</span> <button class="small" disabled=${!zoom} onClick=${() => setZoom(null)}>Show all</button></div>
    ${!plots.length && html`<p class="soft">Not measured yet.</p>`}
    <div class="plots small-plots">${plots.map(([title, unit, format, curves]) => html`<${Plot} key=${title} title=${title} unit=${unit} format=${format} curves=${curves} axis="time" smoothing=${0} log=${false} zoom=${zoom} onZoom=${setZoom} height=${120} theme=${theme} />`)}</div>
    <div class="columns">
      <section><h2>Base models</h2><table class="list"><caption class="hidden">Base models</caption><thead><tr><th scope="col">Name</th><th scope="col">Context</th></tr></thead>
        <tbody>${found.models.map((model) => html`<tr><td><code>${model.name}</code></td><td class="number">${count(model.context_length)} tokens</td></tr>`)}</tbody></table>
        <h2>Engines</h2><div class="scroll"><table class="list"><caption class="hidden">Engines</caption><thead><tr><th scope="col">Name</th><th scope="col">State</th><th scope="col">Memory</th><th scope="col">Models</th><th scope="col">Starts</th><th scope="col">Time training</th></tr></thead>
        <tbody>${engine.engines.map((each) => html`<tr><td>${each.name || "engine"} <span class="soft">${each.node} ${each.device}</span></td><td class=${each.trouble ? "bad" : ""} title=${each.trouble}>${!each.up ? "down" : each.trouble ? "stuck" : "up"}</td><td>${bytes(each.memory_bytes)}</td><td class="number">${count(each.models)}</td><td class="number">${count(each.starts)}</td><td>${duration(each.busy_seconds)}</td></tr>`)}</tbody></table></div></section>
      <section><h2>Disk</h2><table class="list pairs"><caption class="hidden">Disk</caption><tbody>
        <tr><th scope="row">Free</th><td>${bytes(disk.free)} of ${bytes(disk.total)}</td></tr>
        <tr><th scope="row">Checkpoints of this key</th><td>${bytes(disk.checkpoints)}</td></tr>
        <tr><th scope="row">Metrics and samples of this key</th><td>${bytes(disk.metrics)}</td></tr>
        <tr><th scope="row">Journal</th><td>${bytes(disk.journal)}</td></tr></tbody></table>
        <h2>Since the start</h2>${!Object.keys(found.usage).length ? html`<p class="soft">Nothing yet.</p>` : html`<table class="list pairs"><caption class="hidden">Usage</caption><tbody>
        ${Object.entries(found.usage).map(([name, number]) => html`<tr><th scope="row">${name.replace("_", " ")}</th><td>${count(number)}</td></tr>`)}</tbody></table>`}</section>
    </div>
    <h2>Failed in the last hour <span class="soft">${found.failures.length}</span></h2>
    ${found.failures.length === 0 ? html`<p class="soft">Nothing.</p>` : html`<div class="scroll"><table class="list"><caption class="hidden">Failed requests</caption>
      <thead><tr><th scope="col">When</th><th scope="col">Operation</th><th scope="col">Whose fault</th><th scope="col">Why</th><th scope="col">Run</th></tr></thead>
      <tbody>${found.failures.map((each) => html`<tr><td><${Time} at=${each.time} /></td><td>${each.operation}</td><td>${each.category}</td><td class="wide">${each.message}</td>
        <td>${each.scope && html`<a href=${`#/run/${encodeURIComponent(each.scope)}`}>${each.scope.slice(0, 8)}</a>`}</td></tr>`)}</tbody></table></div>`}
    <p class="soft">The same numbers for Prometheus: <a href="/metrics">/metrics</a>.</p>`;
}

// An hour of readings: those that were read before, and the new ones.
function joined(before, fresh) {
  if (before && !fresh.time.length) return before;
  const old = before?.time.findIndex((time) => time > fresh.time.at(-1) - 3600) ?? -1;
  return Object.fromEntries(Object.entries(fresh).map(([name, list]) => [name, old < 0 ? list : [...before[name].slice(old), ...list]]));
}

function curve(history, name, zoom) {
  const x = [], y = [];
  history.time.forEach((time, place) => {
    if (!zoom || (time >= zoom.start && time <= zoom.end)) { x.push(time); y.push(history[name][place]); }
  });
  return { x, y, label: name, color: COLORS[0] };
}
