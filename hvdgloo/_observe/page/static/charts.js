"use strict";

/* Curves over the job's life, drawn by uPlot. They share one view of time: zooming into one zooms into all. */

/** A colour of page.css as a canvas needs it, in the theme that is in use. */
const colour = (() => {
  const probe = dom.make("span", { hidden: "" });
  const known = new Map();
  return {
    of(name) {
      if (!known.has(name)) {
        if (!probe.isConnected) document.body.append(probe);
        probe.style.color = `var(--${name})`;
        known.set(name, getComputedStyle(probe).color);
      }
      return known.get(name);
    },
    forget: () => known.clear(),
  };
})();

const SPANS = [
  { label: "1 min", seconds: 60 },
  { label: "10 min", seconds: 600 },
  { label: "1 h", seconds: 3600 },
  { label: "All", seconds: Infinity },
];

/** The span of time that all charts show: the last so many seconds, or a span selected by dragging. */
class TimeView {
  /** Events that charts mark. */
  marks = [];

  constructor(onChange) {
    this._span = Infinity;
    this._zoom = null;
    this._begin = 0;
    this._now = 0;
    this._onChange = onChange;
    this._buttons = SPANS.map(({ label, seconds }) => {
      const button = dom.make("button", { type: "button", text: label });
      button.addEventListener("click", () => this.last(seconds));
      return button;
    });
    dom.byId("spans").append(...this._buttons);
    this._mark();
  }

  /** Set the time range that exists, by the job's clock. */
  set(begin, now) {
    this._begin = begin;
    this._now = now;
  }

  range() {
    if (this._zoom) return this._zoom;
    const begin = Math.max(this._begin, this._now - this._span);
    return [Math.min(begin, this._now - 10), this._now];
  }

  last(seconds) {
    this._span = seconds;
    this.zoom(null);
  }

  /** Show from `min` to `max`, or the last seconds again. */
  zoom(range) {
    this._zoom = range;
    this._mark();
    this._onChange();
  }

  /** Zoom in or out around the middle; nothing is shown that lies before the job or after now. */
  scale(factor) {
    const [min, max] = this.range();
    const half = Math.max(1, ((max - min) / 2) * factor);
    const middle = (min + max) / 2;
    const wider = [Math.max(this._begin, middle - half), Math.min(this._now, middle + half)];
    this.zoom(wider[0] <= this._begin && wider[1] >= this._now ? null : wider);
  }

  _mark() {
    this._buttons.forEach((button, i) => {
      dom.setAttribute(button, "aria-pressed", String(!this._zoom && SPANS[i].seconds === this._span));
    });
  }
}

/** The labels of a time axis: as exact as the distance between them. At its ends there is no room for any. */
function timeLabels(plot, splits, _axis, _space, increment) {
  const width = plot.bbox.width / uPlot.pxRatio;
  return splits.map((at) => {
    const place = plot.valToPos(at, "x");
    if (place < 24 || (width && place > width - 16)) return null;
    const date = new Date(at * 1000);
    if (increment >= 86400) return date.toLocaleDateString("en", { day: "numeric", month: "short" });
    return format.clock(at, increment < 60);
  });
}

/** Synchronisation of the plots' cursors; selections go through the view. */
const POINTING = new Set(["mousemove", "mouseleave"]);

/** Kinds of events that charts mark. */
const MARKED = new Set(["failure", "stall", "warning", "elastic", "host", "tuning", "trace", "note"]);
const MOST_MARKS = 100;
/** Distance in pixels from which a mark is read. */
const NEAR_MARK = 6;
/** Height in pixels of a short mark. */
const SHORT_MARK = 9;

/** Kind of the short marks that are at the bottom; others are at the top. */
const OUTER_STEP = "outer step";

/** Return the marks that all charts have: short ones of what happens often, and the latest events of these kinds. */
const marksOf = (store) => [
  ...store.marks.map(({ at, kind, count }) => ({ at, kind, text: count > 1 ? format.plural(count, kind) : kind, grave: false, short: true })),
  ...store.events
    .filter(({ kind }) => MARKED.has(kind))
    .slice(-MOST_MARKS)
    .map((event) => ({ ...event, grave: isGrave(event, store) })),
];

/** Return the explanation of the marks. */
function describeMarks(marks) {
  const often = [...new Set(marks.filter(({ short }) => short).map(({ kind }) => `${kind}s`))].join(" and ");
  const kinds = [...(often ? [`short lines mark ${often}`] : []), ...(marks.some(({ short }) => !short) ? ["dashed lines mark events"] : [])];
  return `${capital(kinds.join(", "))}; point at one to read it.`;
}

/** Draw a dashed line for each event, and the short marks: those of outer steps at the bottom, others at the top. */
function drawMarks(plot, marks) {
  const { ctx, bbox } = plot;
  const [min, max] = [plot.scales.x.min, plot.scales.x.max];
  ctx.save();
  ctx.lineWidth = uPlot.pxRatio;
  for (const { at, kind, grave, short } of marks) {
    if (at < min || at > max) continue;
    const x = Math.round(plot.valToPos(at, "x", true)) + 0.5;
    const height = short ? SHORT_MARK * uPlot.pxRatio : bbox.height;
    const top = bbox.top + (kind === OUTER_STEP ? bbox.height - height : 0);
    ctx.strokeStyle = colour.of(grave ? "bad" : "muted");
    ctx.setLineDash(short ? [] : [4 * uPlot.pxRatio, 3 * uPlot.pxRatio]);
    ctx.beginPath();
    ctx.moveTo(x, top);
    ctx.lineTo(x, top + height);
    ctx.stroke();
  }
  ctx.restore();
}

/** Return the event whose mark is under the cursor. */
function markAt(plot, marks) {
  const left = plot.cursor.left ?? -1;
  if (left < 0) return undefined;
  return marks.findLast(({ at }) => Math.abs(plot.valToPos(at, "x") - left) <= NEAR_MARK);
}

/** Options of all plots, including the heat map. */
function plotOptions(view, element, { left = 56 } = {}) {
  const axis = {
    stroke: () => colour.of("muted"),
    grid: { stroke: () => colour.of("grid"), width: 1 },
    ticks: { show: false },
    font: "11px system-ui, sans-serif",
  };
  return {
    width: Math.max(200, element.clientWidth),
    height: element.clientHeight,
    legend: { show: false },
    padding: [8, 8, 0, 0],
    scales: { x: { time: true, range: () => view.range() } },
    axes: [
      { ...axis, values: timeLabels, space: 64, size: 24, gap: 4 },
      { ...axis, size: left, gap: 6, space: 28 },
    ],
    cursor: {
      sync: { key: "time", setSeries: false, scales: ["x", null], filters: { pub: (type) => POINTING.has(type) } },
      drag: { x: true, y: false, setScale: false },
      bind: {
        dblclick: () => () => {
          view.zoom(null);
          return null;
        },
      },
    },
    hooks: {
      draw: [(plot) => drawMarks(plot, view.marks)],
      setSelect: [
        (plot) => {
          const { left: from, width } = plot.select;
          if (width < 4) return;
          view.zoom([plot.posToVal(from, "x"), plot.posToVal(from + width, "x")]);
          plot.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
        },
      ],
    },
  };
}

/** Handle keys like a pointer: arrows move the cursor, + and - zoom, 0 shows all. */
function bindKeys(element, plot, view, say) {
  element.addEventListener("keydown", (event) => {
    if (!plot()) return;
    const { data, cursor } = plot();
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (step) {
      const last = data[0].length - 1;
      const place = Math.min(last, Math.max(0, (cursor.idx ?? (step < 0 ? last + 1 : -1)) + step));
      if (place < 0) return;
      plot().setCursor({ left: plot().valToPos(data[0][place], "x"), top: 10 });
      dom.announce(say(place));
    } else if (event.key === "+" || event.key === "=") view.scale(0.5);
    else if (event.key === "-") view.scale(2);
    else if (event.key === "0") view.zoom(null);
    else return;
    event.preventDefault();
  });
}

/** Curves of planes differ in colour and in dashes. */
const PLANE_STYLES = [
  { colour: "indigo", dash: [] },
  { colour: "purple", dash: [7, 4] },
  { colour: "sky", dash: [2, 3] },
  { colour: "muted", dash: [8, 3, 2, 3] },
];

/** The charts. `curves` turns a Series into the curves of one chart, `text` formats a value. */
const CHARTS = [
  {
    title: "Steps per second",
    ofSteps: true,
    text: format.number,
    curves: (series) => [{ name: "steps per second", values: series.steps_per_second, colour: "computing", filled: true }],
  },
  {
    title: "Time of a step",
    ofSteps: true,
    text: format.seconds,
    stacked: true,
    curves: (series) =>
      PARTS.map(({ name, label }) => ({ name: label, values: series[name], colour: name, filled: true })),
  },
  {
    title: "Data per second, by plane",
    text: (value) => format.bytes(value) + "/s",
    curves: (series) =>
      Object.entries(series.bytes_per_second)
        .filter(([, values]) => sum(values))
        .sort(([, a], [, b]) => sum(b) - sum(a))
        .map(([name, values], i) => ({ name, values, ...PLANE_STYLES[i % PLANE_STYLES.length] })),
  },
  {
    title: "Processor cores",
    text: format.number,
    said: format.cores,
    curves: (series) => [{ name: "in use", values: series.cpu, colour: "purple", filled: true }],
  },
  {
    title: "Memory",
    text: format.bytes,
    curves: (series) => [{ name: "resident", values: series.memory, colour: "sky", filled: true }],
  },
];

/** Each curve on top of those before it; where one is unknown, all are. */
function stack(curves) {
  let below = null;
  return curves.map((curve) => {
    const { values } = curve;
    below = values.map((value, i) => (value === null || (below && below[i] === null) ? null : value + (below ? below[i] : 0)));
    return { ...curve, drawn: below };
  });
}

/** The range of values that need not begin at 0, with some room around them. */
function freeRange(_plot, min, max) {
  if (min === null || max === null) return [0, 1];
  const room = (max - min || Math.abs(max) || 1) * 0.08;
  return [min >= 0 ? Math.max(0, min - room) : min - room, max + room];
}

/** Return the number of known values. */
const known = (values) => values.filter((value) => value !== null).length;

class Chart {
  constructor(kind, view) {
    this._kind = kind;
    this._view = view;
    this._plot = null;
    this._shape = "";
    this._time = dom.make("span", { class: "time" });
    const title = dom.make("b");
    dom.setName(title, kind.title);
    this._legend = dom.make("ul", { class: "legend" });
    this._area = dom.make("div", { class: "plot", tabindex: "0", role: "img" });
    this._nothing = dom.make("p", { class: "nothing" });
    this.figure = dom.make(
      "figure",
      {},
      dom.make("figcaption", {}, title, this._time),
      this._legend,
      this._area,
      this._nothing,
    );
    bindKeys(this._area, () => this._plot, view, (place) => this._say(place));
    new ResizeObserver(() => {
      this._plot?.setSize({ width: this._area.clientWidth, height: this._area.clientHeight });
    }).observe(this._area);
  }

  render(series, job) {
    const curves = this._kind.curves(series);
    this._at = series.at;
    this._curves = this._kind.stacked ? stack(curves) : curves.map((curve) => ({ ...curve, drawn: curve.values }));
    const points = Math.max(0, ...curves.map(({ values }) => known(values)));
    dom.setText(this._nothing, this._lack(series, job));
    // A single point is no line; while the job runs, others follow.
    this._nothing.hidden = points > (RUNNING.has(job.state) ? 0 : 1);
    // The top of a stack is drawn first, so that the curves below cover it.
    const drawn = this._kind.stacked ? [...this._curves].reverse() : this._curves;
    const data = [series.at, ...drawn.map((curve) => curve.drawn)];
    const shape = curves.map(({ name }) => name).join("\n");
    if (!this._plot || shape !== this._shape) {
      this._shape = shape;
      this._make(drawn, data);
    } else this._plot.setData(data);
    this._setLegend();
    const last = this._curves.map((curve) => `${curve.name} ${this._value(curve, this._lastOf(curve))}`).join(", ");
    dom.setAttribute(this._area, "aria-label", `${this._kind.title}; now ${last || "nothing"}`);
  }

  /** Return why there is no curve. */
  _lack(series, job) {
    if (this._kind.ofSteps && !job.steps && known(series.memory)) return "no steps are counted";
    return job.steps && !RUNNING.has(job.state) ? tooShort(job) : nothing(job);
  }

  /** Draw with the present colours and the present view. */
  redraw() {
    this._plot?.setData(this._plot.data);
  }

  destroy() {
    this._plot?.destroy();
    this._plot = null;
  }

  _make(drawn, data) {
    this.destroy();
    const options = plotOptions(this._view, this._area);
    const range = this._kind.free ? freeRange : (_plot, _min, max) => [0, max > 0 ? max * 1.08 : 1];
    options.scales.y = { range };
    options.axes[1].values = (_plot, splits) => splits.map((value) => (this._nothing.hidden ? this._kind.text(value) : ""));
    options.series = [
      {},
      ...drawn.map(({ colour: name, dash, filled }) => ({
        stroke: () => colour.of(name),
        fill: filled ? () => colour.of(name + (this._kind.stacked ? "-area" : "-faint")) : undefined,
        width: this._kind.stacked ? 0 : 1.75,
        dash,
        points: { show: false },
      })),
    ];
    options.hooks.setCursor = [() => this._setLegend()];
    this._legend.replaceChildren(
      ...this._curves.map((curve) =>
        dom.make("li", {}, dom.make("span", { class: "key " + curve.colour }), ` ${curve.name} `, dom.make("b")),
      ),
    );
    this._plot = new uPlot(options, data, this._area);
  }

  /** The values under the cursor, or the latest. */
  _setLegend() {
    const place = this._plot?.cursor.idx ?? null;
    const mark = this._plot && markAt(this._plot, this._view.marks);
    dom.setClass(this._time, mark ? "time mark" : "time");
    if (mark) dom.setText(this._time, `${format.clock(mark.at)} ${mark.text}`);
    else dom.setText(this._time, place === null ? "" : format.moment(this._at[place]));
    this._curves.forEach((curve, i) => {
      const item = this._legend.children[i]?.lastElementChild;
      if (item) dom.setText(item, this._value(curve, place ?? this._lastOf(curve)));
    });
  }

  _lastOf({ values }) {
    let place = values.length - 1;
    while (place > 0 && values[place] === null) place -= 1;
    return place;
  }

  _value({ values }, place) {
    const value = values[place];
    return value === null || value === undefined ? UNKNOWN : (this._kind.said ?? this._kind.text)(value);
  }

  _say(place) {
    const values = this._curves.map((curve) => `${curve.name} ${this._value(curve, place)}`).join(", ");
    return `${format.clock(this._at[place])}: ${values}`;
  }
}

/** Least number of points for a chart to be useful: a point is a second, or more. */
const LEAST_POINTS = 3;

/** Return the text for a job that ended too soon for charts. */
function tooShort(job) {
  const whole = Math.max(0, job.now - job.started);
  if (!job.steps) return `Too short for charts: it took ${format.seconds(whole)}.`;
  const training = job.steps * job.step_seconds;
  return `Too short for charts: ${format.plural(job.steps, "step")} in ${format.seconds(training || whole)}.`;
}

/** All charts, of all ranks together or of one. */
class Charts {
  constructor(view) {
    this._view = view;
    this._charts = CHARTS.map((kind) => new Chart(kind, view));
    dom.byId("plots").append(...this._charts.map(({ figure }) => figure));
  }

  render(series, job) {
    const short = !RUNNING.has(job.state) && known(series.memory) < LEAST_POINTS;
    dom.byId("too-short").hidden = !short;
    dom.byId("plots").hidden = dom.byId("spans").hidden = short;
    dom.byId("marks").hidden = short || !this._view.marks.length;
    dom.setText(dom.byId("marks"), describeMarks(this._view.marks));
    if (short) dom.setText(dom.byId("too-short"), tooShort(job));
    else for (const chart of this._charts) chart.render(series, job);
  }

  redraw() {
    for (const chart of this._charts) chart.redraw();
  }

  /** Show which ranks the curves belong to. */
  setScope(text) {
    dom.setText(dom.byId("scope"), text);
  }
}
