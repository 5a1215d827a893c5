"use strict";
// One answer: the request, its stream, and the line below the answer.

const headers = () => ({"Content-Type": "application/json", ...apiKey && {Authorization: `Bearer ${apiKey}`}});

/** Where a path of the server is. A proxy may have the page at /llm, without a slash behind it. */
const at = path => `${location.pathname.replace(/\/$/, "")}/${path}`;

/** What is asked of the server, GET or with something `posted`, as JSON; null where it says nothing. */
async function ask(path, signal, posted) {
  const sent = posted && {method: "POST", body: JSON.stringify(posted)};
  const how = {headers: headers(), signal, cache: "no-store", ...sent};       // else the same question waits for itself
  const response = await fetch(at(path), how).catch(() => null);
  if (response?.status === 401) $("key-field").hidden = false;
  return response?.status === 200 ? response.json().catch(() => null) : null;
}

/** The same of one of the server's models. */
const askOf = (model, path, signal) =>
  ask(models.length > 1 ? `${path}?model=${encodeURIComponent(model.model)}` : path, signal);

/** How the server is. Raises where it cannot be reached. */
const healthOf = async signal => (await fetch(at("health"), {signal})).json();

/** What is asked for this message: an answer to those before it. */
function requestBody({chat: {messages: all}, message: {after}, model}) {
  const {system, thinking, tools, showsChats, showsPipes, ...sampling} = settings;
  const messages = thread({messages: all, head: after}).filter(
    m => m.content || m.calls?.length || urlsOf(m).length || m.role === "tool");
  return {
    messages: [...system ? [{role: "system", content: system}] : [], ...messages.map(wireMessage)],
    ...sampling, model: model?.model, stream: true, stream_options: {include_usage: true},
    ...tools && {tools: JSON.parse(tools)},
    ...thinking && {chat_template_kwargs: {enable_thinking: thinking === "on"}},
  };
}

function wireMessage(message) {
  const {role, content, call, calls} = message, urls = urlsOf(message);
  if (role === "tool") return {role, content, tool_call_id: call};
  if (urls.length) return {role, content: [
    ...urls.map(url => ({type: "image_url", image_url: {url}})), ...content ? [{type: "text", text: content}] : []]};
  if (!calls?.length) return {role, content};
  return {role, content, tool_calls: calls.map(({id, name, arguments: text}) =>
    ({id, type: "function", function: {name, arguments: text}}))};
}

/** A server-sent stream's JSON events, up to [DONE]. */
async function* events(response, own) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  while (true) {
    const {done, value} = await reader.read();
    if (done) throw new TypeError("the stream ended early");
    const pieces = (rest + value).split("\n\n");
    rest = pieces.pop();
    for (const piece of pieces) own.read = piece.match(/^: reading (\d+) of (\d+) tokens/)?.slice(1);
    showReading();
    for (const piece of pieces.filter(piece => piece.startsWith("data: "))) {
      if (piece === "data: [DONE]") return;
      yield JSON.parse(piece.slice(6));
    }
  }
}

/** A bar while a comment of the stream says how much of a long prompt is read; no bar after any other piece. */
function showReading() {
  const read = running.get(chat)?.read;
  $("read").hidden = !read;
  if (read) [$("read").value, $("read").max] = read;
}

/** An error that has its sentence for the reader. */
class Refusal extends Error {}

async function refusal(response, own) {
  const {message: said = `status ${response.status}`, param} = (await response.json().catch(() => ({}))).error ?? {};
  const message = said.startsWith(`${param}: `) ? said.slice(param.length + 2) : said;     // the reader knows no paths
  if (response.status === 401) {
    const what = own.key ? "The server does not know this API key" : "This server wants an API key";
    askForKey(`${what}.`, own);
    return new Refusal(`${what}: ${own.key ? "change" : "enter"} it under Settings.`);
  }
  if (response.status === 429) {
    const wait = response.headers.get("Retry-After");
    return new Refusal(`The server is busy (${message}). Try again${wait ? ` in ${wait} s` : " soon"}.`);
  }
  if (response.status === 503) watchHealth();
  return new Refusal(`The server says: ${message}.`.replace(/\.\.$/, "."));
}

/** The head of the server's answer. While a model is being loaded, the request waits and comes again. */
async function begin(own, signal) {
  while (true) {
    own.key = apiKey;
    const response = await fetch(at("v1/chat/completions"), {method: "POST", signal,
      body: JSON.stringify(requestBody(own)), headers: {...headers(), "X-Request-Id": own.request}});
    own.isEarly = response.status === 503 && await isLoading(signal);
    if (response.ok) return response;
    if (response.status === 401 && own.key !== apiKey && !$("settings").open) continue;     // the key came meanwhile
    if (!own.isEarly) throw await refusal(response, own);
    watchHealth();
    arrived(own);
    do await sleep(.5); while (await isLoading(signal));
    own.isEarly = false;
  }
}

const isLoading = async signal => (await healthOf(signal).catch(() => ({}))).status === "loading";

// ---- one answer --------------------------------------------------------------------------------------------

const SAVE_SECONDS = 2;     // a tab that dies loses no more of an answer than this
const MOST_ANSWERS = 4;     // at a time: a browser opens six connections to a server, and short questions need some

// conversation -> {chat, message, model, abort, request, key, compiled, isEarly, ahead, read, began}, while it is
// answered. `key` is the API key that it was asked with: by the time of a refusal there may be another one.
const running = new Map();
const isRunning = own => running.get(own.chat) === own;

/** Whether a conversation may ask now. All tabs share the browser's connections, so the answers of all count: as long
 *  as one is written, its tab keeps saying so (see `writing`). */
function mayAsk(one = chat) {
  if (running.has(one)) return false;
  const messages = [...chats.values()].flatMap(each => Object.values(each.messages));
  const isFull = messages.filter(isBeingWritten).length >= MOST_ANSWERS;
  note(isFull ? `${MOST_ANSWERS} answers are being written, here or in other tabs: ask when one is whole.` : "");
  return !isFull;
}

/** Asks for an answer to the last message of a conversation. */
async function generate(one = chat) {
  const message = addMessage(one, {role: "assistant", thoughts: "", calls: []});
  const own = {chat: one, message, model: modelOf(one), abort: new AbortController(), request: makeId(), ahead: 0,
    began: performance.now()};
  running.set(one, own);
  one.model ??= own.model?.model;
  const signal = own.abort.signal, times = {};
  keep(own);
  if (one === chat) { showBusy(); showAll(); }
  own.compiled = untilCompiled(own);
  watchQueue(own);
  watchPipes(own);
  try {
    await own.compiled;
    own.began = performance.now();
    times.before = await expertsUsed(own);
    const response = await begin(own, signal);
    times.head = true;
    for await (const event of events(response, own)) take(event, own, times);
    times.after = await expertsUsed(own);
  } catch (error) {
    if (signal.aborted) message.figures = "stopped";
    else if (error instanceof Refusal) message.error = error.message;
    else if (error instanceof TypeError) message.error = !times.head ? "The server cannot be reached."
      : `The connection was lost. ${times.first ? "What had arrived is kept" : "Nothing had arrived"}.`;
    else throw error;
    if (times.head ? !signal.aborted : !(error instanceof Refusal)) watchHealth();
  } finally {
    if (own.model?.state === "unloaded") watchHealth();         // it may be loaded now, and counts pipes then
    finish(own, times);
    running.delete(own.chat);
    own.ended = performance.now();
    keep(own);
    if (own.chat === chat) showEnd(message);
  }
}

function showEnd({error, figures}) {
  showBusy();
  turns.forEach(turn => turn.update());
  scrollDown();
  $("spoken").textContent = error ? "" : `Answer finished. ${figures}`;
}

/** Keeps an answer as far as it has arrived, unless its conversation was deleted meanwhile. */
function keep(own) {
  const {chat, message, abort} = own;
  if (!chats.has(chat.id)) return;
  message.writing = isRunning(own) && !abort.signal.aborted ? Date.now() : null;
  touch(chat, message);
  save(chat);
  showChats();
}

/** How many experts the server's answers have used so far, and found on its cards (hits); null if all are there. */
const expertsUsed = ({model, abort}) => model?.counts_experts ? askOf(model, "experts", abort.signal) : null;

/** While an answer has not begun: how many requests the server has to take before it. And from time to time the answer
 *  is kept. */
async function watchQueue(own) {
  for (let kept = Date.now(); isRunning(own); await sleep(.5)) {
    if (!own.message.content && !own.message.thoughts) {
      own.ahead = (await ask(`waiting?request=${own.request}`))?.ahead ?? 0;
      if (isRunning(own)) arrived(own);
    } else own.ahead = 0;
    if (isRunning(own) && Date.now() - kept > 1000 * SAVE_SECONDS) { keep(own); kept = Date.now(); }
  }
}

/** One event of a stream, into the message. */
function take(event, own, times) {
  const message = own.message;
  if (event.error) throw new Refusal(`The answer broke off: ${event.error.message}.`.replace(/\.\.$/, "."));
  if (event.usage) times.end = event;
  const choice = event.choices[0], delta = choice?.delta ?? {};
  if (delta.reasoning_content || delta.content || delta.tool_calls) times.first ??= performance.now();
  if (delta.reasoning_content) message.thoughts += delta.reasoning_content;
  if (message.thoughts && message.seconds == null && (delta.content || delta.tool_calls || choice?.finish_reason))
    message.seconds = (performance.now() - times.first) / 1000;
  message.content += delta.content ?? "";
  for (const {index, id, function: part} of delta.tool_calls ?? []) {
    const call = message.calls[index] ??= {id: "", name: "", arguments: ""};
    call.id += id ?? "";
    call.name += part?.name ?? "";
    call.arguments += part?.arguments ?? "";
  }
  if (choice?.finish_reason === "length") times.cut = true;
  if (message.content || message.thoughts) own.ahead = 0;
  arrived(own);
}

const LEAST_COMPUTED = 64;      // tokens of a prompt: the speed of fewer says more of one pass than of the card

/** The line below an answer, of what the engine has counted and measured. A gateway in between may drop its times. */
function finish({message, model}, {first, end, cut, before, after}) {
  if (message.thoughts) message.seconds ??= (performance.now() - first) / 1000;
  if (!end) return;
  const {prompt_tokens: prompt, completion_tokens: answer} = end.usage, timings = end.timings ?? {};
  const {draft_n: drafts, draft_n_accepted: right, cache_n: cached} = timings;
  const experts = before && after ? after.used - before.used : 0;
  message.figures = [models.length > 1 && model.model, count(answer, "token"),
    timings.predicted_per_second && `${rounded(timings.predicted_per_second)} tokens/s`,
    drafts && `drafts accepted ${rounded(100 * right / drafts)} %`,
    experts > 0 && `${rounded(100 * (after.hits - before.hits) / experts)} % of experts on the card`,
    end.timings && `first after ${rounded((timings.wait_ms + timings.prompt_ms) / 1000)} s`,
    [`prompt ${prompt.toLocaleString("en")}`, end.timings && `${cached.toLocaleString("en")} cached`,
      prompt - cached >= LEAST_COMPUTED && `${rounded(timings.prompt_per_second)} tokens/s`].filter(Boolean).join(", "),
    cut && "cut at its limit"].filter(Boolean).join(" · ");
}

/** Another version of a conversation's last answer. */
function regenerate(one) {
  if (!mayAsk(one)) return;
  one.head = thread(one).findLast(m => m.role === "assistant").after;
  generate(one);
}

/** Whether the conversation that is shown is being answered. */
function showBusy() {
  const isBusy = running.has(chat);
  const hadFocus = document.activeElement === $("send") || document.activeElement === $("stop");
  $("send").hidden = isBusy;
  $("stop").hidden = !isBusy;
  if (hadFocus) (isBusy ? $("stop") : $("send")).focus();
  $("spoken").textContent = isBusy ? "Answering." : "";
  showReading();
}
