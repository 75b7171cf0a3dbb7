// Which language the page speaks, and which sentence each node says: switching says them all again, in place, so that
// nothing that a reader opened, typed or focused is lost.

import { strings } from "./strings.js";

const STORED_AS = "care-language";
const spoken = new WeakMap(); // node → {what ("" for its text, else an attribute): [key, ...values]}
let current = remembered() ?? (navigator.language.toLowerCase().startsWith("zh") ? "zh" : "en");

/** The sentence `key`, with its values filled in; a value that itself depends on the language is a function. */
export function sentence(key, ...values) {
  const entry = strings[current][key];
  return typeof entry === "function" ? entry(...values.map((v) => (typeof v === "function" ? v() : v))) : entry;
}

/** The name of a field, or of a field's value, as a reader knows it; the data's own word where the table has none. */
export function nameOf(field, value) {
  const { fieldNames, valueNames } = strings[current];
  return value === undefined ? fieldNames[field] ?? field : valueNames[field]?.[value] ?? String(value);
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
