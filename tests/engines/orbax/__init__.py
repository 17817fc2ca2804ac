"""Orbax: what it saves is read, and what is written for it is restored by it."""
