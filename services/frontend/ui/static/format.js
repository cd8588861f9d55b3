// Numbers, times and states as text.

const NONE = "–";
const isNumber = (value) => typeof value === "number" && Number.isFinite(value);

export const count = (value) => (isNumber(value) ? Math.round(value).toLocaleString("en-US") : NONE);

export const rate = (value) => {
  if (!isNumber(value)) return NONE;
  return value > 0 && value < 10 ? value.toFixed(1) : count(value);
};

export const percent = (value) => (isNumber(value) ? `${Math.round(value * 100)} %` : NONE);

export function seconds(value) {
  if (!isNumber(value)) return NONE;
  const size = Math.abs(value);
  if (size === 0) return "0 ms";
  if (size >= 100) return `${Math.round(value)} s`;
  if (size >= 10) return `${value.toFixed(1)} s`;
  if (size >= 1) return `${value.toFixed(2)} s`;
  return `${(value * 1000).toFixed(size >= 0.1 ? 0 : 1)} ms`;
}

export const cost = (value, unit) => {
  if (!isNumber(value)) return NONE;
  return unit === "s" ? seconds(value) : `${Number(value.toPrecision(4))}${unit ? ` ${unit}` : ""}`;
};

export const clock = (wall_s) => (isNumber(wall_s) ? new Date(wall_s * 1000).toLocaleTimeString("en-GB") : NONE);

export const age = (wall_s, now_s) => {
  if (!isNumber(wall_s)) return NONE;
  const gone = Math.max(0, now_s - wall_s);
  return gone < 120 ? `${Math.floor(gone)} s` : gone < 7200 ? `${Math.floor(gone / 60)} min` : `${Math.floor(gone / 3600)} h`;
};

export const shortId = (id) => (id.length > 12 ? `${id.slice(0, 10)}…` : id);

export const place = (prefill, decode) => {
  if (!decode) return prefill || NONE;
  return prefill ? `${prefill} → ${decode}` : decode;
};

const GOOD = new Set(["ok", "passing", "finished", "accepted", "complete"]);
const WARN = new Set(["draining", "joining", "paths lost", "queued", "warning", "proposed", "hold", "stale", "cancelled", "unknown"]);
const LIVE = new Set(["prefilling", "transferring", "decoding"]);

export function toneOf(state) {
  if (GOOD.has(state)) return "good";
  if (LIVE.has(state)) return "live";
  if (WARN.has(state)) return "warn";
  return state === "" || state === "none" || state === "keep" ? "quiet" : "bad";
}
