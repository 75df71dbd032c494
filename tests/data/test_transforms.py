import functools

import pytest
import torch
from pipe_cases import ListReader, numbered, numbers

from nvalchemi.data import AtomicData, Batch, Compose
from nvalchemi.data.datapipes import DataLoader, Dataset


def up(data: AtomicData, metadata: dict) -> tuple[AtomicData, dict]:
    return data.replace(energy=data.energy + 1), {**metadata, "up": True}


def double(data, metadata):
    return data.replace(energy=data.energy * 2), metadata


def batch_up(batch: Batch) -> Batch:
    return batch.with_fields("system", {"energy": batch.energy + 1})


def batch_double(batch):
    return batch.with_fields("system", {"energy": batch.energy * 2})


def test_one_after_the_other():
    data, metadata = Compose([up, double])(numbered(1, start=3)[0], {})
    assert data.energy.item() == 8 and metadata == {"up": True}
    assert Compose([batch_up, batch_double])(Batch.from_data_list(numbered(2))).energy[1] == 4


def test_the_kind_is_told_by_the_annotation():
    assert Compose([up, double]).is_batch is False
    assert Compose([batch_double, batch_up]).is_batch is True
    assert Compose([double]).is_batch is None and Compose([torch.nn.Identity()]).is_batch is None
    assert Compose([up, double]).transforms == (up, double)


def test_none_at_all_is_the_identity():
    empty, data = Compose([]), numbered(1)[0]
    assert empty(data) is data and empty(data, {"a": 1}) == (data, {"a": 1})
    assert empty.is_batch is None


def test_a_generator_of_transforms_is_not_lost():
    composed = Compose(transform for transform in (up, double))
    assert composed.transforms == (up, double)


def test_annotations_as_strings_and_subclasses():
    class Mine(AtomicData):
        pass

    def named(data: "AtomicData", metadata: dict):
        return data, metadata

    def dotted(batch: "nvalchemi.data.Batch"):  # noqa: F821
        return batch

    def mine(data: Mine, metadata: dict):
        return data, metadata

    assert Compose([named]).is_batch is False and Compose([dotted]).is_batch is True
    assert Compose([mine, up]).is_batch is False


def test_objects_and_partial_functions():
    class Shift:
        def __init__(self, by: float) -> None:
            self.by = by

        def __call__(self, batch: Batch) -> Batch:
            return batch.with_fields("system", {"energy": batch.energy + self.by})

    def shift(batch: Batch, by: float) -> Batch:
        return Shift(by)(batch)

    composed = Compose([Shift(1.0), functools.partial(shift, by=2.0)])
    assert composed.is_batch is True
    assert composed(Batch.from_data_list(numbered(1))).energy.item() == 3


def test_nested():
    inner = Compose([up])
    assert Compose([inner, double]).is_batch is False and Compose([Compose([])]).is_batch is None
    with pytest.raises(TypeError, match="all be for AtomicData or all for Batch"):
        Compose([inner, batch_up])


def test_what_is_refused():
    def other(data: int, metadata: dict):
        return data, metadata

    with pytest.raises(TypeError, match="must all be for AtomicData or all for Batch: got both"):
        Compose([up, batch_up])
    with pytest.raises(TypeError, match=r"transforms\[0\] must be annotated AtomicData or Batch"):
        Compose([other])
    with pytest.raises(TypeError, match=r"transforms\[1\] must be callable: got 3"):
        Compose([up, 3])


def test_in_a_data_set_and_a_loader():
    dataset = Dataset(ListReader(numbered(4)), device="cpu", transforms=[Compose([up, double])])
    loader = DataLoader(dataset, batch_size=2, batch_transforms=[Compose([batch_up])])
    assert numbers(list(loader)) == [[3, 5], [7, 9]]
    dataset.close()
