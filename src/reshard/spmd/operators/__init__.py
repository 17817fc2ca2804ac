"""The table of rules: what every operator does to cut operands."""
