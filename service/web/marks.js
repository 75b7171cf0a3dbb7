// Cuts a text at the service's highlight ranges. Knows nothing of the page.
//
// The service counts Unicode code points; a JavaScript string counts UTF-16 units, so that every character beyond the
// basic plane (rare Chinese characters, emoji) would shift what follows it. Array.from walks code points.

/**
 * @param {string} text
 * @param {number[][]} ranges [start, end) in code points, in any order, possibly touching or overlapping
 * @returns {{text: string, marked: boolean}[]} the pieces of the text, in order, none of them empty
 */
export function pieces(text, ranges) {
  const characters = Array.from(text);
  const sorted = ranges
    .map(([start, end]) => [Math.max(0, start), Math.min(characters.length, end)])
    .filter(([start, end]) => start < end)
    .sort((a, b) => a[0] - b[0]);
  const found = [];
  const add = (start, end, marked) => {
    if (start < end) found.push({ text: characters.slice(start, end).join(""), marked });
  };
  let at = 0;
  for (let next = 0; next < sorted.length; ) {
    let [start, end] = sorted[next++];
    while (next < sorted.length && sorted[next][0] <= end) end = Math.max(end, sorted[next++][1]);
    add(at, start, false);
    add(start, end, true);
    at = end;
  }
  add(at, characters.length, false);
  return found;
}
