"use strict";
// The list of conversations, what other tabs do to them, and their export.

const WIDE = matchMedia("(min-width: 64rem)");      // there is room for the list beside the conversation

function showChats() {
  const all = [...chats.values()].sort((a, b) => b.changed - a.changed);
  $("chats").hidden = WIDE.matches ? settings.showsChats === false : !$("chats").dataset.asked;
  $("show-chats").setAttribute("aria-expanded", !$("chats").hidden);
  $("chat-list").replaceChildren(...all.map(one => el("li", {class: classOf(one)},
    el("button", {type: "button", class: "title", title: titleOf(one), "aria-current": one === chat && "page",
      click: () => { if (mayLeave()) open(one); }}, titleOf(one)),
    el("button", {type: "button", class: "quiet", "aria-label": `Delete “${titleOf(one)}”`, title: "Delete",
      click: () => remove(one)}, "×"))));
  $("none-kept").hidden = all.length > 0;
  $("export").disabled = !chats.has(chat.id);
  $("export-all").disabled = !all.length;
}

const classOf = one => `${one === chat ? "shown" : ""} ${running.has(one) ? "busy" : ""}`;

const ofAddress = () => chats.get(location.hash.slice(1)) ?? makeChat();
const addressOf = one => chats.has(one.id) ? `#${one.id}` : location.pathname + location.search;

/** Opens a conversation. The browser's button Back leads to the one before. */
function open(one) {
  if (one !== chat) history.pushState(null, "", addressOf(one));
  showChat(one);
}

addEventListener("popstate", () => {
  if (mayLeave()) showChat(ofAddress());
  else history.pushState(null, "", addressOf(chat));
});

/** Shows a conversation; an answer that is being written in another one goes on. */
function showChat(one) {
  chat = one;
  if (edited) edit(null);
  if (!WIDE.matches) delete $("chats").dataset.asked;
  showAll();
  showBusy();
  showChats();
  showModel();
}

function remove(one) {
  if (!confirm(`Delete “${titleOf(one)}”?`)) return;
  forget(one);
  left(one);
}

/** The conversation is gone, by this tab or by another. */
function left(one) {
  running.get(one)?.abort.abort();
  one === chat ? open(makeChat()) : showChats();
}

$("clear").addEventListener("click", () => {
  if (!mayLeave()) return;
  open(makeChat());
  $("text").focus();
});
$("show-chats").addEventListener("click", () => {
  const isShown = !$("chats").hidden;
  if (WIDE.matches) set("showsChats", isShown ? false : undefined);
  else if (isShown) delete $("chats").dataset.asked;
  else $("chats").dataset.asked = true;
  showChats();
});
WIDE.addEventListener("change", showChats);
$("scroll").addEventListener("click", foldChats);

/** Hides the list where it lies over the conversation; whether it did. */
function foldChats() {
  if (WIDE.matches || $("chats").hidden) return false;
  delete $("chats").dataset.asked;
  showChats();
  return true;
}

// ---- other tabs --------------------------------------------------------------------------------------------

addEventListener("storage", ({key, newValue}) => {
  if (key === SETTINGS) {
    Object.keys(settings).forEach(name => delete settings[name]);
    Object.assign(settings, read(SETTINGS));
    fillSettings();
    showModel();
  }
  if (key === KEY) apiKey = newValue ?? "";
  if (key?.startsWith(CHAT)) otherTab(key.slice(CHAT.length));
});

/** Another tab has written or deleted a conversation. */
function otherTab(id) {
  const there = read(CHAT + id), own = chats.get(id);
  if (!there) {
    if (own) { chats.delete(id); unsaved.delete(id); left(own); }
    return;
  }
  if (!own) chats.set(id, there);
  else {
    const isBehind = Object.values(own.messages).some(m => !(there.messages[m.id]?.revision >= m.revision));
    merge(own, there);
    if (isBehind && !running.has(own)) { unsaved.add(id); save(own); }      // both wrote at once, and it was first
    const isQuiet = own === chat && !running.has(own) && !edited, isAtEnd = isQuiet && following(own, own.head).length;
    if (isAtEnd) show(own, own.head);
    if (isQuiet) showAll(isAtEnd ? null : turns.at(-1)?.message);
  }
  showChats();
}

// ---- export ------------------------------------------------------------------------------------------------

/** The conversation that is shown, as Markdown. */
function asMarkdown(one) {
  const parts = thread(one).map(({role, content, thoughts, calls, pictures: shown}) => [
    {user: "## You", assistant: "## Answer", tool: "## Result of a tool"}[role],
    ...(shown ?? []).map(id => pictureAt(id) ? `![](${pictureAt(id)})` : "(a picture)"),
    ...thoughts ? [thoughts.trim().replace(/^/gm, "> ")] : [], content,
    ...(calls ?? []).map(call => `\`${call.name}(${call.arguments})\``)].filter(Boolean).join("\n\n"));
  return `# ${titleOf(one)}\n\n${parts.join("\n\n")}\n`;
}

$("export").addEventListener("click", () => {
  const name = titleOf(chat).replace(/[^\p{L}\p{N} _-]/gu, "").trim().slice(0, 50) || "chat";
  download(`${name}.md`, asMarkdown(chat), "text/markdown");
});
$("export-all").addEventListener("click", () => {
  const all = [...chats.values()], ids = new Set(all.flatMap(one => [...picturesOf(one)]));
  const shown = Object.fromEntries([...ids].map(id => [id, pictureAt(id)]));
  download("qengine chats.json", JSON.stringify({chats: all, pictures: shown}, null, 1), "application/json");
});
