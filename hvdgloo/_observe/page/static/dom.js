"use strict";

/* Creation and change of elements. All text is inserted as text: nothing from a job is ever parsed as HTML. */
const dom = (() => {
  /** Make an element with the given `text` and `class`; other properties become attributes. */
  function make(tag, properties = {}, ...children) {
    const node = document.createElement(tag);
    for (const [name, value] of Object.entries(properties)) {
      if (name === "text") node.textContent = value;
      else if (name === "class") node.className = value;
      else node.setAttribute(name, value);
    }
    node.append(...children);
    return node;
  }

  const byId = (id) => document.getElementById(id);

  /** Set a text if it differs, so that unchanged text costs no layout. */
  function setText(node, text) {
    if (node.textContent !== text) node.textContent = text;
  }

  /** Set a name that may break after its underscores, dots and slashes. */
  function setName(node, name) {
    if (node.textContent === name) return;
    node.replaceChildren(...name.split(/(?<=[_./])(?=[^_./])/).flatMap((part, i) => (i ? [document.createElement("wbr"), part] : [part])));
  }

  function setAttribute(node, name, value) {
    if (node.getAttribute(name) !== value) node.setAttribute(name, value);
  }

  function setClass(node, name) {
    if (node.className !== name) node.className = name;
  }

  /** Fill a <dl> with (term, description) pairs; its elements stay while the terms do. */
  function describe(list, pairs) {
    const terms = pairs.map(([term]) => term).join("\n");
    if (list.dataset.terms !== terms) {
      list.dataset.terms = terms;
      list.replaceChildren(...pairs.map(([term]) => {
        const name = make("dt");
        setName(name, term);
        return make("div", {}, name, make("dd"));
      }));
    }
    pairs.forEach(([, description], i) => setText(list.children[i].lastElementChild, description));
  }

  /** Announce a text to users of a screen reader. */
  function announce(text) {
    setText(byId("announcement"), text);
  }

  return { make, byId, setText, setName, setAttribute, setClass, describe, announce };
})();
