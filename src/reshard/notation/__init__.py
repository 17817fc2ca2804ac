"""Shardings in the words of other systems: texts and objects, both ways."""
