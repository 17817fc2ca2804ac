"""Tables of a thousand ranks and files say what every rank does, or how many they leave out."""

from __future__ import annotations

from reshard.text.short_tables import MOST_ROWS, file_table, rank_table


def rows(read: list[int]) -> list[dict[str, int]]:
    others = {"written_bytes": 5, "sent_bytes": 0, "received_bytes": 1}
    return [{"rank": rank, "read_bytes": amount, **others} for rank, amount in enumerate(read)]


def test_few_ranks_have_a_row_each() -> None:
    lines = rank_table(rows([7] * MOST_ROWS)).splitlines()
    assert lines[0].split() == ["rank", "read", "written", "sent", "received"]
    assert [line.split()[0] for line in lines[2:]] == [*map(str, range(MOST_ROWS)), "all"]
    assert lines[-1].split() == ["all", "112", "B", "80", "B", "0", "B", "16", "B"]


def test_ranks_that_do_the_same_share_a_row() -> None:
    lines = rank_table(rows([3 if rank % 2 else 7 for rank in range(100)])).splitlines()
    assert [line.split()[:2] for line in lines[2:]] == [
        ["0,2..98", "7"],
        ["1,3..99", "3"],
        ["all", "500"],
    ]


def test_of_too_many_kinds_the_largest_are_listed_and_the_rest_counted() -> None:
    lines = rank_table(rows(list(range(100)))).splitlines()
    assert [line.split()[0] for line in lines[2:-2]] == [str(rank) for rank in range(99, 87, -1)]
    assert lines[-2].split()[:3] == ["all", "4.95", "kB"]
    assert lines[-1] == "... and 88 ranks with less, --json lists all"


def test_files_in_the_middle_are_one_row() -> None:
    files = [(f"rank{rank}.safetensors", rank, 100) for rank in range(1024)]
    assert file_table(files).splitlines()[2:] == [
        *(f"rank{rank}.safetensors           {rank}  100 B" for rank in range(6)),
        "... 1,016 more        6..1021  100 B",
        "rank1022.safetensors     1022  100 B",
        "rank1023.safetensors     1023  100 B",
    ]
    assert len(file_table(files[:MOST_ROWS]).splitlines()) == 2 + MOST_ROWS


def test_files_of_one_rank_and_long_names() -> None:
    files = [("model-" * 20 + str(number), 0, number) for number in range(30)]
    lines = file_table(files).splitlines()
    assert lines[8].split() == ["...", "22", "more", "0", "6", "B", "to", "27", "B"]
    assert all(len(line) <= 100 for line in lines)
    assert lines[-1].split()[0].endswith("model-29")
