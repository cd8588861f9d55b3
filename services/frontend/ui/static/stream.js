// The link to the frontend: readings of the mesh, explanations, chat. The key is in a header, never in a URL.

const BASE = document.baseURI;
const RETRY_MS = [500, 1000, 2000, 5000];
let key = "";

export const setKey = (value) => { key = value; };
export const url = (path) => new URL(path, BASE).href;
export const headers = (more = {}) => (key ? { ...more, Authorization: `Bearer ${key}` } : more);

export class Refused extends Error {
  constructor(status, message, reason) {
    super(message);
    this.status = status;
    this.reason = reason;
  }
}

export async function checked(response) {
  if (response.ok) return response;
  let body = {};
  try {
    body = (await response.json()).error ?? {};
  } catch {
    body = {};
  }
  throw new Refused(response.status, String(body.message ?? `status ${response.status}`), String(body.code ?? ""));
}

// The data of each server-sent event of a response. EventSource cannot send a key in a header.
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      const records = (rest + value).split("\n\n");
      rest = records.pop();
      for (const record of records) {
        const data = record.split("\n").filter((line) => line.startsWith("data: ")).map((line) => line.slice(6));
        if (data.length) yield data.join("\n");
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

const pause = (ms) => new Promise((wake) => setTimeout(wake, ms));

// Calls back with every reading, and with what stands in the way, for ever.
export async function follow({ onMesh, onState, needKey }) {
  let failures = 0;
  for (;;) {
    try {
      const response = await checked(await fetch(url("ui/events"), { headers: headers(), cache: "no-store" }));
      onState("live");
      for await (const data of events(response)) {
        failures = 0;
        try {
          onMesh(JSON.parse(data));
        } catch (defect) {
          console.error(defect);
        }
      }
      onState("lost", "the connection ended");
    } catch (error) {
      if (error instanceof Refused && (error.status === 401 || error.status === 403)) {
        onState("key", error.message);
        await needKey(error.message);
        failures = 0;
        continue;
      }
      onState("lost", error instanceof Refused ? error.message : "the frontend cannot be reached");
    }
    await pause(RETRY_MS[Math.min(failures, RETRY_MS.length - 1)]);
    failures += 1;
  }
}

export async function explain(id) {
  const response = await fetch(url(`ui/explain/${encodeURIComponent(id)}`), { headers: headers(), cache: "no-store" });
  return (await checked(response)).json();
}
