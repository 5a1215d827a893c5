"use strict";
// The page begins: with the conversation that its address names, or with a new one.

takeOver();
chat = ofAddress();
makeSettings();
showAll();
showChats();
showPipes();
watchHealth();
$("text").focus({preventScroll: true});
