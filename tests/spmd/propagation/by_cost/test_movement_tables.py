"""Tables of movements: both directions, columns that repeat, and prices that come later."""

from __future__ import annotations

from reshard import DeviceMesh, dtype, spec
from reshard.spmd.propagation.axis_parts import AxisTable
from reshard.spmd.propagation.by_cost.cost_model import CostModel, Machine
from reshard.spmd.propagation.by_cost.movement_tables import ValueMovements

MESH = DeviceMesh.of(x=2, y=2)
SHAPE, ELEMENT = (64, 64), dtype("float32")


def make() -> tuple[ValueMovements, tuple[int, ...]]:
    model = CostModel(AxisTable.of(MESH), Machine())
    moves = ValueMovements(model, SHAPE, ELEMENT)
    texts = ("-, -", "x, -", "-, y", "x, y")
    numbers = moves.numbers(model.table.encoded(spec(MESH, text)) for text in texts)
    moves.fill(bounds=False)
    return moves, numbers


def test_a_sharding_has_one_number() -> None:
    moves, numbers = make()
    again = moves.numbers([moves.model.table.encoded(spec(MESH, "-, y"))])
    assert numbers == (0, 1, 2, 3) and again == (2,)


def test_rows_are_the_values_whichever_way_it_goes() -> None:
    moves, (whole, rows, columns, both) = make()
    read = moves.table((rows, both), (whole, columns, whole), True).seconds_s
    made = moves.table((rows, both), (whole, columns, whole), False).seconds_s
    model = moves.model
    texts = {whole: "-, -", rows: "x, -", columns: "-, y", both: "x, y"}
    every = {number: model.table.encoded(spec(MESH, text)) for number, text in texts.items()}
    for i, own in enumerate((rows, both)):
        for j, other in enumerate((whole, columns, whole)):
            ends = every[own], every[other]
            assert read[i, j] == model.movement_s(*ends, SHAPE, 4)
            assert made[i, j] == model.movement_s(*ends[::-1], SHAPE, 4)
    assert (read[:, 0] > 0).all() and not made[:, 0].any()


def test_a_price_stands_in_every_column_of_it_and_elsewhere_nothing_changes() -> None:
    moves, (whole, rows, columns, both) = make()
    before = moves.table((rows, both), (whole, columns, whole), True)
    other = moves.table((columns,), (both,), True)
    assert moves.price([(rows, whole), (rows, rows)])
    after = moves.table((rows, both), (whole, columns, whole), True)
    price_s = moves.model.program_s(
        *(moves.model.table.encoded(spec(MESH, text)) for text in ("x, -", "-, -")), SHAPE, ELEMENT
    )
    assert after.seconds_s[0].tolist() == [price_s, before.seconds_s[0, 1], price_s]
    assert after.seconds_s[1].tolist() == before.seconds_s[1].tolist()
    # What no price concerns is the same object: what was found with it holds.
    assert moves.table((columns,), (both,), True) is other
    assert after.seconds_s is not before.seconds_s
    assert not moves.price([(rows, whole)])


def test_prices_stay_when_the_rest_is_found_again() -> None:
    moves, (whole, rows, _, _) = make()
    moves.price([(rows, whole)])
    moves.fill(bounds=True)
    assert moves.table((rows,), (whole,), True).seconds_s[0, 0] == moves.priced[rows, whole]
