// Which language the page speaks, and which sentence each node says: switching says them all again, in place, so that
// nothing that a reader opened, typed or focused is lost. What the collection says of itself takes precedence.

import { strings } from "./strings.js";

const STORED_AS = "care-language";
const spoken = new WeakMap(); // node → {what ("" for its text, else an attribute): [key, ...values]}
let current = remembered() ?? (navigator.language.toLowerCase().startsWith("zh") ? "zh" : "en");

// Sentences that a collection's page.json may replace, by its names.
const OWN = { heroTitle: "title", heroText: "intro", queryHint: "hint", disclaimer: "disclaimer" };
let collectionWords = {}; // by language

/** Takes over what a collection's page.json says. */
export function adopt(words) {
  collectionWords = words;
  sayAll();
}

/** What the collection says under a name, in this language or else in the one that it has. */
export function own(name) {
  return (collectionWords[current] ?? Object.values(collectionWords)[0])?.[name];
}

/** The sentence `key`, with its values filled in; a value that itself depends on the language is a function. */
export function sentence(key, ...values) {
  const entry = (OWN[key] && own(OWN[key])) || strings[current][key];
  return typeof entry === "function" ? entry(...values.map((v) => (typeof v === "function" ? v() : v))) : entry;
}

/** The name of a field, or of a field's value, as a reader knows it; the data's own word where the table has none. */
export function nameOf(field, value) {
  if (value === undefined) return own("fields")?.[field] ?? strings[current].fieldNames[field] ?? field;
  return own("values")?.[field]?.[value] ?? spell(value);
}

/** A number to read: no digits that nobody needs, and no separators, which would make a year a quantity. */
export function spell(value) {
  if (typeof value !== "number" || Number.isInteger(value)) return String(value);
  return String(Number(Math.abs(value) < 1 ? value.toPrecision(3) : value.toFixed(3)));
}

/** Lets a node say a sentence, now and after every change of language. */
export function say(node, key, ...values) {
  return keep(node, "", () => sentence(key, ...values));
}

/** The same for the name of a field or value. */
export function sayName(node, field, value) {
  return keep(node, "", () => nameOf(field, value));
}

/** The same for an attribute. */
export function sayIn(node, attribute, key, ...values) {
  return keep(node, attribute, () => sentence(key, ...values));
}

/** Empties a node, which then stays silent. */
export function hush(node) {
  spoken.delete(node);
  node.replaceChildren();
}

/** Gives the nodes of the static page their words. */
export function speak() {
  for (const node of document.querySelectorAll("*")) {
    for (const { name, value } of node.attributes) {
      if (name === "data-say") say(node, value);
      else if (name.startsWith("data-say-")) sayIn(node, name.slice("data-say-".length), value);
    }
  }
  document.documentElement.lang = sentence("languageCode");
}

/** Changes to the other language and remembers it. */
export function switchLanguage() {
  current = current === "zh" ? "en" : "zh";
  try {
    localStorage.setItem(STORED_AS, current);
  } catch {
    // A browser that forbids storage forgets the choice; nothing else depends on it.
  }
  sayAll();
}

function sayAll() {
  document.documentElement.lang = sentence("languageCode");
  for (const node of document.querySelectorAll("*")) {
    for (const [what, words] of Object.entries(spoken.get(node) ?? {})) put(node, what, words());
  }
}

function keep(node, what, words) {
  spoken.set(node, { ...spoken.get(node), [what]: words });
  put(node, what, words());
  return node;
}

function put(node, what, words) {
  if (what) node.setAttribute(what, words);
  else node.textContent = words;
}

function remembered() {
  try {
    const language = localStorage.getItem(STORED_AS);
    return language in strings ? language : null;
  } catch {
    return null;
  }
}
