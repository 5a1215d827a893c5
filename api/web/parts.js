"use strict";
// Small things that every other file of the page uses.

const $ = id => document.getElementById(id);

/** An element. Children are nodes or strings, and strings become text, never markup. Functions listen. */
function el(tag, attributes, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (typeof value === "function") node.addEventListener(name, value);
    else if (value !== false && value != null) node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.filter(child => child));
  return node;
}

const button = (label, click, more) => el("button", {class: "quiet", type: "button", click, ...more}, label);
const sleep = seconds => new Promise(resolve => setTimeout(resolve, 1000 * seconds));
const count = (n, noun) => `${n.toLocaleString("en")} ${noun}${n === 1 ? "" : "s"}`;
const rounded = n => n.toLocaleString("en", {maximumSignificantDigits: n < 10 ? 2 : 3});

/** An id that no other tab makes. Later ids come later in the order of letters. */
const makeId = () => Date.now().toString(36) + [...crypto.getRandomValues(new Uint8Array(6))]
  .map(byte => byte.toString(36).padStart(2, "0")).join("");

/** Whether the text got into the clipboard. Browsers offer `navigator.clipboard` to https and to localhost alone. */
async function copyText(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch { /* there is none, or it is not allowed */ }
  const field = el("textarea", {class: "unseen", "aria-hidden": true}), focused = document.activeElement;
  field.value = text;
  document.body.append(field);
  field.select();
  const isCopied = document.execCommand("copy");
  field.remove();
  focused?.focus?.({preventScroll: true});
  return isCopied;
}

/** A button that copies what `text()` gives, and says for a moment how that went. */
function copyButton(text) {
  return button("Copy", async ({currentTarget: pressed}) => {
    pressed.textContent = await copyText(text()) ? "Copied" : "The browser forbids it";
    await sleep(1.5);
    pressed.textContent = "Copy";
  });
}

function download(name, text, type) {
  const url = URL.createObjectURL(new Blob([text], {type}));
  el("a", {href: url, download: name}).click();
  setTimeout(() => URL.revokeObjectURL(url), 60_000);
}
