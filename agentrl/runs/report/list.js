// The list, its filters, the keyboard, and what is on the stage.

const ROW = 44, MOST_COLUMNS = 16, TOGETHER = 32;
let rows = [], sources = [], shown = [], at = 0, columns = [], shows = 0, searches = 0, direction = 1;
const list = $("list"), filters = $("filters").elements, tools = $("tools").elements, notice = $("notice");
const texts = new Map();

function rowOf(number, index) {
  const row = rows[number], other = rows[row.pair];
  const outcome = (each) => element("b", { class: each.won ? "good" : "bad" }, `${each.won ? "✓" : "✗"} ${written(each.return)}`);
  const notes = [sources.length > 1 && !other ? sources[row.source] : "", row.env, row.step, attemptOf(row), counted(row.turns, "turn"), row.errors ? counted(row.errors, "tool error") : "", row.cut ? "cut" : "", ...row.tags].filter(Boolean).join(" · ");
  const outcomeOf = (each) => (each.won ? "solved" : "failed");
  const flip = other && other.won !== row.won;
  const line = element("div", { role: "option", id: `row-${index}`, "aria-selected": String(index === at), "aria-posinset": index + 1, "aria-setsize": shown.length, class: flip ? "flip" : "",
      "aria-label": plain([row.task, outcomeOf(row), ...(other ? [`in the other ${outcomeOf(other)}`] : []), notes].join(", ")) },
    element("span", { class: "score" }, outcome(row), ...(other ? [" → ", outcome(other)] : [])), element("span", { class: "task" }, row.task), element("small", {}, notes));
  line.style.top = `${index * ROW}px`;
  line.addEventListener("click", () => choose(index));
  return line;
}

function drawList() {
  const top = Math.max(0, Math.floor(list.scrollTop / ROW) - 5), last = Math.min(shown.length, Math.ceil((list.scrollTop + list.clientHeight) / ROW) + 5);
  list.firstElementChild.style.height = `${shown.length * ROW}px`;
  const lines = [];
  for (let index = top; index < last; index += 1) lines.push(rowOf(shown[index], index));
  list.firstElementChild.replaceChildren(...lines);
  if (shown.length) list.setAttribute("aria-activedescendant", `row-${at}`);
  else list.removeAttribute("aria-activedescendant");
}

function matches(row) {
  const { outcome, source, low, high, few, many, errors, cut } = filters;
  const other = rows[row.pair];
  // Of a pair only the first is listed: the second is shown beside it.
  if (other && other.source < row.source && !source.value) return false;
  if (outcome.value && (outcome.value === "flip" ? !other || other.won === row.won : row.won !== (outcome.value === "won"))) return false;
  if (source.value && row.source !== Number(source.value)) return false;
  const within = (value, from, to) => (from.value === "" || value >= Number(from.value)) && (to.value === "" || value <= Number(to.value));
  return within(row.return, low, high) && within(row.turns, few, many) && (!errors.checked || row.errors > 0) && (!cut.checked || row.cut);
}

// What a search looks through.
async function readText(number) {
  if (texts.has(number)) return;
  const text = await read(`text-${number}`), { task, tags } = rows[number];
  texts.set(number, [task, ...tags, ...segmentsOf(text).map((segment) => segment.text)].join("\n").toLowerCase());
}

async function filter() {
  const mine = (searches += 1), was = shown[at], wanted = filters.text.value.toLowerCase();
  const flipped = (number) => (rows[number].pair === undefined ? 1 : rows[rows[number].pair].won === rows[number].won ? 1 : 0);
  let matching = rows.map((_, number) => number).filter((number) => matches(rows[number]));
  if (rows.some((row) => row.pair !== undefined)) matching.sort((a, b) => flipped(a) - flipped(b) || a - b);
  if (wanted) {
    await wait(200);
    const hits = [];
    for (let start = 0; start < matching.length; start += TOGETHER) {
      const some = matching.slice(start, start + TOGETHER);
      await Promise.all(some.map(readText));
      if (mine !== searches) return;
      hits.push(...some.filter((number) => texts.get(number).includes(wanted)));
      $("count").textContent = `searched ${start + some.length} of ${matching.length} …`;
    }
    matching = hits;
  }
  if (mine !== searches) return;
  shown = matching;
  $("count").textContent = `${shown.length} of ${rows.length} episodes`;
  list.scrollTop = 0;
  choose(Math.max(0, shown.indexOf(was)));
}

function choose(index, towards = 1) {
  if (index < 0 || index >= shown.length) return shown.length ? undefined : (drawList(), show());
  at = index;
  direction = towards;
  if (index * ROW < list.scrollTop) list.scrollTop = index * ROW;
  if ((index + 1) * ROW > list.scrollTop + list.clientHeight) list.scrollTop = (index + 1) * ROW - list.clientHeight;
  drawList();
  show();
}

function beside(number) {
  const row = rows[number], layout = tools.layout.value;
  if (layout === "pair" && row.pair !== undefined) return [number, row.pair];
  const group = (other) => other.source === row.source && other.file === row.file && other.env === row.env && other.task === row.task;
  return layout === "group" ? rows.map((_, other) => other).filter((other) => group(rows[other])).slice(0, MOST_COLUMNS) : [number];
}

// What the first rows of all columns begin with is folded away: where they differ is on the screen.
function fold() {
  const episodes = columns.map((column) => column.texts.rows[0].segments), [reference] = episodes;
  const alike = (segment, index) => episodes.every((segments) => segments[index]?.source === segment.source && segments[index].text === segment.text);
  const count = reference.findIndex((segment, index) => !alike(segment, index));
  if (count < 1) return;
  const size = reference.slice(0, count).reduce((sum, segment) => sum + segment.count, 0);
  for (const { sections } of columns) {
    const folded = element("details", { class: "shared" }, element("summary", {}, `${size} tokens, the same in all ${columns.length}`));
    sections[0].before(folded);
    folded.append(...sections.slice(0, count));
  }
}

async function show() {
  const mine = (shows += 1), number = shown[at];
  const next = number === undefined ? [] : beside(number).map((member) => new Column(member, rows[member]));
  await Promise.all(next.map((column) => column.fill()));
  // Another episode may have been chosen while this one was being read.
  if (mine !== shows) return next.forEach((column) => column.close());
  columns.forEach((column) => column.close());
  columns = next;
  notice.textContent = "";
  if (columns.length > 1) fold();
  $("columns").className = `of-${Math.min(columns.length, 3)}`;
  $("columns").replaceChildren(...columns.map((column) => column.pane));
  $("columns").scrollLeft = (columns.find((column) => column.number === number)?.pane.offsetLeft || 0) - $("columns").offsetLeft;
  // A screen reader reads the list's own choice where the list has the focus.
  if (columns.length && document.activeElement !== list) $("place").textContent = `Episode ${at + 1} of ${shown.length}: ${columns[0].pane.getAttribute("aria-label")}`;
  const figure = tools.layout.value === "group" ? baselineChart(columns) : "";
  $("baseline").replaceChildren(figure);
  $("baseline").hidden = !figure;
  tools.turn.max = columns[0]?.turns.length || 1;
  tools.turn.placeholder = `of ${tools.turn.max}`;
  legend();
  columns.forEach((column) => column.find(filters.text.value));
  const hits = chosen()?.hits.length;
  if (hits) reveal(direction < 0 ? hits - 1 : 0);
}

const chosen = () => columns.find((column) => column.number === shown[at]);

function reveal(index) {
  const column = chosen();
  column.reveal(column.hits[index]);
  notice.textContent = `hit ${index + 1} of ${column.hits.length} in this episode`;
}

// The next hit, or the previous one: where this episode has no more, that of the next in the list.
function jump(by) {
  if (!filters.text.value) return false;
  const column = chosen(), next = column ? column.hits.indexOf(column.hit) + by : -1;
  if (column?.hits[next]) reveal(next);
  else choose(at + by, by);
}

function legend() {
  const [, key, , write, what] = MODES[mode], scale = columns[0] && key ? largest(columns[0].numbers[key]) : 0;
  const missing = key && columns.length && !columns.some((column) => column.numbers[key]);
  $("legend").textContent = missing ? "This episode's file does not hold it." : what + (scale ? ` Full shade at ${write === exp ? `a factor of ${written(exp(scale))}` : written(scale)}.` : "");
}

function setMode(name) {
  tools.mode.value = mode = name;
  columns.forEach((column) => column.refresh());
  notice.textContent = "";
  legend();
}

function setLayout(name) {
  const radio = [...tools.layout].find((option) => option.value === name);
  if (radio.closest("label").hidden) return;
  radio.checked = true;
  show();
}

function goTo(turn) {
  const column = columns[0], number = Math.min(Math.max(1, turn), column?.turns.length || 1);
  tools.turn.value = number;
  for (const { turns } of columns) {
    turns[number - 1]?.closest("details")?.setAttribute("open", "");
    turns[number - 1]?.scrollIntoView({ block: "start" });
  }
}

// The token that was pointed at, clicked, or reached with the arrow keys is described in a bar at the bottom.
function describe(token, stays) {
  document.querySelectorAll("bdi.chosen").forEach((old) => old.classList.remove("chosen"));
  const column = token.closest(".episode").column;
  token.title = column.describe(token, token.closest(".chunk").chunk.segment.source);
  if (!stays) return;
  token.classList.add("chosen");
  token.scrollIntoView({ block: "nearest" });
  notice.textContent = token.title;
}

const KEYS = {
  j: () => choose(at + 1), k: () => choose(at - 1), "/": () => filters.text.focus(),
  n: () => jump(1), N: () => jump(-1), m: () => setMode(turned(1)), M: () => setMode(turned(-1)),
  o: () => setLayout("one"), g: () => setLayout("group"), p: () => setLayout("pair"),
  "]": () => goTo(Number(tools.turn.value || 0) + 1), "[": () => goTo(Number(tools.turn.value || 2) - 1),
  ArrowRight: () => move("nextElementSibling", "firstElementChild"), ArrowLeft: () => move("previousElementSibling", "lastElementChild"),
};
const LIST_KEYS = { ArrowDown: () => at + 1, ArrowUp: () => at - 1, PageDown: () => Math.min(at + 10, shown.length - 1), PageUp: () => Math.max(at - 10, 0), Home: () => 0, End: () => shown.length - 1 };
const turned = (by) => Object.keys(MODES).at((Object.keys(MODES).indexOf(mode) + by) % Object.keys(MODES).length);

function move(sibling, end) {
  const token = document.querySelector("bdi.chosen");
  const next = token ? token[sibling] || token.closest(".chunk")[sibling]?.[end] : document.querySelector("#columns .policy bdi");
  if (next?.localName === "bdi") describe(next, true);
  return Boolean(token || next);
}

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || $("episodes").hidden) return;
  if (event.target === filters.text && event.key === "Enter") return void jump(event.shiftKey ? -1 : 1);
  if (event.target.matches("input, select, textarea")) return event.key === "Escape" ? event.target.blur() : undefined;
  if (event.target === list && event.key in LIST_KEYS) choose(LIST_KEYS[event.key]());
  else if (event.target === list && event.key === "Enter") columns[0]?.pane.querySelector("h2").focus();
  else if (!(event.key in KEYS) || KEYS[event.key]() === false) return;
  event.preventDefault();
});

document.addEventListener("pointerover", (event) => {
  const token = event.target.closest?.("bdi");
  if (token && !token.title) describe(token, false);
});

// A touch screen shows no tooltips: a tap puts the tooltip's text in a bar at the bottom.
document.addEventListener("click", (event) => {
  const token = event.target.closest("bdi");
  if (token) return describe(token, true);
  const inChart = event.target.closest("svg *");
  const owner = inChart && (inChart.querySelector(":scope > title") || inChart.parentNode.querySelector(":scope > title"));
  notice.textContent = owner ? owner.textContent : "";
});

function goToPart(name) {
  for (const part of ["overview", "episodes"]) {
    $(part).hidden = part !== name;
    if (part === name) $(`to-${part}`).setAttribute("aria-current", "page");
    else $(`to-${part}`).removeAttribute("aria-current");
  }
  document.body.className = name;
  if (name === "episodes" && rows.length) drawList();
}

// Closed sections and chunks that are off the screen are not printed.
window.addEventListener("beforeprint", () => {
  document.querySelectorAll("details:not(.context)").forEach((part) => (part.open = true));
  columns.forEach((column) => column.nodes.forEach((node) => column.show(node)));
});
window.addEventListener("afterprint", () => $("episodes").hidden || show());

// Follows a link to an episode, past filters that hide it; of a pair the first is listed.
async function follow() {
  const number = Number(/^#episode-(\d+)$/.exec(location.hash)?.[1] ?? -1);
  if (!rows[number]) return;
  goToPart("episodes");
  if (!shown.includes(number)) {
    $("filters").reset();
    await filter();
  }
  choose(shown.indexOf(shown.includes(number) ? number : rows[number].pair));
}

async function begin() {
  document.querySelector("nav").hidden = false;
  ["overview", "episodes"].forEach((part) => $(`to-${part}`).addEventListener("click", () => goToPart(part)));
  for (const [name, [title]] of Object.entries(MODES)) tools.mode.append(new Option(title, name));
  ({ rows, sources } = await read("index"));
  sources.forEach((name, index) => filters.source.append(new Option(plain(name), index)));
  filters.source.closest("label").hidden = sources.length < 2;
  const paired = rows.some((row) => row.pair !== undefined);
  filters.outcome.querySelector("[value=flip]").hidden = !paired;
  [...tools.layout].at(-1).closest("label").hidden = !paired;
  if (paired) [...tools.layout].at(-1).checked = true;
  $("filters").addEventListener("input", filter);
  $("filters").addEventListener("submit", (event) => event.preventDefault());
  $("tools").addEventListener("submit", (event) => event.preventDefault());
  tools.mode.addEventListener("change", () => setMode(tools.mode.value));
  tools.turn.addEventListener("change", () => goTo(Number(tools.turn.value)));
  [...tools.layout].forEach((option) => option.addEventListener("change", show));
  list.addEventListener("scroll", drawList);
  goToPart($("to-overview").hidden ? "episodes" : "overview");
  window.addEventListener("hashchange", follow);
  await filter();
  await follow();
}
begin();
