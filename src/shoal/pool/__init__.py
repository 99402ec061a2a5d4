"""The pool: who has which devices. Head, agents and device servers."""
