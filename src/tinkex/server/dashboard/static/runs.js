// The list of runs: live state, filters, search, sorting, and a choice of runs to compare.
import { html, useState, useMemo, useCallback, count, value, bytes, Time, State, Spark, Notice, Code, still } from "./base.js";

const COLUMNS = [
  ["name", "Run", (run) => run.name.toLowerCase()],
  ["state", "State", (run) => run.state.kind],
  ["loss", "Loss", (run) => (typeof run.loss === "number" ? run.loss : Infinity)],
  ["steps", "Steps", (run) => -run.steps],
  ["tokens", "Tokens", (run) => -run.tokens],
  ["model", "Base model", (run) => run.base_model],
  ["bytes", "Disk", (run) => -run.bytes],
  ["age", "Last active", (run) => -run.active_at],
];
const SHOWN = 100;

function fits(run, words, state, tag) {
  if (state && run.state.kind !== state) return false;
  if (tag && !run.tags.includes(tag)) return false;
  const text = `${run.name} ${run.id} ${run.base_model} ${run.owner} ${run.tags.join(" ")}`.toLowerCase();
  return words.every((word) => text.includes(word));
}

export function Runs({ runs, total, error }) {
  const [search, setSearch] = useState("");
  const [state, setState] = useState("");
  const [tag, setTag] = useState("");
  const [sort, setSort] = useState(["age", 1]);
  const [shown, setShown] = useState(SHOWN);
  const [chosen, setChosen] = useState([]);
  const all = useMemo(() => [...(runs?.values() ?? [])], [runs]);
  const tags = useMemo(() => [...new Set(all.flatMap((run) => run.tags))].sort(), [all]);
  const choose = useCallback((id) => setChosen((before) => (before.includes(id) ? before.filter((each) => each !== id) : [...before, id].slice(-10))), []);
  const listed = useMemo(() => {
    const words = search.toLowerCase().split(/\s+/).filter(Boolean);
    const key = COLUMNS.find(([name]) => name === sort[0])[2];
    const found = all.filter((run) => fits(run, words, state, tag));
    return found.sort((a, b) => { const x = key(a), y = key(b); return (x < y ? -1 : x > y ? 1 : 0) * sort[1]; });
  }, [all, search, state, tag, sort]);

  if (error && error.status !== 401 && !runs) return html`<${Notice} kind="bad">${error.message}<//>`;
  if (!runs) return html`<h1>Runs</h1><p class="soft wait">Loading…</p>`;
  if (!all.length) return html`<${Empty} />`;
  const head = ([name, text]) => html`<th scope="col" class=${`col-${name}`} aria-sort=${sort[0] === name ? (sort[1] > 0 ? "ascending" : "descending") : "none"}>
    <button class="sort" onClick=${() => setSort([name, sort[0] === name ? -sort[1] : 1])}>${text}${sort[0] === name ? (sort[1] > 0 ? " ↓" : " ↑") : ""}</button></th>`;
  return html`
    <div class="title"><h1>Runs</h1><span class="soft">${listed.length === all.length ? count(total) : `${listed.length} of ${count(total)}`}</span></div>
    <div class="tools" role="search">
      <input type="search" placeholder="Search name, tag, model…" aria-label="Search runs" value=${search} onInput=${(event) => setSearch(event.target.value)} />
      <label class="inline">State <select value=${state} onChange=${(event) => setState(event.target.value)}>
        <option value="">all</option>${["training", "waiting", "idle", "ended", "failed"].map((kind) => html`<option value=${kind}>${kind}</option>`)}</select></label>
      ${tags.length > 0 && html`<label class="inline">Tag <select value=${tag} onChange=${(event) => setTag(event.target.value)}>
        <option value="">all</option>${tags.map((each) => html`<option value=${each}>${each}</option>`)}</select></label>`}
      <a class="button ${chosen.length < 2 ? "off" : "main"}" role="button" aria-disabled=${chosen.length < 2} title="Tick two to ten runs"
        href=${chosen.length < 2 ? null : `#/compare?runs=${chosen.map(encodeURIComponent).join(",")}`}>Compare ${chosen.length || ""}</a>
    </div>
    <div class="scroll"><table class="list runs"><caption class="hidden">Training runs</caption>
      <thead><tr><th scope="col" class="pick"><span class="hidden">Compare</span></th>${COLUMNS.slice(0, 3).map(head)}<th scope="col" class="curve">Curve</th>${COLUMNS.slice(3).map(head)}</tr></thead>
      <tbody>${listed.slice(0, shown).map((run) => html`<${Line} key=${run.id} run=${run} chosen=${chosen.includes(run.id)} choose=${choose} />`)}</tbody>
    </table></div>
    ${!listed.length && html`<${Notice}>No run fits. <button class="link" onClick=${() => { setSearch(""); setState(""); setTag(""); }}>Show all</button><//>`}
    ${listed.length > shown && html`<p><button onClick=${() => setShown(shown + 200)}>Show more (${listed.length - shown})</button></p>`}`;
}

const Line = still(({ run, chosen, choose }) => {
  return html`<tr>
    <td class="pick"><input type="checkbox" checked=${chosen} aria-label=${`Compare ${run.name}`} onChange=${() => choose(run.id)} /></td>
    <td class="name"><a href=${`#/run/${encodeURIComponent(run.id)}`}>${run.name}</a>
      <span class="tags">${run.tags.map((tag) => html`<span class="tag">${tag}</span>`)}</span></td>
    <td class="state-cell"><${State} state=${run.state} /></td>
    <td class="number loss">${value(run.loss)}</td>
    <td class="curve"><${Spark} values=${run.spark} label=${`Loss of ${run.name}`} /></td>
    <td class="number steps">${count(run.steps)}</td>
    <td class="number tokens-cell">${count(run.tokens)}</td>
    <td class="model">${run.base_model.split("/").pop()} <span class="soft">r${run.rank}</span></td>
    <td class="number disk">${bytes(run.bytes)}</td>
    <td class="age" title=${`Owner: ${run.owner}`}><${Time} at=${run.active_at} /> <span class="soft owner">${run.owner}</span></td>
  </tr>`;
});

function Empty() {
  const script = `import tinkex
from tinkex import types

service = tinkex.ServiceClient(base_url="${location.origin}", api_key="tml-local")
training = service.create_lora_training_client("tinkex/tiny", rank=8)
tokens = training.get_tokenizer().encode("The sky is green today.")
datum = types.Datum(
    model_input=types.ModelInput.from_ints(tokens[:-1]),
    loss_fn_inputs={"target_tokens": tokens[1:], "weights": [1.0] * len(tokens[1:])},
)
for step in range(20):
    training.forward_backward([datum], "cross_entropy")
    training.optim_step(types.AdamParams(learning_rate=1e-3)).result()
`;
  return html`<h1>Runs</h1><section class="card"><h2>Nothing has been trained yet</h2>
    <p>A run appears here as soon as a client creates a training model. Try this one, with a base model of <a href="/about">this service</a>:</p>
    <${Code} text=${script} label="A first training script" /></section>`;
}
