// Requests, and the picture of a decision.

import { byId, chip, element, setText, Table } from "./dom.js";
import { age, count, place, seconds, shortId, toneOf } from "./format.js";
import { picture } from "./picture.js";
import { explain } from "./stream.js";

const IN_FLIGHT = new Set(["queued", "prefilling", "transferring", "decoding"]);

export class RequestsView {
  constructor() {
    this.mesh = null;
    this.chosen = "";
    this.asked = 0;
    this.table = new Table(byId("requests"), this.columns(), {
      caption: "Requests", key: (row) => row.id, empty: "No request is known.",
      rowClass: (node, row) => node.classList.toggle("chosen", row.id === this.chosen),
    });
    byId("request-show").addEventListener("input", () => this.show());
    byId("explain-form").addEventListener("submit", (event) => {
      event.preventDefault();
      const id = byId("explain-id").value.trim();
      if (id) this.choose(id);
    });
  }

  columns() {
    return [
      { title: "Request", header: true, signature: (row) => row.id, render: (row) => {
        const made = element("button", { type: "button", class: "plain mono", onclick: () => this.choose(row.id) }, shortId(row.id));
        made.setAttribute("aria-label", `Explain request ${row.id}`);
        made.title = row.id;
        return made;
      } },
      { title: "State", signature: (row) => `${row.state} ${row.reason}`, render: (row) => {
        const made = chip(row.state, toneOf(row.state));
        if (row.reason) made.title = row.reason;
        return made;
      } },
      { title: "Where", clip: true, render: (row) => place(row.prefill, row.decode) },
      { title: "Prompt", number: true, render: (row) => count(row.prompt_tokens) },
      { title: "Cached", number: true, render: (row) => count(row.cached_tokens) },
      { title: "Output", number: true, render: (row) => (row.output_tokens ? count(row.output_tokens) : "–") },
      { title: "First token", number: true, render: (row) => seconds(row.ttft_observed_s) },
      { title: "Tenant", clip: true, render: (row) => row.tenant || "–" },
      { title: "Age", number: true, render: (row) => age(row.at, this.mesh.at) },
    ];
  }

  update(mesh) {
    this.mesh = mesh;
    this.show();
  }

  show() {
    if (!this.mesh) return;
    const onlyFlight = byId("request-show").value === "flight";
    this.table.update(this.mesh.requests.filter((row) => !onlyFlight || IN_FLIGHT.has(row.state)));
    const queued = this.mesh.requests_queued ? `, ${count(this.mesh.requests_queued)} queued` : "";
    setText(byId("request-count"), `${count(this.mesh.requests_in_flight)} in flight${queued}`);
  }

  async choose(id) {
    this.chosen = id;
    this.asked += 1;
    const asked = this.asked;
    byId("explain-id").value = id;
    this.show();
    try {
      const explanation = await explain(id);
      if (asked === this.asked) byId("picture").replaceChildren(picture(explanation));
    } catch (error) {
      if (asked === this.asked) byId("picture").replaceChildren(element("p", { class: "problems" }, error.message));
    }
  }
}
