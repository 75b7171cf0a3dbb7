// What is being asked, and its two written forms: the address of the page and the request to the service.
//
// The page writes the question behind "#": a fragment can be shared and bookmarked, but a browser never sends it, so a
// medical question does not reach the access log of any server or proxy on the way. It reads "?q=…", too.

export const MODES = ["hybrid", "dense", "lexical"];
export const TOP_K = [5, 10, 20, 50];
export const DATE_FIELD = "updated";

/**
 * @typedef {{query: string, mode: string, topK: number, filters: Object<string, string[]>, from: string, to: string,
 *   ranges: Object<string, string[]>, explain: boolean}} Question  `from` and `to` are the first and the last day of
 *   DATE_FIELD, a range the least and the greatest number of a field; "" if open
 */

/** @returns {Question} what a fragment or a query string asks; whatever it says wrongly becomes the default */
export function readAddress(text) {
  const said = new URLSearchParams(text.replace(/^[#?]/, ""));
  const topK = Number(said.get("top_k"));
  const filters = Object.create(null); // a field may have any name, "constructor" too
  for (const filter of said.getAll("filter")) {
    const colon = filter.indexOf(":");
    const field = filter.slice(0, colon).replaceAll("%3A", ":").replaceAll("%25", "%");
    if (colon > 0) (filters[field] ??= []).push(filter.slice(colon + 1));
  }
  const ranges = Object.create(null);
  for (const range of said.getAll("range")) {
    const [, field, low, high] = /^(.+):([^:]*):([^:]*)$/s.exec(range) ?? [];
    if (field && (isNumber(low) || isNumber(high))) ranges[field] = [low, high].map((n) => (isNumber(n) ? n : ""));
  }
  return {
    query: (said.get("q") ?? "").trim(),
    mode: MODES.includes(said.get("mode")) ? said.get("mode") : MODES[0],
    topK: TOP_K.includes(topK) ? topK : 10,
    filters,
    from: dayOrNothing(said.get("from")),
    to: dayOrNothing(said.get("to")),
    ranges,
    explain: said.get("explain") === "1",
  };
}

/** @returns {string} the fragment, "#" included; "" where nothing is asked */
export function writeAddress({ query, mode, topK, filters, from, to, ranges, explain }) {
  if (!query) return "";
  const said = new URLSearchParams({ q: query, mode, top_k: String(topK) });
  for (const [field, values] of Object.entries(filters)) {
    const name = field.replaceAll("%", "%25").replaceAll(":", "%3A"); // the first colon ends it
    for (const value of values) said.append("filter", `${name}:${value}`);
  }
  if (from) said.set("from", from);
  if (to) said.set("to", to);
  for (const [field, [low, high]] of Object.entries(ranges)) said.append("range", `${field}:${low}:${high}`);
  if (explain) said.set("explain", "1");
  return `#${said}`;
}

/** @returns {object} the body of POST /v1/search */
export function searchBody({ query, mode, topK, filters, from, to, ranges, explain }) {
  const asked = Object.entries(filters).map(([field, values]) => ({ field, in: values }));
  if (from || to) {
    asked.push({ field: DATE_FIELD, ...(from && { gte: from }), ...(to && { lt: dayAfter(to) }) });
  }
  for (const [field, [low, high]] of Object.entries(ranges)) {
    asked.push({ field, ...(low && { gte: number(low) }), ...(high && { lte: number(high) }) });
  }
  const fields = ["headline", "snippet", "metadata"];
  return { query, mode, top_k: topK, fields, filters: asked, ...(explain && { explain }) };
}

/** How many separate conditions narrow the question. */
export function countFilters({ filters, from, to, ranges }) {
  return Object.values(filters).flat().length + (from || to ? 1 : 0) + Object.keys(ranges).length;
}

function isNumber(text) {
  return Boolean(text?.trim()) && Number.isFinite(Number(text));
}

// A whole number that JavaScript cannot hold goes as it was typed: the service reads digits in a text, too.
function number(text) {
  const value = Number(text);
  return Number.isInteger(value) && !Number.isSafeInteger(value) ? text : value;
}

function dayOrNothing(text) {
  return /^\d{4}-\d{2}-\d{2}$/.test(text ?? "") && !Number.isNaN(Date.parse(text)) ? text : "";
}

// The last day belongs to the range, also where the field holds times of that day.
function dayAfter(day) {
  const date = new Date(`${day}T00:00:00Z`);
  date.setUTCDate(date.getUTCDate() + 1);
  return date.toISOString().slice(0, 10);
}
