// One episode in a column. Its tokens are in chunks of whole lines; only chunks near the screen hold elements.

const attemptOf = (row) => (row.attempt === null ? "" : `attempt ${row.attempt}`);
const exp = (value) => value === null || value === undefined ? value : Math.exp(value);
const same = (value) => value;
// Each view of the tokens: its name; the numbers it shows; how; how one is written; and what it says.
const MODES = {
  text: ["Conversation", null, "", same, "What was said, and by whom."],
  source: ["Tokens by source", null, "", same, "Each token by itself; those that the policy sampled have a background."],
  logp: ["Log-prob", "logp", "low", same, "Nats, as the engine sampled it: the stronger the colour, the less probable."],
  entropy: ["Entropy", "entropy", "high", same, "Nats, of the distribution it was sampled from: the stronger the colour, the more."],
  ratio: ["Ratio", "log_ratio", "signed", exp, "θ/old at the update's first pass: blue over a solid line above 1, orange over a dashed one below."],
  cumulative: ["Cumulative ratio, clipped", "cumulative_log_ratio", "signed", exp, "Product of the ratios so far; crossed out where the loss cut the gradient."],
  advantage: ["Advantage", "advantage", "signed", same, "Blue over a solid line raises a token's probability, orange over a dashed one lowers it."],
  weight: ["W_t", "realized_energy", "high", same, "OTB's realized energy: the episode's weight in the baseline of its group."],
  baseline: ["B_t", "baseline", "signed", same, "OTB's baseline: what the reward from here on is compared with."],
  mismatch: ["Trainer − engine", "mismatch", "signed", same, "Nats by which trainer and engine disagree on the log-prob."],
  version: ["Weight version", null, "", same, "Another background with each version of the weights that sampled."],
};
let mode = "text";

function largest(values) {
  const sizes = (values || []).filter((value) => value !== null).map(Math.abs).sort((a, b) => a - b);
  return sizes.length ? sizes[Math.floor(0.98 * (sizes.length - 1))] || sizes[sizes.length - 1] : 0;
}

// Cuts an episode's segments into chunks; a chunk ends with a line where it can, so that it can be a block of its own.
function chunks(segment, offset, sampled) {
  const parts = [];
  for (let from = 0, start = 0; from < segment.pieces.length; ) {
    let to = from, size = 0;
    while (to < segment.pieces.length && to - from < 1200) {
      const piece = segment.pieces[to];
      size += piece.length;
      to += 1;
      if (to - from >= 200 && piece.endsWith("\n")) break;
    }
    parts.push({ segment, from, to, start, size, offset: offset + from, sampled: sampled < 0 ? -1 : sampled + from });
    from = to;
    start += size;
  }
  return parts;
}

// Where a text has what is searched for, whatever the case.
function findAll(segments, wanted) {
  if (!wanted) return [];
  const words = new RegExp(wanted.replace(/[\\^$.*+?()[\]{}|]/g, "\\$&"), "giu");
  return segments.flatMap((segment) => [...segment.text.matchAll(words)].map((hit) => ({ segment, start: hit.index, stop: hit.index + hit[0].length })));
}

const segmentsOf = (texts) => texts.rows.flatMap((row) => row.segments);
const counted = (size, name) => `${size} ${name}${size === 1 ? "" : "s"}`;

class Column {
  constructor(number, row) {
    Object.assign(this, { number, row, nodes: [], turns: [], sections: [], hits: [], scale: new Map() });
    this.pane = element("article", { class: "episode", tabindex: "0", "aria-label": `Episode of task ${plain(row.task)}, ${row.won ? "solved" : "failed"}` });
    this.pane.column = this;
    this.watch = new IntersectionObserver((seen) => seen.forEach((entry) => this.turn(entry)), { root: this.pane, rootMargin: "1000px" });
  }

  async fill() {
    [this.texts, this.numbers] = await Promise.all([open(`text-${this.number}`), open(`numbers-${this.number}`)]);
    this.pane.replaceChildren(this.header());
    let offset = 0;
    this.texts.rows.forEach(({ segments }, number) => {
      if (this.texts.rows.length > 1) this.pane.append(...this.heading(number));
      for (const segment of segments) {
        this.pane.append(this.section(segment, offset));
        offset += segment.count;
      }
    });
    this.nodes.forEach((node) => this.watch.observe(node));
  }

  // How a row begins. The tokens that it inherits are shown with their numbers in the row that owns them.
  heading(number) {
    const { parent, fork } = this.texts.rows[number];
    const begin = parent !== null ? `, continues row ${parent + 1} after ${counted(fork, "token")}` : number ? ", begins anew" : "";
    const title = element("h3", { class: "row" }, `Row ${number + 1}${begin}`);
    if (parent === null) return [title];
    const text = element("div", { class: "tokens" });
    const context = element("details", { class: "context" }, element("summary", {}, `The ${counted(fork, "token")} before it`), text);
    context.addEventListener("toggle", () => context.open && !text.firstChild && marked(text, this.inherited(number), false));
    return [title, context];
  }

  inherited(number) {
    const { rows } = this.texts, parts = [];
    let { parent, fork } = rows[number];
    for (; parent !== null; parent = rows[parent].parent) {
      const own = rows[parent].segments.flatMap((segment) => segment.pieces);
      parts.unshift(own.slice(0, Math.max(0, fork - rows[parent].fork)).join(""));
      fork = Math.min(fork, rows[parent].fork);
    }
    return parts.join("");
  }

  section(segment, offset) {
    const trained = segment.source === "policy", { text, count: size, turn } = segment;
    segment.pieces = tokens(text, this.numbers.sizes.slice(offset, offset + size));
    const notes = [counted(size, "token")];
    if (trained) notes.push(`reward ${written(segment.reward)}`, `weights ${[segment.version, ...segment.swaps.map((part) => part[1])].map((part) => `v${part}`).join(" → ")}`);
    if (segment.cut) notes.push(`cut at ${size} tokens`);
    const title = element("h3", {}, trained ? `policy · turn ${turn + 1}` : segment.source, ...notes.map((note) => element("span", {}, note)));
    const body = element("div", { class: "tokens" });
    const section = element("section", { class: `segment ${segment.source}` }, title, body);
    this.sections.push(section);
    if (trained) this.turns[turn] = section;
    for (const chunk of chunks(segment, offset, trained ? segment.sampled : -1)) {
      const node = element("div", { class: "chunk" });
      node.chunk = chunk;
      node.style.height = `${Math.ceil(chunk.size / 80) * 1.45}rem`;
      this.nodes.push(node);
      body.append(node);
    }
    return section;
  }

  header() {
    const { row } = this, facts = element("dl", { class: "facts" });
    const { expected, answer } = this.texts, answers = { "Expected answer": expected, "Given answer": answer === "" ? "none" : answer };
    for (const [name, text] of Object.entries(answers)) {
      if (!text) continue;
      const shown = element("dd");
      marked(shown, text, false);
      facts.append(element("div", { class: "answer" }, element("dt", {}, name), shown));
    }
    const parts = Object.entries(this.texts.parts).map(([name, value]) => `${name} ${written(value)}`);
    const several = this.texts.rows.length > 1 ? ` in ${this.texts.rows.length} rows` : "";
    const details = { Stop: `${row.stop}: ${row.why}`, Return: written(row.return), Parts: parts.join(", "), Tokens: `${row.sampled} sampled of ${row.tokens}${several}`, Tags: row.tags.join(", ") };
    for (const [name, text] of Object.entries(details)) if (text) facts.append(element("div", {}, element("dt", {}, name), element("dd", {}, text)));
    const outcome = element("span", { class: `outcome ${row.won ? "good" : "bad"}` }, row.won ? "✓ solved" : "✗ failed");
    return element("header", {}, outcome, element("h2", { tabindex: "-1" }, row.task), element("p", {}, [sources[row.source], row.step, attemptOf(row), `seed ${row.seed}`].filter(Boolean).join(", "), " ", element("a", { href: `#episode-${this.number}` }, "link")), facts, ...this.calls());
  }

  // What each tool was asked; what it answered stands in the conversation.
  calls() {
    const calls = this.texts.tools.map(([name, ok, s, asked]) => [`${name} ${ok ? "✓" : "✗ failed"}${s === null ? "" : ` ${(1000 * s).toFixed(1)} ms`}`, asked]);
    if (!calls.length) return [];
    const inputs = ([name, text]) => {
      const shown = element("pre");
      marked(shown, text, false);
      return element("div", {}, name, shown);
    };
    const list = element("ol", {}, ...calls.map(([call, asked]) => element("li", {}, call, ...Object.entries(asked).map(inputs))));
    const few = calls.slice(0, 8).map(([call]) => call).join(", ") + (calls.length > 8 ? `, ${calls.length - 8} more` : "");
    return [element("details", { class: "calls" }, element("summary", {}, `Tool calls: ${few}`), list)];
  }

  turn({ target, isIntersecting, boundingClientRect }) {
    if (isIntersecting) this.show(target);
    else if (target.firstChild) {
      target.style.height = `${boundingClientRect.height}px`;
      target.replaceChildren();
    }
  }

  show(node) {
    const { segment, from, to, start, size, offset, sampled } = node.chunk;
    const shown = document.createDocumentFragment();
    const hits = this.hits.filter((hit) => hit.segment === segment && hit.start < start + size && hit.stop > start);
    let end = start;
    if (mode === "text") {
      for (const hit of hits) {
        const mark = this.mark(element("mark"), hit), last = Math.min(hit.stop, start + size);
        marked(shown, segment.text.slice(end, hit.start), false);
        marked(mark, segment.text.slice(Math.max(hit.start, start), last), false);
        shown.append(mark);
        end = last;
      }
      marked(shown, segment.text.slice(end, start + size), false);
    } else for (let at = from; at < to; at += 1) {
      // <bdi> keeps right-to-left text from moving the tokens around it.
      const token = document.createElement("bdi");
      token.at = offset + at - from;
      token.sampled = sampled < 0 ? -1 : sampled + at - from;
      if (token.sampled >= 0) this.colour(token, segment, at);
      marked(token, segment.pieces[at], true);
      shown.append(token);
      end += segment.pieces[at].length;
      const hit = hits.find((other) => other.start < end && other.stop > end - segment.pieces[at].length);
      if (hit) this.mark(token, hit);
    }
    node.style.height = "";
    node.replaceChildren(shown);
  }

  mark(node, hit) {
    node.hit = hit;
    node.classList.add("hit", ...(hit === this.hit ? ["now"] : []));
    return node;
  }

  find(wanted) {
    this.hits = findAll(segmentsOf(this.texts), wanted);
  }

  // Shows a hit, and has its element on the screen.
  reveal(hit) {
    const node = this.nodes.find(({ chunk }) => chunk.segment === hit.segment && hit.start < chunk.start + chunk.size);
    this.hit = hit;
    node.closest("details")?.setAttribute("open", "");
    this.show(node);
    this.refresh();
    [...node.children].find((child) => child.hit === hit).scrollIntoView({ block: "center" });
  }

  colour(token, segment, at) {
    const [, key, kind] = MODES[mode], values = this.numbers[key], value = values?.[token.sampled];
    token.className = "even";
    if (mode === "version") token.className = (segment.version + segment.swaps.filter((swap) => swap[0] <= at).length) % 2 ? "odd" : "even";
    if (mode === "cumulative" && this.numbers.clipped?.[token.sampled]) token.className += " clipped";
    if (!value) return;
    if (!this.scale.has(key)) this.scale.set(key, largest(values));
    token.className += kind !== "signed" ? " more" : value > 0 ? " up" : " down";
    token.style.setProperty("--size", Math.min(1, Math.abs(value) / this.scale.get(key)).toFixed(2));
  }

  describe(token, segment) {
    const words = [`token ${this.numbers.ids[token.at]}`];
    if (token.sampled < 0) return [segment, ...words].join(" · ");
    for (const [name, key, , write] of Object.values(MODES))
      if (key && this.numbers[key]) words.push(`${name.replace(", clipped", "").toLowerCase()} ${written(write(this.numbers[key][token.sampled]), 4)}`);
    const p = exp(this.numbers.logp[token.sampled]);
    return [`sampled, probability ${(100 * p).toFixed(1)}%`, ...words, ...(this.numbers.clipped?.[token.sampled] ? ["clipped"] : [])].join(" · ");
  }

  refresh() {
    this.nodes.filter((node) => node.firstChild).forEach((node) => this.show(node));
  }

  close() {
    this.watch.disconnect();
  }
}

// B_t over the sampled tokens of a group's members, and where each of them ended with what return.
function baselineChart(columns) {
  const lines = columns.filter((column) => column.numbers?.baseline).flatMap(({ numbers, row }) => {
    const apart = Math.ceil(numbers.baseline.length / 700);
    const points = numbers.baseline.map((value, index) => [index + 1, value]).filter(([token, value]) => value !== null && (token - 1) % apart === 0);
    const end = { points: [[row.sampled, row.return]], titles: [`return ${written(row.return)} after ${row.sampled} tokens`] };
    return [{ style: "success", name: "B_t", points }, { style: row.won ? "success" : "reward", ...end }];
  });
  return chart({ id: "baseline", title: "Baseline B_t of the group", what: "with the return at each episode's end: blue solved, orange failed", lines, size: "flat", unit: "token" });
}
