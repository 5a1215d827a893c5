"use strict";
// What each pipe of an emulated card does in a step, counted while an answer is written and shown below it.

const HUES = {dp4a: 190, dp2a: 205, imad: 220, fp32: 35, ffma: 15, half2: 330, half: 345, integer: 250, special: 85,
  conversion: 65, shuffle: 130, vote: 145, shared: 280, global: 300, local: 310, atomic: 320, barrier: 0, branch: 110};

const WAITING = "Waiting for a step that is counted. The first time, the answer begins when what counts is compiled, "
  + "in some seconds.";
const MISSED = "No step of this answer was counted: it was over too soon.";
const awaited = new Set();              // the answers of which a count is wanted, and none is there yet

/** The meter of one answer. `update(message)` shows what /pipes said while the answer was written. */
function makeMeter() {
  const step = el("p"), bar = el("div", {class: "bar", role: "img"}), legend = el("ul", {class: "legend"});
  const details = el("details", null, el("summary", null, step), legend);
  const none = el("p", {role: "status"});
  const node = el("section", {class: "pipes", "aria-label": "Pipes of the card"}, bar, details, none);
  const parts = {};
  let shown = null;
  function update(message) {
    const counted = message.pipes;
    node.hidden = !((counted || awaited.has(message)) && settings.showsPipes);
    if (node.hidden) return;
    none.hidden = Boolean(counted?.tokens);
    bar.hidden = details.hidden = !none.hidden;
    if (!none.hidden) none.textContent = counted ? MISSED : WAITING;
    else if (counted !== shown) draw(shown = counted, {step, bar, legend, parts});
  }
  return {node, update};
}

function draw({tokens, launches, pipes, megabytes, card, estimated_seconds: seconds}, {step, bar, legend, parts}) {
  const shown = Object.entries(pipes).filter(([, n]) => n).sort((a, b) => b[1] - a[1]);
  const total = shown.reduce((sum, [, n]) => sum + n, 0), share = n => `${rounded(100 * n / total)} %`;
  const estimate = seconds ? [" A ", el("span", {class: "card"}, card),
    ` would take ${rounded(1e6 * seconds)} µs, by estimate.`] : [];
  step.replaceChildren(`The last step counted, of ${count(tokens, "token")}: ${launches} launches, `
    + `${rounded(total / 1e6)} million instructions of warps, ${rounded(megabytes)} MB moved.`,
    ...estimate, " Counting slows an answer down.");
  const colour = name => `oklch(.66 .11 ${HUES[name] ?? 0})`;
  for (const [name, n] of shown) {
    const part = parts[name] ??= bar.appendChild(el("div"));
    part.style.flexGrow = n;
    part.style.background = colour(name);
    part.title = `${name} ${share(n)}`;
  }
  bar.setAttribute("aria-label", shown.map(([name, n]) => `${name} ${share(n)}`).join(", "));
  legend.replaceChildren(...shown.filter(([, n]) => n / total > .01).map(([name, n]) => {
    const dot = el("i");
    dot.style.background = colour(name);
    return el("li", null, dot, `${name} ${share(n)}`);
  }));
}

/** Asks for counts while this answer is written and meters are shown: they cost the server a little. What the server
 *  tells may be a step of another answer, which was counted before this one or after it: that is not shown. */
async function watchPipes(own) {
  if (own.isCounting) return;
  own.isCounting = true;
  const update = () => { turns.find(turn => turn.message === own.message)?.update(); scrollDown(); };
  if (!own.message.pipes && isCounting()) awaited.add(own.message);
  update();
  await own.compiled;
  for (let isOver = false; !isOver && isCounting();) {
    isOver = !isRunning(own);
    const told = await askOf(own.model, "pipes");
    const counted = isStepOf(own, told) ? told : isOver && !own.message.pipes && {tokens: 0};
    if (counted) {
      own.message.pipes = counted;
      awaited.delete(own.message);
      update();
      isOver = !isRunning(own);
    }
    if (!isOver) await sleep(own.message.pipes ? 2 : .1);
  }
  if (!isRunning(own)) keep(own);
  if (awaited.delete(own.message)) update();
  own.isCounting = false;
}

/** Whether what the server has just told was counted while this answer was written. */
function isStepOf({began, ended}, told) {
  const at = performance.now() - 1000 * told?.seconds_ago;
  return at >= began && !(at > ended);
}

const isCounting = () => Boolean(settings.showsPipes) && !$("show-pipes").hidden;

const MOST_COMPILING = 30;      // seconds that an answer waits at most for what counts its steps
const compiling = new Map();    // name of a model -> what the server tells once what counts there is compiled

/** Has the server compile what counts, before a short answer is over by then. */
async function expectPipes() {
  const model = isCounting() && !running.size && modelOf(chat);
  if (!model || compiling.has(model.model)) return;
  compiling.set(model.model, askOf(model, "pipes"));
  await compiling.get(model.model);
  compiling.delete(model.model);
}

/** Before an answer that is to be counted: waits until what counts is compiled. Where a step was counted before, it is;
 *  the server says so at once. */
async function untilCompiled({model, abort: {signal}}) {
  const isCompiled = compiling.get(model?.model);
  if (!isCompiled || !isCounting()) return;
  const isCounted = askOf(model, "pipes", signal).then(told => told ?? isCompiled);
  const isStopped = new Promise(stop => signal.addEventListener("abort", stop));
  await Promise.race([isCounted, isStopped, sleep(MOST_COMPILING)]);
}

function showPipes() {
  $("show-pipes").setAttribute("aria-pressed", Boolean(settings.showsPipes));
  turns.forEach(turn => turn.update());
  scrollDown();
}

$("show-pipes").addEventListener("click", () => {
  set("showsPipes", !settings.showsPipes || undefined);
  showPipes();
  running.forEach(watchPipes);
  expectPipes();
});
