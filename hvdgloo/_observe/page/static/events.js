"use strict";

/* Events, newest first. */

const EVENT_KINDS = ["failure", "stall", "stall ended", "straggler", "warning", "elastic", "host", "tuning", "trace", "note", "state"];
const GRAVE = new Set(["failure", "stall", "warning"]);

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
      this.render(this._events);
    });
    this._list.addEventListener("click", (event) => {
      const button = event.target.closest("button[data-rank]");
      if (button) onChoose(Number(button.dataset.rank));
    });
  }

  /** @param events in ascending order of their numbers */
  render(events) {
    const oldest = events[0]?.number ?? 0;
    if (!this._shown || oldest < this._first || (events.at(-1)?.number ?? 0) < this._shown) {
      this._shown = 0;
      this._list.replaceChildren();
    }
    this._events = events;
    this._first = oldest;
    const fresh = events.filter(({ number }) => number > this._shown);
    const wanted = fresh.filter(({ kind }) => !this._kind.value || kind === this._kind.value);
    this._list.prepend(...wanted.reverse().map((event) => this._item(event)));
    this._shown = events.at(-1)?.number ?? 0;
    while (this._list.lastElementChild && Number(this._list.lastElementChild.dataset.number) < oldest) {
      this._list.lastElementChild.remove();
    }
    this._list.classList.toggle("empty", !this._list.childElementCount);
  }

  _item(event) {
    const item = dom.make("li", { class: GRAVE.has(event.kind) ? "event grave" : "event" });
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
