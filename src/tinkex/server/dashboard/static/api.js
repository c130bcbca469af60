// Calls to the service. The key is kept in this tab only and is sent as a header, never in an address or a cookie.
const KEY = "tinkex-key";
const PATIENCE = 1500;  // milliseconds that news wait for what is read because of them
const watching = { key: new Set(), state: new Set(), news: new Set(), reading: new Set() };

export class Failure extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

export function setKey(key) {
  if (key) sessionStorage.setItem(KEY, key); else sessionStorage.removeItem(KEY);
  stream.restart();
}

export const hasKey = () => sessionStorage.getItem(KEY) !== null;

function headers(more) {
  const key = sessionStorage.getItem(KEY);
  return key ? { ...more, "x-api-key": key } : { ...more };
}

export async function call(method, path, body, signal) {
  let answer;
  try {
    answer = await fetch(path, {
      method, signal, credentials: "omit",
      headers: headers(body === undefined ? {} : { "content-type": "application/json" }),
      body: body === undefined ? undefined : JSON.stringify(body),
    });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Failure("The service does not answer.", 0);
  }
  if (!answer.ok) throw await failed(answer);
  return answer;
}

async function failed(answer) {
  let message = `The service answered ${answer.status}.`;
  try {
    const body = await answer.json();
    message = body.detail ?? body.error ?? message;
    if (typeof message !== "string") message = JSON.stringify(message);
  } catch { /* not JSON: the status has to do */ }
  if (answer.status === 401) for (const tell of watching.key) tell(message);
  return new Failure(message, answer.status);
}

export async function get(path, query, signal) {
  const entries = Object.entries(query ?? {}).filter(([, value]) => value !== null && value !== undefined);
  const asked = entries.length ? `?${new URLSearchParams(entries)}` : "";
  return (await call("GET", path + asked, undefined, signal)).json();
}

export const runPath = (id, rest = "") => `/local/runs/${encodeURIComponent(id)}${rest}`;
export const checkpointPath = (run, checkpoint, rest = "") =>
  `/api/v1/training_runs/${encodeURIComponent(run)}/checkpoints/${checkpoint.split("/").map(encodeURIComponent).join("/")}${rest}`;

// The events of a response as they arrive: [name, content].
export async function* events(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      rest += value;
      let end;
      while ((end = rest.indexOf("\n\n")) >= 0) {
        const block = rest.slice(0, end);
        rest = rest.slice(end + 2);
        let name = "message", data = "";
        for (const line of block.split("\n")) {
          if (line.startsWith("event: ")) name = line.slice(7);
          else if (line.startsWith("data: ")) data += line.slice(6);
        }
        yield [name, JSON.parse(data)];
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

export function on(what, tell) {
  watching[what].add(tell);
  return () => watching[what].delete(tell);
}

// Calls `work` at once and then every `pause` milliseconds, but not while nobody can see the page.
export function whileSeen(work, pause) {
  const go = () => { if (!document.hidden) work(); };
  go();
  const timer = setInterval(go, pause);
  document.addEventListener("visibilitychange", go);
  return () => { clearInterval(timer); document.removeEventListener("visibilitychange", go); };
}

// What the page has not shown yet: runs that changed and are gone; `again` after a break, when anything may be different.
const news = {
  runs: new Map(), gone: new Set(), again: false, telling: false,

  add({ runs = [], gone = [], again = false }) {
    for (const run of runs) {
      const before = this.runs.get(run.id)?.changed ?? [];
      this.runs.set(run.id, { ...run, changed: [...new Set([...before, ...run.changed])] });
      this.gone.delete(run.id);
    }
    for (const id of gone) { this.gone.add(id); this.runs.delete(id); }
    this.again ||= again;
    this.tell();
  },

  take() {
    if (!this.runs.size && !this.gone.size && !this.again) return null;
    const taken = { runs: [...this.runs.values()], gone: [...this.gone], again: this.again };
    this.runs.clear();
    this.gone.clear();
    this.again = false;
    return taken;
  },

  // What an open part reads because of the news is shown together with them, so that the page is drawn once. Nothing is
  // read or drawn while nobody can see the page.
  async tell() {
    if (this.telling) return;
    this.telling = true;
    for (let told; !document.hidden && (told = this.take());) {
      const read = [...watching.reading].map((each) => each(told)).filter(Boolean);
      const shown = read.length ? await Promise.race([Promise.all(read), new Promise((late) => setTimeout(late, PATIENCE))]) : null;
      if (!shown) read.forEach((each) => each.then((show) => show()));
      for (const show of shown ?? []) show();
      for (const tell of watching.news) tell(told);
    }
    this.telling = false;
  },
};
document.addEventListener("visibilitychange", () => news.tell());

// The one connection for live updates. After a break everything on the screen is read again.
export const stream = {
  state: "connecting", hello: null, _abort: null, _running: false, _wake: null,

  _set(state) {
    if (state === this.state) return;
    this.state = state;
    for (const tell of watching.state) tell(state);
  },

  restart() {
    this._abort?.abort();
    this._wake?.();
    this.start();
  },

  async start() {
    if (this._running) return;
    this._running = true;
    let pause = 300, before = false;
    for (;;) {
      this._abort = new AbortController();
      const quiet = setInterval(() => { if (Date.now() - heard > 20000) this._abort.abort(); }, 5000);
      let heard = Date.now();
      try {
        const answer = await call("GET", "/local/events", undefined, this._abort.signal);
        for await (const [name, content] of events(answer)) {
          heard = Date.now();
          if (name === "hello") {
            this.hello = content;
            this._set("live");
            if (before) news.add({ again: true });
            before = true;
            pause = 300;
          } else if (name === "runs") {
            news.add({ runs: content.runs });
          } else if (name === "gone") {
            news.add({ gone: content.runs });
          }
        }
      } catch (error) {
        if (error.status === 401) { before = true; pause = 60000; }
      } finally {
        clearInterval(quiet);
      }
      this._set("offline");
      await new Promise((done) => { this._wake = done; setTimeout(done, pause); });
      pause = Math.min(pause * 1.6, 4000);
    }
  },
};
