"use strict";

/* The connection to the job's server. All addresses are relative: the page lives below a path of its own. */

/** Fetch JSON; an error's message is the server's reason. */
async function ask(path, options = {}) {
  const response = await fetch(path, { credentials: "same-origin", ...options });
  if (!response.ok) {
    const answer = await response.json().catch(() => ({}));
    throw new Error(answer.reason ?? `the server answered ${response.status}`);
  }
  return response.json();
}

const server = {
  /** @param {{rank?: number, after?: number, before?: number, search?: string, limit?: number}} wanted */
  lines(wanted) {
    const query = new URLSearchParams();
    for (const [name, value] of Object.entries(wanted)) {
      if (value !== undefined && value !== "") query.set(name, value);
    }
    return ask("v1/output?" + query);
  },

  series: (rank) => ask(`v1/ranks/${rank}/series`),

  traces: async () => (await ask("v1/traces")).traces,

  trace: (steps) =>
    ask("v1/traces", {
      method: "POST",
      headers: { "Content-Type": "application/json" },
      body: JSON.stringify({ steps }),
    }),
};

/**
 * Follow the job. `onMessage("snapshot" or "update", value)` is called for each message, and `onStatus(status)` whenever
 * the state of the connection changes: "live", "reconnecting", "refused" (the cookie is not valid, or no more), "over".
 */
function follow(onMessage, onStatus) {
  const events = new EventSource("events");
  for (const kind of ["snapshot", "update"]) {
    events.addEventListener(kind, (event) => onMessage(kind, JSON.parse(event.data)));
  }
  events.addEventListener("open", () => onStatus("live"));
  events.addEventListener("end", () => {
    events.close();
    onStatus("over");
  });
  events.addEventListener("error", () => {
    // A browser tries again by itself, unless the answer was not a stream of events.
    onStatus(events.readyState === EventSource.CLOSED ? "refused" : "reconnecting");
  });
}

/** The server's replacement in a report: its recorded lines and curves. */
function recorded({ lines = [], series = {} }) {
  const matches = (line, { rank, before, search }) =>
    (rank === undefined || line.rank === rank) &&
    (before === undefined || line.number < before) &&
    (!search || line.text.toLowerCase().includes(search.toLowerCase()));
  return {
    lines: async (wanted) => lines.filter((line) => matches(line, wanted)).slice(-(wanted.limit ?? 500)),
    series: async (rank) => {
      if (!series[rank]) throw new Error(`this report has no curves of rank ${rank}`);
      return series[rank];
    },
    traces: async () => [],
  };
}
