"""Everything that runs on a card, one operation per file, and the card itself, real or emulated."""
