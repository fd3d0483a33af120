"""Feature shift: client by client, training and test alike, inside the range."""

import numpy as np
import pytest

from fedjax_tp.data import shift
from fedjax_tp.data.catalog import Dataset
from fedjax_tp.data.partition import Partition
from fedjax_tp.types import InputError


def dataset(count=600, side=8, value=120, kind=np.uint8):
    rng = np.random.default_rng(0)
    x = np.full((count, side, side, 1), value, kind)
    # The range is that of the training images.
    x[0, 0, 0], x[0, 0, 1] = 0, 250
    y = rng.integers(0, 3, count).astype(np.int32)
    one = np.ones(1, np.float32)
    return Dataset("grey", x, y, x.copy(), y, ("a", "b", "c"), one, one)


def partition(count=600, clients=3):
    parts = tuple(np.array_split(np.arange(count), clients))
    return Partition(parts, parts)


def test_noise_grows_with_the_client_before_clipping():
    data, parts = dataset(), partition()
    found = shift.apply(data, parts, "noise:0.08", seed=1)
    for x, before in ((found.x_train, data.x_train), (found.x_test, data.x_test)):
        change = x.astype(float) - before
        assert x.dtype == np.uint8
        assert (change[parts.train[0]] == 0).all()
        for client, deviation in ((1, 10), (2, 20)):
            held = change[parts.train[client]]
            assert abs(held.std() / deviation - 1) < 0.02
            assert abs(held.mean()) < 0.5
    assert not np.array_equal(found.x_train, found.x_test)
    again = shift.apply(data, parts, "noise:0.08", seed=1)
    assert np.array_equal(found.x_train, again.x_train)
    other = shift.apply(data, parts, "noise:0.08", seed=2)
    assert not np.array_equal(found.x_train, other.x_train)


def test_values_stay_in_the_range_of_the_training_images():
    found = shift.apply(dataset(), partition(), "noise:9", seed=0)
    assert (found.x_train.min(), found.x_train.max()) == (0, 250)
    assert found.x_test.max() == 250


def test_a_half_turn_is_a_half_turn():
    data = dataset(12, kind=np.float32)
    data = data._replace(
        x_train=np.random.default_rng(1).random((12, 5, 5, 1), np.float32)
    )
    parts = partition(12)
    found = shift.apply(data, parts, "rotation:180", seed=0)
    before = data.x_train
    assert np.array_equal(found.x_train[parts.train[0]], before[parts.train[0]])
    for client, quarters in ((1, 1), (2, 2)):
        turned = np.rot90(before[parts.train[client]], -quarters, axes=(2, 1))
        np.testing.assert_allclose(
            found.x_train[parts.train[client]], turned, atol=1e-5
        )


def test_brightness_is_one_offset_a_client_and_class_in_both_splits():
    data, parts = dataset(), partition()
    found = shift.apply(data, parts, "brightness:0.2", seed=3)
    offsets = set()
    for part in parts.train:
        for label in range(3):
            mine = part[(data.y_train[part] == label) & (part > 0)]
            values = np.unique(found.x_train[mine])
            assert len(values) == 1
            assert np.array_equal(values, np.unique(found.x_test[mine]))
            assert abs(int(values[0]) - 120) <= 50
            offsets.add(int(values[0]))
    assert len(offsets) > 4


@pytest.mark.parametrize(
    "bad", ["blur:1", "noise", "noise:-1", "noise:nan", "noise:inf", "rotation:x"]
)
def test_bad_shifts_are_refused(bad):
    with pytest.raises(InputError, match="allowed are noise:X"):
        shift.parse(bad)


def test_text_is_not_shifted():
    data = dataset()._replace(x_train=np.zeros((3, 5), np.uint8))
    with pytest.raises(InputError, match="the data is text"):
        shift.apply(data, partition(), "noise:1", seed=0)
