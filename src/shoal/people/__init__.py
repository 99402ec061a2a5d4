"""People: events that clients enrol for by a code on a screen, and draws that anyone can check."""
