// Elements and tables. Text only ever becomes textContent: names of workers and models come from other machines.

export const byId = (id) => document.getElementById(id);

export function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
    else if (value === true) made.setAttribute(key, "");
    else if (value !== false && value !== null && value !== undefined) made.setAttribute(key, value);
  }
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}

const SVG = "http://www.w3.org/2000/svg";

export function svg(name, attributes = {}, ...children) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

export const chip = (text, tone) => element("span", { class: "chip", "data-tone": tone }, text);

export function bar(share, tone = "") {
  const fill = element("i", { "data-tone": tone });
  fill.style.width = `${Math.max(0, Math.min(1, share)) * 100}%`;
  return element("span", { class: "bar", "aria-hidden": "true" }, fill);
}

// A share from 0 to 1 as a bar and a number. Calls of `update` keep the elements, so that the bar moves.
export function meter(share) {
  const track = bar(share ?? 0);
  const label = element("span", {});
  const made = element("span", { class: "meter" }, track, label);
  const update = (value) => {
    track.firstChild.style.width = `${Math.max(0, Math.min(1, value ?? 0)) * 100}%`;
    track.firstChild.dataset.tone = value >= 0.95 ? "bad" : value >= 0.85 ? "warn" : "";
    setText(label, value === null || value === undefined ? "–" : `${Math.round(value * 100)} %`);
  };
  update(share);
  return { node: made, update };
}

// A table whose rows are kept from one update to the next: focus, selection and scrolling survive.
// columns: {key, title, number, render(row) -> text | Node, meter(row), header, sort(row), signature(row), clip}
// signature: what a rendered node depends on. clip: a long text is cut.
export class Table {
  constructor(node, columns, { key, caption, empty = "Nothing to show.", onSort = null, rowClass = null } = {}) {
    this.columns = columns;
    this.key = key;
    this.empty = empty;
    this.rowClass = rowClass;
    this.sort = null;
    this.rows = new Map();
    this.order = "";
    this.body = element("tbody");
    this.heads = columns.map((column) => this.head(column, onSort));
    node.replaceChildren(
      element("caption", { class: "hidden" }, caption),
      element("thead", {}, element("tr", {}, ...this.heads)),
      this.body,
    );
  }

  head(column, onSort) {
    const attributes = { scope: "col", class: column.number ? "number" : null };
    if (!column.sort || !onSort) return element("th", attributes, column.title);
    const button = element("button", { type: "button", onclick: () => { this.sortBy(column); onSort(); } }, column.title);
    return element("th", { ...attributes, "aria-sort": "none" }, button);
  }

  sortBy(column) {
    const same = this.sort && this.sort.column === column;
    this.sort = { column, falls: same ? !this.sort.falls : Boolean(column.number || column.meter) };
    this.columns.forEach((each, i) => {
      if (!this.heads[i].hasAttribute("aria-sort")) return;
      const order = each !== column ? "none" : this.sort.falls ? "descending" : "ascending";
      this.heads[i].setAttribute("aria-sort", order);
    });
  }

  update(data) {
    const rows = this.sorted(data);
    const order = rows.map((row) => this.key(row)).join("\n");
    const seen = new Set();
    for (const row of rows) {
      const key = this.key(row);
      seen.add(key);
      let known = this.rows.get(key);
      if (!known) {
        known = this.makeRow(row);
        this.rows.set(key, known);
      }
      this.fill(known, row);
    }
    for (const [key, known] of this.rows) {
      if (!seen.has(key)) {
        known.node.remove();
        this.rows.delete(key);
      }
    }
    if (order !== this.order || !rows.length) this.arrange(rows);
    this.order = order;
  }

  sorted(data) {
    if (!this.sort) return data;
    const { column, falls } = this.sort;
    const value = (row) => column.sort(row);
    return [...data].sort((a, b) => {
      const [x, y] = [value(a), value(b)];
      const least = x === null || x === undefined ? 1 : y === null || y === undefined ? -1 : 0;
      if (least) return least;
      return (x < y ? -1 : x > y ? 1 : 0) * (falls ? -1 : 1);
    });
  }

  arrange(rows) {
    if (!rows.length) {
      const cell = element("td", { colspan: String(this.columns.length), class: "empty" }, this.empty);
      this.body.replaceChildren(element("tr", {}, cell));
      return;
    }
    // Only rows that are not where they belong move, so that the focused one keeps its focus.
    const wanted = new Set(rows.map((row) => this.rows.get(this.key(row)).node));
    for (const child of [...this.body.children]) if (!wanted.has(child)) child.remove();
    let at = this.body.firstChild;
    for (const row of rows) {
      const { node } = this.rows.get(this.key(row));
      if (node === at) at = at.nextSibling;
      else this.body.insertBefore(node, at);
    }
  }

  makeRow(row) {
    const cells = this.columns.map((column) => {
      const cell = element(column.header ? "th" : "td", {
        scope: column.header ? "row" : null, class: column.number ? "number" : column.clip ? "clip" : null,
      });
      let gauge = null;
      if (column.meter) {
        gauge = meter(column.meter(row));
        cell.append(gauge.node);
      }
      return { cell, gauge, shown: null };
    });
    return { node: element("tr", {}, ...cells.map((each) => each.cell)), cells };
  }

  fill(known, row) {
    this.columns.forEach((column, i) => {
      const slot = known.cells[i];
      if (slot.gauge) {
        slot.gauge.update(column.meter(row));
        return;
      }
      const shown = column.signature ? column.signature(row) : column.render(row);
      if (shown === slot.shown) return;
      slot.shown = shown;
      const content = column.signature ? column.render(row) : shown;
      if (content instanceof Node) slot.cell.replaceChildren(content);
      else setText(slot.cell, content);
      if (column.clip) slot.cell.title = slot.cell.textContent;
    });
    if (this.rowClass) this.rowClass(known.node, row);
  }
}
