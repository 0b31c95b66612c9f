"use strict";

/* All ranks by host, as cells that show the present state of each; and the details of the selected one. */

/** Names of a rank's states. */
const STATE_WORDS = { ...Object.fromEntries(STATES.map((state) => [state, state])), waiting: "waiting for others" };

/** With more ranks, cells hold less: first no details, then no numbers. */
const MOST_CARDS = 16;
const MOST_NUMBERS = 256;

/** What a rank is doing, in words: "rank 3 on h2: waiting for rank 1 (allreduce.w)". */
function describeRank(store, row) {
  return `rank ${row.rank} on ${store.hostOf(row)}: ${row.detail || STATE_WORDS[row.state]}`;
}

/** Which ranks are shown: a text that is part of a host's name or is a rank, and states. */
class RankFilter {
  constructor(onChange) {
    this.text = "";
    this.states = new Set();
    this._onChange = onChange;
    this._buttons = new Map();
    dom.byId("rank-filter").addEventListener("input", (event) => {
      this.text = event.target.value.trim().toLowerCase();
      onChange();
    });
    for (const state of STATES) {
      const button = dom.make(
        "button",
        { type: "button", "aria-pressed": "false", class: "state" },
        dom.make("span", { class: "key " + state }),
        dom.make("span", { text: STATE_WORDS[state] }),
        dom.make("b"),
      );
      button.addEventListener("click", () => this._toggle(state));
      this._buttons.set(state, button);
      dom.byId("state-filter").append(button);
    }
  }

  /** Show how many ranks are in each state. */
  render({ ranks }) {
    const counts = Object.fromEntries(STATES.map((state) => [state, 0]));
    for (const { state } of ranks) counts[state] += 1;
    for (const [state, button] of this._buttons) {
      button.hidden = !counts[state] && !this.states.has(state);
      dom.setText(button.lastElementChild, format.count(counts[state]));
      dom.setAttribute(button, "aria-pressed", String(this.states.has(state)));
    }
  }

  shows(row, host) {
    if (this.states.size && !this.states.has(row.state)) return false;
    return !this.text || host.toLowerCase().includes(this.text) || this.text.replace(/^rank\s*/, "") === String(row.rank);
  }

  _toggle(state) {
    if (!this.states.delete(state)) this.states.add(state);
    this._onChange();
  }
}

/** One row of cells for each host. Cells stay as long as their ranks; only what has changed is touched. */
class Grid {
  constructor(filter, onChoose) {
    this._root = dom.byId("grid");
    this._filter = filter;
    this._onChoose = onChoose;
    this._cells = new Map();
    this._rows = new Map();
    this._current = null;
    this._root.addEventListener("click", (event) => this._choose(event.target.closest(".cell")));
    this._root.addEventListener("pointerover", (event) => this._read(event.target.closest(".cell")));
    this._root.addEventListener("focusin", (event) => this._read(event.target.closest(".cell")));
    this._root.addEventListener("keydown", (event) => this._move(event));
  }

  render(store, chosen) {
    this._store = store;
    const density = store.ranks.length <= MOST_CARDS ? "cards" : store.ranks.length <= MOST_NUMBERS ? "numbers" : "dots";
    dom.setClass(this._root, "grid " + density);
    const shown = new Set();
    for (const row of store.ranks) {
      const host = store.hostOf(row);
      const cell = this._cellOf(row, host);
      this._setCell(cell, row, row.rank === chosen);
      const visible = this._filter.shows(row, host);
      if (cell.hidden === visible) cell.hidden = !visible;
      if (visible) shown.add(host);
    }
    for (const [rank, cell] of this._cells) {
      if (!store.byRank.has(rank)) {
        cell.remove();
        this._cells.delete(rank);
      }
    }
    for (const host of store.hosts) this._setHost(host, shown);
    if (!this._current?.isConnected || this._current.hidden) this._setCurrent(this._visible()[0] ?? null);
    if (this._pointed !== undefined) this._say(this._pointed);
    else dom.setText(dom.byId("readout"), shown.size ? "Point at a rank to see what it is doing; select it for details." : "No rank matches.");
  }

  _cellOf(row, host) {
    let cell = this._cells.get(row.rank);
    if (cell && cell.dataset.host === host) return cell;
    cell?.remove();
    cell = dom.make(
      "div",
      { role: "gridcell", tabindex: "-1" },
      dom.make("span", { class: "unseen", text: "rank" }),
      dom.make("span", { class: "number", text: String(row.rank) }),
      dom.make("span", { class: "word" }),
      dom.make("span", { class: "what" }),
    );
    cell.dataset.rank = row.rank;
    cell.dataset.host = host;
    this._cells.set(row.rank, cell);
    const cells = this._rowOf(host).lastElementChild;
    const next = [...cells.children].find((other) => Number(other.dataset.rank) > row.rank);
    cells.insertBefore(cell, next ?? null);
    return cell;
  }

  _rowOf(host) {
    let row = this._rows.get(host);
    if (!row) {
      row = dom.make(
        "div",
        { role: "row", class: "host" },
        dom.make(
          "div",
          { role: "rowheader", class: "host-name" },
          dom.make("b", { text: host }),
          dom.make("span", { class: "host-use" }),
        ),
        dom.make("div", { class: "cells" }),
      );
      this._rows.set(host, row);
      this._root.append(row);
    }
    return row;
  }

  _setCell(cell, row, chosen) {
    dom.setClass(cell, `cell ${row.state}${chosen ? " chosen" : ""}`);
    dom.setAttribute(cell, "aria-selected", String(chosen));
    if (!this._root.classList.contains("cards")) {
      dom.setAttribute(cell, "aria-label", `rank ${row.rank}: ${row.detail || STATE_WORDS[row.state]}`);
      return;
    }
    // A card's text is its accessible name, too.
    cell.removeAttribute("aria-label");
    dom.setText(cell.querySelector(".word"), row.state);
    const step = row.step_seconds ? `${format.seconds(row.step_seconds)} per step` : "";
    dom.setText(cell.querySelector(".what"), row.detail || step);
  }

  _setHost(host, shown) {
    const row = this._rows.get(host.name);
    if (!row) return;
    row.hidden = !shown.has(host.name) || !row.lastElementChild.childElementCount;
    const use = host.state !== "up" ? host.state : host.cores ? `${format.share(host.cpu)} of ${format.plural(host.cores, "core")}` : "";
    dom.setText(row.firstElementChild.lastElementChild, use);
  }

  _visible() {
    return [...this._root.querySelectorAll(".host:not([hidden]) .cell:not([hidden])")];
  }

  _setCurrent(cell) {
    this._current?.setAttribute("tabindex", "-1");
    this._current = cell;
    cell?.setAttribute("tabindex", "0");
  }

  _choose(cell) {
    if (!cell) return;
    this._setCurrent(cell);
    this._onChoose(Number(cell.dataset.rank));
  }

  _read(cell) {
    if (!cell) return;
    this._pointed = Number(cell.dataset.rank);
    this._say(this._pointed);
  }

  _say(rank) {
    const row = this._store.byRank.get(rank);
    dom.setText(dom.byId("readout"), row ? describeRank(this._store, row) : "");
  }

  /** Arrow keys go to neighbours, Home and End to a host's first and last rank, Enter chooses. */
  _move(event) {
    const cell = event.target.closest(".cell");
    if (!cell) return;
    if (event.key === "Enter" || event.key === " ") {
      event.preventDefault();
      this._choose(cell);
      return;
    }
    const all = this._visible();
    const ofHost = all.filter((other) => other.dataset.host === cell.dataset.host);
    const place = all.indexOf(cell);
    const beside = (step) => {
      const hosts = [...new Set(all.map((other) => other.dataset.host))];
      const host = hosts[hosts.indexOf(cell.dataset.host) + step];
      const cells = all.filter((other) => other.dataset.host === host);
      return cells[Math.min(ofHost.indexOf(cell), cells.length - 1)];
    };
    const moves = {
      ArrowLeft: () => all[place - 1],
      ArrowRight: () => all[place + 1],
      ArrowUp: () => beside(-1),
      ArrowDown: () => beside(1),
      Home: () => (event.ctrlKey ? all[0] : ofHost[0]),
      End: () => (event.ctrlKey ? all.at(-1) : ofHost.at(-1)),
    };
    if (!(event.key in moves)) return;
    event.preventDefault();
    const target = moves[event.key]();
    if (target) {
      this._setCurrent(target);
      target.focus();
    }
  }
}

/** The details of one rank. */
class RankCard {
  constructor({ onClose, onOutput }) {
    this._root = dom.byId("rank");
    this._title = dom.make("h3", { tabindex: "-1" });
    this._what = dom.make("p", { class: "what" });
    this._facts = dom.make("dl", { class: "pairs" });
    const split = dom.make("div", { class: "split", role: "img" });
    this._setSplit = makeSplit(split);
    const output = dom.make("button", { type: "button", text: "Its output" });
    const close = dom.make("button", { type: "button", text: "All ranks" });
    output.addEventListener("click", onOutput);
    close.addEventListener("click", onClose);
    this._root.append(
      this._title,
      this._what,
      split,
      this._facts,
      dom.make("p", { class: "buttons" }, output, close),
    );
  }

  render(store, chosen) {
    const row = store.byRank.get(chosen);
    this._root.hidden = !row;
    if (!row) return;
    const host = store.hosts[row.host];
    dom.setText(this._title, `Rank ${row.rank} on ${store.hostOf(row)}`);
    dom.setText(this._what, row.detail ? `${row.state}: ${row.detail}` : row.state);
    this._setSplit(row);
    dom.describe(this._facts, [
      ["steps", format.count(row.steps)],
      ["time per step", format.seconds(row.step_seconds)],
      ...PARTS.map(({ name, label }) => [label, format.share(row[name])]),
      ["before its first operation", format.seconds(row.before_first)],
      ["operations", format.count(row.operations)],
      ["data", `${format.bytes(row.bytes)}, ${format.bytes(row.bytes_per_second)}/s now`],
      ["processor", format.cores(row.cpu)],
      ["memory", format.bytes(row.memory)],
      ...this._gpu(host?.gpus.find(({ index }) => index === row.gpu)),
      ["process", `${row.pid}, local rank ${row.local_rank}`],
    ]);
  }

  _gpu(gpu) {
    if (!gpu) return [];
    return [
      ["GPU", `${gpu.index}: ${gpu.name}`],
      ["GPU in use", `${format.share(gpu.use)}, ${format.bytes(gpu.memory)} of ${format.bytes(gpu.memory_total)}`],
      ["GPU clock", `${format.count(gpu.clock)} of ${format.count(gpu.clock_most)} MHz`],
    ];
  }
}
