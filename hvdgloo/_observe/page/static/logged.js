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

/** Return a job's series with the curve of `name` that begins with what was logged first, in the first minutes. */
function withEarly(series, early, name) {
  const values = series.logged[name] ?? series.at.map(() => null);
  const last = early.at.at(-1);
  if (last === undefined || series.width > 1) return { ...series, logged: { [name]: values } };
  const first = series.at.findIndex((at) => at + series.width > last);
  const rest = first < 0 ? series.at.length : first;
  return {
    ...series,
    // The item in which the early points end comes after them.
    at: [...early.at, ...series.at.slice(rest).map((at) => Math.max(at, last + 0.01))],
    logged: { [name]: [...(early.logged[name] ?? early.at.map(() => null)), ...values.slice(rest)] },
  };
}

class Logged {
  constructor(view) {
    this._view = view;
    this._charts = new Map();
  }

  render({ job, series, early }) {
    const entries = Object.entries(job.logged);
    dom.byId("logged").hidden = !entries.length;
    dom.describe(dom.byId("logged-values"), entries.map(([name, value]) => [name, format.measured(value)]));
    for (const name of Object.keys({ ...early.logged, ...series.logged }).slice(0, MOST_LOGGED_CHARTS)) {
      if (this._charts.has(name)) continue;
      const chart = new Chart(loggedChart(name), this._view);
      this._charts.set(name, chart);
      dom.byId("logged-plots").append(chart.figure);
    }
    // A single point is no line.
    for (const [name, chart] of this._charts) {
      const drawn = withEarly(series, early, name);
      chart.figure.hidden = !RUNNING.has(job.state) && known(drawn.logged[name]) < 2;
      if (!chart.figure.hidden) chart.render(drawn, job);
    }
  }

  redraw() {
    for (const chart of this._charts.values()) if (!chart.figure.hidden) chart.redraw();
  }
}
