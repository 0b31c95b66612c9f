// Adds to each result of the search the words around what was found, from texts.js.
const query = (new URLSearchParams(location.search).get("q") ?? "").trim();
const wanted = splitQuery(query);

function excerpt(result) {
  const [page, anchor] = result.querySelector("a").getAttribute("href").split("#");
  const sections = TEXTS[page.replace(/\.html$/, "")] ?? [];
  const own = sections.filter(([id]) => id === anchor);
  const main = document.createElement("div");
  main.setAttribute("role", "main"); // where Sphinx looks for a page's text
  main.textContent = (own.length ? own : sections).map(([, text]) => text).join(" ");
  // It begins at the last of these that occurs.
  return main.textContent && Search.makeSearchSummary(main.outerHTML, [...wanted, query]);
}

new MutationObserver((changes) => {
  for (const result of changes.flatMap(({ addedNodes }) => [...addedNodes])) {
    if (result.nodeName !== "LI") continue;
    const summary = excerpt(result);
    if (!summary) continue;
    result.append(summary);
    for (const word of wanted) _highlightText(result, word.toLowerCase(), "highlighted");
  }
}).observe(document.getElementById("search-results"), { childList: true, subtree: true });
