"""Runs Shardy's passes on modules: one JSON line in (text, pipelines), one out.

A process of its own: a pass that aborts takes this one down, and no test.
"""

from __future__ import annotations

import json
import re
import sys
from typing import Any

PER_VALUE = re.compile(r"<@[^>]*>")


def shardings_of(module: Any) -> dict[str, Any]:
    """The shardings of arguments, of operations' results, and of the function's results."""
    function = module.body.operations[-1]
    entry = function.regions[0].blocks[0]
    arguments = []
    attributes = function.attributes
    given = list(attributes["arg_attrs"]) if "arg_attrs" in attributes else []
    for number in range(len(entry.arguments)):
        here = given[number] if number < len(given) else {}
        arguments.append(str(here["sdy.sharding"]) if "sdy.sharding" in here else None)
    returned: list[str] = []
    operations, rules, walk = [], [], []
    for operation in entry.operations:
        name = operation.operation.name
        if name == "func.return":
            returned = [operand.get_name() for operand in operation.operands]
            continue
        own = operation.attributes
        if name in ("sdy.sharding_constraint", "sdy.reshard"):
            operations.append([str(own["sharding"])])
        elif "out_sharding" in own:
            operations.append([str(own["out_sharding"])])
        elif "sdy.sharding" in own:
            operations.append(PER_VALUE.findall(str(own["sdy.sharding"])))
        else:
            operations.append([None] * len(operation.results))
        rules.append(str(own["sdy.sharding_rule"]) if "sdy.sharding_rule" in own else None)
        walk.append(
            {
                "name": name,
                "operands": [operand.get_name() for operand in operation.operands],
                "results": [result.get_name() for result in operation.results],
                "axes": str(own["reduction_axes"]) if "reduction_axes" in own else "",
            }
        )
    asked = list(attributes["res_attrs"]) if "res_attrs" in attributes else []
    outputs = [str(one["sdy.sharding"]) if "sdy.sharding" in one else None for one in asked]
    return {
        "arguments": arguments,
        "operations": operations,
        "rules": rules,
        "outputs": outputs,
        "walk": walk,
        "inputs": [argument.get_name() for argument in entry.arguments],
        "returned": returned,
    }


def main() -> None:
    from jax._src.interpreters import mlir
    from jaxlib.mlir import ir
    from jaxlib.mlir.passmanager import PassManager

    with mlir.make_ir_context(), ir.Location.unknown():
        for line in sys.stdin:
            request = json.loads(line)
            found: dict[str, Any] = {}
            for pipeline in request["pipelines"]:
                module = ir.Module.parse(request["text"])
                try:
                    PassManager.parse(f"builtin.module({pipeline})").run(module.operation)
                except ir.MLIRError as error:
                    found[pipeline] = {"refused": str(error)}
                    continue
                found[pipeline] = shardings_of(module)
            sys.stdout.write(json.dumps(found) + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
