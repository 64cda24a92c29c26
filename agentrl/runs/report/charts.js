// Charts as SVG, from the data that charts.py describes. Steps and values are data; all other numbers are SVG units.

const SVG = new DOMParser().parseFromString("<svg>", "text/html").querySelector("svg").namespaceURI;
// Width, height, the room for labels at the top, right, bottom and left, and about how many ticks across and up.
const SIZES = { small: [340, 180, 10, 12, 26, 44, 5, 4], middle: [520, 240, 10, 12, 26, 44, 6, 5], wide: [760, 340, 18, 30, 34, 62, 8, 5], flat: [760, 150, 10, 12, 26, 44, 8, 3] };
const MOST_DOTS = 30;
// More places to point at than this would be narrower than a pixel or two.
const MOST_TARGETS = 240;

function drawn(name, attributes, ...inside) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, typeof value === "number" ? value.toFixed(1) : value);
  made.append(...inside.map((part) => (part instanceof Node ? part : plain(part))));
  return made;
}

// A number in few characters: 0.0125, 1.5M.
function brief(value) {
  for (const [limit, divisor, unit] of [[1e9, 1e9, "G"], [1e6, 1e6, "M"], [1e4, 1e3, "k"]])
    if (Math.abs(value) >= limit) return written(value / divisor) + unit;
  return written(value, Math.abs(value) >= 1000 ? 4 : 3);
}

// The range of some numbers, never empty.
function span(values) {
  const low = values.reduce((a, b) => Math.min(a, b)), high = values.reduce((a, b) => Math.max(a, b));
  const room = Math.max(Math.abs(low), Math.abs(high), 1e-9);
  return high - low > 1e-6 * room ? [low, high] : [low - room / 2, high + room / 2];
}

// The distance of about so many ticks in a range: 1, 2 or 5 times a power of ten.
function tickStep(low, high, about) {
  const rough = (high - low) / about, power = 10 ** Math.floor(Math.log10(rough));
  return power * [1, 2, 5, 10].find((factor) => factor * power >= rough * 0.999);
}

function ticks(low, high, about) {
  const apart = tickStep(low, high, about), marks = [];
  for (let tick = Math.ceil(low / apart - 1e-9); tick <= Math.floor(high / apart + 1e-9); tick += 1) marks.push(tick * apart);
  return marks.length ? marks : [(low + high) / 2];
}

// The range of the value axis: it reaches to zero and ends, at both ends, on a tick.
function valueRange(values, about) {
  const [low, high] = span([0, ...values]), apart = tickStep(low, high, about);
  return values.some(Boolean) ? [Math.floor(low / apart + 1e-9) * apart, Math.ceil(high / apart - 1e-9) * apart] : [0, 1];
}

// A style is a class of the style sheet, or a colour of its own.
const styled = (kind, style) => (style.startsWith("hsl") ? { class: kind, color: style } : { class: `${kind} ${style}` });

// The points of a chart, to find the ranges of its axes.
function extent({ lines, bars }) {
  const ofLine = ({ points, band }) => [...points, ...band.flatMap(([step, low, high]) => [[step, low], [step, high]])];
  const ofBar = ({ span: [first, last], parts }) => [[first - 0.5, 0], [last + 0.5, parts.reduce((sum, [, value]) => sum + value, 0)]];
  return [...lines.flatMap(ofLine), ...bars.flatMap(ofBar)];
}

class Paper {
  constructor({ lines, bars, within, size, unit }) {
    const [width, height, top, right, bottom, left, across, up] = SIZES[size], points = extent({ lines, bars });
    Object.assign(this, { width, height, unit, steps: span(points.map(([step]) => step)), values: valueRange([...within, ...points.map(([, value]) => value)], up) });
    const share = (value, [low, high]) => (value - low) / (high - low);
    this.x = (step) => left + share(step, this.steps) * (width - left - right);
    this.y = (value) => height - bottom - share(value, this.values) * (height - top - bottom);
    this.ticks = [ticks(...this.steps, across).filter(Number.isInteger), ticks(...this.values, up)];
  }

  path(points) {
    return "M" + points.map(([step, value]) => `${this.x(step).toFixed(1)} ${this.y(value).toFixed(1)}`).join("L");
  }

  axes() {
    const [left, right] = this.steps.map(this.x), bottom = this.y(this.values[0]), parts = [];
    for (const value of this.ticks[1]) {
      const y = this.y(value);
      parts.push(drawn("line", { class: "grid", x1: left, x2: right, y1: y, y2: y }), drawn("text", { class: "tick", x: left - 7, y, dy: ".34em" }, brief(value)));
    }
    for (const step of this.ticks[0]) {
      const x = this.x(step);
      parts.push(drawn("line", { class: "axis", x1: x, x2: x, y1: bottom, y2: bottom + 4 }), drawn("text", { class: "tick step", x, y: bottom + 7, dy: ".9em" }, brief(step)));
    }
    parts.push(drawn("text", { class: "tick", x: left - 18, y: bottom + 7, dy: ".9em" }, this.unit), drawn("line", { class: "axis", x1: left, x2: right, y1: bottom, y2: bottom }));
    return parts;
  }

  // A line through few points hides where they are, and one through a single point is not drawn at all.
  line({ style, points, band, titles, labels }) {
    const parts = [], edge = (bound) => band.map((row) => [row[0], row[bound]]);
    if (band.length) parts.push(drawn("path", { ...styled("band", style), d: `${this.path([...edge(2), ...edge(1).reverse()])}Z` }));
    if (titles.length) parts.push(...band.map(([step, low, high]) => drawn("path", { class: "whisker", d: this.path([[step, low], [step, high]]) })));
    if (points.length > 1) parts.push(drawn("path", { ...styled("line", style), d: this.path(points) }));
    if (titles.length) parts.push(...points.map(([step, value], index) => this.dot(style, step, value, titles[index])));
    else if (points.length <= MOST_DOTS) parts.push(...points.map(([step, value]) => drawn("circle", { ...styled("dot", style), cx: this.x(step), cy: this.y(value), r: 1.8 })));
    const ends = labels ? [[points[0], "start"], [points[points.length - 1], "end"]].slice(0, points.length) : [];
    for (const [[step, value], anchor] of ends)
      parts.push(drawn("text", { class: "value", x: this.x(step), y: this.y(value) - 12, "text-anchor": anchor }, `${(100 * value).toFixed(1)}%`));
    return parts;
  }

  dot(style, step, value, title) {
    const centre = { cx: this.x(step), cy: this.y(value) };
    return drawn("g", { class: "eval" }, drawn("title", {}, title), drawn("circle", { class: "near", ...centre, r: 13 }), drawn("circle", { ...styled("dot", style), ...centre, r: 4 }));
  }

  bar({ span: [first, last], parts }) {
    const left = this.x(first - 0.42), right = this.x(last + 0.42), rects = [];
    let below = 0;
    for (const [style, value] of parts) {
      const top = this.y(below + value);
      rects.push(drawn("rect", { class: style, x: left, y: top, width: right - left, height: this.y(below) - top }));
      below += value;
    }
    const name = first === last ? `step ${first}` : `steps ${first} to ${last}, mean`;
    return drawn("g", { class: "bar" }, drawn("title", {}, `${name}: ${parts.map(([style, value]) => `${style} ${brief(value)} s`).join(" · ")}`), ...rects);
  }

  // Invisible columns that show the values of all lines at a step when pointed at; at most so many that each can be hit.
  targets(lines) {
    const values = new Map();
    for (const { name, points } of lines) for (const [step, value] of points) values.set(step, [...(values.get(step) || []), `${name} ${brief(value)}`]);
    const steps = [...values.keys()].sort((a, b) => a - b), every = Math.ceil(steps.length / MOST_TARGETS);
    const shown = steps.filter((_, index) => index % every === 0), [left, right] = this.steps.map(this.x), [bottom, top] = this.values.map(this.y);
    const width = Math.min(24, Math.max(2, (right - left) / shown.length));
    const column = (step) => drawn("rect", { class: "target", x: this.x(step) - width / 2, y: top, width, height: bottom - top }, drawn("title", {}, `${this.unit} ${step}: ${values.get(step).join(" · ")}`));
    return shown.map(column);
  }
}

const key = ([style, text]) => element("span", { class: "key" }, drawn("svg", { viewBox: "0 0 22 10", "aria-hidden": "true" }, drawn("path", { ...styled("swatch", style), d: "M1 5H21" })), text);

function chart({ id, title, what = "", keys = [], lines = [], bars = [], within = [], size = "small", unit = "step" }) {
  lines = lines.filter(({ points }) => points.length).map((line) => ({ name: "", band: [], titles: [], labels: false, ...line }));
  if (!lines.length && !bars.length) return "";
  const paper = new Paper({ lines, bars, within, size, unit });
  const titled = lines.filter(({ titles }) => titles.length), plainLines = lines.filter(({ titles }) => !titles.length);
  const body = [...paper.axes(), ...bars.map((bar) => paper.bar(bar)), ...plainLines.flatMap((line) => paper.line(line)), ...paper.targets(plainLines), ...titled.flatMap((line) => paper.line(line))];
  const svg = drawn("svg", { viewBox: `0 0 ${paper.width} ${paper.height}`, role: "img", "aria-label": plain(title) }, ...body);
  const notes = keys.length ? [element("span", { class: "what" }, ...keys.map(key))] : [];
  if (lines.length === 1 && !keys.length) notes.push(element("span", { class: "last" }, `last ${brief(lines[0].points.at(-1)[1])}`));
  if (what) notes.push(element("span", { class: "what" }, what));
  return element("figure", { class: "chart", id: `chart-${plain(id)}` }, element("figcaption", {}, element("b", {}, title), ...notes), svg);
}

// Each part of the page that has charts names the list of them.
async function drawCharts() {
  const lists = await read("charts");
  for (const part of document.querySelectorAll("[data-charts]")) part.append(...lists[part.dataset.charts].map((spec) => chart(spec)));
}
drawCharts();
