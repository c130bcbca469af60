// One plot: curves with a band where a point stands for several steps, marks for values that are not finite.
import { html, still, useState, useEffect, useLayoutEffect, useRef, useMemo, count, value, exact, duration } from "./base.js";

const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

function faded(color, part) {
  const number = parseInt(color.slice(1), 16);
  return `rgba(${number >> 16}, ${(number >> 8) & 255}, ${number & 255}, ${part})`;
}

// An average that follows the curve; the beginning is not pulled towards zero.
export function smoothed(values, amount) {
  if (!amount) return values;
  let mean = 0, weight = 0;
  return values.map((number) => {
    if (number === null || number === undefined) return number;
    mean = mean * amount + number * (1 - amount);
    weight = weight * amount + (1 - amount);
    return mean / weight;
  });
}

function axisText(kind, number) {
  return kind === "time" ? exact(number) : kind === "tokens" ? `${count(number)} tokens` : `step ${count(number)}`;
}

// How many lines uPlot draws for a curve: itself, the smoothed one, and the edges of its band, where it has them.
const lines = (curve, smoothing) => 1 + (smoothing ? 1 : 0) + (curve.low ? 2 : 0);

// Columns for uPlot: x, then the lines of each curve.
function columns(curves, smoothing, log) {
  const usable = (list) => (log ? list.map((number) => (number > 0 ? number : null)) : list);
  const tables = curves.map(({ x, y, low, high }) =>
    [x, y, ...(smoothing ? [smoothed(y, smoothing)] : []), ...(low ? [low, high] : [])].map((list, place) => (place ? usable(list) : list)));
  if (tables.length === 1) return tables[0];
  return window.uPlot.join(tables);
}

// The column of each curve that is read out.
function readOut(curves, smoothing) {
  let place = 1;
  return curves.map((curve) => { const found = place + (smoothing ? 1 : 0); place += lines(curve, smoothing); return found; });
}

function options(props, width, height, show, latest) {
  const { curves, axis, log, smoothing, onZoom, format = value } = props;
  const ink = style("--soft"), line = style("--line");
  const bad = style("--bad"), series = [{}], bands = [];
  curves.forEach((curve) => {
    const color = curve.color;
    const hidden = { points: { show: false }, width: 0, stroke: "transparent", spanGaps: true };
    const few = curve.x.length < 60;
    series.push(
      { stroke: smoothing ? faded(color, 0.25) : color, width: smoothing ? 1 : 1.6, spanGaps: true, points: { show: few && !smoothing, size: 4, fill: color } },
    );
    if (smoothing) series.push({ stroke: color, width: 2, spanGaps: true, points: { show: false } });
    if (curve.low) {
      series.push(hidden, hidden);
      bands.push({ series: [series.length - 1, series.length - 2], fill: faded(color, smoothing ? 0.1 : 0.18) });
    }
  });
  const grid = { stroke: line, width: 1 };
  const font = "11px system-ui, sans-serif";
  const first = curves[0]?.x[0];
  return {
    width, height, series, bands, legend: { show: false },
    padding: [8, 18, 0, 0],
    cursor: { y: false, drag: { x: true, y: false, setScale: false }, points: { size: 7 } },
    scales: { x: { time: false }, y: log ? { distr: 3 } : { range: spread } },
    axes: [
      { stroke: ink, grid: { show: false }, ticks: { show: false }, font, size: 26, space: 70,
        values: (_, ticks) => ticks.map((tick) => (axis === "time" ? (tick >= first ? duration(tick - first) : "") : count(tick))) },
      { stroke: ink, grid, ticks: { show: false }, font, size: 52, space: 32,
        values: (_, ticks) => ticks.map((tick) => (tick === null ? "" : format(tick))) },
    ],
    hooks: {
      setSelect: [(plot) => {
        const { left, width: selected } = plot.select;
        if (selected > 4) onZoom({ start: plot.posToVal(left, "x"), end: plot.posToVal(left + selected, "x") });
        plot.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
      }],
      setCursor: [(plot) => show(plot.cursor.idx ?? null)],
      draw: [(plot) => marks(plot, latest(), bad)],
    },
  };
}

// The range of the y axis. Values that are all the same stand in a small range around them, not between 0 and 100.
function spread(plot, low, high) {
  if (low === null) return [null, null];
  if (low !== high) return window.uPlot.rangeNum(low, high, 0.1, true);
  return low === 0 ? [0, 1] : [low - Math.abs(low) / 2, low + Math.abs(low) / 2];
}

// A triangle at the upper edge wherever a value was not finite.
function marks(plot, curves, color) {
  const { ctx, bbox } = plot, ratio = devicePixelRatio || 1;
  ctx.save();
  ctx.fillStyle = color;
  for (const curve of curves) {
    for (const [x] of curve.odd ?? []) {
      const left = plot.valToPos(x, "x", true);
      if (left < bbox.left || left > bbox.left + bbox.width) continue;
      ctx.beginPath();
      ctx.moveTo(left - 4 * ratio, bbox.top);
      ctx.lineTo(left + 4 * ratio, bbox.top);
      ctx.lineTo(left, bbox.top + 7 * ratio);
      ctx.fill();
    }
  }
  ctx.restore();
}

// Plots on the screen or near it. Others are drawn when somebody scrolls to them.
const near = new WeakMap();
const seen = new IntersectionObserver((entries) => { for (const entry of entries) near.get(entry.target)?.(entry.isIntersecting); }, { rootMargin: "200px" });

function useNear(place) {
  const [shown, setShown] = useState(false);
  useEffect(() => {
    const element = place.current;
    near.set(element, setShown);
    seen.observe(element);
    return () => seen.unobserve(element);
  }, []);
  return shown;
}

export const Plot = still((props) => {
  const { title, curves, axis, log, smoothing, zoom, onZoom, height = 190, unit = "", format = value } = props;
  const place = useRef(), plot = useRef(), latest = useRef(props), drawn = useRef(null);
  const [at, setAt] = useState(null);
  const shown = useNear(place);
  latest.current = props;
  const data = useMemo(() => columns(curves, smoothing, log), [curves, smoothing, log]);
  const about = useMemo(() => `${title}, ${summary(curves)}`, [title, curves]);
  const key = `${axis} ${log} ${smoothing > 0} ${curves.map((curve) => `${curve.label}${curve.color}${Boolean(curve.low)}${curve.x.length < 60}`).join("|")} ${props.theme}`;

  useLayoutEffect(() => {  // in the same frame as the words around it
    if (!shown) return;
    const element = place.current;
    if (plot.current?.key !== key) {
      plot.current?.destroy();
      const width = Math.max(180, element.clientWidth);
      plot.current = new window.uPlot(options({ ...latest.current, onZoom: (range) => latest.current.onZoom(range) }, width, height, setAt, () => latest.current.curves), data, element);
      plot.current.key = key;
    } else if (drawn.current !== data) {
      plot.current.setData(data, true);
    }
    drawn.current = data;
  }, [key, data, shown]);

  useEffect(() => {
    const resized = new ResizeObserver(([{ contentRect }]) => {
      const width = Math.max(180, Math.floor(contentRect.width));
      if (plot.current && plot.current.width !== width) plot.current.setSize({ width, height });
    });
    resized.observe(place.current);
    return () => { resized.disconnect(); plot.current?.destroy(); plot.current = null; };
  }, []);

  const keys = (event) => {
    const shown = curves[0]?.x;
    if (!shown?.length) return;
    const start = zoom?.start ?? shown[0], end = zoom?.end ?? shown[shown.length - 1], span = end - start;
    const move = {
      ArrowLeft: [start - span / 4, end - span / 4], ArrowRight: [start + span / 4, end + span / 4],
      "+": [start + span / 4, end - span / 4], "-": [start - span / 2, end + span / 2], 0: null, Escape: null,
    }[event.key];
    if (move === undefined) return;
    event.preventDefault();
    onZoom(move && { start: move[0], end: move[1] });
  };

  const odd = curves.flatMap((curve) => curve.odd ?? []).reduce((sums, [, word, number]) => ({ ...sums, [word]: (sums[word] ?? 0) + number }), {});
  const x = at === null || at === undefined ? null : data[0][at];
  const read = x === null || x === undefined ? [] : readOut(curves, smoothing);
  const said = read.map((column, number) => ({ curve: curves[number], number: before(data[column], at) }));
  const last = curves.map((curve) => curve.y[curve.y.length - 1]);
  return html`<figure class="plot" aria-label=${about}>
    <figcaption><h3>${title}</h3>
      <span class="readout">${x === null || x === undefined
        ? html`${curves.length === 1 ? html`<b>${format(last[0])}</b> ${unit}` : null}`
        : html`<span class="soft">${axisText(axis, x)}</span> ${said.map(({ curve, number }) => html`<span><i class="dot" style=${{ background: curve.color }}></i><b>${format(number)}</b></span>`)}`}
        ${Object.entries(odd).map(([word, number]) => html` <span class="odd">${number} × ${word}</span>`)}
      </span>
    </figcaption>
    <div class="canvas" ref=${place} tabindex="0" role="application" style=${{ height: `${height}px` }}
      aria-label=${`${title}: arrows move, plus and minus zoom, 0 shows all`}
      onKeyDown=${keys} onDblClick=${() => onZoom(null)} onMouseDown=${(event) => pan(event, plot.current, onZoom)} onMouseLeave=${() => setAt(null)}></div>
  </figure>`;
});

// With shift the mouse moves the plot instead of choosing a part of it.
function pan(event, plot, onZoom) {
  if (!event.shiftKey || !plot) return;
  event.stopPropagation();
  event.preventDefault();
  const from = event.clientX, { min, max } = plot.scales.x;
  const scale = (max - min) / plot.over.clientWidth;
  const up = (end) => {
    removeEventListener("mouseup", up);
    const moved = (from - end.clientX) * scale;
    if (moved) onZoom({ start: min + moved, end: max + moved });
  };
  addEventListener("mouseup", up);
}

function before(list, at) {
  for (let place = at; place >= 0 && place > at - 50; place -= 1) if (list?.[place] !== undefined && list[place] !== null) return list[place];
  return undefined;
}

function summary(curves) {
  return curves.map(({ label, y }) => {
    const finite = y.filter((number) => number !== null);
    return finite.length ? `${label}: from ${value(finite[0])} to ${value(finite[finite.length - 1])}, lowest ${value(Math.min(...finite))}` : `${label}: no values`;
  }).join("; ");
}
