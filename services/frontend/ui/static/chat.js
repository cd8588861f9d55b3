// A playground: one conversation with a model of the mesh, over the same API that clients use.

import { byId, element } from "./dom.js";
import { count, seconds } from "./format.js";
import { checked, events, headers, url } from "./stream.js";

const TURNS_MAX = 200;

export class ChatView {
  constructor({ explain }) {
    this.explain = explain;
    this.turns = [];
    this.abort = null;
    this.hasModels = false;
    byId("chat-form").addEventListener("submit", (event) => {
      event.preventDefault();
      this.send();
    });
    byId("chat-text").addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      this.send();
    });
    byId("chat-stop").addEventListener("click", () => this.abort?.abort());
    byId("chat-clear").addEventListener("click", () => this.clear());
  }

  // Lists the models that the key may use.
  async open() {
    if (this.hasModels) return;
    try {
      const response = await checked(await fetch(url("v1/models"), { headers: headers() }));
      const names = (await response.json()).data.map((each) => String(each.id));
      byId("chat-model").replaceChildren(...names.map((name) => element("option", { value: name }, name)));
      this.hasModels = names.length > 0;
    } catch (error) {
      this.show("error", error.message);
    }
  }

  forget() {
    this.hasModels = false;
    if (!byId("view-chat").hidden) this.open();
  }

  clear() {
    this.abort?.abort();
    this.turns = [];
    byId("chat-log").replaceChildren();
    byId("chat-text").focus();
  }

  show(role, text) {
    const shown = element("div", { class: "text" }, text);
    const name = { user: "You", assistant: "Model", error: "Error" }[role];
    const turn = element("div", { class: "turn", "data-role": role }, element("span", { class: "hidden" }, `${name}:`), shown);
    byId("chat-log").append(turn);
    this.follow();
    return { turn, shown };
  }

  follow() {
    const log = byId("chat-log");
    log.scrollTop = log.scrollHeight;
  }

  async send() {
    const text = byId("chat-text").value.trim();
    if (!text || this.abort || !byId("chat-model").value) return; // Models are listed a moment after the page.
    byId("chat-text").value = "";
    this.show("user", text);
    this.turns.push({ role: "user", content: text });
    this.turns = this.turns.slice(-TURNS_MAX);
    this.abort = new AbortController();
    this.busy(true);
    try {
      await this.answer();
    } catch (error) {
      if (error.name !== "AbortError") this.show("error", error.message);
    } finally {
      this.abort = null;
      this.busy(false);
    }
  }

  busy(is) {
    byId("chat-send").hidden = is;
    byId("chat-stop").hidden = !is;
    if (!is) byId("chat-text").focus();
  }

  body() {
    return JSON.stringify({
      model: byId("chat-model").value,
      messages: this.turns,
      max_tokens: Number(byId("chat-tokens").value) || 256,
      temperature: Number(byId("chat-temperature").value),
      stream: true,
      stream_options: { include_usage: true },
    });
  }

  async answer() {
    const began = performance.now();
    const response = await checked(await fetch(url("v1/chat/completions"), {
      method: "POST", headers: headers({ "Content-Type": "application/json" }), body: this.body(), signal: this.abort.signal,
    }));
    const { turn, shown } = this.show("assistant", "");
    const words = document.createTextNode("");
    shown.append(words);
    let [first, usage] = [null, null];
    try {
      for await (const data of events(response)) {
        if (data === "[DONE]") break;
        const chunk = JSON.parse(data);
        if (chunk.error) throw new Error(String(chunk.error.message));
        usage = chunk.usage ?? usage;
        const piece = chunk.choices?.[0]?.delta?.content ?? "";
        if (piece) {
          first ??= performance.now();
          words.appendData(piece);
          this.follow();
        }
      }
    } finally {
      this.turns.push({ role: "assistant", content: words.data });
      this.note(turn, response, { began, first, usage });
    }
  }

  note(turn, response, { began, first, usage }) {
    const parts = [];
    if (first !== null) parts.push(`first token after ${seconds((first - began) / 1000)}`);
    if (usage) {
      const took_s = (performance.now() - (first ?? began)) / 1000;
      parts.push(`${count(usage.completion_tokens)} tokens`);
      if (took_s > 0) parts.push(`${count(usage.completion_tokens / took_s)} tokens/s`);
    }
    const id = response.headers.get("x-kvmesh-request-id") ?? "";
    const button = id ? element("button", { type: "button", class: "plain", onclick: () => this.explain(id) }, "Why there?") : null;
    turn.append(element("div", { class: "note" }, ...parts.map((text) => element("span", {}, text)), button));
    byId("announce").textContent = "The answer is complete.";
    this.follow();
  }
}
