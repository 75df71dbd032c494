"""Targets and restart counters against the length of a loader."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nvalchemi.training.progress import (
    loader_length,
    rest_of_pass,
    restart_point,
    set_epoch,
    target_steps,
)

lengths = st.integers(1, 50)
counts = st.integers(0, 500)


@given(done=counts, length=lengths)
def test_a_count_of_batches_alone_finds_its_place(done, length):
    assert restart_point(done, 0, 0, 0, length) == divmod(done, length)
    assert restart_point(0, done, 0, 0, length) == divmod(done, length)


@given(done=counts, length=lengths, steps=counts)
def test_counters_of_a_real_training_are_taken_as_they_are(done, length, steps):
    # some steps may have been left out, so batches and not steps tell the place
    epochs, rest = divmod(done, length)
    assert restart_point(done, min(steps, done), epochs, rest, length) == (epochs, rest)
    if rest == 0 and epochs:  # saved after the last batch, before the epoch was closed
        point = restart_point(done, min(steps, done), epochs - 1, length, length)
        assert point == (epochs - 1, length)


@given(
    batches=counts, steps=counts, epochs=st.integers(0, 9), rest=st.integers(0, 99), length=lengths
)
def test_a_restart_is_where_the_counters_say_or_an_error(batches, steps, epochs, rest, length):
    done = batches or steps
    try:
        point = restart_point(batches, steps, epochs, rest, length)
    except ValueError as error:
        assert "restart counters are inconsistent" in str(error)
        assert done != epochs * length + rest or rest > length
    else:
        assert point[0] * length + point[1] == done and 0 <= point[1] <= length
        assert epochs in (0, point[0]) and rest in (0, point[1])


def test_without_a_length_counters_are_believed():
    assert restart_point(7, 0, 2, 3, None) == (2, 3)
    assert restart_point(0, 7, 0, 0, None) == (0, 0)


def test_the_error_has_the_numbers_and_the_remedy():
    with pytest.raises(ValueError) as caught:
        restart_point(7, 0, 2, 3, 4)
    text = str(caught.value)
    for part in ("is 7,", "epoch_count=2", "of 4 batches", "epoch_step_count=3 make 11", "alone"):
        assert part in text


@given(epochs=st.integers(1, 20), modifier=st.floats(0.01, 5), length=lengths)
def test_target_of_epochs(epochs, modifier, length):
    assert target_steps(epochs, None, modifier, length) == math.ceil(epochs * length * modifier)
    assert target_steps(epochs, None, 1.0, length) == epochs * length


def test_target_of_steps_needs_no_length():
    assert target_steps(None, 7, 1.0, None) == 7
    with pytest.raises(ValueError, match="num_epochs requires a sized dataloader.*num_steps"):
        target_steps(2, None, 1.0, None)


class Lengthless:
    def __len__(self):
        raise TypeError("it depends")


def test_loader_length():
    assert loader_length([1, 2]) == 2
    assert loader_length(iter([1])) is None
    assert loader_length(Lengthless()) is None
    with pytest.raises(ValueError, match="the dataloader is empty"):
        loader_length([])


class Seekable:
    def __init__(self, size):
        self.size = size
        self.start = 0

    def set_epoch_step(self, step):
        self.start = step

    def __iter__(self):
        start, self.start = self.start, 0
        return iter(range(start, self.size))


@given(size=st.integers(1, 30), data=st.data())
def test_rest_of_a_pass_is_what_was_not_done(size, data):
    done = data.draw(st.integers(0, size))
    for length in (size, None):
        assert list(rest_of_pass(range(size), done, length)) == list(range(done, size))
        assert list(rest_of_pass(Seekable(size), done, length)) == list(range(done, size))


def test_a_pass_that_is_done_leaves_no_skip_behind():
    loader = Seekable(3)
    assert list(rest_of_pass(loader, 3, 3)) == []
    assert list(rest_of_pass(loader, 0, 3)) == [0, 1, 2]


class Tells:
    def __init__(self):
        self.epochs = []

    def set_epoch(self, epoch):
        self.epochs.append(epoch)


def test_set_epoch_with_and_without_takers():
    set_epoch([1, 2], 3)  # nobody asks
    loader = Tells()
    loader.sampler = Tells()
    loader.batch_sampler = object()
    set_epoch(loader, 3)
    assert loader.epochs == loader.sampler.epochs == [3]
