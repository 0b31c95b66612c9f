"use strict";

/* The last lines of ranks' output, with search. Lines are fetched as they are needed. */

const MOST_LINES = 2000;
const LINES_AT_ONCE = 500;
/** Characters that are not for reading; what programs write to colour a terminal has been taken out before. */
const CONTROLS = /[\x00-\x08\x0b-\x1f\x7f-\x9f]/g;
/** Characters that would turn the direction of all that follows. */
const DIRECTIONS = /[\u202a-\u202e\u2066-\u2069]/g;

class Output {
  constructor(lines, { atOnce = LINES_AT_ONCE } = {}) {
    this._fetch = lines;
    this._atOnce = atOnce;
    this._list = dom.byId("lines");
    this._search = dom.byId("search");
    this._rank = dom.byId("output-rank");
    this._follow = dom.byId("follow");
    this._earlier = dom.make("button", { type: "button", class: "plain", text: "Earlier lines" });
    this._message = dom.make("p", { class: "none-yet" });
    this._rows = dom.make("ol", { class: "line-list" });
    this._list.append(this._earlier, this._message, this._rows);
    this._newest = 0;
    this._known = 0;
    this._fetching = Promise.resolve();
    this._waiting = 0;
    /** The rank whose last line is shown at first, instead of the latest one. */
    this._culprit = null;
    this._stopped = new Set();
    this._top = 0;
    let typing = 0;
    this._search.addEventListener("input", () => {
      clearTimeout(typing);
      typing = setTimeout(() => this.reset(), 250);
    });
    this._rank.addEventListener("input", () => this.reset());
    this._follow.addEventListener("change", () => this._follow.checked && this._scrollDown());
    this._earlier.addEventListener("click", () => this._inTurn(() => this._fetchEarlier()));
    // A reader who scrolls up wants to read there, and one who returns to the end wants to follow. A larger distance to
    // the end means nothing by itself: the rows of a line are known only once it has been in sight.
    this._list.addEventListener("scroll", () => {
      const top = this._list.scrollTop;
      const atEnd = top + this._list.clientHeight >= this._list.scrollHeight - 8;
      this._follow.checked = atEnd || (this._follow.checked && top >= this._top);
      this._top = top;
    });
    for (const kind of ["wheel", "touchmove", "pointerdown", "keydown"]) {
      this._list.addEventListener(kind, () => this._letGo(), { passive: true });
    }
    new ResizeObserver(() => this._follow.checked && this._scrollDown()).observe(this._rows);
  }

  /** Say how many lines there are; new ones are fetched. At first, a `culprit`'s last line is shown. Errors of ranks that were `stopped` are not at fault. */
  render(number, culprit = null, stopped = []) {
    this._culprit = culprit;
    if (stopped.length !== this._stopped.size) {
      this._stopped = new Set(stopped);
      for (const row of this._rows.children) row.classList.toggle("stopped", this._stopped.has(Number(row.dataset.rank)));
    }
    if (number < this._known) this._newest = 0;
    this._known = number;
    if (!this._waiting) this._inTurn(() => this._fetchNew());
  }

  showRank(rank) {
    this._rank.value = rank === null ? "" : String(rank);
    this.reset();
  }

  /** Show the latest lines that match. */
  reset() {
    this._culprit = null;
    this._newest = 0;
    this._follow.checked = true;
    this._inTurn(() => this._fetchNew());
  }

  /** One after the other: answers must not overtake each other. */
  _inTurn(task) {
    this._waiting += 1;
    this._fetching = this._fetching
      .then(task)
      .catch((error) => this._say(error.message))
      .then(() => {
        this._waiting -= 1;
      });
  }

  _wanted(more) {
    const rank = this._rank.value === "" ? undefined : Number(this._rank.value);
    return { rank, search: this._search.value, limit: this._atOnce, ...more };
  }

  async _fetchNew() {
    // If there are more new lines than are shown, only the latest are fetched.
    const startsOver = !this._newest || this._known - this._newest > MOST_LINES;
    const wanted = this._wanted(startsOver ? {} : { after: this._newest });
    const known = this._known;
    const lines = await this._fetch(wanted);
    if (startsOver) {
      this._rows.replaceChildren();
      this._earlier.hidden = lines.length < this._atOnce;
    }
    this._rows.append(...lines.map((line) => this._row(line)));
    while (this._rows.childElementCount > MOST_LINES) {
      this._rows.firstElementChild.remove();
      this._earlier.hidden = false;
    }
    this._newest = lines.length === this._atOnce ? lines.at(-1).number : Math.max(known, lines.at(-1)?.number ?? 0);
    if (this._rows.childElementCount) this._say("");
    else this._say(this._search.value || this._rank.value ? "No line matches." : "No output yet.");
    if (this._follow.checked) this._scrollDown();
    if (this._newest < this._known) this._inTurn(() => this._fetchNew());
  }

  async _fetchEarlier() {
    const first = this._rows.firstElementChild;
    if (!first) return;
    const height = this._list.scrollHeight;
    const lines = await this._fetch(this._wanted({ before: Number(first.dataset.number) }));
    this._earlier.hidden = lines.length < this._atOnce;
    this._rows.prepend(...lines.map((line) => this._row(line)));
    this._list.scrollTop += this._list.scrollHeight - height;
  }

  _row(line) {
    const row = dom.make(
      "li",
      { class: line.stream === 2 ? "line error" : "line" },
      dom.make("time", { text: format.clock(line.at), title: format.moment(line.at) }),
      dom.make("span", { class: "source", text: String(line.rank), title: line.stream === 2 ? "stderr" : "stdout" }),
    );
    if (this._stopped.has(line.rank)) row.classList.add("stopped");
    row.dataset.number = line.number;
    row.dataset.rank = line.rank;
    row.append(this._marked(line.text.replace(CONTROLS, "").replace(DIRECTIONS, "\ufffd")));
    return row;
  }

  /** The text, with what is searched for marked in it. */
  _marked(text) {
    const node = dom.make("span", { class: "text" });
    const wanted = this._search.value.toLowerCase();
    // Text of the same length in lower case has the same positions.
    const lower = text.toLowerCase();
    let from = 0;
    if (wanted && lower.length === text.length) {
      for (let at = lower.indexOf(wanted); at >= 0; at = lower.indexOf(wanted, from)) {
        node.append(text.slice(from, at), dom.make("mark", { text: text.slice(at, at + wanted.length) }));
        from = at + wanted.length;
      }
    }
    node.append(text.slice(from));
    return node;
  }

  _say(text) {
    dom.setText(this._message, text);
    this._message.hidden = !text;
  }

  /** To the end, or to the culprit's last line. */
  _scrollDown() {
    const row = this._culprit === null ? null : [...this._rows.querySelectorAll(`[data-rank="${this._culprit}"]`)].at(-1);
    if (row) this._list.scrollTop += row.getBoundingClientRect().bottom - this._list.getBoundingClientRect().bottom + 8;
    else this._list.scrollTop = this._list.scrollHeight;
    this._top = this._list.scrollTop;
  }

  /** Let the reader read on from the culprit's line. */
  _letGo() {
    if (this._culprit !== null) this._follow.checked = false;
    this._culprit = null;
  }
}
