"""What the head does for people: events, browsers, tokens, and the history that charts show."""
