// The planner's plan beside what there is.

import { byId, chip, element, setText, Table } from "./dom.js";
import { clock, count, rate, seconds, toneOf } from "./format.js";

const difference = (row) => {
  if (row.planned === null) return ["no plan", "quiet"];
  const missing = row.planned - row.ready;
  if (!missing) return ["as planned", "good"];
  return missing > 0 ? [`${missing} missing`, "warn"] : [`${-missing} more than planned`, "warn"];
};

const POOLS = [
  { title: "Model", clip: true, header: true, render: (row) => row.model },
  { title: "Role", render: (row) => row.role },
  { title: "Planned", number: true, render: (row) => count(row.planned) },
  { title: "Ready", number: true, render: (row) => count(row.ready) },
  { title: "Registered", number: true, render: (row) => count(row.workers) },
  { title: "Difference", signature: (row) => difference(row)[0], render: (row) => chip(...difference(row)) },
  { title: "Running", number: true, render: (row) => count(row.running) },
  { title: "Waiting", number: true, render: (row) => count(row.waiting) },
  { title: "KV in use", meter: (row) => row.kv },
];

const met = (value, target) => (value === null || !target ? null : value <= target);

function versus(value, target) {
  const made = element("span", {}, `${seconds(value)}${target ? ` of ${seconds(target)}` : ""} `);
  const verdict = met(value, target);
  if (verdict !== null) made.append(chip(verdict ? "met" : "missed", verdict ? "good" : "bad"));
  return made;
}

const LATENCIES = [
  { title: "Model", clip: true, header: true, render: (row) => row.model },
  { title: "Requests/s", number: true, render: (row) => rate(row.requests_per_s) },
  { title: "First token, mean", number: true, render: (row) => seconds(row.ttft_mean_s) },
  { title: "First token, p99", number: true, signature: (row) => `${seconds(row.ttft_p99_s)} ${row.ttft_s}`, render: (row) => versus(row.ttft_p99_s, row.ttft_s) },
  { title: "Between tokens, mean", number: true, render: (row) => seconds(row.itl_mean_s) },
  { title: "Between tokens, p99", number: true, signature: (row) => `${seconds(row.itl_p99_s)} ${row.itl_s}`, render: (row) => versus(row.itl_p99_s, row.itl_s) },
  { title: "Observation", signature: (row) => row.state, render: (row) => chip(row.state, toneOf(row.state)) },
];

const CHANGES = new Set(["flip", "scale"]);
const shape = (it) => `${it.prefill} + ${it.decode}`;

const DECISIONS = [
  { title: "Time", header: true, render: (row) => clock(row.at) },
  { title: "Model", clip: true, render: (row) => row.model },
  { title: "Action", signature: (row) => row.action, render: (row) => chip(row.action, row.action === "keep" ? "quiet" : row.action === "hold" ? "warn" : "live") },
  { title: "Prefill + decode", number: true, render: (row) => (CHANGES.has(row.action) ? `${shape(row.ready)} → ${shape(row.wanted)}` : shape(row.ready)) },
  { title: "Requests/s", number: true, render: (row) => rate(row.observed_per_s) },
  { title: "Predicted", number: true, render: (row) => rate(row.predicted_per_s) },
  { title: "Reason", render: (row) => row.reason },
  { title: "Outcome", signature: (row) => row.outcome, render: (row) => (row.outcome === "none" ? "–" : chip(row.outcome, toneOf(row.outcome))) },
];

export class PlannerView {
  constructor() {
    this.pools = new Table(byId("plan-pools"), POOLS, { caption: "Plan and reality", key: (row) => `${row.model}\t${row.role}` });
    this.latencies = new Table(byId("plan-latencies"), LATENCIES, {
      caption: "Latency and targets", key: (row) => row.model, empty: "Nothing is observed yet.",
    });
    this.decisions = new Table(byId("plan-decisions"), DECISIONS, {
      caption: "Decisions of the planner", key: (row) => `${row.number}`, empty: "The planner has decided nothing yet.",
    });
  }

  update({ plan, pools }) {
    setText(byId("plan-head"), plan ? this.head(plan) : "No planner is registered.");
    const targets = new Map((plan?.targets ?? []).map((each) => [each.model, each]));
    this.pools.update(pools);
    this.latencies.update((plan?.latencies ?? []).map((row) => {
      const target = targets.get(row.model);
      return { ...row, ttft_s: target?.ttft_s ?? null, itl_s: target?.itl_s ?? null };
    }));
    this.decisions.update(plan?.decisions ?? []);
  }

  head(plan) {
    const parts = [`mode ${plan.mode.replace("_", " ")}`, `reads ${plan.source}`];
    if (plan.observed_at !== null) parts.push(`observed at ${clock(plan.observed_at)}`);
    if (plan.leader) parts.push(`leader ${plan.leader}`);
    return [...parts, ...plan.problems].join(" · ");
  }
}
