"""One gate per paper, and what they share."""
