// What a page has heard of runs and not shown yet.

// Values of points that are kept until they are shown, of all runs together. Each takes up to 80 bytes.
const MOST_VALUES = 10000;

const valuesOf = (points) => (points ?? []).reduce((sum, row) => sum + Object.keys(row.values).length, 0);

export class News {
  // `followed` says whether a part of the page makes the curves of a run longer; points of others are not kept.
  constructor(followed) {
    this._followed = followed;
    this.drop();
  }

  // Forgets everything.
  drop() {
    this._runs = new Map();
    this._gone = new Set();
    this._again = false;
    this._values = 0;
  }

  // Runs that changed and are gone; `again` after a break, when anything may be different.
  add({ runs = [], gone = [], again = false }) {
    for (const run of runs) {
      const before = this._runs.get(run.id), changed = [...new Set([...(before?.changed ?? []), ...run.changed])];
      this._runs.set(run.id, { ...run, changed, points: this._joined(before, run) });
      this._gone.delete(run.id);
    }
    for (const id of gone) {
      this._values -= valuesOf(this._runs.get(id)?.points);
      this._runs.delete(id);
      this._gone.add(id);
    }
    this._again ||= again;
  }

  // The new points of two changes of a run one after the other; null if its curves must be read.
  _joined(before, run) {
    const rows = [before, run].filter((each) => each?.changed.includes("metrics")).map((each) => each.points);
    this._values -= valuesOf(before?.points);
    const joined = rows.includes(null) || !this._followed(run.id) ? null : rows.flat();
    const values = valuesOf(joined);
    if (this._values + values > MOST_VALUES) return null;
    this._values += values;
    return joined;
  }

  // Everything, which is then forgotten; null if there is nothing.
  take() {
    if (!this._runs.size && !this._gone.size && !this._again) return null;
    const taken = { runs: [...this._runs.values()], gone: [...this._gone], again: this._again };
    this.drop();
    return taken;
  }
}
