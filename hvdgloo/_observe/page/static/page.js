"use strict";

/* The page: its selection, and when each part is drawn. */

class Page {
  constructor(server, { isReport = false } = {}) {
    this._server = server;
    this._store = new Store();
    this._changed = new Set();
    this._scheduled = false;
    this._chosen = null;
    this._table = false;
    this._theme = "";
    this._filter = new RankFilter(() => this._touch("ranks"));
    this._view = new TimeView(() => this._touch("view"));
    const choose = (rank) => this.choose(rank);
    this._summary = new Summary();
    this._grid = new Grid(this._filter, choose);
    this._rankTable = new RankTable(this._filter, choose);
    this._card = new RankCard({ onClose: () => this.choose(null), onOutput: () => this._showOutput() });
    this._charts = new Charts(this._view);
    this._logged = new Logged(this._view);
    this._stragglers = new Stragglers(this._view, choose);
    this._events = new Events(choose);
    this._output = new Output(server.lines, isReport ? { atOnce: MOST_LINES } : {});
    this._details = new Details();
    this._traces = new Traces(server);
    this._ownSeries = null;
    this._views = this._makeViews(isReport);
    for (const id of ["as-grid", "as-table"]) dom.byId(id).addEventListener("click", () => this._showTable(id === "as-table"));
    window.addEventListener("hashchange", () => this._readHash());
    document.addEventListener("visibilitychange", () => this._schedule());
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this._recolour());
    setInterval(() => this._tick(), 1000);
  }

  receive(kind, value) {
    if (kind === "snapshot") {
      this._store.replace(value);
      for (const part of PARTS_OF_STORE) this._changed.add(part);
      if (dom.byId("content").hidden) {
        dom.byId("content").hidden = false;
        this._watchSections();
        this._readHash();
      }
    } else {
      this._store.update(value);
      for (const part of Object.keys(value)) this._changed.add(part === "gone" ? "ranks" : part);
    }
    if (this._chosen !== null && this._changed.has("series")) this._fetchSeries();
    this._schedule();
  }

  /** Choose a rank, whose details and curves are shown; null is all of them. */
  choose(rank) {
    const hash = rank === null ? "#all" : `#rank-${rank}`;
    if (location.hash !== hash) location.hash = hash;
    else this._readHash();
  }

  /** Follow the system's theme, or use a given one: "light", "dark" or "". */
  setTheme(theme) {
    this._theme = theme;
    document.documentElement.style.colorScheme = theme || "light dark";
    dom.setText(dom.byId("theme"), `Theme: ${theme || "system"}`);
    this._recolour();
  }

  _recolour() {
    colour.forget();
    this._touch("view");
  }

  _touch(part) {
    this._changed.add(part);
    this._schedule();
  }

  /** Draw with the next frame; a hidden page draws nothing. */
  _schedule() {
    if (this._scheduled || document.hidden || !this._store.known || !this._changed.size) return;
    this._scheduled = true;
    requestAnimationFrame(() => {
      this._scheduled = false;
      const changed = this._changed;
      this._changed = new Set();
      this._draw(changed);
      performance.clearMarks("drawn");
      performance.mark("drawn", { detail: this._store.job.now });
    });
  }

  /** The drawing functions, with the parts of the store whose changes call them. */
  _makeViews(isReport) {
    const views = [
      ["summary", ["job", "hosts", "ranks", "planes", "stragglers", "events"], (store) => this._summary.render(store)],
      ["ranks", ["ranks", "hosts"], (store) => this._drawRanks(store)],
      ["logged", ["job", "series", "view", "events", "marks"], (store, changed) => this._drawLogged(store, changed)],
      ["charts", ["series", "view", "events", "marks"], (store, changed) => this._drawCharts(store, changed)],
      ["stragglers", ["stragglers", "waits", "heat", "view", "events", "marks"], (store, changed) => this._drawStragglers(store, changed)],
      ["events", ["events", "job"], (store) => this._events.render(store)],
      ["output", ["output", "job", "ranks"], (store) => this._output.render(store.output, isReport ? culprit(store.job) : null, stopped(store))],
      ["planes", ["planes", "job"], (store) => this._details.renderPlanes(store)],
      ["trace", ["events", "job"], (store) => this._traces.render(store)],
      ["hosts", ["hosts"], (store) => this._details.renderHosts(store)],
      ["details", ["settings", "changed", "units", "job"], (store) => this._details.renderSettings(store)],
    ];
    return new Map(views.map(([id, parts, draw]) => [id, { parts, draw, seen: true, pending: new Set() }]));
  }

  /** Draw the sections that are in sight; the others wait until they are. */
  _draw(changed) {
    this._view.set(this._store.job.started, this._store.job.now);
    if (changed.has("events") || changed.has("marks")) this._view.marks = marksOf(this._store);
    for (const view of this._views.values()) {
      for (const part of view.parts) if (changed.has(part)) view.pending.add(part);
      if (!view.pending.size || !view.seen) continue;
      const { pending } = view;
      view.pending = new Set();
      view.draw(this._store, pending);
    }
  }

  _watchSections() {
    const observer = new IntersectionObserver((entries) => {
      for (const { target, isIntersecting } of entries) this._views.get(target.id).seen = isIntersecting;
      this._touch("seen");
    });
    // A hidden section is not in sight, but decides itself whether it is shown.
    for (const id of this._views.keys()) if (id !== "trace" && id !== "logged") observer.observe(dom.byId(id));
    window.addEventListener("beforeprint", () => this._drawForPaper());
    window.addEventListener("afterprint", () => this.setTheme(this._theme));
  }

  /** Draw everything at once, dark on light. */
  _drawForPaper() {
    const theme = this._theme;
    this.setTheme("light");
    this._theme = theme;
    for (const view of this._views.values()) view.seen = true;
    this._draw(new Set(["view"]));
  }

  _drawRanks(store) {
    this._filter.render(store);
    if (this._table) this._rankTable.render(store, this._chosen);
    else this._grid.render(store, this._chosen);
    this._card.render(store, this._chosen);
  }

  _drawCharts(store, changed) {
    const series = this._chosen === null ? store.series : (this._ownSeries ?? EMPTY_SERIES);
    if (changed.has("series")) this._charts.render(series, store.job);
    else this._charts.redraw();
  }

  _drawLogged(store, changed) {
    if (changed.has("job") || changed.has("series")) this._logged.render(store);
    else this._logged.redraw();
  }

  _drawStragglers(store, changed) {
    if (changed.has("heat") || changed.has("stragglers") || changed.has("waits")) this._stragglers.render(store);
    else this._stragglers.redraw();
  }

  _tick() {
    if (this._store.known && !document.hidden) this._summary.tick(this._store);
  }

  _readHash() {
    // Links within the page, as the one to its content, choose nothing.
    if (!/^#(rank-\d+|all)$/.test(location.hash) && location.hash) return;
    const rank = /^#rank-(\d+)$/.exec(location.hash)?.[1];
    const chosen = rank === undefined ? null : Number(rank);
    if (chosen !== this._chosen) {
      this._chosen = chosen;
      this._ownSeries = null;
      if (chosen !== null) this._fetchSeries();
    }
    this._charts.setScope(chosen === null ? "all ranks" : `rank ${chosen}`);
    this._touch("ranks");
    this._touch("series");
  }

  async _fetchSeries() {
    const rank = this._chosen;
    if (document.hidden || this._fetchingSeries === rank) return;
    this._fetchingSeries = rank;
    try {
      const series = await this._server.series(rank);
      if (rank === this._chosen) this._ownSeries = series;
    } catch (error) {
      if (rank === this._chosen) this._charts.setScope(error.message);
    }
    this._fetchingSeries = null;
    this._touch("series");
  }

  _showOutput() {
    this._output.showRank(this._chosen);
    dom.byId("output").scrollIntoView({ block: "nearest" });
    dom.byId("search").focus({ preventScroll: true });
  }

  _showTable(table) {
    this._table = table;
    dom.byId("grid").hidden = table;
    dom.byId("table").hidden = !table;
    dom.setAttribute(dom.byId("as-grid"), "aria-pressed", String(!table));
    dom.setAttribute(dom.byId("as-table"), "aria-pressed", String(table));
    this._touch("ranks");
  }
}

/** The rank whose failure has ended the job; null if it has not failed, or for another reason. */
function culprit(job) {
  const found = job.state === "failed" && /\brank (\d+)\b/.exec(job.message);
  return found ? Number(found[1]) : null;
}

/** The ranks that ended only because the job failed. */
const stopped = ({ job, ranks }) => (job.state === "failed" ? ranks.filter(({ state }) => state === "ended").map(({ rank }) => rank) : []);

const EMPTY_SERIES = {
  at: [],
  width: 1,
  steps_per_second: [],
  step_seconds: [],
  computing: [],
  waiting: [],
  communicating: [],
  bytes_per_second: {},
  cpu: [],
  memory: [],
  logged: {},
};

const STATUS_TEXTS = {
  live: "live",
  reconnecting: "connection lost; trying again",
  refused: "this page’s link is no longer valid: open the address that hvdgloo printed",
  over: "the job is over",
  report: "report",
};

function setStatus(status) {
  dom.setText(dom.byId("connection"), STATUS_TEXTS[status]);
  dom.setClass(dom.byId("connection"), "connection " + status);
}

/** The theme's button goes from the system's to light to dark; the choice is kept, where the browser keeps anything. */
function bindTheme(page) {
  const themes = ["", "light", "dark"];
  let theme = "";
  try {
    theme = localStorage.getItem("hvdgloo-theme") ?? "";
  } catch {
    // Without storage, each page begins with the system's theme.
  }
  page.setTheme(theme);
  dom.byId("theme").addEventListener("click", () => {
    theme = themes[(themes.indexOf(theme) + 1) % themes.length];
    page.setTheme(theme);
    try {
      localStorage.setItem("hvdgloo-theme", theme);
    } catch {
      // As above.
    }
  });
}

function main() {
  // A report is this page with its contents included.
  const recording = dom.byId("recording");
  if (!recording) {
    const page = new Page(server);
    bindTheme(page);
    follow((kind, value) => page.receive(kind, value), setStatus);
    return;
  }
  const { snapshot, ...rest } = JSON.parse(recording.textContent);
  snapshot.job.control = false;
  document.body.classList.add("report");
  const page = new Page(recorded(rest), { isReport: true });
  bindTheme(page);
  setStatus("report");
  page.receive("snapshot", snapshot);
}

main();
