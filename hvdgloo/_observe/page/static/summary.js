"use strict";

/* The job at a glance: its state, a few figures, and its problems in words. */

/** The three parts of a step; their order, names and colours are the same wherever they are shown. */
const PARTS = [
  { name: "computing", label: "computing" },
  { name: "waiting", label: "waiting for other ranks" },
  { name: "communicating", label: "communicating" },
];

/** A bar that shows the three parts of a step, as shares of it; it is made once and then set. */
function makeSplit(bar) {
  bar.replaceChildren(...PARTS.map(({ name }) => dom.make("span", { class: name })));
  return (shares) => {
    PARTS.forEach(({ name }, i) => {
      bar.children[i].style.flexGrow = String(Math.max(0, shares[name]));
    });
    dom.setAttribute(
      bar,
      "aria-label",
      PARTS.map(({ name, label }) => `${format.share(shares[name])} ${label}`).join(", "),
    );
  };
}

/** States of a job that is not over. */
const RUNNING = new Set(["starting", "running"]);

/** Placeholder where there is nothing to show, or nothing yet. */
const nothing = (job) => (RUNNING.has(job.state) ? "nothing yet" : "nothing");

/** With process sets there may be many; all are in a table below. */
const MOST_PLANES = 3;

/** Return the planes that carry data. Operations of torch.distributed come by their kind, and `why` begins with the plane. */
function carriers(planes) {
  const found = new Map();
  for (const { name, why, ranks, process_set: set } of planes) {
    const plane = { name, why, ranks };
    if (name.startsWith("dist.")) {
      const [label, ...reason] = why.split(": ");
      [plane.name, plane.why] = [label, reason.join(": ")];
    }
    const key = JSON.stringify([plane.name, plane.why, set]);
    if (plane.name && name !== "agreement" && !(found.get(key)?.ranks >= ranks)) found.set(key, plane);
  }
  return [...found.values()];
}

/** As the beginning of a sentence. */
const capital = (text) => text.charAt(0).toUpperCase() + text.slice(1);

class Summary {
  constructor() {
    this._setSplit = makeSplit(dom.byId("split"));
    dom.byId("split-legend").replaceChildren(
      ...PARTS.map(({ name, label }) =>
        dom.make("li", {}, dom.make("span", { class: "key " + name }), dom.make("b"), ` ${label}`),
      ),
    );
  }

  render(store) {
    const { job } = store;
    document.title = `${job.state === "running" ? format.number(job.steps_per_second) + " steps/s" : job.state} – ${job.command}`;
    dom.setText(dom.byId("command"), job.command);
    dom.setClass(dom.byId("state"), "value job-state " + job.state);
    dom.setText(dom.byId("state"), this._state(job));
    const over = !RUNNING.has(job.state);
    // A job that is over has no present rates: they are means.
    dom.setText(dom.byId("rate"), format.number(job.steps_per_second));
    dom.setText(dom.byId("rate-label"), over ? "steps per second, on average" : "steps per second");
    dom.setText(dom.byId("step-time"), job.step_seconds ? format.seconds(job.step_seconds) : UNKNOWN);
    const bytes = over ? format.bytes(sum(store.ranks.map((row) => row.bytes))) : format.bytes(job.bytes_per_second) + "/s";
    dom.setText(dom.byId("traffic"), bytes);
    dom.setText(dom.byId("steps"), format.count(job.steps));
    // Not every program has steps that can be counted, but all have operations.
    const operations = Math.max(0, ...store.ranks.map((row) => row.operations));
    dom.byId("summary").classList.toggle("stepless", !job.steps && operations > 0);
    dom.setText(dom.byId("operations"), format.count(operations));
    dom.setText(dom.byId("size"), format.plural(job.size, "rank"));
    dom.setText(dom.byId("size-label"), this._hosts(store));
    dom.setAttribute(dom.byId("elapsed"), "title", "since " + format.moment(job.started));
    this._setSplit(job);
    PARTS.forEach(({ name }, i) => {
      dom.setText(dom.byId("split-legend").children[i].querySelector("b"), job.step_seconds ? format.share(job[name]) : UNKNOWN);
    });
    this.tick(store);
    this._renderProgress(job);
    this._renderPlanes(store);
    dom.setText(dom.byId("outer-steps"), job.outer && job.outer[0].toUpperCase() + job.outer.slice(1) + ".");
    this._renderVerdict(store);
  }

  /** The training's progress, where the program tells it. */
  _renderProgress({ progress }) {
    dom.byId("progress").hidden = !progress;
    if (!progress) return;
    const { step, steps, epoch, epochs, share, remaining } = progress;
    const counted = (what, value, all) =>
      value === null ? [] : [`${what}${"\u00a0"}${format.count(value + 1)}` + (all ? ` of ${format.count(all)}` : "")];
    const places = [...counted("epoch", epoch, epochs), ...counted("step", step, steps)];
    const parts = [...places, ...(remaining === null ? [] : [`about ${format.seconds(Math.round(remaining))} left`])];
    // Without its end, the place is the figure.
    const known = share !== null;
    dom.setText(dom.byId("progress-share"), known ? format.share(Math.floor(100 * share) / 100) : capital(parts.shift() ?? "started"));
    dom.setText(dom.byId("progress-label"), parts.join(", "));
    dom.byId("progress-bar").parentElement.hidden = !known;
    dom.byId("progress-bar").style.width = `${100 * (share ?? 0)}%`;
  }

  /** What changes without news. */
  tick(store) {
    dom.setText(dom.byId("elapsed"), `${RUNNING.has(store.job.state) ? "for" : "after"} ${format.seconds(Math.round(store.elapsed()))}`);
  }

  _state({ state, exit_code: code }) {
    const words = { starting: "Starting", running: "Running", ended: "Ended", failed: "Failed", stopped: "Stopped" };
    return words[state] + (state === "failed" && code !== null ? `, exit code ${code}` : "");
  }

  _hosts({ job, hosts }) {
    const up = hosts.filter((host) => host.state === "up").length;
    const where = "on " + format.plural(job.state === "running" ? up : hosts.length, "host");
    if (job.least === null) return where;
    const limits = job.most === null ? `at least ${job.least}` : `${job.least} to ${job.most}`;
    return `${where}, elastic (${limits}), epoch ${job.epoch}`;
  }

  /** The planes that data goes over, each with its reason; those for the most ranks first. */
  _renderPlanes({ planes }) {
    const line = dom.byId("planes-in-use");
    const used = carriers(planes).sort((a, b) => b.ranks - a.ranks);
    const shown = used.slice(0, MOST_PLANES).map(({ name, why }) => [name, why ? ` (${why})` : ""]);
    const said = JSON.stringify([shown, used.length]);
    if (line.dataset.said === said) return;
    line.dataset.said = said;
    const parts = shown.flatMap(([name, why], i) => [i ? "; " : "", dom.make("b", { text: name }), why]);
    const more = used.length > shown.length ? [`; ${format.count(used.length - shown.length)} more`] : [];
    line.replaceChildren(...(used.length ? ["Data goes over ", ...parts, ...more, "."] : []));
  }

  /** Return the most important fact: the failure; stalled or lost ranks; stragglers; or that all is well. */
  _renderVerdict(store) {
    const [kind, sentences] = this._verdict(store);
    const verdict = dom.byId("verdict");
    dom.setClass(verdict, "verdict " + kind);
    if (verdict.dataset.said !== sentences.join("\n")) {
      verdict.dataset.said = sentences.join("\n");
      verdict.replaceChildren(...sentences.map((text) => dom.make("p", { text: capital(text) })));
    }
  }

  /** The event that told of a stall which is not over. Those after it have its stacks. */
  _stall(events) {
    const over = events.findLastIndex(({ kind }) => kind === "stall ended" || kind === "elastic");
    return events.slice(over + 1).find(({ kind }) => kind === "stall");
  }

  /** Describe the fate of a rank. A failed one's detail is a predicate, "was killed by signal 9 (SIGKILL)". */
  _fate({ rank, state, detail }, host) {
    const who = `Rank ${rank} (${host})`;
    if (state === "failed") return `${who} ${detail || "has failed"}`;
    return `${who} is ${state}${detail ? `: ${detail}` : ""}`;
  }

  _verdict(store) {
    const { job, ranks, stragglers, events } = store;
    if (job.state === "failed") return ["bad", [job.message || "The job has failed."]];
    if (job.state === "stopped") return ["plain", [job.message || "The job was stopped."]];
    if (job.state === "ended") return ["good", ["The job has ended without an error.", ...stragglers.slice(0, 1).map(({ text }) => text)]];
    const stuck = ranks.filter(({ state }) => state === "stalled" || state === "lost" || state === "failed");
    if (stuck.length) {
      const named = stuck.slice(0, 3).map((row) => this._fate(row, store.hostOf(row)));
      if (stuck.length > 3) named.push(`${format.count(stuck.length - 3)} more are stalled, lost or failed.`);
      return ["bad", named];
    }
    const stall = this._stall(events);
    if (stall) return ["bad", [stall.text]];
    if (stragglers.length) return ["late", [stragglers[0].text]];
    if (job.state === "starting") return ["plain", [job.message || "Waiting for the first collective operation."]];
    return ["good", ["No rank makes the others wait noticeably."]];
  }
}
