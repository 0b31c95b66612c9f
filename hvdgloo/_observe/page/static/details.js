"use strict";

/* Details that are looked up now and then: data planes, hosts, settings, versions; and traces. */

class Details {
  constructor() {
    this._planes = makeTable("Data planes in use, and why", ["plane", "for", "why", "ranks", "operations", "data", "rate"]);
    this._hosts = makeTable("Hosts", [
      "host", "state", "cores", "busy", "stolen", "throttled", "memory", "pressure", "received", "sent", "read", "written", "GPUs",
    ]);
    this._noPlanes = dom.make("p", { class: "none-yet" });
    dom.byId("plane-list").append(this._planes.table, this._noPlanes);
    dom.byId("host-list").append(this._hosts.table);
  }

  renderPlanes({ planes, job }) {
    // Rates of a job that is over are means.
    dom.setText(this._planes.table.querySelector("th:last-child"), RUNNING.has(job.state) ? "now" : "on average");
    dom.setText(this._noPlanes, RUNNING.has(job.state) ? "None is open yet." : "None was open.");
    this._planes.table.hidden = !planes.length;
    this._noPlanes.hidden = Boolean(planes.length);
    this._planes.setRows(
      planes.map((plane) => [
        plane.name,
        (plane.process_set ? `process set ${plane.process_set}` : "all ranks") + (plane.device === "cpu" ? "" : `, ${plane.device}`),
        [plane.why, plane.crossed].filter(Boolean).join("; "),
        format.count(plane.ranks),
        format.count(plane.operations),
        format.bytes(plane.bytes),
        format.bytes(plane.bytes_per_second) + "/s",
      ]),
    );
  }

  renderHosts({ hosts }) {
    const rate = (value) => format.bytes(value) + "/s";
    const measured = (host) => [
      format.count(host.cores),
      format.share(host.cpu),
      format.share(host.stolen),
      format.share(host.throttled),
      `${format.bytes(host.memory)} of ${format.bytes(host.memory_total)}`,
      format.share(host.memory_pressure),
      rate(host.received),
      rate(host.sent),
      rate(host.read),
      rate(host.written),
      host.gpus.map((gpu) => `${gpu.index}: ${format.share(gpu.use)}, ${format.bytes(gpu.memory)}`).join("; ") || UNKNOWN,
    ];
    // Its agent has measured nothing yet, or there is none.
    const unmeasured = Array(11).fill(UNKNOWN);
    this._hosts.setRows(hosts.map((host) => [host.name, host.state, ...(host.cores ? measured(host) : unmeasured)]));
  }

  renderSettings({ settings, changed, units, job }) {
    const write = (name, value) => {
      if (typeof value === "boolean") return value ? "on" : "off";
      const text = typeof value === "number" ? format.measured(value) : typeof value === "string" ? value : JSON.stringify(value);
      return units[name] ? `${text}\u00a0${units[name]}` : text;
    };
    const own = new Set(changed);
    const described = (names) => names.map((name) => [name, write(name, settings[name])]);
    const names = Object.keys(settings).filter((name) => settings[name] !== null);
    dom.describe(dom.byId("changed-settings"), described(names.filter((name) => own.has(name))));
    dom.describe(dom.byId("settings"), described(names.filter((name) => !own.has(name))));
    dom.byId("changed-title").hidden = dom.byId("changed-settings").hidden = !changed.length;
    dom.byId("default-title").hidden = !names.length || changed.length === names.length;
    dom.describe(dom.byId("versions"), Object.entries(job.versions));
  }
}

/** The button that has steps traced, for visitors that the job allows it. */
class Traces {
  constructor(server) {
    this._server = server;
    this._list = dom.byId("trace-list");
    this._asked = -1;
    dom.byId("trace-form").addEventListener("submit", (event) => {
      event.preventDefault();
      this._start(Number(dom.byId("trace-steps").value));
    });
  }

  /** Fetch the traces, at first and after each event about one. */
  render({ job, events }) {
    dom.byId("trace").hidden = !job.control;
    if (!job.control) return;
    const number = events.findLast(({ kind }) => kind === "trace")?.number ?? 0;
    if (number !== this._asked) {
      this._asked = number;
      this._refresh();
    }
  }

  async _start(steps) {
    try {
      await this._server.trace(steps);
      await this._listTraces();
    } catch (error) {
      this._list.prepend(dom.make("li", { class: "grave", text: error.message }));
    }
  }

  async _refresh() {
    try {
      await this._listTraces();
    } catch {
      // The connection's state says what is wrong, and the next event has them listed again.
    }
  }

  async _listTraces() {
    const traces = await this._server.traces();
    this._list.replaceChildren(
      ...traces.reverse().map(({ number, state, text, bytes }) => {
        const item = dom.make("li", { class: state, text: `${text} ` });
        if (state === "ready") {
          const link = dom.make("a", { href: `v1/traces/${number}`, download: "", text: `Download (${format.bytes(bytes)})` });
          item.append(link);
        }
        return item;
      }),
    );
  }
}
