"use strict";

/* Tables: the one of ranks, which can be sorted and makes rows only for what is seen of it; and small ones. */

/** A table with these headers; `setRows` fills it with rows of texts, and touches only what has changed. */
function makeTable(caption, headers) {
  const body = dom.make("tbody");
  const table = dom.make(
    "table",
    {},
    dom.make("caption", { class: "unseen", text: caption }),
    dom.make("thead", {}, dom.make("tr", {}, ...headers.map((text) => dom.make("th", { scope: "col", text })))),
    body,
  );
  return {
    table,
    setRows(rows) {
      while (body.childElementCount > rows.length) body.lastElementChild.remove();
      rows.forEach((texts, i) => {
        const row = body.children[i] ?? body.appendChild(dom.make("tr", {}, ...texts.map(() => dom.make("td"))));
        texts.forEach((text, j) => dom.setText(row.children[j], text));
      });
    },
  };
}

/** In pixels, as page.css has it. */
const ROW_HEIGHT = 28;
const ROWS_BEYOND = 6;

const RANK_COLUMNS = [
  { title: "rank", value: (row) => row.rank, text: (row) => String(row.rank) },
  { title: "host", value: (row, store) => store.hostOf(row), text: (row, store) => store.hostOf(row) },
  { title: "state", value: (row) => STATES.indexOf(row.state), text: (row) => row.state },
  { title: "steps", value: (row) => row.steps, text: (row) => format.count(row.steps) },
  { title: "time per step", value: (row) => row.step_seconds, text: (row) => format.seconds(row.step_seconds) },
  { title: "computing", value: (row) => row.computing, text: (row) => format.share(row.computing) },
  { title: "waiting", value: (row) => row.waiting, text: (row) => format.share(row.waiting) },
  { title: "communicating", value: (row) => row.communicating, text: (row) => format.share(row.communicating) },
  { title: "data", value: (row) => row.bytes_per_second, text: (row) => format.bytes(row.bytes_per_second) + "/s" },
  { title: "processor", value: (row) => row.cpu, text: (row) => format.cores(row.cpu) },
  { title: "memory", value: (row) => row.memory, text: (row) => format.bytes(row.memory) },
  { title: "what", value: (row) => row.detail, text: (row) => row.detail },
];

class RankTable {
  constructor(filter, onChoose) {
    this._root = dom.byId("table");
    this._filter = filter;
    this._column = RANK_COLUMNS[0];
    this._descending = false;
    this._rows = [];
    this._above = dom.make("tr", { class: "space", "aria-hidden": "true" }, dom.make("td", { colspan: String(RANK_COLUMNS.length) }));
    this._below = this._above.cloneNode(true);
    this._body = dom.make("tbody");
    this._table = dom.make(
      "table",
      {},
      dom.make("caption", { class: "unseen", text: "Ranks" }),
      dom.make("thead", {}, dom.make("tr", {}, ...RANK_COLUMNS.map((column) => this._header(column)))),
      dom.make("tbody", {}, this._above),
      this._body,
      dom.make("tbody", {}, this._below),
    );
    this._root.append(this._table);
    this._root.addEventListener("scroll", () => this._draw(), { passive: true });
    new ResizeObserver(() => this._draw()).observe(this._root);
    this._body.addEventListener("click", (event) => {
      const row = event.target.closest("tr");
      if (row) onChoose(Number(row.dataset.rank));
    });
  }

  render(store, chosen) {
    this._store = store;
    this._chosen = chosen;
    const { value } = this._column;
    const sign = this._descending ? -1 : 1;
    const keyed = store.ranks
      .filter((row) => this._filter.shows(row, store.hostOf(row)))
      .map((row) => ({ row, key: value(row, store) }));
    keyed.sort((a, b) => (a.key < b.key ? -sign : a.key > b.key ? sign : a.row.rank - b.row.rank));
    this._rows = keyed.map(({ row }) => row);
    dom.setAttribute(this._table, "aria-rowcount", String(this._rows.length + 1));
    this._draw();
  }

  _header(column) {
    const button = dom.make("button", { type: "button", text: column.title });
    const header = dom.make("th", { scope: "col" }, button);
    if (column === this._column) header.setAttribute("aria-sort", "ascending");
    button.addEventListener("click", () => {
      this._descending = column === this._column && !this._descending;
      this._column = column;
      for (const other of header.parentElement.children) other.removeAttribute("aria-sort");
      header.setAttribute("aria-sort", this._descending ? "descending" : "ascending");
      this.render(this._store, this._chosen);
    });
    return header;
  }

  /** Make rows for what is seen, and space for the rest. */
  _draw() {
    const first = Math.max(0, Math.floor(this._root.scrollTop / ROW_HEIGHT) - ROWS_BEYOND);
    const last = Math.min(this._rows.length, first + Math.ceil(this._root.clientHeight / ROW_HEIGHT) + 2 * ROWS_BEYOND);
    this._above.style.height = first * ROW_HEIGHT + "px";
    this._below.style.height = (this._rows.length - last) * ROW_HEIGHT + "px";
    const shown = this._rows.slice(first, last);
    while (this._body.childElementCount > shown.length) this._body.lastElementChild.remove();
    shown.forEach((row, i) => this._setRow(i, first + i, row));
  }

  _setRow(i, place, row) {
    let node = this._body.children[i];
    if (!node) {
      node = dom.make("tr", {}, ...RANK_COLUMNS.map(() => dom.make("td")));
      const link = dom.make("button", { type: "button", class: "plain" });
      node.firstElementChild.append(link);
      node.children[2].append(dom.make("span"), dom.make("span"));
      this._body.append(node);
    }
    node.dataset.rank = row.rank;
    dom.setAttribute(node, "aria-rowindex", String(place + 2));
    dom.setClass(node, row.rank === this._chosen ? "chosen" : "");
    RANK_COLUMNS.forEach(({ text }, j) => {
      const cell = node.children[j];
      if (j === 2) dom.setClass(cell.firstElementChild, "key " + row.state);
      dom.setText(j === 0 ? cell.firstElementChild : j === 2 ? cell.lastElementChild : cell, text(row, this._store));
    });
  }
}
