"""Dead letters: their record format, and the reading and replay of a dead-letter topic."""
