"use strict";

/* Events, newest first. */

const EVENT_KINDS = ["failure", "stall", "stall ended", "straggler", "warning", "elastic", "host", "tuning", "trace", "note", "state"];
const GRAVE = new Set(["failure", "stall", "warning"]);

/** Tell whether an event is a reason for concern. A rank that ended only because another had failed is none. */
const isGrave = ({ kind, rank }, { job, byRank }) =>
  GRAVE.has(kind) && !(kind === "failure" && job.state === "failed" && byRank.get(rank)?.state === "ended");

class Events {
  constructor(onChoose) {
    this._list = dom.byId("event-list");
    this._kind = dom.byId("event-kind");
    this._shown = 0;
    this._first = 0;
    this._kind.append(
      dom.make("option", { value: "", text: "all" }),
      ...EVENT_KINDS.map((kind) => dom.make("option", { value: kind, text: kind })),
    );
    this._kind.addEventListener("change", () => {
      this._shown = 0;
      this.render(this._store);
    });
    this._list.addEventListener("click", (event) => {
      const button = event.target.closest("button[data-rank]");
      if (button) onChoose(Number(button.dataset.rank));
    });
  }

  /** Show the events of a store, which are in ascending order of their numbers. */
  render(store) {
    const { events } = store;
    const oldest = events[0]?.number ?? 0;
    if (!this._shown || oldest < this._first || (events.at(-1)?.number ?? 0) < this._shown) {
      this._shown = 0;
      this._list.replaceChildren();
    }
    this._store = store;
    this._first = oldest;
    const fresh = events.filter(({ number }) => number > this._shown);
    const wanted = fresh.filter(({ kind }) => !this._kind.value || kind === this._kind.value);
    this._list.prepend(...wanted.reverse().map((event) => this._item(event)));
    this._shown = events.at(-1)?.number ?? 0;
    while (this._list.lastElementChild && Number(this._list.lastElementChild.dataset.number) < oldest) {
      this._list.lastElementChild.remove();
    }
    // Failures of ranks are told before the job's, which shows which of them followed from another.
    if (store.job.state === "failed") {
      const followed = new Set(events.filter((event) => !isGrave(event, store)).map(({ number }) => String(number)));
      for (const item of this._list.children) if (followed.has(item.dataset.number)) item.classList.remove("grave");
    }
    this._list.classList.toggle("empty", !this._list.childElementCount);
  }

  _item(event) {
    const item = dom.make("li", { class: isGrave(event, this._store) ? "event grave" : "event" });
    item.dataset.number = event.number;
    const time = dom.make("time", { datetime: new Date(event.at * 1000).toISOString(), title: format.moment(event.at), text: format.clock(event.at) });
    item.append(time, dom.make("span", { class: "kind", text: event.kind }));
    const text = dom.make("p", { text: event.text });
    if (event.rank >= 0) {
      const button = dom.make("button", { type: "button", class: "plain", text: `rank ${event.rank}` });
      button.dataset.rank = event.rank;
      text.append(" ", button);
    }
    item.append(text);
    if (event.more) {
      item.append(
        dom.make("details", {}, dom.make("summary", { text: "more" }), dom.make("pre", { tabindex: "0", text: event.more })),
      );
    }
    return item;
  }
}
