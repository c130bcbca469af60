// One run: its metrics, samples, checkpoints and configuration.
import { html, still, useState, useEffect, useRef, useMemo, useCallback, count, value, bytes, Time, State, Notice, Code, Copy, Dialog, COLORS } from "./base.js";
import { get, call, on, seen, Failure, runPath, checkpointPath } from "./api.js";
import { useLive, reading } from "./live.js";
import { useCurves } from "./curves.js";
import { Plot } from "./plot.js";
import { Samples } from "./samples.js";

const TABS = [["metrics", "Metrics"], ["samples", "Samples"], ["checkpoints", "Checkpoints"], ["configuration", "Configuration"]];
const RETRY = 4000;  // milliseconds after which a run that could not be read is read again
const FIRST = ["loss", "tokens_per_second", "grad_norm", "learning_rate"];
const UNITS = new Map([["tokens_per_second", "tokens/s"]]);

export function Run({ address, runs, theme }) {
  const id = address.rest[0] ?? "", tab = address.rest[1] ?? "metrics";
  const [run, setRun] = useState(null);
  const [error, setError] = useState(null);
  const [deleting, setDeleting] = useState(false);
  const askDelete = useCallback(() => setDeleting(true), []);
  // The list of runs tells everything else that changes; only settings and the queue are read again where they are shown.
  const [tries, setTries] = useState(0);
  useLive([id], tab === "configuration" ? ["metrics", "state"] : [], reading(() => get(runPath(id)), setRun, setError), [id, tab === "configuration", tries]);
  const tryAgain = error !== null && ![401, 404].includes(error.status);
  useEffect(() => {
    if (!tryAgain) return undefined;
    const timer = setTimeout(() => seen().then(() => setTries((before) => before + 1)), RETRY);
    return () => clearTimeout(timer);
  }, [error]);
  const failed = error && html`<${Notice} kind="bad">${error.message}${tryAgain && " Trying again…"}<//>`;
  useEffect(() => on("news", ({ gone }) => { if (gone.includes(id)) setError(new Failure("It was deleted.", 404)); }), [id]);
  const saved = runs?.get(id)?.checkpoints;
  const part = useMemo(() => (tab === "samples" ? html`<${Samples} id=${id} />`
    : tab === "checkpoints" ? html`<${Checkpoints} id=${id} saved=${saved} />`
    : html`<${Metrics} ids=${[id]} theme=${theme} />`), [id, tab, theme, tab === "checkpoints" && saved]);
  if (error?.status === 404) {
    return html`<h1>Not found</h1><${Notice} kind="bad">There is no run <code>${id}</code> for this key; it may have been deleted. <a href="#/">Back to all runs</a><//>`;
  }
  if (!run) return failed ?? html`<p class="soft wait">Loading…</p>`;
  const now = { ...run, ...(runs?.get(id) ?? {}) };
  return html`
    <${Head} id=${id} name=${now.name} state=${now.state} tags=${now.tags} active=${now.active_at} onDelete=${askDelete} />
    ${failed}
    <${Facts} run=${now} />
    <${Tabs} id=${id} tab=${tab} />
    ${tab === "configuration" ? html`<${Configuration} run=${run} />` : part}
    ${deleting && html`<${DeleteRun} run=${now} onClose=${() => setDeleting(false)} />`}`;
}

const Head = still(({ id, name, state, tags, active, onDelete }) => html`
  <nav class="crumbs" aria-label="Path"><a href="#/">Runs</a></nav>
  <div class="title"><h1>${name}</h1><${State} state=${state} />
    ${tags.map((tag) => html`<span class="tag">${tag}</span>`)}
    <span class="right buttons"><a class="button" href=${`#/compare?runs=${encodeURIComponent(id)}`}>Compare with…</a>
      <button class="bad" onClick=${onDelete}>Delete…</button></span></div>
  <p class="soft about">${state.kind === "waiting" ? `Waiting ${state.about}.` : state.about} Last active <${Time} at=${active} />.</p>`);

function Facts({ run }) {
  return html`<dl class="facts">
    <div><dt>Loss</dt><dd>${value(run.loss)}</dd></div><div><dt>Steps</dt><dd>${count(run.steps)}</dd></div>
    <div><dt>Tokens</dt><dd>${count(run.tokens)}</dd></div>
    <div><dt>Base model</dt><dd class="text">${run.base_model.split("/").pop()} <span class="soft">rank ${run.rank}</span></dd></div>
    <div><dt>Checkpoints</dt><dd>${count(run.checkpoints)}</dd></div><div><dt>On disk</dt><dd>${bytes(run.bytes)}</dd></div>
    <div><dt>Started</dt><dd class="text"><${Time} at=${run.created_at} short=${true} /></dd></div>
    <div><dt>In queue</dt><dd>${count(run.queued)}</dd></div>
  </dl>`;
}

const Tabs = still(({ id, tab }) => html`<nav class="tabs" aria-label="Parts of the run">${TABS.map(([name, text]) =>
  html`<a href=${`#/run/${encodeURIComponent(id)}/${name}`} aria-current=${tab === name ? "page" : null}>${text}</a>`)}</nav>`);

// Asks before a run is deleted, and names what goes.
function DeleteRun({ run, onClose }) {
  const [rows, setRows] = useState(null);
  const [keep, setKeep] = useState(false);
  const [error, setError] = useState(null);
  const [busy, setBusy] = useState(false);
  useEffect(() => { get(runPath(run.id, "/checkpoints")).then((found) => setRows(found.checkpoints), setError); }, [run.id]);
  const remove = async () => {
    setBusy(true);
    try {
      await call("DELETE", `${runPath(run.id)}?keep_checkpoints=${keep}`);
      if (keep) onClose(); else location.hash = "#/";
    } catch (failure) { setError(failure); setBusy(false); }
  };
  const some = rows?.length > 0;
  return html`<${Dialog} title=${`Delete ${run.name}?`} onClose=${onClose}>
    ${error && html`<${Notice} kind="bad">${error.message}<//>`}
    <p>This removes for good, of <code>${run.id}</code>:</p>
    <ul><li>all metrics of ${count(run.steps)} steps, and all samples</li>
      ${some && html`<li class=${keep ? "struck" : ""}>${rows.length === 1 ? "its checkpoint" : `all ${rows.length} checkpoints`} (${bytes(rows.reduce((sum, row) => sum + row.bytes, 0))}): ${rows.slice(0, 8).map((row) => row.name).join(", ")}${rows.length > 8 ? "…" : ""}</li>`}
      ${!keep && html`<li>the run itself, from every list</li>`}</ul>
    ${some && html`<label class="inline"><input type="checkbox" checked=${keep} onChange=${(event) => setKeep(event.target.checked)} /> Keep the checkpoints, and the run with them</label>`}
    ${run.state.kind !== "ended" && html`<p class="soft">Its session must have ended: close its client first.</p>`}
    <p class="actions"><button onClick=${onClose}>Keep it</button> <button class="bad" disabled=${busy || rows === null} onClick=${remove}>Delete ${keep ? "metrics and samples" : run.name}</button></p><//>`;
}

// -- metrics -----------------------------------------------------------------------------------------

// Pixels of a plot for each point that is read; where a point stands for several steps, a band shows their extremes.
const PIXELS = 2;

export function Metrics({ ids, names = null, theme }) {
  const [axis, setAxis] = useState("step");
  const [smoothing, setSmoothing] = useState(0);
  const [log, setLog] = useState(false);
  const [zoom, setZoom] = useState(null);
  const width = useMemo(() => Math.round(Math.min(1200, innerWidth) / (innerWidth > 900 ? 2 : 1) / PIXELS), []);
  const [found, error] = useCurves(ids, { axis, width, start: zoom?.start, end: zoom?.end }, [ids.join(" "), axis, zoom]);

  const drawn = useRef(new Map());
  const plots = useMemo(() => {
    const all = [...new Set((found ?? []).flatMap((one) => Object.keys(one)))];
    all.sort((a, b) => rank(a) - rank(b) || (a < b ? -1 : 1));
    const read = all.map((name) => [name, (found ?? []).flatMap((one, place) => {
      const curve = one[name];
      return curve && curve.x.length ? [{ ...curve, label: names?.[place] ?? name, color: COLORS[place % COLORS.length] }] : [];
    })]).filter(([, curves]) => curves.length);
    drawn.current = new Map(read.map(([name, curves]) => [name, unchanged(drawn.current.get(name), curves) ? drawn.current.get(name) : curves]));
    return [...drawn.current];
  }, [found, names?.join("|")]);

  return html`
    <${Tools} axis=${axis} setAxis=${setAxis} smoothing=${smoothing} setSmoothing=${setSmoothing} log=${log} setLog=${setLog} zoom=${zoom} setZoom=${setZoom} />
    ${error && html`<${Notice} kind="bad">${error.message}<//>`}
    ${found && !error && !plots.length && html`<${Notice}>${zoom ? "Nothing was recorded in this part." : "No metrics yet. The first optimizer step draws the first point; training.log(step, metrics={…}) adds your own."}<//>`}
    <div class="plots">${plots.map(([name, curves]) => html`<${Plot} key=${name} title=${name} unit=${UNITS.get(name) ?? ""} curves=${curves} axis=${axis} log=${log} smoothing=${smoothing} zoom=${zoom} onZoom=${setZoom} theme=${theme} />`)}</div>`;
}

const Tools = still(({ axis, setAxis, smoothing, setSmoothing, log, setLog, zoom, setZoom }) => html`
    <div class="tools">
      <label class="inline">By <select value=${axis} onChange=${(event) => { setZoom(null); setAxis(event.target.value); }}>
        <option value="step">step</option><option value="tokens">tokens</option><option value="time">time</option></select></label>
      <label class="inline">Smooth <input type="range" min="0" max="0.99" step="0.01" value=${smoothing} aria-valuetext=${smoothing ? `${Math.round(smoothing * 100)} percent` : "off"} onInput=${(event) => setSmoothing(Number(event.target.value))} /></label>
      <label class="inline"><input type="checkbox" checked=${log} onChange=${(event) => setLog(event.target.checked)} /> Log scale</label>
      <button class="small" disabled=${!zoom} onClick=${() => setZoom(null)}>Show all</button>
      <span class="soft hint">Drag to zoom, shift-drag to move, double-click to show all</span>
    </div>`);

// Whether curves look as before. They have no new point, or only such as lie outside of the part that is shown; then these
// are counted, and the others are the same list.
function unchanged(before, curves) {
  const facts = ({ x, y, odd, points, label, color }) => [x.length, x[0], x.at(-1), y[0], y.at(-1), odd.length, points, label, color].join("\n");
  const same = (curve, other) => (curve.x === other.x && curve.label === other.label && curve.color === other.color) || facts(curve) === facts(other);
  return before?.length === curves.length && curves.every((curve, place) => same(curve, before[place]));
}

const rank = (name) => (FIRST.includes(name) ? FIRST.indexOf(name) : 99);

// -- checkpoints -------------------------------------------------------------------------------------

const SHOWN = 200;

// `saved` is how many there are: they are read again when it changes, not at every step.
function Checkpoints({ id, saved }) {
  const [rows, setRows] = useState(null);
  const [error, setError] = useState(null);
  const [asked, setAsked] = useState(null);
  const [shown, setShown] = useState(SHOWN);
  const [changes, setChanges] = useState(0);
  const load = () => setChanges((before) => before + 1);
  useLive([id], [], reading(async () => (await get(runPath(id, "/checkpoints"))).checkpoints, setRows, setError), [id, saved, changes]);
  const change = async (method, row, rest, body) => {
    try { await call(method, checkpointPath(id, row.id, rest), body); setError(null); } catch (failure) { setError(failure); }
    setAsked(null);
    load();
  };
  const download = async (row) => {
    const stop = new AbortController();
    try {
      const answer = await call("GET", checkpointPath(id, row.id, "/archive"), undefined, stop.signal);
      const url = answer.url;  // where the service redirects to: a signed address that needs no key
      stop.abort();
      location.assign(url);
    } catch (failure) { setError(failure); }
  };
  if (!rows) return error ? html`<${Notice} kind="bad">${error.message}<//>` : html`<p class="soft wait">Loading…</p>`;
  return html`
    ${error && html`<${Notice} kind="bad">${error.message}<//>`}
    ${!rows.length && html`<${Notice}>No checkpoints. <code>training.save_state("name")</code> writes one to go on from, <code>training.save_weights_for_sampler("name")</code> one to sample.<//>`}
    ${rows.length > 0 && html`<div class="scroll"><table class="list checkpoints"><caption class="hidden">Checkpoints</caption>
      <thead><tr><th scope="col">Name</th><th scope="col">Kind</th><th scope="col">Size</th><th scope="col">Saved</th><th scope="col">Expires</th><th scope="col">Actions</th></tr></thead>
      <tbody>${rows.slice(0, shown).map((row) => html`<tr key=${row.path}>
        <td class="name"><b>${row.name}</b> ${row.public && html`<span class="tag">public</span>`}<br /><code class="soft">${row.path}</code></td>
        <td>${row.kind}</td><td class="number">${bytes(row.bytes)}</td><td><${Time} at=${row.created_at} /></td>
        <td class="expires">${row.expires_at ? html`<${Time} at=${row.expires_at} />` : "never"}</td>
        <td class="actions">
          <button class="small" aria-label=${`Use ${row.name} in code`} onClick=${() => setAsked(["code", row])}>Use</button>
          <button class="small" aria-label=${`Download ${row.name}`} onClick=${() => download(row)}>Download</button>
          <button class="small" aria-label=${`${row.public ? "Make private" : "Publish"} ${row.name}`} onClick=${() => setAsked(["publish", row])}>${row.public ? "Make private" : "Publish"}</button>
          <button class="small" aria-label=${`Set when ${row.name} expires`} onClick=${() => setAsked(["ttl", row])}>Expiry</button>
          <button class="small bad" aria-label=${`Delete ${row.name}`} onClick=${() => setAsked(["delete", row])}>Delete</button>
        </td></tr>`)}</tbody></table></div>`}
    ${rows.length > shown && html`<p><button onClick=${() => setShown(shown + 500)}>Show more (${rows.length - shown})</button></p>`}
    ${asked?.[0] === "delete" && html`<${Dialog} title=${`Delete ${asked[1].name}?`} onClose=${() => setAsked(null)}>
      <p>This removes <b>${asked[1].kind === "training" ? "the weights and the optimizer state" : "the weights"}</b> of <code>${asked[1].path}</code>, ${bytes(asked[1].bytes)}, for good. Samplers that already use it go on.</p>
      <p class="actions"><button onClick=${() => setAsked(null)}>Keep it</button> <button class="bad" onClick=${() => change("DELETE", asked[1], "")}>Delete ${asked[1].name}</button></p><//>`}
    ${asked?.[0] === "publish" && html`<${Dialog} title=${asked[1].public ? `Make ${asked[1].name} private?` : `Publish ${asked[1].name}?`} onClose=${() => setAsked(null)}>
      <p>${asked[1].public ? "Other keys of this service can no longer read it." : "Every key of this service will be able to read and sample these weights."}</p>
      <p class="actions"><button onClick=${() => setAsked(null)}>Cancel</button> <button class="main" onClick=${() => change(asked[1].public ? "DELETE" : "POST", asked[1], "/publish", asked[1].public ? undefined : {})}>${asked[1].public ? "Make private" : "Publish"}</button></p><//>`}
    ${asked?.[0] === "ttl" && html`<${Expiry} row=${asked[1]} onClose=${() => setAsked(null)} onDone=${(seconds) => change("PUT", asked[1], "/ttl", { ttl_seconds: seconds })} />`}
    ${asked?.[0] === "code" && html`<${Use} row=${asked[1]} onClose=${() => setAsked(null)} />`}`;
}

function Expiry({ row, onClose, onDone }) {
  const [days, setDays] = useState("7");
  const number = Number(days);
  return html`<${Dialog} title=${`When does ${row.name} expire?`} onClose=${onClose}>
    <form onSubmit=${(event) => { event.preventDefault(); if (number > 0) onDone(Math.round(number * 86400)); }}>
      <label>Days from now <input type="number" min="0.01" step="any" max="36500" value=${days} onInput=${(event) => setDays(event.target.value)} /></label>
      <p class="soft">Then it is deleted by the service.</p>
      <p class="actions"><button type="button" onClick=${() => onDone(null)}>Never expire</button> <button class="main" disabled=${!(number > 0)}>Set</button></p></form><//>`;
}

function Use({ row, onClose }) {
  const code = row.kind === "training"
    ? `training = service.create_training_client_from_state_with_optimizer("${row.path}")`
    : `sampling = service.create_sampling_client(model_path="${row.path}")`;
  const line = `tinkex sample --model-path ${row.path} --prompt "Hello"`;
  return html`<${Dialog} title=${`Use ${row.name}`} onClose=${onClose}>
    <h3>${row.kind === "training" ? "Go on training" : "Sample"}</h3><${Code} text=${code} label="Python" />
    ${row.kind === "training" && html`<h3>Sample</h3><${Code} text=${`sampling = service.create_sampling_client(model_path="${row.path}")`} label="Python" />`}
    <h3>Command line</h3><${Code} text=${line} label="Shell" />
    <p class="actions"><a class="button" href=${`#/play?models=${encodeURIComponent(row.path)}`}>Open in the playground</a> <button onClick=${onClose}>Close</button></p><//>`;
}

// -- configuration -----------------------------------------------------------------------------------

function Configuration({ run }) {
  const entries = Object.entries(run.config).sort(([a], [b]) => (a < b ? -1 : 1));
  const script = `rest = tinkex.ServiceClient(base_url="${location.origin}").create_rest_client()\nrun = rest.get_training_run("${run.id}").result()`;
  return html`<div class="columns">
    <section><h2>Settings</h2><table class="list pairs"><caption class="hidden">Settings of this run</caption><tbody>
      ${entries.map(([name, setting]) => html`<tr><th scope="row">${name}</th><td>${String(setting)}</td></tr>`)}</tbody></table></section>
    <section><h2>Queue</h2>
      ${run.queue.total === 0 ? html`<p class="soft">Nothing waits.</p>` : html`<table class="list"><caption class="hidden">Requests that wait</caption>
        <thead><tr><th scope="col">Number</th><th scope="col">Operation</th><th scope="col">Size</th><th scope="col">Since</th></tr></thead>
        <tbody>${run.queue.requests.map((each) => html`<tr><td class="number">${each.number ?? "–"}</td><td>${each.operation}</td><td class="number">${bytes(each.bytes)}</td><td><${Time} at=${each.accepted_at} /></td></tr>`)}</tbody></table>
        ${run.queue.total > run.queue.requests.length && html`<p class="soft">and ${run.queue.total - run.queue.requests.length} more</p>`}`}
      <h2>This run in code</h2><p><code>${run.id}</code> <${Copy} text=${run.id} label="Copy id" /></p>
      <${Code} text=${script} label="Python" /><${Code} text=${`tinkex run info ${run.id}`} label="Shell" /></section></div>`;
}
