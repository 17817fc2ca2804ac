"""Names: every tensor of every class that transformers has for a model type is matched.

configurations  what is set over a model type's default configuration
harvest         builds the classes, and records their tensors
replay          which recorded tensors no rule matches
"""
