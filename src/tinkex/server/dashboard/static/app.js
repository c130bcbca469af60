// The frame of the page: navigation, the key, the connection, and which part is shown.
import { html, render, still, useState, useEffect, useRef, useCallback, Dialog } from "./base.js";
import { get, on, setKey, hasKey, stream } from "./api.js";
import { Runs } from "./runs.js";

// Parts that are not needed for the first look load when they are opened.
const PARTS = {
  run: () => import("./run.js").then((part) => part.Run),
  compare: () => import("./compare.js").then((part) => part.Compare),
  play: () => import("./playground.js").then((part) => part.Playground),
  service: () => import("./service.js").then((part) => part.Service),
};

function parsed() {
  const [path, query = ""] = location.hash.replace(/^#\/?/, "").split("?");
  const [part = "", ...rest] = path.split("/").map(decodeURIComponent);
  return { part, rest, query: new URLSearchParams(query) };
}

function useAddress() {
  const [address, setAddress] = useState(parsed);
  useEffect(() => {
    const changed = () => { setAddress(parsed()); scrollTo(0, 0); };
    addEventListener("hashchange", changed);
    return () => removeEventListener("hashchange", changed);
  }, []);
  return address;
}

const THEMES = ["auto", "light", "dark"];

function useTheme() {
  const [theme, setTheme] = useState(() => localStorage.getItem("tinkex-theme") ?? "auto");
  useEffect(() => {
    if (theme === "auto") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = theme;
    localStorage.setItem("tinkex-theme", theme);
  }, [theme]);
  return [theme, useCallback(() => setTheme((before) => THEMES[(THEMES.indexOf(before) + 1) % 3]), [])];
}

const RECENTLY = 5;  // seconds of which nobody sees whether they have passed since a run was active

// A run after an event. What looks as before is the same object as before, so that it is not drawn again.
function updated(before, { changed, points, ...run }) {
  if (!before) return run;
  if (run.active_at - before.active_at < RECENTLY) run.active_at = before.active_at;
  const other = Object.keys(run).filter((name) => JSON.stringify(run[name]) !== JSON.stringify(before[name]));
  return other.length ? Object.assign({ ...before }, ...other.map((name) => ({ [name]: run[name] }))) : before;
}

// All runs after an event.
function withNews(before, { runs: changed, gone }) {
  const fresh = changed.map((run) => updated(before.runs?.get(run.id), run)).filter((run) => run !== before.runs?.get(run.id));
  if (!before.runs || (!fresh.length && !gone.length)) return before;
  const runs = new Map(before.runs);
  let total = before.total - gone.filter((id) => runs.delete(id)).length;
  for (const run of fresh) { if (!runs.has(run.id)) total += 1; runs.set(run.id, run); }
  return { runs, total, error: null };
}

// All runs by id: read once, then changed by events.
function useRuns() {
  const [state, setState] = useState({ runs: null, total: 0, error: null });
  const missed = useRef(null);  // events that came while the list is being read, whose answer may be older
  const load = async () => {
    const since = missed.current = [];
    const show = (next) => {
      if (missed.current !== since) return;  // it is being read once more
      missed.current = null;
      setState(next);
    };
    try {
      const found = await get("/local/runs", { limit: 1000 });
      show(since.reduce(withNews, { runs: new Map(found.runs.map((run) => [run.id, run])), total: found.total, error: null }));
    } catch (error) {
      show((before) => ({ ...before, error }));
    }
  };
  useEffect(() => {
    stream.opened.then(load);
    return on("news", (told) => {
      missed.current?.push(told);
      setState((before) => withNews(before, told));
      if (told.again) load();
    });
  }, []);
  return [state, load];
}

function AskForKey({ message, onDone }) {
  const input = useRef();
  const [empty, setEmpty] = useState(false);
  const submit = (event) => {
    event.preventDefault();
    const key = input.current.value.trim();
    setEmpty(!key);
    if (key) { setKey(key); onDone(); }
  };
  return html`<${Dialog} title="This service needs a key" onClose=${() => {}}>
    <form onSubmit=${submit}>
      <p class="soft">It is kept in this tab only, and is gone when you close it.</p>
      ${hasKey() && html`<p class="notice bad" role="alert">${message}</p>`}
      ${empty && html`<p class="notice bad" role="alert">Type the key first.</p>`}
      <label>API key <input ref=${input} type="password" autocomplete="off" spellcheck="false" /></label>
      <p class="actions"><button class="main">Open</button></p>
    </form><//>`;
}

const Bar = still(({ part, connection, theme, nextTheme, keyed }) => {
  const link = (name, text) => html`<a href=${`#/${name}`} aria-current=${part === name || (name === "" && part === "run") ? "page" : null}>${text}</a>`;
  const said = { live: "Live", offline: "Connecting again…", connecting: "Connecting…" }[connection];
  return html`
    <a class="skip" href="#content" onClick=${(event) => { event.preventDefault(); document.getElementById("content").focus(); }}>Skip to the content</a>
    <header class="bar"><nav aria-label="Main">
      <a class="brand" href="#/"><img src="/static/icon.svg" alt="" width="22" height="22" /> tinkex</a>
      ${link("", "Runs")} ${link("compare", "Compare")} ${link("play", "Playground")} ${link("service", "Service")}
      <a class="docs" href="/docs">API</a>
      <span class="connection ${connection}" role="status" title=${said}><span class="words">${said}</span></span>
      ${keyed && html`<button class="small forget" title="Forget key" aria-label="Forget key" onClick=${() => { setKey(null); location.reload(); }}><span class="words">Forget key</span></button>`}
      <button class="small" onClick=${nextTheme} aria-label=${`Colours: ${theme}. Change them.`} title="Colours">${{ auto: "◐", light: "☀", dark: "☾" }[theme]}</button>
    </nav></header>`;
});

function App() {
  const address = useAddress();
  const [theme, nextTheme] = useTheme();
  const [connection, setConnection] = useState(stream.state);
  const [askedKey, setAskedKey] = useState(null);
  const [state, load] = useRuns();
  const [part, setPart] = useState(null);

  useEffect(() => {
    const stops = [on("state", setConnection), on("key", setAskedKey)];
    stream.start();
    return () => stops.forEach((stop) => stop());
  }, []);
  useEffect(() => {
    let wanted = true;
    setPart(null);
    PARTS[address.part]?.().then((Part) => wanted && setPart(() => Part));
    return () => { wanted = false; };
  }, [address.part]);

  const named = { run: state.runs?.get(address.rest[0])?.name ?? "Run", compare: "Compare", play: "Playground", service: "Service" }[address.part] ?? "Runs";
  useEffect(() => { document.title = `${named} · tinkex`; }, [named]);

  const Part = PARTS[address.part] ? part : Runs;
  return html`
    <${Bar} part=${address.part} connection=${connection} theme=${theme} nextTheme=${nextTheme} keyed=${hasKey()} />
    <main id="content" tabindex="-1">
      ${Part ? html`<${Part} key=${address.part + (address.rest[0] ?? "")} address=${address} runs=${state.runs} total=${state.total} error=${state.error} theme=${theme} />` : html`<p class="soft wait">Loading…</p>`}
    </main>
    ${askedKey !== null && html`<${AskForKey} message=${askedKey} onDone=${() => { setAskedKey(null); load(); }} />`}`;
}

render(html`<${App} />`, document.getElementById("app"));
