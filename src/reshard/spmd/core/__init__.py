"""Operators as records.

The registry of operators, the libraries that compute, and the types that records name.
"""
