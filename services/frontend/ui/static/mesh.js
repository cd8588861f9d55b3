// Totals, pools, workers and services.

import { byId, chip, element, setText, svg, Table } from "./dom.js";
import { count, percent, rate, seconds, toneOf } from "./format.js";

const SAMPLES_MAX = 90;
const sum = (rows, key) => rows.reduce((total, row) => total + (row[key] ?? 0), 0);

const state = { key: "state", title: "State", signature: (row) => `${row.state} ${row.note ?? ""}`, sort: (row) => row.state,
  render: (row) => {
    const made = chip(row.state, toneOf(row.state));
    if (row.note) made.title = row.note;
    return made;
  } };

const POOLS = [
  { title: "Model", clip: true, header: true, render: (row) => row.model },
  { title: "Role", render: (row) => row.role },
  { title: "Ready", number: true, render: (row) => `${row.ready} of ${row.workers}` },
  { title: "Planned", number: true, render: (row) => count(row.planned) },
  { title: "Running", number: true, render: (row) => count(row.running) },
  { title: "Waiting", number: true, render: (row) => count(row.waiting) },
  { title: "KV in use", meter: (row) => row.kv },
  { title: "Prompt tokens/s", number: true, render: (row) => rate(row.prompt_per_s) },
  { title: "Output tokens/s", number: true, render: (row) => rate(row.output_per_s) },
];

const WORKERS = [
  { title: "Worker", header: true, clip: true, render: (row) => row.id, sort: (row) => row.id },
  { title: "Role", render: (row) => row.role, sort: (row) => row.role },
  { title: "Model", clip: true, render: (row) => row.model, sort: (row) => row.model },
  { title: "Engine", render: (row) => row.engine, sort: (row) => row.engine },
  state,
  { title: "Running", number: true, render: (row) => count(row.running), sort: (row) => row.running },
  { title: "Waiting", number: true, render: (row) => count(row.waiting), sort: (row) => row.waiting },
  { title: "Placed", number: true, render: (row) => count(row.in_flight), sort: (row) => row.in_flight },
  { title: "KV in use", meter: (row) => row.kv, sort: (row) => row.kv },
  { title: "Prompt tokens/s", number: true, render: (row) => rate(row.prompt_per_s), sort: (row) => row.prompt_per_s },
  { title: "Output tokens/s", number: true, render: (row) => rate(row.output_per_s), sort: (row) => row.output_per_s },
  { title: "Cache hits", number: true, render: (row) => percent(row.hit_rate), sort: (row) => row.hit_rate },
  { title: "Index", render: (row) => row.trust || "–", sort: (row) => row.trust },
];

const SERVICES = [
  { title: "Service", header: true, render: (row) => row.service },
  { title: "Id", render: (row) => row.id },
  { title: "Address", render: (row) => row.address },
  { ...state, sort: undefined },
  { title: "Version", render: (row) => row.version || "–" },
];

class Tile {
  constructor(parent, title, { hasSpark = false } = {}) {
    this.value = document.createTextNode("–");
    this.more = element("small");
    this.samples = [];
    this.line = hasSpark ? svg("polyline", { points: "" }) : null;
    const chart = this.line
      ? svg("svg", { class: "spark", viewBox: `0 0 ${SAMPLES_MAX - 1} 20`, preserveAspectRatio: "none", "aria-hidden": "true" }, this.line)
      : null;
    parent.append(element("div", {}, element("dt", {}, title), element("dd", {}, this.value, this.more), chart));
  }

  set(text, more = "", sample = null) {
    if (this.value.data !== text) this.value.data = text;
    setText(this.more, more);
    if (!this.line || sample === null) return;
    this.samples.push(sample);
    if (this.samples.length > SAMPLES_MAX) this.samples.shift();
    const most = Math.max(1e-9, ...this.samples);
    const first = SAMPLES_MAX - this.samples.length;
    const points = this.samples.map((value, i) => `${first + i},${(19 - (value / most) * 18).toFixed(2)}`);
    this.line.setAttribute("points", points.join(" "));
  }
}

export class MeshView {
  constructor() {
    const tiles = byId("tiles");
    this.ready = new Tile(tiles, "Workers ready");
    this.running = new Tile(tiles, "Requests running", { hasSpark: true });
    this.waiting = new Tile(tiles, "Waiting", { hasSpark: true });
    this.output = new Tile(tiles, "Output tokens/s", { hasSpark: true });
    this.kv = new Tile(tiles, "KV in use", { hasSpark: true });
    this.ttft = new Tile(tiles, "Time to first token");
    this.pools = new Table(byId("pools"), POOLS, {
      caption: "Pools", key: (row) => `${row.model}\t${row.role}`, empty: "No worker is registered.",
    });
    this.workers = new Table(byId("workers"), WORKERS, {
      caption: "Workers", key: (row) => row.id, empty: "No worker matches.", onSort: () => this.showWorkers(),
    });
    this.services = new Table(byId("services"), SERVICES, { caption: "Services", key: (row) => row.id });
    this.mesh = null;
    for (const id of ["worker-filter", "worker-state"]) byId(id).addEventListener("input", () => this.showWorkers());
  }

  update(mesh) {
    this.mesh = mesh;
    this.showTiles(mesh);
    this.pools.update(mesh.pools);
    this.services.update(mesh.services);
    this.showWorkers();
  }

  showTiles({ pools, workers, plan, requests_queued: queued }) {
    const running = sum(pools.filter((pool) => pool.role === "decode"), "running");
    const waiting = sum(pools, "waiting") + queued;
    const output = sum(pools, "output_per_s");
    const [used, total] = [sum(workers, "kv_used"), sum(workers, "kv_total")];
    const p99 = plan ? plan.latencies.map((each) => each.ttft_p99_s).filter((value) => value !== null) : [];
    this.ready.set(count(sum(pools, "ready")), `of ${count(sum(pools, "workers"))}`);
    this.running.set(count(running), "", running);
    this.waiting.set(count(waiting), queued ? `${count(queued)} at routers` : "", waiting);
    this.output.set(rate(output), "", output);
    this.kv.set(total ? percent(used / total) : "–", "", total ? used / total : 0);
    this.ttft.set(p99.length ? seconds(Math.max(...p99)) : "–", p99.length ? "p99" : plan ? "" : "no planner");
  }

  showWorkers() {
    if (!this.mesh) return;
    const words = byId("worker-filter").value.toLowerCase().split(/\s+/).filter(Boolean);
    const wanted = byId("worker-state").value;
    const rows = this.mesh.workers.filter((row) => {
      if (wanted && (row.state === "ok") !== (wanted === "ok")) return false;
      const text = `${row.id} ${row.role} ${row.model} ${row.engine} ${row.state}`.toLowerCase();
      return words.every((word) => text.includes(word));
    });
    this.workers.update(rows);
    const all = this.mesh.workers.length + this.mesh.workers_left_out;
    const left = this.mesh.workers_left_out ? `, ${this.mesh.workers_left_out} not listed` : "";
    setText(byId("worker-count"), rows.length === all ? `${all}` : `${rows.length} of ${all}${left}`);
  }
}
