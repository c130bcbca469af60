// Reading what is on the screen again when events say that it changed.
import { useEffect, useRef } from "./base.js";
import { on, stream } from "./api.js";

// Reads at once, and again whenever `what` of these runs changes. `load` reads and returns a function that shows what it
// read; of two readings the later is shown.
export function useLive(ids, what, load, inputs) {
  const last = useRef(0), current = useRef(load);
  current.current = load;
  const read = async () => {
    const number = (last.current += 1);
    const show = await current.current();
    return () => { if (number === last.current) show(); };
  };
  useEffect(() => {
    let wanted = true;
    stream.opened.then(async () => { if (wanted) (await read())(); });
    return () => { wanted = false; last.current += 1; };
  }, inputs);
  useEffect(() => on("reading", ({ runs, again }) => {
    const changed = runs.some((run) => ids.includes(run.id) && what.some((each) => run.changed.includes(each)));
    return again || changed ? read() : null;
  }), [ids.join(" "), what.join(" ")]);
}

// A load for `useLive` that shows what `ask` finds, or its failure.
export const reading = (ask, show, setError) => async () => {
  try {
    const found = await ask();
    return () => { show(found); setError(null); };
  } catch (failure) {
    return () => setError(failure);
  }
};
