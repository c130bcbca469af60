// Two to ten runs in the same plots, with the settings in which they differ.
import { html, useState, useEffect, COLORS, Notice, State, value, count } from "./base.js";
import { get, runPath } from "./api.js";
import { Metrics } from "./run.js";

export function Compare({ address, runs, theme }) {
  const ids = (address.query.get("runs") ?? "").split(",").filter(Boolean).slice(0, 10);
  const [known, setKnown] = useState({});
  const [failed, setFailed] = useState({});
  useEffect(() => {
    for (const id of ids) {
      if (known[id]) continue;
      get(runPath(id)).then((run) => setKnown((before) => ({ ...before, [id]: run })), (error) => setFailed((before) => ({ ...before, [id]: error.message })));
    }
  }, [ids.join(",")]);
  const set = (list) => { location.hash = `#/compare?runs=${list.map(encodeURIComponent).join(",")}`; };
  const there = ids.filter((id) => known[id]);
  const others = [...(runs?.values() ?? [])].filter((run) => !ids.includes(run.id));
  return html`
    <div class="title"><h1>Compare</h1><span class="soft">${ids.length} of at most 10</span></div>
    <div class="tools">
      ${ids.map((id) => html`<span class="chosen" style=${{ borderColor: COLORS[there.indexOf(id) % COLORS.length] ?? "gray" }}>
        <a href=${`#/run/${encodeURIComponent(id)}`}>${known[id]?.name ?? id}</a>
        <button class="link" aria-label=${`Remove ${known[id]?.name ?? id}`} onClick=${() => set(ids.filter((each) => each !== id))}>×</button></span>`)}
      ${ids.length < 10 && html`<label class="inline">Add <select value="" onChange=${(event) => event.target.value && set([...ids, event.target.value])}>
        <option value="">choose a run…</option>${others.slice(0, 300).map((run) => html`<option value=${run.id}>${run.name === run.id ? run.id : `${run.name} (${run.id.slice(0, 8)})`}</option>`)}</select></label>`}
    </div>
    ${Object.entries(failed).filter(([id]) => ids.includes(id)).map(([id, message]) => html`<${Notice} kind="bad"><code>${id}</code>: ${message}<//>`)}
    ${ids.length < 2 && html`<${Notice}>Choose two to ten runs: here, or by ticking them in the <a href="#/">list</a>.<//>`}
    ${there.length > 0 && html`<${Metrics} ids=${there} names=${there.map((id) => known[id].name)} theme=${theme} />
      <h2>Settings that differ</h2><${Differences} runs=${there.map((id) => ({ ...known[id], ...(runs?.get(id) ?? {}) }))} />`}`;
}

function Differences({ runs }) {
  const names = [...new Set(runs.flatMap((run) => Object.keys(run.config)))].sort();
  const text = (run, name) => (run.config[name] === undefined ? "–" : String(run.config[name]));
  const different = names.filter((name) => new Set(runs.map((run) => text(run, name))).size > 1);
  return html`<div class="scroll"><table class="list pairs"><caption class="hidden">Settings in which the runs differ</caption>
    <thead><tr><th scope="col">Setting</th>${runs.map((run, place) => html`<th scope="col"><i class="dot" style=${{ background: COLORS[place % COLORS.length] }}></i>${run.name}</th>`)}</tr></thead>
    <tbody>
      <tr><th scope="row">state</th>${runs.map((run) => html`<td><${State} state=${run.state} /></td>`)}</tr>
      <tr><th scope="row">last loss</th>${runs.map((run) => html`<td>${value(run.loss)}</td>`)}</tr>
      <tr><th scope="row">steps</th>${runs.map((run) => html`<td>${count(run.steps)}</td>`)}</tr>
      ${different.map((name) => html`<tr><th scope="row">${name}</th>${runs.map((run) => html`<td>${text(run, name)}</td>`)}</tr>`)}
    </tbody></table></div>
    ${runs.length > 1 && !different.length && html`<p class="soft">Their settings are the same.</p>`}`;
}
