// Run by node: a chat and its stream.
import OpenAI from "openai";

const [url, model] = process.argv.slice(2);
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "tml-local", maxRetries: 0 });
const asked = { model, messages: [{ role: "user", content: "Hi" }], max_tokens: 8, seed: 1 };
const answer = await client.chat.completions.create(asked);
let text = "";
for await (const chunk of await client.chat.completions.create({ ...asked, stream: true }))
  text += chunk.choices[0]?.delta?.content ?? "";
if (text !== answer.choices[0].message.content) throw new Error("the stream differs");
console.log("ok");
