// The playground: one prompt to one to four models, answered side by side.
import { html, useState, useEffect, useRef, Notice, Tokens, Copy, Code, Dialog, count, value } from "./base.js";
import { get, call, events } from "./api.js";

const MAX = 4;

export function Playground({ address }) {
  const [choices, setChoices] = useState(null);
  const [models, setModels] = useState(() => (address.query.get("models") ?? "").split(",").filter(Boolean).slice(0, MAX));
  const [kind, setKind] = useState("chat");
  const [messages, setMessages] = useState([{ role: "user", content: "" }]);
  const [prompt, setPrompt] = useState("");
  const [settings, setSettings] = useState({ temperature: 0.7, max_tokens: 128, top_p: 1, seed: "", stop: "" });
  const [answers, setAnswers] = useState([]);
  const [running, setRunning] = useState(false);
  const [error, setError] = useState(null);
  const [code, setCode] = useState(false);
  const stop = useRef(null);

  useEffect(() => {
    get("/local/choices").then((found) => {
      setChoices(found);
      setModels((before) => (before.length ? before : found.models.slice(0, 1)));
    }, setError);
    return () => stop.current?.abort();
  }, []);

  const asked = (model) => ({
    model, ...(kind === "chat" ? { messages } : { prompt }),
    temperature: settings.temperature, max_tokens: settings.max_tokens, top_p: settings.top_p,
    ...(settings.seed === "" ? {} : { seed: Number(settings.seed) }),
    ...(settings.stop === "" ? {} : { stop: settings.stop.split("\n").filter(Boolean) }),
  });
  const run = async () => {
    stop.current?.abort();
    const controller = (stop.current = new AbortController());
    setRunning(true);
    setError(null);
    setAnswers(models.map((model) => ({ model, texts: [], logprobs: [], state: "waiting" })));
    await Promise.all(models.map((model, place) => answer(asked(model), controller.signal, (change) =>
      setAnswers((before) => before.map((each, number) => (number === place ? change(each) : each))))));
    if (stop.current === controller) setRunning(false);
  };
  const set = (name) => (event) => setSettings({ ...settings, [name]: event.target.type === "number" || event.target.type === "range" ? Number(event.target.value) : event.target.value });
  const empty = kind === "chat" ? !messages.some((message) => message.content.trim()) : !prompt;
  const keys = (event) => { if (event.key === "Enter" && (event.ctrlKey || event.metaKey) && !empty) { event.preventDefault(); run(); } };
  return html`
    <div class="title"><h1>Playground</h1></div>
    ${error && html`<${Notice} kind="bad">${error.message}<//>`}
    <div class="play">
      <section class="card settings" aria-label="Prompt and settings">
        <h2>Models</h2>
        ${models.map((model, place) => html`<div class="pick-model"><label class="grow"><span class="hidden">Model ${place + 1}</span>
          <select value=${model} onChange=${(event) => setModels(models.map((each, number) => (number === place ? event.target.value : each)))}>${options(choices, model)}</select></label>
          ${models.length > 1 && html`<button class="small" aria-label=${`Remove model ${place + 1}`} onClick=${() => setModels(models.filter((_, number) => number !== place))}>×</button>`}</div>`)}
        ${models.length < MAX && html`<button class="small" onClick=${() => setModels([...models, choices?.checkpoints[0]?.path ?? choices?.models[0] ?? ""])}>Add a model</button>`}
        <div class="switch" role="radiogroup" aria-label="Kind of prompt">${["chat", "prompt"].map((each) => html`<label><input type="radio" name="kind" checked=${kind === each} onChange=${() => setKind(each)} /> ${each === "chat" ? "Chat" : "Plain prompt"}</label>`)}</div>
        ${kind === "prompt" ? html`<label>Prompt <textarea rows="6" value=${prompt} onInput=${(event) => setPrompt(event.target.value)} onKeyDown=${keys}></textarea></label>`
          : messages.map((message, place) => html`<div class="message"><label class="hidden" for=${`role${place}`}>Role</label>
            <select id=${`role${place}`} value=${message.role} onChange=${(event) => setMessages(messages.map((each, number) => (number === place ? { ...each, role: event.target.value } : each)))}>
              ${["system", "user", "assistant"].map((role) => html`<option value=${role}>${role}</option>`)}</select>
            <textarea rows="3" aria-label=${`Message ${place + 1}`} placeholder="Write a message…" value=${message.content} onKeyDown=${keys} onInput=${(event) => setMessages(messages.map((each, number) => (number === place ? { ...each, content: event.target.value } : each)))}></textarea>
            ${messages.length > 1 && html`<button class="small" aria-label=${`Remove message ${place + 1}`} onClick=${() => setMessages(messages.filter((_, number) => number !== place))}>×</button>`}</div>`)}
        ${kind === "chat" && html`<button class="small" onClick=${() => setMessages([...messages, { role: messages.at(-1)?.role === "user" ? "assistant" : "user", content: "" }])}>Add a message</button>`}
        <div class="grid">
          <label>Temperature <input type="number" min="0" max="10" step="0.1" value=${settings.temperature} onInput=${set("temperature")} /></label>
          <label>Top p <input type="number" min="0.01" max="1" step="0.05" value=${settings.top_p} onInput=${set("top_p")} /></label>
          <label>Most tokens <input type="number" min="1" max="32768" value=${settings.max_tokens} onInput=${set("max_tokens")} /></label>
          <label>Seed <input inputmode="numeric" pattern="[0-9]*" placeholder="random" value=${settings.seed} onInput=${(event) => setSettings({ ...settings, seed: event.target.value.replace(/\D/g, "") })} /></label>
        </div>
        <label>Stop at, one per line <textarea rows="2" value=${settings.stop} onInput=${(event) => setSettings({ ...settings, stop: event.target.value })}></textarea></label>
        <p class="actions"><button onClick=${() => setCode(true)} disabled=${!models.length}>Copy as code</button>
          ${running ? html`<button class="bad" onClick=${() => { stop.current?.abort(); setRunning(false); }}>Stop</button>` : html`<button class="main" disabled=${empty || !models.length} onClick=${run} title="Ctrl+Enter">Run</button>`}</p>
      </section>
      <div class="answers n${Math.max(1, answers.length)}" aria-live="off">
        ${!answers.length && html`<${Notice}>The answers appear here, side by side.<//>`}
        ${answers.map((each, place) => html`<${Answer} key=${place} answer=${each} />`)}
      </div>
    </div>
    ${code && html`<${Dialog} title="The same in code" onClose=${() => setCode(false)}><${Code} text=${script(asked(models[0]), kind)} label="Python" />
      <p class="actions"><button onClick=${() => setCode(false)}>Close</button></p><//>`}`;
}

function options(choices, model) {
  const known = [...(choices?.models ?? []), ...(choices?.checkpoints ?? []).map((each) => each.path)];
  return html`${!known.includes(model) && html`<option value=${model}>${model || "choose…"}</option>`}
    <optgroup label="Base models">${(choices?.models ?? []).map((name) => html`<option value=${name}>${name}</option>`)}</optgroup>
    <optgroup label="Checkpoints">${(choices?.checkpoints ?? []).map((each) => html`<option value=${each.path}>${each.name} · ${each.kind} · ${each.run.slice(0, 8)}</option>`)}</optgroup>`;
}

// Tokens are collected and drawn together once per frame: a fast model sends more than a screen can show.
async function answer(body, signal, change) {
  let waiting = [];
  const draw = () => {
    const more = waiting;
    waiting = [];
    if (more.length) change((each) => ({ ...each, state: "running", texts: [...each.texts, ...more.map((token) => token.text)], logprobs: [...each.logprobs, ...more.map((token) => token.logprob)] }));
  };
  const timer = setInterval(draw, 60);
  const began = performance.now();
  try {
    for await (const [name, content] of events(await call("POST", "/local/playground", body, signal))) {
      if (name === "token") waiting.push(content);
      else if (name === "done") { draw(); change((each) => ({ ...each, ...content, texts: each.texts, count: content.tokens, state: "done", seconds: (performance.now() - began) / 1000 })); }
      else if (name === "error") { draw(); change((each) => ({ ...each, state: "failed", error: content.error ?? "The service failed." })); }
    }
    draw();
    change((each) => (each.state === "done" || each.state === "failed" ? each : { ...each, state: "failed", error: "The connection ended before the answer did." }));
  } catch (error) {
    draw();
    change((each) => ({ ...each, state: error.name === "AbortError" ? "stopped" : "failed", error: error.name === "AbortError" ? null : error.message }));
  } finally {
    clearInterval(timer);
  }
}

function Answer({ answer: { model, texts, logprobs, alternatives, text, state, error, stop_reason, count: number, seconds } }) {
  const whole = text ?? texts.join("");
  return html`<article class="card answer ${state}" aria-label=${`Answer of ${model}`} aria-busy=${state === "running" || state === "waiting"}>
    <header><h3 title=${model}>${model.startsWith("tinker://") ? model.split("/").slice(-1)[0] : model}</h3>
      ${state === "done" && html`<span class="soft">${count(number)} tokens, ${value(number / seconds)} tokens/s, ${stop_reason}</span>`}
      ${(state === "waiting" || state === "running") && html`<span class="soft">writing…</span>`}
      ${whole && html`<${Copy} text=${whole} />`}</header>
    ${error && html`<${Notice} kind="bad">${error}<//>`}
    <div class="text" data-text=${state === "done" ? whole : null}><${Tokens} texts=${texts} logprobs=${logprobs} alternatives=${alternatives} /></div>
  </article>`;
}

function script(asked, kind) {
  const path = asked.model.startsWith("tinker://");
  const text = (what) => JSON.stringify(what);
  const given = kind === "chat"
    ? `messages = ${JSON.stringify(asked.messages, null, 4)}\nprompt = types.ModelInput.from_ints(\n    tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)\n)`
    : `prompt = types.ModelInput.from_ints(tokenizer.encode(${text(asked.prompt)}))`;
  const more = [`max_tokens=${asked.max_tokens}`, `temperature=${asked.temperature}`, `top_p=${asked.top_p}`];
  if (asked.seed !== undefined) more.push(`seed=${asked.seed}`);
  if (asked.stop) more.push(`stop=${text(asked.stop)}`);
  return `import tinkex
from tinkex import types

service = tinkex.ServiceClient(base_url=${text(location.origin)})
sampling = service.create_sampling_client(${path ? "model_path" : "base_model"}=${text(asked.model)})
tokenizer = sampling.get_tokenizer()
${given}
result = sampling.sample(
    prompt, num_samples=1, sampling_params=types.SamplingParams(${more.join(", ")})
).result()
print(tokenizer.decode(result.sequences[0].tokens))
`;
}
