"use strict";

/* Ranks that made others wait: in sentences, as a map of rank and time, and a histogram of waits. */

/** Largest number of rows: the ranks that cost the most; more rows could not be told apart. */
const MOST_ROWS = 32;

class Stragglers {
  constructor(view, onChoose) {
    this._list = dom.byId("straggler-list");
    this._waits = dom.make("ol", { class: "waits" });
    dom.byId("waits").append(this._waits);
    this._heat = new HeatMap(view);
    this._list.addEventListener("click", (event) => {
      const button = event.target.closest("button");
      if (button) onChoose(Number(button.dataset.rank));
    });
  }

  render({ stragglers, waits, heat, job }) {
    this._renderList(stragglers);
    this._renderWaits(waits, capital(nothing(job)) + ".");
    this._heat.render(heat);
  }

  redraw() {
    this._heat.redraw();
  }

  _renderList(stragglers) {
    const said = JSON.stringify(stragglers);
    if (this._list.dataset.said === said) return;
    this._list.dataset.said = said;
    const items = stragglers.map((straggler) => {
      const bar = dom.make("span", { class: "bar" }, dom.make("span"));
      bar.firstElementChild.style.width = Math.round(straggler.share * 100) + "%";
      const button = dom.make("button", { type: "button", class: "plain", text: `Rank ${straggler.rank}` });
      button.dataset.rank = straggler.rank;
      const last = `last in ${format.share(straggler.share)} of the last ${format.plural(straggler.of, straggler.unit.slice(0, -1))}`;
      const cost = `cost the others ${format.seconds(straggler.seconds)} each time`;
      return dom.make(
        "li",
        {},
        dom.make("p", { class: "who" }, button, ` on ${straggler.host}`),
        bar,
        dom.make("p", { text: `${last}; ${cost}` }),
        ...(straggler.causes.length
          ? [dom.make("ul", { class: "causes" }, ...straggler.causes.map((text) => dom.make("li", { text })))]
          : []),
      );
    });
    if (!items.length) items.push(dom.make("li", { class: "none-yet", text: "No rank stands out." }));
    this._list.replaceChildren(...items);
  }

  /** Draw the number of rounds by length of wait, as bars; lengths that never occur at either end are left out. */
  _renderWaits(waits, none) {
    const first = waits.findIndex((count) => count);
    const last = waits.findLastIndex((count) => count);
    const shown = first < 0 ? [] : waits.slice(first, last + 1);
    const most = Math.max(...shown, 1);
    const total = sum(shown);
    if (this._waits.childElementCount !== Math.max(1, shown.length)) {
      this._waits.replaceChildren(
        ...(shown.length ? shown : [0]).map(() =>
          dom.make("li", {}, dom.make("span"), dom.make("span", { class: "bar" }, dom.make("span")), dom.make("b")),
        ),
      );
    }
    if (!shown.length) {
      this._waits.firstElementChild.replaceChildren(dom.make("span", { class: "none-yet", text: none }), dom.make("b"), dom.make("b"));
      return;
    }
    shown.forEach((count, i) => {
      const [label, bar, number] = this._waits.children[i].children;
      dom.setText(label, this._bound(first + i, waits.length));
      if (bar.firstElementChild) bar.firstElementChild.style.width = (100 * count) / most + "%";
      dom.setText(number, count && count / total < 0.005 ? "< 1\u00a0%" : format.share(count / total));
    });
  }

  /** Waits double from one to the next: less than 0.1 ms, 0.2 ms, ...; the last has all that are longer. */
  _bound(place, length) {
    if (place === length - 1) return `≥ ${format.seconds(1e-4 * 2 ** (place - 1))}`;
    return `< ${format.seconds(1e-4 * 2 ** place)}`;
  }
}

class HeatMap {
  constructor(view) {
    this._view = view;
    this._figure = dom.byId("heat");
    this._readout = dom.make("p", { class: "readout" });
    this._area = dom.make("div", { class: "plot", tabindex: "0", role: "img" });
    this._scale = dom.make("p", { class: "heat-scale", "aria-hidden": "true" }, dom.make("span"), dom.make("i"), dom.make("span"));
    this._figure.append(this._readout, this._area, this._scale);
    this._image = document.createElement("canvas");
    this._plot = null;
    this._rows = [];
    bindKeys(this._area, () => this._plot, view, (place) => this._sayColumn(place));
    new ResizeObserver(() => {
      this._plot?.setSize({ width: this._area.clientWidth, height: this._area.clientHeight });
    }).observe(this._area);
  }

  render(heat) {
    this._heat = heat;
    const sums = heat.seconds.map((row, i) => ({ i, rank: heat.rank[i], sum: sum(row) }));
    const worst = sums.sort((a, b) => b.sum - a.sum).slice(0, MOST_ROWS);
    this._rows = worst.sort((a, b) => a.rank - b.rank);
    const left = sums.length - this._rows.length;
    const shown = left > 0 ? `When, by rank (the ${MOST_ROWS} of ${format.count(sums.length)} that cost the most)` : "When, by rank";
    dom.setText(dom.byId("heat-caption"), shown);
    this._figure.classList.toggle("empty", !this._rows.length);
    const height = `${Math.max(5, this._rows.length) * 18 + 40}px`;
    if (this._area.style.height !== height) this._area.style.height = height;
    const worstOf = [...worst].sort((a, b) => b.sum - a.sum)[0];
    const summary = worstOf ? `rank ${worstOf.rank} cost the most, ${format.seconds(worstOf.sum)} in all` : "none yet";
    dom.setAttribute(this._area, "aria-label", `Heat map of the time for which each rank made others wait: ${summary}`);
    this._paint();
    if (this._plot) this._plot.setData([heat.at, heat.at.map(() => 0)]);
    else this._make();
  }

  redraw() {
    if (!this._heat) return;
    this._paint();
    this._plot.setData(this._plot.data);
  }

  _make() {
    const options = plotOptions(this._view, this._area);
    options.scales.y = { range: () => [-0.5, Math.max(5, this._rows.length) - 0.5], dir: -1 };
    Object.assign(options.axes[1], {
      grid: { show: false },
      splits: () => this._rows.map((_row, i) => i),
      values: (_plot, splits) => splits.map((i) => (this._rows[i] ? `rank ${this._rows[i].rank}` : "")),
    });
    options.series = [{}, { show: true, paths: () => null, points: { show: false } }];
    options.cursor.points = { show: false };
    options.hooks.setCursor = [(plot) => this._read(plot)];
    options.hooks.draw.unshift((plot) => this._draw(plot));
    this._plot = new uPlot(options, [this._heat.at, this._heat.at.map(() => 0)], this._area);
  }

  /** Paint one pixel for each rank and time. */
  _paint() {
    const { at, seconds } = this._heat;
    const rows = this._rows.map(({ i }) => seconds[i]);
    this._most = Math.max(1e-9, ...rows.map((row) => row.reduce((most, value) => Math.max(most, value), 0)));
    dom.setText(this._scale.firstElementChild, "0");
    dom.setText(this._scale.lastElementChild, this._rows.length ? `${format.seconds(this._most)} in ${format.seconds(this._heat.width)}` : "");
    if (!at.length || !rows.length) return;
    this._image.width = at.length;
    this._image.height = rows.length;
    const context = this._image.getContext("2d");
    const image = context.createImageData(at.length, rows.length);
    const [red, green, blue] = colour.of("heat").match(/[\d.]+/g).map(Number);
    rows.forEach((row, y) => {
      for (let x = 0; x < at.length; x += 1) {
        if (!row[x]) continue;
        const place = 4 * (y * at.length + x);
        image.data[place] = red;
        image.data[place + 1] = green;
        image.data[place + 2] = blue;
        // Small waits stay visible, and twice the wait is clearly darker.
        image.data[place + 3] = 255 * (0.12 + 0.88 * Math.sqrt(row[x] / this._most));
      }
    });
    context.putImageData(image, 0, 0);
  }

  _draw(plot) {
    const { at, width } = this._heat;
    if (!at.length || !this._rows.length) return;
    const { ctx, bbox } = plot;
    const left = plot.valToPos(at[0], "x", true);
    const right = plot.valToPos(at.at(-1) + width, "x", true);
    const top = plot.valToPos(-0.5, "y", true);
    const bottom = plot.valToPos(this._rows.length - 0.5, "y", true);
    ctx.save();
    ctx.beginPath();
    ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height);
    ctx.clip();
    ctx.imageSmoothingEnabled = false;
    ctx.drawImage(this._image, left, top, right - left, bottom - top);
    // Rows are told apart by thin lines.
    ctx.strokeStyle = colour.of("surface");
    ctx.lineWidth = 1;
    ctx.beginPath();
    for (let i = 1; i < this._rows.length; i += 1) {
      const y = Math.round(plot.valToPos(i - 0.5, "y", true)) + 0.5;
      ctx.moveTo(bbox.left, y);
      ctx.lineTo(bbox.left + bbox.width, y);
    }
    ctx.stroke();
    ctx.restore();
  }

  _read(plot) {
    const { left, top } = plot.cursor;
    const row = top >= 0 ? this._rows[Math.round(plot.posToVal(top, "y"))] : undefined;
    const time = left >= 0 ? plot.posToVal(left, "x") : NaN;
    const place = this._heat.at.findLastIndex((at) => at <= time);
    dom.setText(this._readout, row && place >= 0 ? this._say(row, place) : "");
  }

  _say({ i, rank }, place) {
    const seconds = this._heat.seconds[i][place];
    return `${format.moment(this._heat.at[place])}: others waited ${format.seconds(seconds)} for rank ${rank}`;
  }

  _sayColumn(place) {
    const worst = this._rows.reduce(
      (most, row) => (this._heat.seconds[row.i][place] > this._heat.seconds[most.i][place] ? row : most),
      this._rows[0],
    );
    return worst && this._heat.seconds[worst.i][place] ? this._say(worst, place) : `${format.moment(this._heat.at[place])}: no rank`;
  }
}
