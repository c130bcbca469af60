// The curves of runs: read once, then made longer by the points that events carry.
import { useState, useEffect } from "./base.js";
import { get, on, runPath, seen, stream } from "./api.js";

// All metrics of a run; one answer has a part of them.
async function curvesOf(id, asked, signal) {
  const path = runPath(id, "/metrics"), first = await get(path, asked, signal);
  const size = Object.keys(first.metrics).length, rest = [];
  for (let offset = size; size && offset < first.names.length; offset += size) rest.push(get(path, { ...asked, offset }, signal));
  const parts = [first, ...(await Promise.all(rest))];
  // Without a prototype, because a metric may be called "constructor".
  return Object.assign(Object.create(null), ...parts.map((part) => part.metrics));
}

const ODD = { nan: "NaN", inf: "∞", "-inf": "−∞" };

// The curves of a run with these new points; null if they must be read, because points are missing, do not belong at the
// end, or are more than the plot has room for. `points` of a curve counts its values on the service, also those outside of
// the part that is shown.
export function longer(curves, rows, { axis, width, start, end }) {
  const grown = Object.assign(Object.create(null), curves);
  for (const row of rows) {
    const x = row[axis], shown = x >= (start ?? -Infinity) && x <= (end ?? Infinity);
    for (const [name, [number, value]] of Object.entries(row.values)) {
      const known = curves[name], before = grown[name] ?? { x: [], y: [], odd: [], points: 0 };
      if (number < before.points) continue;  // it was read already
      if (number > before.points) return null;
      if (shown && (before.low || before.x.length >= width || x < before.x.at(-1))) return null;
      const curve = grown[name] = before === known ? { ...before } : before;
      curve.points += 1;
      if (!shown) continue;
      if (curve.x === known?.x) Object.assign(curve, { x: [...curve.x], y: [...curve.y], odd: [...curve.odd] });
      curve.x.push(x);
      curve.y.push(ODD[value] ? null : value);
      if (ODD[value]) curve.odd.push([x, ODD[value], 1]);
    }
  }
  return grown;
}

// Milliseconds between two readings of curves with more points than a plot has room for, as a step moves them by less than a
// pixel; also until a service that does not answer is asked again.
const PAUSE = 2000;
// Steps that are kept while curves are being read; after more of them they are read once more.
const MOST_MISSED = 500;

// What the page knows of the curves of one run, and when these must be read. It reads nothing itself.
export class Followed {
  constructor(asked) {
    this.curves = null;  // as they are drawn; until they are read again they may lack points
    this.error = null;  // why the last reading failed
    this._asked = asked;
    this._whole = false;  // whether curves have, or will have when they are read, every point that was told
    this._missed = null;  // points that were told while curves are being read; null if they are not
    this._refused = false;  // whether to wait for a change before asking again
    this._number = 0;  // of the last reading
    this._began = -Infinity;
  }

  // A reading begins; returns its number.
  began(now) {
    this._whole = true;
    this._missed = [];
    this._began = now;
    return (this._number += 1);
  }

  // The run has these new points; null stands for more than an event has room for.
  told(rows) {
    this._refused = false;
    if (!this._whole) return;
    if (this._missed) {
      this._missed = rows && [...this._missed, ...rows];
      this._whole = Boolean(rows) && this._missed.length <= MOST_MISSED;
      if (!this._whole) this._missed = [];
    } else {
      const next = rows && longer(this.curves, rows, this._asked);
      this._whole = Boolean(next);
      this.curves = next ?? this.curves;
    }
  }

  answered(number, read) {
    if (number !== this._number) return;
    const next = longer(read, this._missed, this._asked);
    this._whole &&= Boolean(next);
    this._missed = null;
    this.curves = next ?? read;
    this.error = null;
  }

  failed(number, error) {
    if (number !== this._number) return;
    this._whole = false;
    this._missed = null;
    this._refused = error.status !== 0;
    this.error = error;
  }

  // Milliseconds until curves must be read; null if they need not be.
  left(now) {
    if (this._missed || this._whole || this._refused) return null;
    const calm = this.error || Object.values(this.curves ?? {}).some((curve) => curve.points > this._asked.width);
    return calm ? Math.max(0, this._began + PAUSE - now) : 0;
  }
}

// The curves of these runs, in their order, and why some could not be read.
export function useCurves(ids, asked, inputs) {
  const [found, setFound] = useState(null);
  const [error, setError] = useState(null);
  useEffect(() => {
    const runs = new Map(ids.map((id) => [id, new Followed(asked)])), all = ids.map((id) => runs.get(id));
    const stop = new AbortController();
    let timer = null;
    const show = () => {
      if (stop.signal.aborted) return;
      const next = all.map((run) => run.curves ?? {});
      const ready = all.every((run) => run.curves || run.error) && all.some((run) => run.curves);
      if (ready) setFound((before) => (before?.length === next.length && next.every((curves, place) => curves === before[place]) ? before : next));
      setError(all.find((run) => run.error)?.error ?? null);
    };
    const readOne = async ([id, run]) => {
      const number = run.began(performance.now());
      try {
        run.answered(number, await curvesOf(id, asked, stop.signal));
      } catch (failure) {
        run.failed(number, failure);
      }
    };
    const read = async (those) => {
      await Promise.all(those.map(readOne));
      return () => { show(); seen().then(readNow); };
    };
    // Reads the runs that must be read now, the others in time; null if there are none.
    const readDue = () => {
      if (stop.signal.aborted) return null;
      const now = performance.now();
      const due = [...runs].filter(([, run]) => run.left(now) === 0);
      const waits = all.map((run) => run.left(now)).filter(Boolean);
      clearTimeout(timer);
      if (waits.length) timer = setTimeout(() => seen().then(readNow), Math.min(...waits));
      return due.length ? read(due) : null;
    };
    const readNow = () => { readDue()?.then((shown) => shown()); };
    const stops = [
      on("following", (id) => runs.has(id)),
      on("reading", ({ runs: changed, again }) => {
        if (again) return read([...runs]);
        const drawn = changed.filter((run) => runs.has(run.id) && run.changed.includes("metrics"));
        if (!drawn.length) return null;
        for (const run of drawn) runs.get(run.id).told(run.points);
        show();
        return readDue();
      }),
      () => { stop.abort(); clearTimeout(timer); },
    ];
    stream.opened.then(readNow);
    return () => stops.forEach((each) => each());
  }, inputs);
  return [found, error];
}
