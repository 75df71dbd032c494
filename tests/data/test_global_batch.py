"""A step has the same samples, and a state the same meaning, on any ranks with one global batch."""

import math
import warnings
from itertools import chain
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sampler_cases import Lengths, per_rank

from nvalchemi.data.datapipes import BalancedBatchSampler, EpochSampler
from nvalchemi.data.datapipes.samplers import MultiDatasetBatchSampler, MultiDatasetSampler

BATCHES = MultiDatasetBatchSampler
GLOBAL = 24
WORLDS = [r for r in range(1, GLOBAL + 1) if GLOBAL % r == 0]


@st.composite
def mixtures(draw: st.DrawFn) -> tuple[list[int], dict[str, Any]]:
    """Lengths, and any options that have a sampler on all numbers of ranks."""
    lengths = draw(st.lists(st.integers(1, 150), min_size=1, max_size=5))
    size = len(lengths)
    shares = st.lists(st.integers(1, 9), min_size=size, max_size=size)
    kinds = ["none", "weights", "ratios", "counts", "temperature", "stages"]
    kind = draw(st.sampled_from(kinds))
    options: dict[str, Any] = {
        "replacement": draw(st.sampled_from([None, True, False])),
        "shuffle": draw(st.booleans()),
        "seed": draw(st.integers(0, 9)),
        "drop_last": draw(st.booleans()),
        "epoch_policy": draw(st.sampled_from(["dataset_size", "min_size", "max_size"])),
    }
    if kind == "weights":
        options["weights"] = draw(shares)
    if kind == "ratios":
        options["samples_per_dataset"] = [share + 0.5 for share in draw(shares)]
    if kind == "counts":
        options["counts"] = draw(st.sampled_from([[1], [2, 1], [1, 1], [1, 2, 1], [3, 1, 1, 1]]))
        lengths = (lengths * 4)[: len(options["counts"])]
    if kind == "temperature":
        options["temperature"] = draw(st.sampled_from([1, 2.5, math.inf]))
    if kind == "stages":
        options["weights"] = {0: draw(shares), 2: draw(shares)}
    if draw(st.booleans()):
        options["steps"] = draw(st.integers(1, 8))
    return lengths, options


def build(
    lengths: list[int],
    world_size: int,
    rank: int,
    *,
    counts: Any = None,
    steps: Any = None,
    **own: Any,
) -> MultiDatasetBatchSampler:
    """The sampler of one rank: counts are those of the smallest batch, steps those of an epoch."""
    batch_size = GLOBAL // world_size
    if counts is not None:
        own["samples_per_dataset"] = [n * batch_size // sum(counts) for n in counts]
    if steps is not None:
        own["num_batches"] = steps * world_size
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of samples that replacement=False leaves over
        return BATCHES(
            Lengths(*lengths), batch_size=batch_size, num_replicas=world_size, rank=rank, **own
        )


def samplers(lengths: list[int], world: int, options: dict[str, Any]) -> Any:
    """Those of all ranks in epoch 2, or the refusal."""
    try:
        ranks = [build(lengths, world, rank, **options) for rank in range(world)]
    except ValueError as refusal:
        return str(refusal)
    for own in ranks:
        own.set_epoch(2)
    return ranks


def joint_steps(ranks: list[MultiDatasetBatchSampler]) -> list[list[int]]:
    return [sorted(chain(*step)) for step in zip(*map(list, ranks), strict=True)]


@given(mixture=mixtures(), data=st.data())
@settings(max_examples=150, deadline=None)
def test_steps_and_states_are_the_same_for_all_ranks_that_share_a_global_batch(
    mixture: tuple[list[int], dict[str, Any]], data: st.DataObject
):
    lengths, options = mixture
    counted = sum(options.get("counts", [1]))
    worlds = [world for world in WORLDS if (GLOBAL // world) % counted == 0]
    first = samplers(lengths, worlds[0], options)
    before, after = (data.draw(st.sampled_from(worlds)) for _ in range(2))
    mine, others = (samplers(lengths, world, options) for world in (before, after))
    refused = [isinstance(ranks, str) for ranks in (first, mine, others)]
    once = comes_once(options)
    if any(refused):
        # num_batches beyond the samples is refused in batches, of which smaller ones say it sooner
        assert all(refused) or (once and options["replacement"] is False)
        return
    expected, own, other = joint_steps(first), joint_steps(mine), joint_steps(others)
    assert len(own) == len(other) == len(expected)
    assert own[:-1] == other[:-1] == expected[:-1]
    if once:  # padding fills the last step by batches, whose size differs with the ranks
        assert set(expected[-1]) <= set(own[-1]) and set(expected[-1]) <= set(other[-1])
    else:
        assert own[-1] == other[-1] == expected[-1]

    step = data.draw(st.integers(0, len(expected)))
    mine[0].set_epoch_step(step)
    state = mine[0].state_dict()
    for rank in others:
        rank.load_state_dict(state)
    assert joint_steps(others) == other[step:]


def comes_once(options: dict[str, Any]) -> bool:
    """Whether an epoch is that of each sample once."""
    asked = {"weights", "temperature", "counts", "samples_per_dataset"} & set(options)
    if asked or options["replacement"] is True:
        return False
    return "steps" not in options or options["replacement"] is False


def test_an_epoch_of_weights_does_not_depend_on_the_batch_of_a_rank():
    def ranks(world: int, **options: Any) -> list[MultiDatasetBatchSampler]:
        return [build([700, 300], world, r, weights=[1, 1], **options) for r in range(world)]

    one, four = ranks(1), ranks(4)
    assert joint_steps(one) == joint_steps(four) and len(one[0]) == 42
    assert one[0].draws_per_dataset == four[0].draws_per_dataset == [504, 504]
    assert (one[0].num_batches, four[0].num_batches) == (42, 168)
    one[0].set_epoch_step(42)
    four[0].load_state_dict(one[0].state_dict())
    assert list(four[0]) == []


def test_a_state_past_the_last_full_step_is_the_end_of_the_epoch():
    """Ranks that leave out less, or nothing, get further than those that load their state."""
    whole = build([700, 300], 1, 0)
    whole.set_epoch_step(len(whole))
    loaded = build([700, 300], 2, 1, drop_last=True)
    for position in (984, 996, whole.state_dict()["position"], 1008):
        loaded.load_state_dict({**whole.state_dict(), "position": position})
        assert list(loaded) == []
    with pytest.raises(ValueError, match="at most 996, got 1009"):
        loaded.load_state_dict({**whole.state_dict(), "position": 1009})
    with pytest.raises(ValueError, match="multiple of the batch size 12"):
        loaded.load_state_dict({**whole.state_dict(), "position": 978})


def test_without_a_repetition_no_rank_repeats_a_batch():
    """Two of the five batches without a repetition do not fill a step of three ranks."""
    with pytest.warns(UserWarning, match="uses 18 of 32 samples"):
        ranks = per_rank(
            3, BATCHES, Lengths(16, 16), batch_size=6, weights=[1, 1], replacement=False
        )
    seen = list(chain(*chain(*ranks)))
    assert len(seen) == len(set(seen)) == 18
    with pytest.raises(ValueError, match="needs one batch of all ranks without a repetition"):
        BATCHES(
            Lengths(16, 1), batch_size=2, weights=[1, 1], replacement=False, num_replicas=3, rank=0
        )


@pytest.mark.parametrize("state", [None, 3, "state", [("epoch", 0)]])
@pytest.mark.parametrize(
    "sampler",
    [
        BATCHES(Lengths(9, 3), batch_size=2),
        MultiDatasetSampler(Lengths(9, 3)),
        EpochSampler(range(9)),
        BalancedBatchSampler(range(9), batch_size=3, sizes=range(1, 10)),
    ],
)
def test_a_state_that_is_no_dict_is_refused(sampler: Any, state: Any):
    with pytest.raises(TypeError, match=r"must be the dict that state_dict\(\) returned, got"):
        sampler.load_state_dict(state)
