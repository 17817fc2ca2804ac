"""Families of operators.

A module holds each operator's function, sharding rule, kernel, derivative and record.
"""
