"""How samples come about: prompts in, scored groups out."""
