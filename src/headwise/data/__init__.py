"""Text, dialogues, pictures and arrays, cut into what a model is given."""
