// Draws answers: the hits, where the time went, and what to do when there is nothing or something failed.

import { DATE_FIELD } from "./address.js";
import { getDocument } from "./api.js";
import { make, makeButton } from "./dom.js";
import { nameOf, say, sayIn, sayName, sentence } from "./language.js";
import { pieces } from "./marks.js";

const STAGES = ["tokenize", "queue", "encode", "search", "fetch"];
const SKELETONS = 4;

/** The hits of one ranking, best first. */
export function drawHits(list, hits) {
  const best = Math.max(...hits.map((hit) => hit.score), Number.MIN_VALUE);
  list.replaceChildren(...hits.map((hit, place) => hitItem(hit, place + 1, best)));
}

/** Shapes of hits to come, where there are no earlier hits to keep in view. */
export function drawSkeletons(list) {
  const shapes = Array.from({ length: SKELETONS }, () =>
    make("li", "hit skeleton", make("div", "body", make("i"), make("i"), make("i"))));
  for (const shape of shapes) shape.setAttribute("aria-hidden", "true");
  list.replaceChildren(...shapes);
}

function hitItem(hit, rank, best) {
  const title = make("h2", "title", hit.headline || hit.id);
  const snippet = make("p", "snippet");
  for (const piece of pieces(hit.snippet ?? "", hit.highlights ?? [])) {
    snippet.append(piece.marked ? make("mark", "", piece.text) : piece.text);
  }
  const item = make("li", "hit", make("span", "rank", String(rank)), title, scoreOf(hit.score, best),
    make("div", "body", snippet, ...(hit.explain ? [ranksOf(hit.explain)] : []), ...fullText(hit, rank, snippet)));
  item.dataset.id = hit.id;
  return item;
}

function scoreOf(score, best) {
  const fill = make("i");
  // Scores of different modes have different scales; the bar compares a hit with the best of its own ranking.
  fill.style.width = `${Math.max(0, Math.min(1, score / best)) * 100}%`;
  const figure = make("data", "", score.toFixed(3));
  figure.value = String(score);
  return make("div", "score", say(make("span", "unseen"), "score"), figure, make("span", "gauge", fill));
}

/** How a hit came to its score: its place by meaning and by words, and how much meaning counted. */
function ranksOf({ dense, lexical, weight }) {
  const list = make("dl", "ranks");
  for (const [name, placing] of [["modeDense", dense], ["modeLexical", lexical]]) {
    const said = make("dd");
    list.append(make("div", "", say(make("dt"), name),
      placing ? say(said, "placing", placing.rank, placing.score) : say(said, "noPlacing")));
  }
  if (weight !== null) list.append(make("div", "", say(make("dt"), "weight"), make("dd", "", weight.toFixed(2))));
  return list;
}

/** The line under a snippet: tags, the button that opens the full text, and the place where it opens. */
function fullText(hit, rank, snippet) {
  const text = make("div", "full");
  text.id = `full-${rank}`;
  text.hidden = true;
  const button = makeButton("quiet", () => (text.hidden ? open() : leave()));
  button.setAttribute("aria-controls", text.id);
  let loaded = false;

  function close() {
    text.hidden = true;
    snippet.hidden = false;
    button.setAttribute("aria-expanded", "false");
    say(button, "openText");
  }
  function leave() {
    close();
    button.scrollIntoView({ block: "nearest" }); // a long text that folds must not leave its reader somewhere else
  }
  async function open() {
    if (!loaded) {
      say(button, "loadingText");
      try {
        const whole = (await getDocument(hit.id)).text;
        if (whole.trim()) text.replaceChildren(whole);
        else say(text, "noText");
        loaded = true;
      } catch {
        say(button, "textFailed");
        return;
      }
    }
    text.hidden = false;
    snippet.hidden = true;
    button.setAttribute("aria-expanded", "true");
    say(button, "closeText");
  }
  close();
  return [text, make("div", "foot", tags(hit.metadata ?? {}), button)];
}

function tags(metadata) {
  const list = make("dl", "tags");
  for (const [field, value] of Object.entries(metadata)) {
    if (value === null || value === "" || value.length === 0) continue;
    const values = Array.isArray(value) ? value : [value];
    const known = nameOf(field) !== field;
    const name = sayName(make("dt", known ? "unseen" : ""), field);
    list.append(make("div", "", name, ...values.map((each) => sayName(make("dd"), field, each))));
  }
  return list;
}

/** One bar whose parts are the stages, and their figures; what no stage claims is "other". */
export function drawTimings(place, timings) {
  const { total, ...stages } = timings;
  const known = STAGES.filter((stage) => stage in stages).map((stage) => [stage, stages[stage]]);
  const claimed = known.reduce((sum, [, value]) => sum + value, 0);
  if (total - claimed >= 0.005) known.push(["other", total - claimed]);
  const bar = make("div", "stages");
  bar.setAttribute("aria-hidden", "true");
  const legend = make("dl");
  for (const [stage, value] of known) {
    const part = make("i", `stage-${stage}`);
    part.style.flexGrow = String(value);
    bar.append(part);
    const name = make("dt", "", make("i", `stage-${stage}`), say(make("span"), `stage_${stage}`));
    legend.append(make("div", "", name, say(make("dd"), "stageValue", value)));
  }
  sayIn(legend, "aria-label", "timings");
  place.replaceChildren(bar, legend);
}

/** Why there may be no hit, and the ways out: each filter can be dropped, keywords can give way to meaning. */
export function drawNone(place, question, onChange) {
  const ways = dropButtons(question, onChange);
  let advice = "nonePlain";
  if (ways.length) advice = "noneFilters";
  else if (question.mode === "lexical") {
    advice = "noneLexical";
    ways.push(say(makeButton("chip", () => onChange({ mode: "dense" })), "tryDense"));
  }
  place.replaceChildren(say(make("h2"), "noneTitle"), say(make("p"), advice), make("div", "ways", ...ways));
}

function dropButtons(question, onChange) {
  const way = (field, value, change) => {
    const button = say(makeButton("chip drop", () => onChange(change)), "drop", () => nameOf(field), value);
    return sayIn(button, "aria-label", "dropLabel", () => nameOf(field), value);
  };
  const ways = Object.entries(question.filters).flatMap(([field, values]) => values.map((value) => {
    const left = { ...question.filters, [field]: values.filter((other) => other !== value) };
    const filters = Object.fromEntries(Object.entries(left).filter(([, some]) => some.length));
    return way(field, () => nameOf(field, value), { filters });
  }));
  const { from, to, ranges } = question;
  for (const [field, bounds] of Object.entries(ranges)) {
    const left = Object.fromEntries(Object.entries(ranges).filter(([other]) => other !== field));
    ways.push(way(field, () => sentence("numbers", ...bounds), { ranges: left }));
  }
  if (from || to) ways.push(way(DATE_FIELD, () => sentence("days", from, to), { from: "", to: "" }));
  return ways;
}

/** What went wrong, in the service's own words where it has any, and the way to try again. */
export function drawTrouble(place, error, onRetry) {
  const message = make("p");
  if (error.message) message.textContent = error.message;
  else if (error.status) say(message, "badAnswer", error.status);
  else say(message, "unreachable");
  const parts = [say(make("h2"), "failedTitle"), message];
  if (error.requestId) {
    parts.push(make("p", "request", say(make("span"), "requestId"), " ", make("code", "", error.requestId)));
  }
  place.replaceChildren(...parts, say(makeButton("primary", onRetry), "retry"));
}
