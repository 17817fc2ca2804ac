"""The families that are judged: each file ends with a list `FAMILIES`."""
