// A decision of the router as a picture: candidates with the terms of their costs, what was expected, and what was observed.

import { bar, chip, element } from "./dom.js";
import { clock, cost, count, place, seconds } from "./format.js";

const SHOWN_FIRST = 12;
const TERM_COLOURS = 6;
const KINDS = { prefilled: "prompt computed", first_token: "first token", finished: "finished", failed: "failed", cancelled: "cancelled" };

export function picture(it) {
  const scored = it.candidates.filter((each) => !each.removed_by && each.terms.length);
  const removed = it.candidates.filter((each) => each.removed_by);
  return element("article", { class: "card", "aria-label": `Decision on request ${it.request_id}` },
    head(it), ttft(it), cached(it), timeline(it), candidates(it, scored), leftOut(it, removed), earlier(it));
}

const fact = (name, ...value) => [element("dt", {}, name), element("dd", {}, ...value)];

function head(it) {
  const placed = it.decode
    ? element("p", { class: "verdict" }, element("strong", {}, place(it.prefill, it.decode)), " ", ...it.reasons.flatMap((reason) => [chip(reason, "live"), " "]))
    : element("p", { class: "verdict" }, it.refused ? chip(`refused: ${it.refused}`, "bad") : chip("queued", "warn"));
  const more = [];
  if (it.attempt) more.push(...fact("Attempt", count(it.attempt + 1)));
  if (it.queued_s !== null) more.push(...fact("Queued", seconds(it.queued_s)));
  if (it.margin !== null) more.push(...fact("Margin", `${cost(it.margin, it.unit)} to the second best`));
  return element("div", {}, placed, element("dl", { class: "facts" },
    ...fact("Request", element("code", {}, it.request_id)),
    ...fact("Decided", `${clock(it.decided_at)} by ${it.router}, policy ${it.policy}`), ...more));
}

// Values of one kind on one scale, such as expected and observed.
function compare(title, rows, format) {
  const known = rows.filter(([, value]) => value !== null && value !== undefined);
  if (!known.length) return null;
  const most = Math.max(1e-12, ...known.map(([, value]) => value));
  const cells = known.flatMap(([name, value, tone]) => [
    element("span", { class: "quiet" }, name), bar(value / most, tone ?? ""), element("span", { class: "value" }, format(value)),
  ]);
  return element("section", {}, element("h4", {}, title), element("div", { class: "compare" }, ...cells));
}

const ttft = (it) => compare("Time to first token", [["expected", it.ttft_expected_s], ["observed", it.ttft_observed_s]], seconds);

const cached = (it) => compare("Prompt tokens",
  [["all", it.prompt_tokens], ["cached, expected", it.cached_expected], ["cached, found", it.cached_found]], count);

function timeline(it) {
  const found = it.reports.filter((report) => report.kind !== "progress");
  if (!found.length) return null;
  const last = Math.max(1e-12, ...found.map((report) => report.elapsed_s));
  const cells = found.flatMap((report) => [
    element("span", { class: "quiet" }, KINDS[report.kind] ?? report.kind, report.reason ? ` (${report.reason}${report.worker ? ` at ${report.worker}` : ""})` : ""),
    bar(report.elapsed_s / last, report.kind === "failed" ? "bad" : ""),
    element("span", { class: "value" }, seconds(report.elapsed_s)),
  ]);
  return element("section", {}, element("h4", {}, "Observed", element("small", {}, "after the placement")),
    element("div", { class: "compare" }, ...cells));
}

function candidates(it, scored) {
  if (!scored.length) return null;
  const names = [...new Set(scored.flatMap((each) => each.terms.map(([name]) => name)))];
  const most = Math.max(1e-12, ...scored.map((each) => each.terms.reduce((total, [, value]) => total + Math.max(0, value), 0)));
  const legend = names.map((name, i) => element("li", {}, element("i", { class: `t${i % TERM_COLOURS}` }), name));
  const rows = scored.map((each) => candidateRow(each, { names, most, unit: it.unit }));
  const hidden = rows.slice(SHOWN_FIRST).filter((row) => !row.classList.contains("chosen"));
  for (const row of hidden) row.hidden = true;
  const heads = ["Pair", "Cost by term", "Sum", ...names];
  const table = element("table", { class: "pairs" },
    element("caption", { class: "hidden" }, "Candidates, best first, with the terms of their costs"),
    element("thead", {}, element("tr", {}, ...heads.map((text, i) => element("th", { scope: "col", class: i > 1 ? "number" : null }, text)))),
    element("tbody", {}, ...rows));
  const button = hidden.length
    ? element("button", { type: "button", onclick: (event) => { for (const row of hidden) row.hidden = false; event.currentTarget.remove(); } }, `Show ${hidden.length} more`)
    : null;
  const size = it.candidates_left_out ? `${scored.length}, ${it.candidates_left_out} not listed` : `${scored.length}`;
  return element("section", {}, element("h4", {}, "Candidates", element("small", {}, `${size}, lower is better`)),
    element("ul", { class: "legend" }, ...legend),
    element("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Candidates" }, table), button);
}

function candidateRow(each, { names, most, unit }) {
  const terms = new Map(each.terms);
  const parts = names.map((name, i) => {
    const part = element("i", { class: `t${i % TERM_COLOURS}` });
    part.style.width = `${(Math.max(0, terms.get(name) ?? 0) / most) * 100}%`;
    part.title = `${name} ${cost(terms.get(name), unit)}`;
    return part;
  });
  const pair = place(each.prefill, each.decode);
  const name = element("th", { scope: "row", class: "clip", title: pair }, each.chosen ? chip("chosen", "good") : null, each.chosen ? " " : null, pair);
  return element("tr", { class: each.chosen ? "chosen" : null }, name,
    element("td", { class: "stack-cell" }, element("span", { class: "stack", "aria-hidden": "true" }, ...parts)),
    element("td", { class: "number" }, element("strong", {}, cost(each.cost, unit))),
    ...names.map((term) => element("td", { class: "number" }, terms.has(term) ? cost(terms.get(term), unit) : "–")));
}

function leftOut(it, removed) {
  if (!removed.length) return null;
  const reasons = new Map();
  for (const each of removed) reasons.set(each.removed_by, [...(reasons.get(each.removed_by) ?? []), place(each.prefill, each.decode)]);
  const items = [...reasons].map(([reason, workers]) => element("li", {}, element("strong", {}, reason), `: ${workers.join(", ")}`));
  return element("section", {}, element("h4", {}, "Left out"), element("ul", { class: "removed" }, ...items));
}

function earlier(it) {
  if (!it.earlier.length) return null;
  const items = it.earlier.map((each) => {
    const reports = each.reports.map((report) => `${KINDS[report.kind] ?? report.kind}${report.reason ? ` (${report.reason})` : ""} after ${seconds(report.elapsed_s)}`);
    const where = each.refused ? `refused: ${each.refused}` : place(each.prefill, each.decode);
    return element("li", {}, `attempt ${each.attempt + 1}: ${[where, ...reports].join(", ")}`);
  });
  return element("section", {}, element("h4", {}, "Earlier placements"), element("ul", { class: "removed" }, ...items));
}
