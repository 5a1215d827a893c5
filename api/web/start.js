"use strict";
// The page begins: with the conversation that its address names, or with a new one.

takeOver();
chat = chats.get(location.hash.slice(1)) ?? chat;
makeSettings();
showAll();
showChats();
showPipes();
watchHealth();
$("text").focus({preventScroll: true});
