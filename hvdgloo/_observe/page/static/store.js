"use strict";

/* The job: a Snapshot and the Updates since (hvdgloo/_observe/view.py describes them). */

/** States of a rank, in the order of view.STATES. */
const STATES = ["starting", "computing", "waiting", "communicating", "idle", "stalled", "lost", "ended", "failed"];

/** Parts that an update replaces, if it has them. */
const REPLACED = ["job", "hosts", "planes", "stragglers", "waits", "early", "marks", "settings", "changed", "units", "output"];
const PARTS_OF_STORE = [...REPLACED, "ranks", "events", "series", "heat"];
const MOST_EVENTS = 500;
const sum = (values) => values.reduce((total, value) => total + value, 0);
const CURVES = ["steps_per_second", "step_seconds", "computing", "waiting", "communicating", "cpu", "memory"];

/** Curves that differ from job to job, by name. */
const NAMED_CURVES = ["bytes_per_second", "logged"];

/** Put the points of `update` into `series`: both are sorted by `at`, and what is new is at the end. */
function mergeSeries(series, update) {
  if (update.width !== series.width) {
    Object.assign(series, update);
    return;
  }
  for (const kind of NAMED_CURVES) {
    for (const name of Object.keys(update[kind])) series[kind][name] ??= series.at.map(() => null);
  }
  update.at.forEach((at, i) => {
    const place = placeOf(series.at, at);
    for (const name of CURVES) series[name][place] = update[name][i];
    for (const kind of NAMED_CURVES) {
      for (const [name, curve] of Object.entries(series[kind])) curve[place] = update[kind][name]?.[i] ?? null;
    }
  });
}

/** Put the columns of `update` into `heat`; a rank without a row made no other wait. */
function mergeHeat(heat, update) {
  if (update.width !== heat.width) {
    Object.assign(heat, update);
    return;
  }
  const rows = new Map(heat.rank.map((rank, i) => [rank, heat.seconds[i]]));
  for (const rank of update.rank) {
    if (!rows.has(rank)) rows.set(rank, heat.at.map(() => 0));
  }
  const columns = new Map(update.rank.map((rank, i) => [rank, update.seconds[i]]));
  update.at.forEach((at, i) => {
    const place = placeOf(heat.at, at);
    for (const [rank, row] of rows) row[place] = columns.get(rank)?.[i] ?? 0;
  });
  heat.rank = [...rows.keys()].sort((a, b) => a - b);
  heat.seconds = heat.rank.map((rank) => rows.get(rank));
}

/** Where in `times` `at` is; a new one is put at the end. */
function placeOf(times, at) {
  let place = times.length;
  while (place > 0 && times[place - 1] >= at) place -= 1;
  times[place] = at;
  return place;
}

class Store {
  constructor() {
    this.known = false;
    /** One object for each rank, in ascending order: its columns of Snapshot.ranks, `state` as a word. */
    this.ranks = [];
    this.byRank = new Map();
    this.receivedAt = 0;
  }

  /** Start again with a snapshot; all parts have changed. */
  replace(snapshot) {
    this.known = true;
    this.receivedAt = performance.now();
    for (const part of PARTS_OF_STORE) if (part !== "ranks") this[part] = snapshot[part];
    this.byRank.clear();
    this._setRanks(snapshot.ranks);
  }

  /** Take in what has changed; its parts are those of `update` that are there. */
  update(update) {
    this.receivedAt = performance.now();
    for (const part of REPLACED) this[part] = update[part] ?? this[part];
    for (const rank of update.gone ?? []) this.byRank.delete(rank);
    if (update.ranks || update.gone) this._setRanks(update.ranks ?? { rank: [] });
    if (update.events) this.events = this.events.concat(update.events).slice(-MOST_EVENTS);
    if (update.series) mergeSeries(this.series, update.series);
    if (update.heat) mergeHeat(this.heat, update.heat);
  }

  hostOf(row) {
    return this.hosts[row.host]?.name ?? "?";
  }

  /** How long the job has run, to this moment; the clocks of the two machines need not agree. */
  elapsed() {
    const since = this.job.state === "running" || this.job.state === "starting" ? performance.now() - this.receivedAt : 0;
    return Math.max(0, this.job.now - this.job.started + since / 1000);
  }

  _setRanks(columns) {
    const names = Object.keys(columns);
    const before = this.byRank.size;
    columns.rank.forEach((rank, i) => {
      let row = this.byRank.get(rank);
      if (!row) this.byRank.set(rank, (row = {}));
      for (const name of names) row[name] = columns[name][i];
      row.state = STATES[row.state] ?? "starting";
    });
    if (this.byRank.size !== before || this.ranks.length !== before) {
      this.ranks = [...this.byRank.values()].sort((a, b) => a.rank - b.rank);
    }
  }
}
