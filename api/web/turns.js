"use strict";
// The conversation that is shown: a turn for each message of the user and of the model.

let chat = makeChat();      // the conversation of this tab; kept from its first message on
let turns = [];

/** A turn on the page; `update()` brings it up to its message. */
function makeTurn(message) {
  return message.role === "user" ? userTurn(message) : answerTurn(message);
}

function userTurn(message) {
  const text = el("div", {class: "text"}), foot = el("div", {class: "foot"});
  const shown = (message.pictures ?? []).map(pictureAt), lost = shown.filter(url => !url).length + (message.lost ?? 0);
  if (message.content) text.append(el("p", null, message.content));
  if (lost) text.append(el("p", null, el("em", null,
    `${count(lost, "picture")} of this message did not survive leaving the page.`)));
  const node = el("article", {class: "user", "aria-label": "You"},
    shown.some(Boolean) && el("div", {class: "pictures"}, ...shown.filter(Boolean).map(pictureNode)),
    text.childElementCount && text, foot);
  function update() {
    node.classList.toggle("edited", message === edited);
    foot.replaceChildren(...versionButtons(message),
      el("span", {class: "actions"}, button("Edit", () => mayLeave() && edit(message))));
  }
  return {node, message, update};
}

function answerTurn(message) {
  const summary = el("summary"), thoughts = el("div"), text = el("div", {class: "text"}), calls = el("div");
  const error = el("div"), queue = el("div", {class: "note", role: "status"}), meter = makeMeter();
  const foot = el("div", {class: "foot"});
  const folded = el("details", {class: "thoughts"}, summary, thoughts);
  const node = el("article", {"aria-label": "Answer"}, folded, queue, text, calls, error, meter.node, foot);
  function update() {
    const own = ownOf(message), isBusy = Boolean(own), isLast = message.id === lastAnswered();
    node.classList.toggle("busy", isBusy);
    node.classList.toggle("edited", message === edited);
    folded.hidden = !message.thoughts;
    summary.textContent = message.seconds == null ? "Thinking …" : `Thought for ${rounded(message.seconds)} s`;
    thoughts.textContent = message.thoughts ?? "";
    showText(text, message.content, !isBusy);
    calls.replaceChildren(...(message.calls ?? []).map(callNode));
    queue.textContent = isBusy ? whyItWaits(own) : isWrittenElsewhere(message) ? "Being written in another tab." : "";
    queue.hidden = !queue.textContent;
    meter.update(message);
    if (isBusy || isWrittenElsewhere(message)) { error.replaceChildren(); foot.replaceChildren(); return; }
    if (isLast && message.calls?.length && !message.error) calls.append(resultsForm(message));
    error.replaceChildren(...message.error ? [el("div", {class: "error", role: "alert"}, message.error,
      isLast && el("button", {type: "button", click: () => regenerate(chat)}, "Try again"))] : []);
    foot.replaceChildren(el("span", {class: "figures"}, message.figures ?? ""), ...versionButtons(message),
      el("span", {class: "actions"}, ...message.content ? [copyButton(() => message.content)] : [],
        ...message.content && !message.calls?.length ? [button("Edit", () => mayLeave() && edit(message))] : [],
        ...isLast && !message.error ? [button("Regenerate", () => regenerate(chat))] : []));
  }
  return {node, message, update};
}

const SILENT_SECONDS = 90;      // after which a tab that was writing counts as dead: hidden ones are slowed down

/** What `running` knows of the answer that is being written here. */
const ownOf = message => running.get(chat)?.message === message ? running.get(chat) : null;

/** Whether this tab or another one writes a message now. */
const isBeingWritten = ({writing}) => Date.now() - (writing ?? 0) < 1000 * SILENT_SECONDS;

const isWrittenElsewhere = message => !ownOf(message) && isBeingWritten(message);

const whyItWaits = own => own.isEarly ? "Waiting until the model is loaded."
  : own.ahead ? `${count(own.ahead, "request")} ${own.ahead === 1 ? "has" : "have"} to end first.` : whatIsSeen(own);

const SEEN_SECONDS = 1;     // pictures that are read faster need no word

/** What is said while the model looks at the pictures of a question, before it reads the prompt. */
function whatIsSeen({chat, message, read, began}) {
  const n = chat.messages[message.after]?.pictures?.length;
  const isSilent = !read && !message.content && !message.thoughts && !message.calls.length;
  const isLate = performance.now() - began > 1000 * SEEN_SECONDS;
  return n && isSilent && isLate ? `Reading the picture${n > 1 ? "s" : ""} …` : "";
}

/** The id of the last message that is no tool's result. */
const lastAnswered = () => thread(chat).findLast(m => m.role !== "tool")?.id;

/** ‹ 2 of 3 ›, where a message has several versions. */
function versionButtons(message) {
  const all = versions(chat, message), at = all.indexOf(message);
  if (all.length < 2 || running.has(chat)) return [];
  const turn = (label, sign, to) => button(sign, () => { show(chat, to.id); save(chat); showAll(message); },
    {"aria-label": label, title: label, disabled: !to});
  return [el("span", {class: "versions"}, turn("Version before", "‹", all[at - 1]), `${at + 1} of ${all.length}`,
    turn("Version after", "›", all[at + 1]))];
}

const pictureNode = (url, i) => el("img", {src: url, alt: `Picture ${i + 1}`, load: () => scrollDown()});

function callNode(call) {
  let shown = call.arguments;
  try { shown = JSON.stringify(JSON.parse(shown), null, 2); } catch { /* it is still arriving */ }
  const result = thread(chat).find(m => m.role === "tool" && m.call === call.id);
  return el("section", {class: "call", "aria-label": `Call of ${call.name}`},
    el("header", null, "calls ", el("b", null, call.name)), el("pre", {tabindex: 0}, el("code", null, shown)),
    result && el("header", null, "result"), result && el("pre", {tabindex: 0}, el("code", null, result.content)));
}

/** What the tools said is for the reader to fill in: the page runs nothing. */
function resultsForm(message) {
  const fields = message.calls.map(() => el("textarea", {rows: 2, required: true}));
  const labels = message.calls.map((call, i) => el("label", null, `Result of ${call.name}`, fields[i]));
  const submit = event => {
    event.preventDefault();
    if (!mayAsk()) return;
    message.calls.forEach(({id}, i) => addMessage(chat, {role: "tool", call: id, content: fields[i].value}));
    generate();
  };
  return el("form", {class: "results", submit}, ...labels,
    el("div", {class: "row"},
      el("button", {class: "main"}, message.calls.length > 1 ? "Send results" : "Send result")));
}

/** Shows the whole conversation: its end, or the place where the turn of `message` was. */
function showAll(message = null) {
  const place = turns.find(turn => turn.message === message)?.node.getBoundingClientRect().top;
  const n = turns.findIndex(turn => turn.message === message);
  turns = thread(chat).filter(m => m.role !== "tool").map(makeTurn);
  turns.forEach(turn => turn.update());
  $("turns").replaceChildren(...turns.length ? turns.map(turn => turn.node) : [welcome]);
  $("clear").disabled = !turns.length;
  document.title = turns.length ? `${titleOf(chat)} · qengine` : "qengine";
  follows = !message;
  if (message) $("scroll").scrollTop += turns[n].node.getBoundingClientRect().top - place;
  else scrollDown();
}

const welcome = $("welcome");

/** Follows what arrives, unless the reader has scrolled up. */
let follows = true;
function scrollDown() {
  if (follows) $("scroll").scrollTop = $("scroll").scrollHeight;
}
$("scroll").addEventListener("scroll", ({target: box}) => {
  follows = box.scrollHeight - box.scrollTop - box.clientHeight < 60;
});

// ---- while an answer is written ----------------------------------------------------------------------------

const REST = 0.1, SHARE = 4;        // seconds between two paintings, and at least so many times what one takes
let painting = false, isBehind = false;

/** Paints the growing answer, soon and not again and again: however much arrives, the tab is free most of the time. */
async function paint() {
  if (painting) return;
  painting = true;
  const began = performance.now();
  turns.find(turn => turn.message === running.get(chat)?.message)?.update();
  scrollDown();
  await sleep(Math.max(REST, SHARE * (performance.now() - began) / 1000));
  painting = false;
  if (isBehind) { isBehind = false; paint(); }
}

/** Something of an answer has arrived. */
function arrived(own) {
  if (own.chat !== chat) return;
  if (painting) isBehind = true;
  else paint();
}
