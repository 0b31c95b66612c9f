"use strict";

/* Numbers that the program logs with hvd.log, and a chart of each. */

/** More names have their numbers, but no charts. */
const MOST_LOGGED_CHARTS = 24;

/** A chart of what was logged as `name`. */
const loggedChart = (name) => ({
  title: name,
  free: true,
  text: format.measured,
  curves: (series) => [{ name: "", values: series.logged[name] ?? series.at.map(() => null), colour: "indigo" }],
});

class Logged {
  constructor(view) {
    this._view = view;
    this._charts = new Map();
  }

  render({ job, series }) {
    const entries = Object.entries(job.logged);
    dom.byId("logged").hidden = !entries.length;
    dom.describe(dom.byId("logged-values"), entries.map(([name, value]) => [name, format.measured(value)]));
    for (const name of Object.keys(series.logged).slice(0, MOST_LOGGED_CHARTS)) {
      if (this._charts.has(name)) continue;
      const chart = new Chart(loggedChart(name), this._view);
      this._charts.set(name, chart);
      dom.byId("logged-plots").append(chart.figure);
    }
    // A single point is no line.
    for (const [name, chart] of this._charts) {
      chart.figure.hidden = !RUNNING.has(job.state) && known(series.logged[name] ?? []) < 2;
      if (!chart.figure.hidden) chart.render(series, job);
    }
  }

  redraw() {
    for (const chart of this._charts.values()) if (!chart.figure.hidden) chart.redraw();
  }
}
