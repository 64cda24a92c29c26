"use strict";
// Whatever comes from an episode is put on the page as text nodes, never as markup.

const $ = (id) => document.getElementById(id);
const wait = (ms) => new Promise((resume) => setTimeout(resume, ms));

// Characters that show nothing or move their neighbours, as agentrl/runs/report/text.py finds them.
const INVISIBLE = /(?! )[\p{C}\p{Z}]/gu;
const sign = (char) => "U+" + char.codePointAt(0).toString(16).toUpperCase().padStart(4, "0");
const plain = (text) => String(text).replace(INVISIBLE, sign);

function element(name, attributes = {}, ...inside) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...inside.map((part) => (part instanceof Node ? part : plain(part))));
  return made;
}

// Line breaks and tabs stay; `all` gives them a sign as well.
function marked(parent, text, all) {
  let end = 0;
  for (const match of text.matchAll(INVISIBLE)) {
    const mark = { "\n": "↵", "\t": "⇥" }[match[0]];
    if (mark && !all) continue;
    parent.append(text.slice(end, match.index), element("i", { class: "sign" }, mark || sign(match[0])), mark ? match[0] : "");
    end = match.index + match[0].length;
  }
  parent.append(text.slice(end));
}

function written(value, digits = 3) {
  if (value === null || value === undefined) return "unknown";
  if (typeof value !== "number") return plain(value);
  return String(Number(value.toPrecision(digits))).replace(/^-/, "−");
}

// Blocks follow this script: one may not be there yet, or not completely.
async function read(id) {
  let block = $(id);
  for (; document.readyState === "loading" && !block?.nextElementSibling; block = $(id)) await wait(20);
  const text = atob(block.textContent);
  const bytes = new Uint8Array(text.length);
  for (let index = 0; index < text.length; index += 1) bytes[index] = text.charCodeAt(index);
  // A Blob's own stream is several times as slow.
  const stream = new Response(bytes).body.pipeThrough(new DecompressionStream("deflate"));
  return JSON.parse(await new Response(stream).text());
}

// The tokens of a text, cut where they end.
function tokens(text, sizes) {
  let end = 0;
  return sizes.map((size) => text.slice(end, (end += size)));
}

// The blocks that were opened last; older ones are dropped.
const opened = new Map();
function open(id) {
  const block = opened.get(id) || read(id);
  opened.delete(id);
  opened.set(id, block);
  if (opened.size > 64) opened.delete(opened.keys().next().value);
  return block;
}
