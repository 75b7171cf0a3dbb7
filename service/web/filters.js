// The filter panel: one group of boxes per facet of the collection, two dates, and two bounds per field of numbers. It
// draws a question's filters and reports changes; the question itself lives in app.js.

import { DATE_FIELD, countFilters } from "./address.js";
import { make, makeButton } from "./dom.js";
import { say, sayName, spell } from "./language.js";

const FIELD_ORDER = ["kind", "department", "language"];
const SHORT = 8; // options of a long group that show before "more"

/**
 * @param {HTMLElement} panel where to draw
 * @param {(change: {filters: Object<string, string[]>, from: string, to: string, ranges: Object<string, string[]>}) => void} onChange
 */
export function makeFilters(panel, onChange) {
  let collection = { facets: {}, fields: [], numbers: {} }; // one that was offered has a snapshot
  let clear;

  const report = () => {
    const filters = Object.create(null);
    for (const { name, value } of panel.querySelectorAll("input:checked")) (filters[name] ??= []).push(value);
    const day = (name) => panel.querySelector(`[type=date][name=${name}]`)?.value ?? "";
    const ranges = Object.create(null);
    for (const group of panel.querySelectorAll("[data-range]")) {
      const bounds = [...group.querySelectorAll("input")].map((input) => input.value);
      if (bounds.some(Boolean)) ranges[group.dataset.range] = bounds;
    }
    onChange({ filters, from: day("from"), to: day("to"), ranges });
  };

  function draw(question) {
    const groups = sortedFields(collection.facets, question.filters).map((field) => {
      const counts = { ...collection.facets[field] };
      for (const value of question.filters[field] ?? []) counts[value] ??= 0;
      return optionGroup(field, counts, report);
    });
    if (collection.fields.includes(DATE_FIELD) || question.from || question.to) groups.push(dateGroup(report));
    const numbers = new Set([...Object.keys(collection.numbers), ...Object.keys(question.ranges)]);
    groups.push(...[...numbers].sort().map((field) => numberGroup(field, collection.numbers[field], report)));
    if (!groups.length && collection.snapshot) groups.push(say(make("p", "hint"), "noFilters"));
    clear = makeButton("quiet", () => onChange({ filters: {}, from: "", to: "", ranges: {} }));
    panel.replaceChildren(...groups, say(clear, "clearFilters"));
  }

  /** Draws the facets of a (new) collection and the question's choice among them. */
  function offer(newCollection, question) {
    collection = newCollection;
    draw(question);
    show(question);
  }

  /** Draws the question's choice; a shared address may name a value that no facet offers. */
  function show(question) {
    const { filters, from, to, ranges } = question;
    const inputs = (type) => [...panel.querySelectorAll(`input[type=${type}]`)];
    const chosen = new Set(Object.entries(filters).flatMap(([field, values]) => values.map((v) => `${field}:${v}`)));
    const offered = new Set(inputs("checkbox").map(({ name, value }) => `${name}:${value}`));
    const bounded = new Set([...panel.querySelectorAll("[data-range]")].map((group) => group.dataset.range));
    const lacking = [...chosen].some((choice) => !offered.has(choice)) || ((from || to) && !inputs("date").length)
      || Object.keys(ranges).some((field) => !bounded.has(field));
    if (!clear || lacking) draw(question);
    for (const box of inputs("checkbox")) box.checked = chosen.has(`${box.name}:${box.value}`);
    for (const date of inputs("date")) date.value = question[date.name];
    for (const group of panel.querySelectorAll("[data-range]")) {
      group.querySelectorAll("input").forEach((input, end) => { input.value = ranges[group.dataset.range]?.[end] ?? ""; });
    }
    clear.hidden = countFilters(question) === 0;
  }

  return { offer, show };
}

function sortedFields(facets, filters) {
  const place = (field) => (FIELD_ORDER.includes(field) ? FIELD_ORDER.indexOf(field) : FIELD_ORDER.length);
  const fields = new Set([...Object.keys(facets), ...Object.keys(filters)]);
  fields.delete(DATE_FIELD); // asked for by its days
  return [...fields].sort((a, b) => place(a) - place(b) || a.localeCompare(b));
}

function optionGroup(field, counts, report) {
  const list = make("ul", "options");
  for (const [value, count] of Object.entries(counts).sort((a, b) => b[1] - a[1])) {
    const box = make("input");
    Object.assign(box, { type: "checkbox", name: field, value });
    box.addEventListener("change", report);
    const name = sayName(make("span", "name"), field, value);
    list.append(make("li", "", make("label", "", box, name, make("span", "count", count.toLocaleString("en")))));
  }
  const group = make("fieldset", "", sayName(make("legend"), field), list);
  if (list.children.length > SHORT + 2) group.append(moreButton(list));
  return group;
}

function moreButton(list) {
  const button = makeButton("quiet", () => fold(!list.classList.contains("short")));
  const fold = (short) => {
    list.classList.toggle("short", short);
    button.setAttribute("aria-expanded", String(!short));
    if (short) say(button, "moreOptions", list.children.length);
    else say(button, "fewerOptions");
  };
  fold(true);
  return button;
}

function dateGroup(report) {
  const days = ["from", "to"].map((name) => {
    const input = make("input");
    Object.assign(input, { type: "date", name });
    input.addEventListener("change", report);
    return make("label", "", say(make("span"), name), input);
  });
  return make("fieldset", "", sayName(make("legend"), DATE_FIELD), make("div", "days", ...days));
}

function numberGroup(field, limits, report) {
  const bounds = [["least", limits?.min], ["most", limits?.max]].map(([name, limit]) => {
    const input = make("input");
    Object.assign(input, { type: "number", step: "any", inputMode: "decimal" });
    if (limit !== undefined) input.placeholder = spell(limit);
    input.addEventListener("change", report);
    return make("label", "", say(make("span", "unseen"), name), input);
  });
  const group = make("fieldset", "", sayName(make("legend"), field), make("div", "bounds", ...bounds));
  group.dataset.range = field;
  return group;
}
