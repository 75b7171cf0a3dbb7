// Makes nodes. Data enters a page as text only: nothing here, or anywhere on the page, parses it as HTML.

/** A new element: make("p", "snippet", "text", otherNode). */
export function make(tag, className = "", ...children) {
  const node = document.createElement(tag);
  if (className) node.className = className;
  node.append(...children);
  return node;
}

/** A new button that does something. */
export function makeButton(className, onClick) {
  const button = make("button", className);
  button.type = "button";
  button.addEventListener("click", onClick);
  return button;
}
