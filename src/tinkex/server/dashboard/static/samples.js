// Samples of a run: by step, by group, by reward, with tokens coloured by how likely they were.
import { html, useState, useEffect, useMemo, value, bytes, count, Time, Notice, Tokens } from "./base.js";
import { get, call, runPath } from "./api.js";
import { useLive, reading } from "./live.js";

const PAGE = 50;

export function Samples({ id }) {
  const [steps, setSteps] = useState(null);
  const [chosen, setChosen] = useState(null);  // null: the newest
  const [order, setOrder] = useState("logged");
  const [grouped, setGrouped] = useState(false);
  const [coloured, setColoured] = useState(true);
  const [offset, setOffset] = useState(0);
  const [found, setFound] = useState(null);
  const [error, setError] = useState(null);
  const fail = (failure) => setError(failure);
  useLive([id], ["samples"], reading(async () => (await get(runPath(id, "/sample_steps"))).steps, setSteps, setError), [id]);
  const place = chosen === null ? (steps?.length ?? 0) - 1 : chosen;
  const step = steps?.[place]?.step;
  useEffect(() => {
    if (step === undefined) return undefined;
    const stop = new AbortController();
    get(runPath(id, "/samples"), { step, order, offset, limit: PAGE }, stop.signal).then(setFound, (failure) => failure.name === "AbortError" || fail(failure));
    return () => stop.abort();
  }, [id, step, order, offset, steps?.[place]?.samples]);
  const groups = useMemo(() => inGroups(found?.samples ?? [], grouped), [found, grouped]);

  if (error && !steps) return html`<${Notice} kind="bad">${error.message}<//>`;
  if (!steps) return html`<p class="soft wait">Loading…</p>`;
  if (!steps.length) return html`<${Notice}>No samples yet. Report them from your loop: <code>training.log(step, samples=[{"prompt": …, "text": …, "reward": …}])</code>.<//>`;
  const go = (number) => { setOffset(0); setChosen(Math.max(0, Math.min(steps.length - 1, number))); };
  return html`
    <div class="tools samples-tools">
      <button class="small" aria-label="Previous step" disabled=${place <= 0} onClick=${() => go(place - 1)}>◀</button>
      <label class="inline slider">Step <input type="range" min="0" max=${steps.length - 1} value=${place} aria-valuetext=${`step ${step}`} onInput=${(event) => go(Number(event.target.value))} /> <output>${count(step)}</output></label>
      <button class="small" aria-label="Next step" disabled=${place >= steps.length - 1} onClick=${() => go(place + 1)}>▶</button>
      <button class="small" disabled=${chosen === null} onClick=${() => { setOffset(0); setChosen(null); }}>Newest</button>
      <label class="inline">Order <select value=${order} onChange=${(event) => { setOffset(0); setOrder(event.target.value); }}>
        <option value="logged">as logged</option><option value="best">best reward first</option><option value="worst">worst reward first</option></select></label>
      <label class="inline"><input type="checkbox" checked=${grouped} onChange=${(event) => setGrouped(event.target.checked)} /> Groups</label>
      <label class="inline"><input type="checkbox" checked=${coloured} onChange=${(event) => setColoured(event.target.checked)} /> Colour tokens</label>
      <span class="soft">${count(steps[place].samples)} samples${steps[place].reward === null ? "" : `, mean reward ${value(steps[place].reward)}`}</span>
    </div>
    ${error && html`<${Notice} kind="bad">${error.message}<//>`}
    ${groups.map(([group, samples]) => html`<section class="group" key=${group}>
      ${grouped && html`<h2>${group || "Without a group"} <span class="soft">${samples.length} samples, mean reward ${value(mean(samples))}</span></h2>`}
      <div class=${grouped ? "side" : ""}>${samples.map((sample) => html`<${Sample} key=${sample.number} id=${id} sample=${sample} coloured=${coloured} />`)}</div></section>`)}
    ${found && (offset > 0 || found.total > found.samples.length) && html`<p class="actions"><button disabled=${offset === 0} onClick=${() => setOffset(Math.max(0, offset - PAGE))}>Before</button>
      <span class="soft">${offset + 1} to ${offset + found.samples.length} of ${found.total}</span>
      <button disabled=${offset + found.samples.length >= found.total} onClick=${() => setOffset(offset + found.samples.length)}>After</button></p>`}`;
}

const mean = (samples) => {
  const rewards = samples.map((sample) => sample.reward).filter((reward) => typeof reward === "number");
  return rewards.length ? rewards.reduce((sum, reward) => sum + reward, 0) / rewards.length : null;
};

function inGroups(samples, grouped) {
  if (!grouped) return [["", samples]];
  const found = new Map();
  for (const sample of samples) found.set(sample.group ?? "", [...(found.get(sample.group ?? "") ?? []), sample]);
  return [...found];
}

function Sample({ id, sample, coloured }) {
  const whole = async () => {
    const answer = await call("GET", runPath(id, `/samples/${sample.number}`));
    const link = document.createElement("a");
    link.href = URL.createObjectURL(await answer.blob());
    link.download = `sample-${sample.number}.json`;
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 10000);
  };
  return html`<article class="sample" aria-label=${`Sample ${sample.number}`}>
    <header>${sample.reward !== undefined && html`<span class="reward ${sample.reward > 0 ? "good" : ""}">reward ${value(sample.reward)}</span>`}
      ${sample.group && html`<span class="tag">${sample.group}</span>`}
      ${sample.stop_reason && html`<span class="soft">stopped: ${sample.stop_reason}</span>`}
      ${sample.tokens && html`<span class="soft">${count(sample.tokens.length)} tokens</span>`}
      ${Object.entries(sample.metadata ?? {}).map(([name, text]) => html`<span class="soft">${name}: ${text}</span>`)}
      <span class="soft right"><${Time} at=${sample.time} /></span></header>
    ${sample.prompt && html`<pre class="prompt" aria-label="Prompt">${sample.prompt}</pre>`}
    ${coloured && sample.token_texts && sample.logprobs ? html`<${Tokens} texts=${sample.token_texts} logprobs=${sample.logprobs} alternatives=${sample.alternatives} />` : html`<pre class="text" aria-label="Text">${sample.text}</pre>`}
    ${sample.cut && html`<p class="soft">This is the beginning; the whole sample has ${bytes(sample.bytes)}. <button class="link" onClick=${whole}>Download it</button></p>`}
  </article>`;
}
