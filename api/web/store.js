"use strict";
// What this browser keeps.
//
//   qengine/chat/ID       a conversation
//   qengine/picture/ID    a picture as a data: URL
//   qengine/settings      the settings
//   qengine/key           the API key
//
// A conversation: {id, revision, changed (milliseconds: when its last message began), head, model, messages: {id:
// message}}. A message names the one before it in `after`, so messages are a tree: two of them after the same one are
// versions of each other. `head` is the last message that is shown, and the conversation that is shown leads from the
// first message to it. `model` is the name of the one that answers.
//
// Two tabs may write into one conversation. Before a tab writes, it takes over what lies there: messages that it has
// not, and those with a higher revision. So nothing that one tab wrote is lost to another.
//
// A message: {id, after, revision, role, content} and, of
//   a user       pictures: [ids], lost: pictures of former times that were too large to be kept
//   a tool       call: the id of the call that it answers
//   an assistant thoughts, calls: [{id, name, arguments}], seconds (of thinking), figures, error, pipes,
//                writing: when the tab that writes it has last kept it; null when it is whole

const CHAT = "qengine/chat/", PICTURE = "qengine/picture/", SETTINGS = "qengine/settings", KEY = "qengine/key";
const FORMER = "qengine";   // where versions of the page for one conversation kept everything
const MOST_KEPT = 2e6;      // letters of pictures that a reload brings back; browsers keep 5 million of a page

const chats = new Map();    // id -> conversation, all of them
const unsaved = new Set();  // ids of those with changes that the browser does not keep yet
const pictures = new Map(); // id -> data: URL, of the pictures that this tab knows

function get(key) {
  try { return localStorage.getItem(key); } catch { return null; }
}

function read(key) {
  try { return JSON.parse(get(key)); } catch { return null; }
}

/** Whether the browser took it: it may be full, or forbid to keep anything. */
function put(key, text) {
  try {
    localStorage.setItem(key, text);
    return true;
  } catch { return false; }
}

function drop(key) {
  try { localStorage.removeItem(key); } catch { /* then it is not there */ }
}

function keysOf(prefix) {
  try { return Object.keys(localStorage).filter(key => key.startsWith(prefix)); } catch { return []; }
}

// ---- conversations -----------------------------------------------------------------------------------------

const makeChat = () => ({id: makeId(), revision: 0, changed: Date.now(), head: null, messages: {}});

/** A new message behind the last one that is shown, or behind `after`. */
function addMessage(chat, message, after = chat.head) {
  const added = {id: makeId(), after, revision: 0, content: "", ...message};
  chat.messages[added.id] = added;
  chat.head = added.id;
  chat.changed = Date.now();
  touch(chat, added);
  return added;
}

/** The message has changed. */
function touch(chat, message) {
  message.revision++;
  chats.set(chat.id, chat);
  unsaved.add(chat.id);
}

/** The messages that are shown, the first one first. */
function thread({messages, head}) {
  const found = [];
  for (let message = messages[head]; message; message = messages[message.after]) found.push(message);
  return found.reverse();
}

const byId = (a, b) => a.id < b.id ? -1 : 1;
const following = (chat, id) => Object.values(chat.messages).filter(m => m.after === id).sort(byId);

/** The versions of a message, itself included, without those that failed before they said anything. */
function versions(chat, message) {
  const isEmpty = m => m.error && !m.content && !m.thoughts && !m.calls?.length;
  return following(chat, message.after).filter(m => m === message || m.role === message.role && !isEmpty(m));
}

/** Shows this message, and behind it the latest versions. */
function show(chat, id) {
  for (let next = id; next; next = following(chat, next).at(-1)?.id) chat.head = next;
  unsaved.add(chat.id);
}

function titleOf(chat) {
  const first = thread(chat).find(m => m.role === "user") ?? Object.values(chat.messages)[0];
  const title = (first?.content ?? "").trim().split("\n")[0];
  return (title.length > 80 ? `${title.slice(0, 80)}…` : title) || "A picture";
}

/** Takes over what another tab wrote. Messages stay the same objects, because one may be growing. */
function merge(chat, other) {
  for (const [id, message] of Object.entries(other.messages)) {
    const own = chat.messages[id];
    if (!own) chat.messages[id] = message;
    else if (message.revision > own.revision) Object.assign(own, message);
  }
  chat.revision = Math.max(chat.revision, other.revision);
  chat.changed = Math.max(chat.changed, other.changed);
}

/** Writes a conversation that has changed, whatever other tabs have written meanwhile. */
function save(chat) {
  if (!unsaved.has(chat.id)) return;
  const there = read(CHAT + chat.id);
  if (there) merge(chat, there);
  chat.revision++;
  keepPictures(chat);
  const text = JSON.stringify(chat);
  let isKept = put(CHAT + chat.id, text);
  if (!isKept) {              // words are worth more than pictures
    keysOf(PICTURE).forEach(drop);
    isKept = put(CHAT + chat.id, text);
  }
  if (isKept) unsaved.delete(chat.id);
  $("full").hidden = isKept;
}

function forget(chat) {
  chats.delete(chat.id);
  unsaved.delete(chat.id);
  drop(CHAT + chat.id);
  for (const id of picturesOf(chat)) drop(PICTURE + id);
}

// ---- pictures ----------------------------------------------------------------------------------------------

const picturesOf = chat => new Set(Object.values(chat.messages).flatMap(m => m.pictures ?? []));

/** The id of a picture that a message is going to have. */
function addPicture(url) {
  const id = makeId();
  pictures.set(id, url);
  return id;
}

/** A picture as a data: URL; null: the browser did not keep it. */
function pictureAt(id) {
  const url = pictures.get(id) ?? get(PICTURE + id);
  if (url) pictures.set(id, url);
  return url;
}

/** The pictures of a message that are still there, as data: URLs. */
const urlsOf = message => (message.pictures ?? []).map(pictureAt).filter(Boolean);

/** Keeps the pictures of a conversation as far as there is room, for which those of the oldest ones have to go. */
function keepPictures(chat) {
  const own = picturesOf(chat), kept = new Map(keysOf(PICTURE).map(key => [key, get(key).length]));
  let letters = [...kept.values()].reduce((sum, n) => sum + n, 0);
  const others = [...kept.keys()].filter(key => !own.has(key.slice(PICTURE.length))).sort();
  for (const id of own) {
    const url = pictures.get(id);
    if (!url || kept.has(PICTURE + id) || url.length > MOST_KEPT) continue;
    while (letters + url.length > MOST_KEPT && others.length) {
      const key = others.shift();
      letters -= kept.get(key);
      drop(key);
    }
    if (letters + url.length <= MOST_KEPT && put(PICTURE + id, url)) letters += url.length;
  }
}

// ---- settings ----------------------------------------------------------------------------------------------

const settings = read(SETTINGS) ?? {};
let apiKey = get(KEY) ?? "";

/** Changes one setting, and none that another tab has changed. undefined: the server chooses. */
function set(name, value) {
  settings[name] = value;
  put(SETTINGS, JSON.stringify({...read(SETTINGS), [name]: value}));
}

function setKey(key) {
  apiKey = key;
  key ? put(KEY, key) : drop(KEY);
}

// ---- at the start ------------------------------------------------------------------------------------------

for (const key of keysOf(CHAT)) {
  const chat = read(key);
  if (chat?.messages) chats.set(chat.id, chat);
}

/** The one conversation that former versions of the page kept becomes one of many. */
function takeOver() {
  const former = read(FORMER);
  if (!former) return;
  const chat = makeChat();
  for (const {pictures: urls, id: call, ...message} of former.messages ?? [])
    addMessage(chat, {...message, ...urls && {pictures: urls.map(addPicture)}, ...call && {call}});
  if (chat.head) save(chat);
  if (unsaved.has(chat.id)) return;         // it stays where it is until there is room
  Object.entries(former.settings ?? {}).forEach(entry => set(...entry));
  if (former.key) setKey(former.key);
  drop(FORMER);
}
