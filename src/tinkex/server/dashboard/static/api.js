// Calls to the service, and its events. The key is kept in this tab only and is sent as a header, never in an address or a cookie.
import { News } from "./news.js";

const KEY = "tinkex-key";
const PATIENCE = 1500;  // milliseconds that news wait for what is read because of them
const LATE = 20000;  // milliseconds after which an answer is not waited for
const SLOW = 1000;  // milliseconds that the page waits for its first events before it reads without them
const UNSEEN = 30000;  // milliseconds after which a hidden page closes its connection: a browser allows six to a service
const watching = { key: new Set(), state: new Set(), news: new Set(), reading: new Set(), following: new Set() };

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

// What the service answers, if it does in time.
export async function get(path, query, signal) {
  const entries = Object.entries(query ?? {}).filter(([, value]) => value !== null && value !== undefined);
  const asked = entries.length ? `?${new URLSearchParams(entries)}` : "";
  const limit = new AbortController(), stop = () => limit.abort(), timer = setTimeout(stop, LATE);
  signal?.addEventListener("abort", stop);
  try {
    return await (await call("GET", path + asked, undefined, limit.signal)).json();
  } catch (error) {
    if (error.name === "AbortError" && !signal?.aborted) throw new Failure("The service does not answer in time.", 0);
    throw error;
  } finally {
    clearTimeout(timer);
    signal?.removeEventListener("abort", stop);
  }
}

export const runPath = (id, rest = "") => `/local/runs/${encodeURIComponent(id)}${rest}`;
export const checkpointPath = (run, checkpoint, rest = "") =>
  `/api/v1/training_runs/${encodeURIComponent(run)}/checkpoints/${checkpoint.split("/").map(encodeURIComponent).join("/")}${rest}`;

// The events of a response as they arrive: [name, content].
export async function* events(answer) {
  const reader = answer.body.getReader(), decoder = new TextDecoder();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      rest += decoder.decode(value, { stream: true });
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

// Resolved when somebody sees the page.
export const seen = () => new Promise((done) => {
  if (document.hidden) document.addEventListener("visibilitychange", done, { once: true }); else done();
});

const news = new News((id) => [...watching.following].some((follows) => follows(id)));
let telling = false;

// What an open part reads because of the news is shown together with them, so that the page is drawn once. Nothing is read
// or drawn while nobody can see the page.
async function tell() {
  if (telling) return;
  telling = true;
  try {
    for (let told; !document.hidden && (told = news.take());) {
      const read = [...watching.reading].map((each) => each(told)).filter(Boolean);
      const shown = read.length ? await Promise.race([Promise.all(read), new Promise((late) => setTimeout(late, PATIENCE))]) : null;
      if (!shown) read.forEach((each) => each.then((show) => show()));
      for (const show of shown ?? []) show();
      for (const each of watching.news) each(told);
    }
  } finally { // a part that fails must not stop the others for ever
    telling = false;
  }
}

// The one connection for live updates. After a break everything on the screen is read again.
let open;

export const stream = {
  // Resolved when the page hears of changes, so that none falls between what it reads and the first event; or cannot hear yet.
  opened: new Promise((done) => { open = done; }),
  state: "connecting", _abort: null, _running: false, _wake: null, _closed: false,

  _set(state) {
    if (state === this.state) return;
    this.state = state;
    for (const each of watching.state) each(state);
  },

  restart() {
    this._abort?.abort();
    this._wake?.();
    this.start();
  },

  async start() {
    if (this._running) return;
    this._running = true;
    let pause = 300, missed = false;  // whether something may have changed after it was read
    const slow = setTimeout(() => { missed = true; open(); }, SLOW);
    for (;;) {
      if (this._closed) await seen();
      this._closed = false;
      this._abort = new AbortController();
      const quiet = setInterval(() => { if (Date.now() - heard > 20000) this._abort.abort(); }, 5000);
      let heard = Date.now();
      try {
        const answer = await call("GET", "/local/events", undefined, this._abort.signal);
        for await (const [name, content] of events(answer)) {
          heard = Date.now();
          if (name === "hello") {
            clearTimeout(slow);
            this._set("live");
            open();
            if (missed) news.add({ again: true });
            pause = 300;
          } else if (name === "runs") {
            news.add({ runs: content.runs });
          } else if (name === "gone") {
            news.add({ gone: content.runs });
          }
          tell();
        }
      } catch (error) {
        if (error.status === 401) pause = 60000;
      } finally {
        clearInterval(quiet);
      }
      missed = true;
      open();
      this._set("offline");
      await new Promise((done) => { this._wake = done; setTimeout(done, pause); });
      pause = Math.min(pause * 1.6, 4000);
    }
  },

  close() {
    this._closed = true;
    this._abort?.abort();
    news.drop();  // everything is read again
  },
};

let closing;
function looked() {
  clearTimeout(closing);
  if (document.hidden) closing = setTimeout(() => stream.close(), UNSEEN);
  else tell();
}
document.addEventListener("visibilitychange", looked);
looked();
