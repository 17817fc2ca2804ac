"""The text of cut rules: read back as the rule, or refused with what can be written."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reshard.block_rules import (
    BlockCyclic,
    Blocks,
    Grouped,
    Joined,
    Pieces,
    Strided,
    WholeBlocks,
    Zigzag,
)
from reshard.cut_rules import Balanced, Ceil, CutRule, Halo, Heads, Padded, Sizes, Windows
from reshard.errors import LayoutError, NotationError, RuleError
from reshard.rule_text import parse_rule
from reshard.testing.strategies import rules


@given(st.data())
def test_every_rule_reads_back(data: st.DataObject) -> None:
    rule = data.draw(rules([data.draw(st.integers(0, 12))], data.draw(st.integers(1, 5))))
    assert parse_rule(rule.text) == rule


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("", Ceil()),
        ("ceil", Ceil()),
        ("unit64", Ceil(64)),
        ("unit1", Ceil()),
        ("balanced", Balanced()),
        ("sizes[3,1]", Sizes((3, 1))),
        ("sizes[ 3, 1 ]", Sizes((3, 1))),
        ("windows[0:4,2:6]", Windows(((0, 4), (2, 6)))),
        ("heads8", Heads(8)),
        ("stride2", Strided(2)),
        ("stride2[4,2]", Strided(2, (4, 2))),
        ("blocks[16,8,4]", Blocks((16, 8, 4))),
        ("blocks[]", Blocks(())),
        ("balanced@blocks[6,2]", Blocks((6, 2), Balanced())),
        ("stride2@blocks[6,2]", Blocks((6, 2), Strided(2))),
        ("joined[6@heads3,2]", Joined((6, 2), (Heads(3), Ceil()))),
        ("groups2", Grouped(2)),
        ("unit32@groups2", Grouped(2, Ceil(32))),
        ("groups2@blocks[6,2]", Blocks((6, 2), Grouped(2))),
        ("joined[]", Joined((), ())),
        (
            "joined[ 6@sizes[3, 3], 4@balanced@blocks[2,2] ]",
            Joined((6, 4), (Sizes((3, 3)), Blocks((2, 2), Balanced()))),
        ),
        ("pieces[4:2,6:4]", Pieces(((4, 2), (6, 4)))),
        ("whole[4,6,4]", WholeBlocks((4, 6, 4))),
        ("whole[4,6,4;1,2]", WholeBlocks((4, 6, 4), (1, 2))),
        ("cyclic16", BlockCyclic(16)),
        ("cyclic16+1", BlockCyclic(16, 1)),
        ("zigzag", Zigzag()),
        ("pad", Padded()),
        ("pad128", Padded(128)),
        ("halo[1,2]", Halo(1, 2)),
        ("halo[1,1,fresh]", Halo(1, 1, fresh=True)),
        ("halo[1,1,padded,fresh]", Halo(1, 1, fresh=True, padded_edges=True)),
        ("heads4@halo[1,0]", Halo(1, 0, rule=Heads(4))),
    ],
)
def test_a_text_means_its_rule(text: str, rule: CutRule) -> None:
    assert parse_rule(text) == rule
    assert parse_rule(rule.text) == rule


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("spiral", "unknown cut rule 'spiral' in 'spiral'; the rules are ceil, unit, balanced"),
        ("Stride2", "unknown cut rule 'Stride2'"),
        ("stride2@", "unknown cut rule ''"),
        ("stride", "cannot read the cut rule 'stride'; write stride2"),
        ("stride2+1", r"cannot read the cut rule 'stride2\+1'"),
        ("balanced2", "cannot read the cut rule 'balanced2'; write balanced"),
        ("unit", "cannot read the cut rule 'unit'"),
        ("sizes", "cannot read the cut rule 'sizes'"),
        ("sizes2[3,1]", "cannot read the cut rule 'sizes2"),
        ("sizes[3,x]", r"cannot read the cut rule 'sizes\[3,x\]'"),
        ("sizes[3,]", "cannot read the cut rule"),
        ("windows[4]", "cannot read the cut rule 'windows"),
        ("windows[1:2:3]", "cannot read the cut rule 'windows"),
        ("pieces[4:x]", "cannot read the cut rule 'pieces"),
        ("joined", "cannot read the cut rule 'joined'; write joined"),
        ("groups", "cannot read the cut rule 'groups'; write groups2"),
        ("groups[2]", "cannot read the cut rule"),
        ("joined[heads3@6]", "cannot read the cut rule"),
        ("joined[6@]", "cannot read the cut rule"),
        ("joined[6@spiral]", "unknown cut rule 'spiral'"),
        ("balanced@joined[6]", "cannot wrap another rule"),
        ("whole", "cannot read the cut rule 'whole'"),
        ("cyclic", "cannot read the cut rule 'cyclic'"),
        ("cyclic4[1]", "cannot read the cut rule"),
        ("halo[1]", r"cannot read the cut rule 'halo\[1\]'; write halo\[1,1\]"),
        ("halo[1,1,stale]", "cannot read the cut rule"),
        ("halo[1,1,fresh,fresh]", "cannot read the cut rule"),
        ("halo", "cannot read the cut rule 'halo'"),
        ("balanced@stride2", "'stride2' in 'balanced@stride2' cannot wrap another rule"),
    ],
)
def test_a_text_that_is_no_rule_says_what_to_write(text: str, message: str) -> None:
    with pytest.raises(NotationError, match=message):
        parse_rule(text)


@pytest.mark.parametrize("text", ["stride0", "sizes[-1,2]", "windows[4:2]", "unit0", "halo[-1,0]"])
def test_numbers_that_cannot_be_are_the_rules_own_error(text: str) -> None:
    with pytest.raises(RuleError):
        parse_rule(text)


@given(st.text(alphabet="stridehaloblockspieces@[]+;:,0123", max_size=14))
def test_any_text_is_read_or_refused(text: str) -> None:
    try:
        rule = parse_rule(text)
    except LayoutError:
        return
    assert parse_rule(rule.text) == rule
