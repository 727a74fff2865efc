"""Dead letters and late records: their formats, and the reading and replay of a dead-letter topic."""
