"""transformers' own loading of tiny models on real ranks, against what was traced of it."""
