"""Shardy's own rules for operations of StableHLO, found in a process of its own.

Reads a JSON list of [arguments, operation] from standard input, and writes the list of the
operations' rules as text, null for those without one.
"""

from __future__ import annotations

import json
import sys


def main() -> None:
    from jax._src.interpreters import mlir
    from jaxlib.mlir import ir
    from jaxlib.mlir.passmanager import PassManager

    found = []
    with mlir.make_ir_context(), ir.Location.unknown():
        passes = PassManager.parse("builtin.module(func.func(sdy-populate-op-sharding-rules))")
        for arguments, operation in json.load(sys.stdin):
            module = ir.Module.parse(f"func.func @main({arguments}) {{\n{operation}\nreturn\n}}")
            passes.run(module.operation)
            body = module.body.operations[0].regions[0].blocks[0].operations
            rule = body[len(body) - 2].attributes
            found.append(str(rule["sdy.sharding_rule"]) if "sdy.sharding_rule" in rule else None)
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
