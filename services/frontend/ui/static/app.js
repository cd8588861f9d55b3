// The page: views, theme, key, and the link to the frontend.

import { byId, element, setText } from "./dom.js";
import { clock } from "./format.js";
import { MeshView } from "./mesh.js";
import { RequestsView } from "./requests.js";
import { PlannerView } from "./planner.js";
import { ChatView } from "./chat.js";
import { follow, setKey } from "./stream.js";

const NAMES = ["mesh", "requests", "planner", "chat"];
const tabs = NAMES.map((name) => byId(`tab-${name}`));

function show(name, { focus = false } = {}) {
  NAMES.forEach((each, i) => {
    const chosen = each === name;
    tabs[i].setAttribute("aria-selected", String(chosen));
    tabs[i].tabIndex = chosen ? 0 : -1;
    byId(`view-${each}`).hidden = !chosen;
    if (chosen && focus) tabs[i].focus();
  });
  if (location.hash !== `#${name}`) history.replaceState(null, "", `#${name}`);
  if (name === "chat") chat.open();
}

function onTabKey(event) {
  const at = tabs.indexOf(event.currentTarget);
  const next = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: tabs.length - 1 }[event.key];
  if (next === undefined) return;
  event.preventDefault();
  show(NAMES[(next + tabs.length) % tabs.length], { focus: true });
}

function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  byId("theme").value = theme;
  try {
    localStorage.setItem("kvmesh-theme", theme);
  } catch {
    // Storage is off: the choice lasts as long as the page.
  }
}

function storedTheme() {
  try {
    const found = localStorage.getItem("kvmesh-theme");
    return ["auto", "light", "dark"].includes(found) ? found : "auto";
  } catch {
    return "auto";
  }
}

function openKeyDialog(reason) {
  setText(byId("key-reason"), reason);
  if (!byId("key-dialog").open) byId("key-dialog").showModal();
  byId("key-input").focus();
}

// Asks for the operator's key. Resolves when one is entered, also if the dialog was closed meanwhile.
function needKey(reason) {
  byId("key-button").hidden = false;
  openKeyDialog(reason);
  return new Promise((wake) => {
    byId("key-form").onsubmit = (event) => {
      event.preventDefault();
      setKey(byId("key-input").value.trim());
      byId("key-input").value = "";
      byId("key-dialog").close();
      chat.forget();
      wake();
    };
  });
}

function onState(state, detail = "") {
  const link = byId("link");
  const shown = { live: ["live", "good"], lost: ["disconnected", "bad"], key: ["key needed", "warn"] }[state];
  setText(link, shown[0]);
  link.dataset.tone = shown[1];
  link.title = detail;
  document.body.classList.toggle("stale", state !== "live");
}

function onMesh(mesh) {
  setText(byId("as-of"), `as of ${clock(mesh.at)}`);
  const problems = mesh.error ? [mesh.error] : mesh.problems;
  const box = byId("problems");
  const text = problems.join("\n");
  if (box.dataset.text !== text) {
    box.dataset.text = text;
    box.replaceChildren(...problems.map((problem) => element("p", {}, problem)));
    box.hidden = !problems.length;
  }
  if (mesh.error) return;
  for (const view of [meshView, requests, planner]) view.update(mesh);
  announceChanges(mesh);
}

let known = null;
let announcedAt = 0;
let waiting = [];

// Screen readers hear of workers that come, go or change their state, a few seconds' changes at a time.
function announceChanges(mesh) {
  const states = new Map(mesh.workers.map((worker) => [worker.id, worker.state]));
  if (known) {
    for (const [id, state] of states) if (known.get(id) !== state) waiting.push(`${id} is ${state}`);
    for (const id of known.keys()) if (!states.has(id)) waiting.push(`${id} has left`);
  }
  known = states;
  if (!waiting.length || mesh.at - announcedAt < 3) return;
  announcedAt = mesh.at;
  const [shown, more] = [waiting.slice(0, 5), waiting.length - 5];
  setText(byId("announce"), `${shown.join(", ")}${more > 0 ? ` and ${more} more changes` : ""}`);
  waiting = [];
}

const meshView = new MeshView();
const requests = new RequestsView();
const planner = new PlannerView();
const chat = new ChatView({
  explain: (id) => {
    show("requests");
    requests.choose(id);
    byId("explain-id").focus();
  },
});

tabs.forEach((tab, i) => {
  tab.addEventListener("click", () => show(NAMES[i]));
  tab.addEventListener("keydown", onTabKey);
});
byId("key-button").addEventListener("click", () => openKeyDialog(""));
byId("theme").addEventListener("change", (event) => setTheme(event.target.value));
addEventListener("hashchange", () => {
  const name = location.hash.slice(1);
  if (NAMES.includes(name)) show(name);
});
setTheme(storedTheme());
show(NAMES.includes(location.hash.slice(1)) ? location.hash.slice(1) : "mesh");
follow({ onMesh, onState, needKey });
