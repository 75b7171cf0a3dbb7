// The page's one state, the question, and what happens when it changes: address, controls, search, answer.

import { countFilters, readAddress, searchBody, writeAddress } from "./address.js";
import { getCollection, search } from "./api.js";
import { make, makeButton } from "./dom.js";
import { makeFilters } from "./filters.js";
import { adopt, hush, own, say, speak, switchLanguage } from "./language.js";
import { drawHits, drawNone, drawSkeletons, drawTimings, drawTrouble } from "./results.js";

const HINTS = { dense: "hintDense", lexical: "hintLexical", hybrid: "hintHybrid" };
const page = Object.fromEntries(
  ["answer", "examples", "explain", "facts", "filters", "fold", "fold-count", "hits", "language", "mode-hint", "modes",
    "encoders", "none", "notice", "panel", "query", "search", "skip", "snapshot", "summary", "timings", "top-k", "trouble"]
    .map((id) => [id, document.getElementById(id)]));

let question = readAddress(location.hash || location.search);
let pending = new AbortController(); // the search whose answer may still be drawn
let collectionSnapshot = null; // the snapshot whose facets are on the page
let samples = []; // titles of its documents
const filters = makeFilters(page.panel, change);

/** Asks something else: a new entry in the history, then the answer. Words typed but not yet sent go along. */
function change(part) {
  const typed = page.query.value.trim();
  question = { ...question, ...(question.query && typed && { query: typed }), ...part };
  if (question.query) page.query.value = question.query;
  const address = writeAddress(question);
  if (address !== writeAddress(readAddress(location.hash))) history.pushState(null, "", address || location.pathname);
  present();
}

/** Asks what the address says. */
function restore() {
  question = readAddress(location.hash);
  page.query.value = question.query;
  present();
  // Not on a phone, whose keyboard would cover the page.
  if (!question.query && !matchMedia("(pointer: coarse)").matches) page.query.focus({ preventScroll: true });
}

/** Brings controls and answer in line with the question. */
function present() {
  const { query, mode, topK, explain } = question;
  nameTab();
  document.body.dataset.view = query ? "answer" : "start";
  page.search.elements.mode.value = mode;
  page["top-k"].value = String(topK);
  page.explain.checked = explain;
  say(page["mode-hint"], HINTS[mode]);
  const count = countFilters(question);
  page["fold-count"].hidden = count === 0;
  page["fold-count"].textContent = String(count);
  filters.show(question);
  pending.abort();
  if (query) ask();
  else draw({});
}

function nameTab() {
  document.title = [question.query, own("title") || "CARE Search"].filter(Boolean).join(" · ");
}

async function ask() {
  const mine = (pending = new AbortController());
  const asked = question;
  if (!page.summary.textContent && !page.trouble.children.length) {
    drawSkeletons(page.hits);
    say(page.summary, "searching");
  }
  page.answer.setAttribute("aria-busy", "true");
  let answer;
  try {
    answer = await search(searchBody(asked), mine.signal);
  } catch (error) {
    if (!mine.signal.aborted) draw({ error });
    return;
  }
  if (!mine.signal.aborted) drawAnswer(answer, asked);
}

function drawAnswer(answer, asked) {
  const [{ hits, truncated }] = answer.results;
  draw({ hits, truncated, timings: answer.timings_ms, asked });
  say(page.snapshot, "snapshot", answer.snapshot);
  // A new snapshot may have other facets and counts.
  if (answer.snapshot !== collectionSnapshot) offerCollection();
}

/** Everything inside the answer, from one description of it: what is not described is not there. */
function draw({ hits, truncated = false, timings, asked, error }) {
  page.answer.removeAttribute("aria-busy");
  // The button that asked (retry, drop a filter) is about to go: a keyboard goes on from the answer, not from nowhere.
  if ([page.none, page.trouble].some((part) => part.contains(document.activeElement))) {
    page.answer.focus({ preventScroll: true });
  }
  for (const part of ["hits", "none", "timings", "trouble", "summary"]) hush(page[part]);
  page.notice.hidden = !truncated;
  if (truncated) say(page.notice, "truncated");
  if (timings) drawTimings(page.timings, timings);
  if (hits?.length) drawHits(page.hits, hits);
  if (hits) say(page.summary, "summary", hits.length, timings.total);
  if (hits?.length === 0) drawNone(page.none, asked, change);
  if (error) drawTrouble(page.trouble, error, ask);
}

async function offerCollection() {
  try {
    const collection = await getCollection();
    collectionSnapshot = collection.snapshot;
    samples = collection.samples;
    adopt(collection.page);
    nameTab();
    offerExamples();
    say(page.facts, "facts", collection.documents, collection.passages);
    say(page.snapshot, "snapshot", collection.snapshot);
    say(page.encoders, "encoders", collection.document_encoder.name || "?", collection.encoder.name);
    for (const radio of page.modes.querySelectorAll("input")) {
      radio.disabled = !collection.modes.includes(radio.value);
    }
    for (const option of page["top-k"].options) option.disabled = Number(option.value) > collection.max_top_k;
    filters.offer(collection, question);
  } catch {
    // Without facets the page still searches; the next answer asks for them again.
  }
}

function listen() {
  page.search.addEventListener("submit", (event) => {
    event.preventDefault();
    const query = page.query.value.trim();
    if (!query) return page.query.focus();
    if (matchMedia("(pointer: coarse)").matches) page.query.blur(); // folds the keyboard of a phone away
    scrollTo({ top: 0 });
    change({ query });
  });
  page.modes.addEventListener("change", (event) => change({ mode: event.target.value }));
  page["top-k"].addEventListener("change", () => change({ topK: Number(page["top-k"].value) }));
  page.explain.addEventListener("change", () => change({ explain: page.explain.checked }));
  page.language.addEventListener("click", () => {
    switchLanguage();
    nameTab();
    offerExamples();
  });
  page.skip.addEventListener("click", () => page.answer.focus());
  page.fold.addEventListener("click", () => {
    page.fold.setAttribute("aria-expanded", String(page.filters.classList.toggle("open")));
  });
  addEventListener("popstate", restore);
  addEventListener("keydown", (event) => {
    const typing = event.target.closest("input:not([type=checkbox], [type=radio]), select, textarea");
    if (event.key !== "/" || typing || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    page.query.focus();
    page.query.select();
  });
}

/** Questions to begin with: the collection's own, or else titles of its documents. */
function offerExamples() {
  const questions = own("questions")?.length ? own("questions") : samples;
  page.examples.replaceChildren(...questions.map((query) => {
    const chip = makeButton("chip", () => change({ query }));
    chip.textContent = query;
    return make("li", "", chip);
  }));
  if (!questions.length) page.examples.append(say(make("li", "hint"), "noExamples"));
}

speak();
listen();
if (location.search) {
  // From here on the question stays in the browser.
  history.replaceState(null, "", location.pathname + writeAddress(question));
}
// The start page shows the collection's own words, so it waits for them; an answer does not.
if (question.query) restore();
offerCollection().then(() => question.query || restore());
