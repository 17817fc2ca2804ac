"""Whether two models fit, as every rank finds it alone."""

from __future__ import annotations

import gc
import weakref

import pytest

from reshard.errors import ShardError
from reshard.recipes.naming import Fusion

torch = pytest.importorskip("torch")

from reshard.torch import BlockQuantized, Cast, Transform  # noqa: E402
from reshard.torch.models.model_manifest import (  # noqa: E402
    Entry,
    ModelManifest,
    write_manifests,
)
from reshard.torch.refitting.options import RefitSettings  # noqa: E402
from reshard.torch.refitting.planning import (  # noqa: E402
    RefitPlan,
    find_transforms,
    plan_or_error,
    plan_refit,
    reuse_plan,
)


def manifests(*entries: list[Entry]) -> dict[int, ModelManifest]:
    return {rank: ModelManifest(tuple(of)) for rank, of in enumerate(entries)}


def settings(**options: object) -> RefitSettings:
    return RefitSettings(**({"extra_bytes": 1024} | options))  # type: ignore[arg-type]


def plan(
    before: dict[int, ModelManifest], after: dict[int, ModelManifest], **options: object
) -> RefitPlan:
    return plan_refit(settings(**options), None, before, after)


A, B, C = (Entry(name, "int8", (2,)) for name in "abc")


def test_what_fits_is_planned() -> None:
    found = plan(manifests([A, B], []), manifests([], [A, B]))
    assert [one.name for one in found.matches] == ["a", "b"]
    assert str(found.part(1).items[0].transfers) == "0 -> 1 [0:2]"
    assert (
        found.part(0).digest
        == found.part(1).digest
        != plan(manifests([A], []), manifests([], [A])).part(0).digest
    )


def test_a_tensor_that_ranks_describe_differently_is_told_once() -> None:
    other = Entry("a", "int16", (2,))
    with pytest.raises(ShardError) as caught:
        plan(manifests([A, B], [other]), manifests([A], [B]))
    assert str(caught.value).splitlines() == [
        "1 thing does not fit; nothing was written:",
        "  a: the source is int8 on rank 0, int16 on rank 1",
    ]
    with pytest.raises(ShardError, match="1 thing"):
        plan(manifests([A, B], [B]), manifests([A], [other, B]))


def test_where_a_rank_cannot_list_its_model_nothing_else_is_told() -> None:
    failed = ModelManifest((), problems=("KeyError: 'lr'",))
    with pytest.raises(ShardError) as caught:
        plan({0: failed}, {0: ModelManifest((A, B))})
    assert str(caught.value).splitlines()[1:] == ["  rank 0: KeyError: 'lr'"]


def test_a_cast_of_what_there_is_not_is_refused() -> None:
    wide = Entry("a", "int16", (2,))
    assert plan(manifests([wide], []), manifests([], [A]), cast={"a": "int8"}).matches
    for cast in ({"a": "int8", "aa": "int8"}, {"a": True, "b": False}):
        unknown = [*cast][1]
        with pytest.raises(ShardError, match=f"{unknown}: cast names it, but it is in neither"):
            plan(manifests([wide], []), manifests([], [A]), cast=cast)
    # Of a source that may serve nothing.
    both, first = manifests([A, B], []), manifests([], [A])
    assert plan(both, first, cast={"b": "int8"}, strict=False).matches


def test_many_problems_are_counted() -> None:
    many = [Entry(str(number), "int8", (2,)) for number in range(23)]
    with pytest.raises(ShardError, match="23 things do not fit") as caught:
        plan(manifests([]), manifests(many))
    assert str(caught.value).splitlines()[-1] == "  ... 3 more"


def test_a_member_of_two_tensors_is_refused() -> None:
    # As a table says whose members have no `*`, of all layers.
    fused = [Entry(f"{layer}.qk", "int8", (4,), fusion=Fusion(("q", "k"))) for layer in range(2)]
    apart = [Entry(name, "int8", (2,)) for name in "qk"]
    for source, target, side in ((fused, apart, "source"), (apart, fused, "target")):
        with pytest.raises(ShardError) as caught:
            plan(manifests(source), manifests(target))
        assert "q: a member of 0.qk and of 1.qk" in str(caught.value)
        assert f"(in the {side})" in str(caught.value)
    tied = plan(manifests(fused), manifests(apart), ties={"1.qk": "0.qk"})
    assert {one.source_name for one in tied.matches} == {"0.qk"}


def test_a_tensor_that_is_also_a_member_is_refused() -> None:
    fused = Entry("qk", "int8", (4,), fusion=Fusion(("q", "k")))
    apart = [Entry(name, "int8", (2,)) for name in "qk"]
    with pytest.raises(ShardError, match="q: a tensor, and a member of qk") as caught:
        plan(manifests([fused, apart[0]]), manifests(apart), strict=False)
    assert "(in the source)" in str(caught.value)
    # A target that has both is filled in both.
    found = plan(manifests(apart), manifests([fused, apart[0]]))
    assert len(found.matches) == 3


def test_what_a_transform_raises_is_told_to_the_other_ranks() -> None:
    class Faulty(Transform):
        def outputs(self, name: str) -> tuple[str, ...]:
            raise ValueError("no more")

    both = {0: write_manifests(ModelManifest((A,)), ModelManifest((A,)))}
    found = plan_or_error(settings(transforms={"a": Faulty()}), None, both)
    assert isinstance(found, ShardError) and "ValueError: no more" in str(found)


def test_the_first_transform_that_fits() -> None:
    block, cast = BlockQuantized(), Cast("int8")
    found = find_transforms(
        ["l.w", "l.w_scale_inv", "l.b"], settings(transforms={"*.w": block, "*": cast})
    )
    # What a transform makes has none of its own.
    assert found == {"l.w": block, "l.b": cast}


def test_plans_are_known_as_long_as_somebody_has_them_and_the_last_one_longer() -> None:
    kept, dropped, other = (plan(manifests([one]), manifests([one])) for one in (A, B, A))
    assert reuse_plan(b"kept", lambda: kept) is kept
    reuse_plan(b"dropped", iter([dropped]).__next__)
    assert reuse_plan(None, lambda: other) is other
    reference = weakref.ref(dropped)
    del dropped
    # It is the last one.
    assert reuse_plan(b"dropped", lambda: other) is reference()
    assert reuse_plan(b"kept", lambda: other) is kept
    gc.collect()
    assert reuse_plan(b"dropped", lambda: other) is other
    error = ShardError("no plan")
    assert reuse_plan(b"failed", lambda: error) is error
    assert reuse_plan(b"failed", lambda: other) is other


def test_transforms_are_code_so_their_plans_are_not_known() -> None:
    assert settings(transforms={"x": Cast("int8")}).plan_key(None) is None
    keys = [settings(cast=cast).plan_key(None) for cast in (False, {"x": "int8"}, True)]
    assert len(set(map(repr, keys))) == 3
