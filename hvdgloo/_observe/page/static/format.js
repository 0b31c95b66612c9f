"use strict";

/* Numbers, sizes and times as people read them. Numbers and their units stay together in one line. */

/** Placeholder for an unknown value. */
const UNKNOWN = "–";

const format = (() => {
  const SPACE = "\u00a0";

  /** Three significant digits, without an exponent: 0.0123, 1.23, 12.3, 123, 1,234. */
  function number(value) {
    if (!value) return "0";
    const digits = Math.max(0, 2 - Math.floor(Math.log10(Math.abs(value))));
    return value.toLocaleString("en", { maximumFractionDigits: Math.min(digits, 4) });
  }

  /** A number of any scale that a program logs, with four significant digits; null is not finite. */
  function measured(value) {
    if (value === null) return "not finite";
    const size = Math.abs(value);
    if (value && (size < 1e-6 || size >= 1e15)) return value.toExponential(3);
    const digits = size >= 1000 || !value ? 1 : 3 - Math.floor(Math.log10(size));
    return value.toLocaleString("en", { maximumFractionDigits: digits });
  }

  /** Processor time per second: "9 % of a core", "1.53 cores". */
  function cores(value) {
    return value < 0.995 ? share(value) + " of a core" : plural(Number(number(value)), "core");
  }

  function count(value) {
    if (value < 1e7) return value.toLocaleString("en");
    return value < 1e10 ? number(value / 1e6) + SPACE + "million" : number(value / 1e9) + SPACE + "billion";
  }

  function bytes(value) {
    const units = ["B", "kB", "MB", "GB", "TB", "PB"];
    let power = 0;
    // 999.5 would be written as 1,000.
    while (Math.abs(value) >= 999.5 && power < units.length - 1) {
      value /= 1000;
      power += 1;
    }
    return number(power ? value : Math.round(value)) + SPACE + units[power];
  }

  /** A duration: "120 µs", "14 ms", "3.2 s", "2 min 5 s", "3 h 20 min", "2 d 4 h". */
  function seconds(value) {
    if (!value) return "0" + SPACE + "s";
    if (value < 0.9995e-3) return number(value * 1e6) + SPACE + "µs";
    if (value < 0.9995) return number(value * 1e3) + SPACE + "ms";
    if (value < 99.95) return number(value) + SPACE + "s";
    const units = [["d", 86400], ["h", 3600], ["min", 60], ["s", 1]];
    const rounded = value < 3600 ? Math.round(value) : Math.round(value / 60) * 60;
    const largest = units.findIndex(([, length]) => rounded >= length);
    const [unit, length] = units[largest];
    const rest = units[largest + 1];
    const whole = Math.floor(rounded / length);
    const part = rest ? Math.floor((rounded % length) / rest[1]) : 0;
    return whole + SPACE + unit + (part ? " " + part + SPACE + rest[0] : "");
  }

  const share = (value) => Math.round(value * 100) + SPACE + "%";

  const two = (value) => String(value).padStart(2, "0");

  /** The time of day where the reader is: "12:03:10". */
  function clock(at, withSeconds = true) {
    const date = new Date(at * 1000);
    const time = two(date.getHours()) + ":" + two(date.getMinutes());
    return withSeconds ? time + ":" + two(date.getSeconds()) : time;
  }

  /** Day and time: "2026-11-22 12:03:10". */
  function moment(at) {
    const date = new Date(at * 1000);
    return `${date.getFullYear()}-${two(date.getMonth() + 1)}-${two(date.getDate())} ${clock(at)}`;
  }

  const plural = (value, noun) => `${count(value)}${SPACE}${noun}${value === 1 ? "" : "s"}`;

  return { number, measured, cores, count, bytes, seconds, share, clock, moment, plural };
})();
